"""Decoders on hostile input."""

from __future__ import annotations

from typing import Any

import numpy as np

from shrinkpoint.kernels.errors import CorruptDataError


def outcome(decode: Any, *args: Any, **keywords: Any) -> list[Any] | None:
    """Return the values of a decoder, or None for CorruptDataError."""
    try:
        return list(np.asarray(decode(*args, **keywords)).tolist())
    except CorruptDataError:
        return None
