"""The public name of the module `shrinkpoint.codec.presets`."""

from __future__ import annotations

import sys

from .codec import presets
from .codec.presets import *  # noqa: F403

sys.modules[__name__] = presets
