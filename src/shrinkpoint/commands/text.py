"""Names and sizes in the form in which they are displayed on a terminal or a page."""

from __future__ import annotations

import math


def printable(text: object) -> str:
    """Escape control characters, with which names in files could control a terminal.

    Example:
        >>> printable("a\\x1b[31m/b")
        'a\\\\x1b[31m/b'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


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
