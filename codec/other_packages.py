"""Names of codecs and streams of other packages: `PACKAGE.NAME`."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from .errors import MissingCodecError

GROUP = "shrinkpoint.codecs"
"""Group of the entry points by which packages declare codecs."""
_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,99})\.[\w.-]{1,100}")


def package_of(name: str) -> str:
    """Return the package that a name of a codec or stream begins with, or "".

    Example:
        >>> package_of("my-codecs.rounded"), package_of("quantize")
        ('my-codecs', '')
    """
    match = _NAME.fullmatch(name)
    return match[1] if match else ""


def missing(name: str, path: str = "") -> MissingCodecError:
    """Return the error for an unknown name of another package that the array at `path` needs."""
    package = package_of(name)
    try:
        found = f"{package} {version(package)} is installed, and has no such entry point in the group {GROUP}"
    except PackageNotFoundError:
        found = "it is not installed"
    where = f"{path}: " if path else ""
    return MissingCodecError(f"{where}{name!r} is a codec of the package {package!r}: {found}")
