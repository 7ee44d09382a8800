"""The keys of a header and of its records.

A reader refuses all others, because new keys come with a new version.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import CorruptDataError

HEADER = frozenset(("parent", "as", "raw", "tree", "why", "arrays", "bundles"))
RECORD = frozenset(("l", "d", "s", "f", "m", "b", "p", "v", "q", "e", "n", "y", "c"))
BUNDLE = frozenset(("a", "f", "m", "b", "p"))


def check_keys(found: Iterable[str], known: frozenset[str], what: str) -> None:
    """Raise CorruptDataError for a key that is not known.

    Example:
        >>> check_keys({"raw": 1, "x": 2}, HEADER, "it")
        Traceback (most recent call last):
        ...
        shrinkpoint.kernels.errors.CorruptDataError: header: it has the unknown key 'x'
    """
    for key in found:
        if key not in known:
            raise CorruptDataError(f"header: {what} has the unknown key {key[:40]!r}")
