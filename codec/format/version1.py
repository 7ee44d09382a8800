"""Refusal of files of format version 1, which no release wrote.

The error names the commit that converts them.
"""

from __future__ import annotations

from ..errors import CorruptDataError

CONVERTER = "e5cd555fb963"
"""The last commit that wrote version 1: its `restore` converts such files."""


def is_not_read() -> CorruptDataError:
    """Return the error for such a file.

    Example:
        >>> str(is_not_read())[:52]
        'the file has format version 1, which only developmen'
    """
    return CorruptDataError(
        "the file has format version 1, which only development versions wrote, and is not read any more. Install "
        f"commit {CONVERTER} of shrinkpoint, write the state with its `shrinkpoint restore RUN state.pt`, "
        "and compress that again"
    )
