"""Names and sizes in the form in which they are displayed on a terminal or a page."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


def printable(text: object) -> str:
    """Escape control characters, so that names in files cannot control a terminal.

    Example:
        >>> printable("a\\x1b[31m/b")
        'a\\\\x1b[31m/b'
    """
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in plain)


def size(nbytes: float) -> str:
    """Bytes in decimal units.

    Example:
        >>> size(999), size(1234), size(56_700_000)
        ('999 B', '1.23 kB', '56.7 MB')
    """
    if abs(nbytes) < 1000:
        return f"{nbytes:.0f} B"
    unit = min(int(math.log10(abs(nbytes)) // 3), 5)
    value = nbytes / 1000**unit
    if abs(value) >= 999.5 and unit < 5:
        value, unit = value / 1000, unit + 1
    return f"{value:#.3g}".rstrip(".") + f" {'kMGTP'[unit - 1]}B"


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
