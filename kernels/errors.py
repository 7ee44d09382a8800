"""The errors that kernels and decoders raise, and the family of warnings; `codec.errors` adds the errors that only a
checkpoint can have."""

from __future__ import annotations


class ShrinkpointError(Exception):
    """Base of every error this package raises on purpose."""


class BadArgumentError(ShrinkpointError, ValueError):
    """An argument is out of its range or of the wrong type; the message names it, its value and the limit."""


class CorruptDataError(ShrinkpointError, ValueError):
    """Stored bytes are truncated, altered, or not what they claim to be."""


class ShrinkpointWarning(UserWarning):
    """Base of every warning of this package: `warnings.simplefilter("error", ShrinkpointWarning)` makes them errors."""
