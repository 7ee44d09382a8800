"""The whole family of errors: those of the kernels, and those that only a checkpoint can have; and of warnings."""

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
    """A value in the state cannot be stored without pickle, or its structure cannot be rebuilt; the path is named."""


class MissingParentError(ShrinkpointError, LookupError):
    """A delta was given no parent, the wrong one, or one that is not resolved."""


class MissingCodecError(ShrinkpointError, LookupError):
    """A file or a configuration needs a codec of a package that is not installed, or cannot be imported."""


class NewerFormatError(ShrinkpointError):
    """The file was written by a newer version of the format than this reader knows."""
