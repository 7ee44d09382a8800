"""Names and sizes in the form in which they are displayed on a terminal or a page."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ..codec.display import printable as printable
from ..codec.display import size as size


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name most similar to a mistyped one.

    The hint is for the end of a message. It is "" if no name is similar.

    Example:
        >>> nearest("modle/*", ["model", "optimizer"]), nearest("x", ["model"])
        ("; did you mean 'model'?", '')
    """
    found = difflib.get_close_matches(name.rstrip("*").rstrip("/"), list(known), n=1)
    return f"; did you mean {printable(found[0])!r}?" if found else ""


def parts_of(paths: Iterable[str]) -> list[str]:
    """Return all paths and their parents, each once.

    Example:
        >>> parts_of(["model/a", "model/b"])
        ['model/a', 'model', 'model/b']
    """
    found: dict[str, None] = {}
    for path in paths:
        keys = path.split("/")
        found |= dict.fromkeys("/".join(keys[:n]) for n in range(len(keys), 0, -1))
    return list(found)
