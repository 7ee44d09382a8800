"""All errors and warnings of kernels and checkpoints."""

from __future__ import annotations

from ..kernels.errors import BadArgumentError, CorruptDataError, ShrinkpointError, ShrinkpointWarning

__all__ = [
    "BadArgumentError",
    "CorruptDataError",
    "MissingCodecError",
    "MissingParentError",
    "NewerFormatError",
    "ShrinkpointError",
    "ShrinkpointWarning",
    "UnsupportedLeafError",
]


class UnsupportedLeafError(ShrinkpointError, TypeError):
    """A value needs pickle, or cannot be rebuilt here; the message has its path."""


class MissingParentError(ShrinkpointError, LookupError):
    """The parent of a delta is missing, wrong, or not resolved."""


class MissingCodecError(ShrinkpointError, LookupError):
    """A file or configuration needs a codec of a package that cannot be imported."""


class NewerFormatError(ShrinkpointError):
    """The file was written by a newer version of the format than this reader knows."""
