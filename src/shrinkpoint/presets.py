"""Published systems as configurations. They stand in `shrinkpoint.codec.presets`; this is their public name."""

from __future__ import annotations

from .codec.presets import bitsnap, check_n_run, expected_failures, inshrinkerator, lc_checkpoint, lossless

__all__ = ["bitsnap", "check_n_run", "expected_failures", "inshrinkerator", "lc_checkpoint", "lossless"]
