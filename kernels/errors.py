"""Errors that kernels and decoders raise, and the base class of all warnings.

`codec.errors` adds the errors that only a checkpoint can have.
"""

from __future__ import annotations


class ShrinkpointError(Exception):
    """Base of every error this package raises on purpose."""


class BadArgumentError(ShrinkpointError, ValueError):
    """An argument has the wrong type or is out of range.

    The message gives its name, its value and the limit.
    """


class CorruptDataError(ShrinkpointError, ValueError):
    """Stored bytes are truncated, altered or inconsistent."""


class ShrinkpointWarning(UserWarning):
    """Base of every warning of this package.

    `warnings.simplefilter("error", ShrinkpointWarning)` turns them into errors.
    """

    def for_command_line(self) -> str:
        """Return the message with the options of commands in place of Python arguments."""
        return str(self)
