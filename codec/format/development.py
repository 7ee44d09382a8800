"""Refusal of files from before release 0.1.0; the error names their converter."""

from __future__ import annotations

from ..errors import CorruptDataError

CONVERTER = "66d567f34a6f"
"""The last commit of development: its `restore` converts them."""


def before_release() -> CorruptDataError:
    """Return the error for such a file.

    Example:
        >>> str(before_release())[:52]
        'the file was written before release 0.1.0, by a deve'
    """
    return CorruptDataError(
        "the file was written before release 0.1.0, by a development version, and is not read any more. Install "
        f"commit {CONVERTER} of shrinkpoint, write the state with its `shrinkpoint restore RUN state.pt`, "
        "and compress that again"
    )
