"""Codecs by id and stream formats by name, also of other packages.

A codec of another package has the id `PACKAGE.NAME`, and its streams have that name or `PACKAGE.NAME.MORE`, so that a
file says which package reads it. The package declares the codec as an entry point:

    [project.entry-points."shrinkpoint.codecs"]
    "PACKAGE.NAME" = "MODULE:CLASS"

It is imported when a configuration or a file first names the codec.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any, TypeVar

from .base import Codec
from .deduplication import decode_copy
from .embeddings.rows import Rows, decode_rows, rebase_rows
from .errors import BadArgumentError, MissingCodecError
from .groups import Stream
from .lossless.changed import Changed, decode_changed, rebase_changed
from .lossless.exact import Exact, decode_bytes, rebase_bytes
from .moments.clusters import Clusters, decode_clusters
from .moments.firstmoment import FirstMoment, decode_grid, decode_own_grid, square_of
from .moments.logbuckets import LogBuckets, decode_log_buckets
from .moments.secondmoment import SecondMoment, decode_rank_one, fill_rank_one, rank_one_values, rebase_rank_one
from .weights.exponent import ExponentDelta, decode_exponent, rebase_exponent
from .weights.levels import decode_levels, fill_levels, level_values, rebase_levels
from .weights.quantize import Quantize
from .weights.uniform_quantizer import decode_multiples, rebase_multiples

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


T = TypeVar("T")


class Table(dict[str, T]):
    """A table that finds a missing `PACKAGE.NAME` in the entry points of installed packages."""

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        return isinstance(name, str) and _load(name) and super().__contains__(name)

    def __missing__(self, name: str) -> T:
        if name in self:
            return self[name]
        raise KeyError(name)


CODECS: Table[type[Codec]] = Table(
    {c.id: c for c in (Exact, Quantize, LogBuckets, FirstMoment, SecondMoment, ExponentDelta, Changed, Clusters, Rows)}
)
"""Classes of codecs by id."""
STREAMS: Table[Stream] = Table(
    {
        "bytes": Stream(
            decode_bytes, Exact.id, rebase_bytes, is_wide=True, is_shared=True, decodes_there=True, meta=()
        ),
        "levels": Stream(
            decode_levels,
            Quantize.id,
            rebase_levels,
            values=level_values,
            fill_there=fill_levels,
            is_shared=True,
            decodes_there=True,
            meta=("t", "i", "a"),
        ),
        "multiples": Stream(decode_multiples, Quantize.id, rebase_multiples, is_wide=True, meta=("s", "w")),
        "log-buckets": Stream(decode_log_buckets, LogBuckets.id, is_shared=True, decodes_there=True, meta=("b",)),
        "rank-one": Stream(
            decode_rank_one,
            SecondMoment.id,
            rebase_rank_one,
            values=rank_one_values,
            fill_there=fill_rank_one,
            is_shared=True,
            meta=(),
        ),
        "grid": Stream(decode_grid, FirstMoment.id, pair=square_of, is_shared=True, decodes_there=True, meta=()),
        "own-grid": Stream(decode_own_grid, FirstMoment.id, decodes_there=True, meta=()),
        "copy": Stream(decode_copy, Exact.id, pair=lambda values, _: values, meta=()),
        "exponent": Stream(
            decode_exponent, ExponentDelta.id, rebase_exponent, is_wide=True, decodes_there=True, meta=()
        ),
        "changed": Stream(decode_changed, Changed.id, rebase_changed, is_wide=True, decodes_there=True, meta=()),
        "clusters": Stream(decode_clusters, Clusters.id, decodes_there=True, meta=()),
        "rows": Stream(decode_rows, Rows.id, rebase_rows, meta=("s",)),
    }
)
"""Stream formats by name, with decoders and properties."""


def register(codec: type[Codec]) -> type[Codec]:
    """Register a codec and its streams in this process; an entry point does so in every process.

    Args:
        codec: a class that follows `Codec`, with `streams`: a dict of its stream formats by name.

    Returns:
        The class, so that this also works as a decorator.

    Raises:
        BadArgumentError: the id is not `PACKAGE.NAME`, a stream's name does not begin with it, or another class has
            the id.
    """
    name = codec.id
    streams: dict[str, Stream] = getattr(codec, "streams", {})
    if not package_of(name):
        raise BadArgumentError(f"codec {codec.__qualname__}: its id must be PACKAGE.NAME, not {name!r}")
    if CODECS.get(name, codec) is not codec:
        raise BadArgumentError(f"codec {name}: the class {CODECS[name].__qualname__} has this id already")
    for stream in streams:
        if stream != name and not stream.startswith(f"{name}."):
            raise BadArgumentError(f"codec {name}: its stream {stream!r} must be named {name} or {name}.MORE")
    CODECS[name] = codec
    STREAMS.update(streams)
    return codec


def to_json(codec: Codec) -> dict[str, Any]:
    """Return a codec as plain JSON: its id and its fields."""
    fields = dataclasses.asdict(codec)  # type: ignore[call-overload]
    return {"id": codec.id, **fields}


def from_json(table: Mapping[str, type[Codec]], data: Any) -> Codec:
    """Return the codec that `to_json` described.

    Raises:
        BadArgumentError: an unknown id or field.
        MissingCodecError: the id is that of another package, which does not provide it here.
    """
    if not isinstance(data, Mapping) or data.get("id") not in table:
        if isinstance(data, Mapping) and package_of(str(data.get("id"))):
            raise missing(str(data["id"]))
        raise BadArgumentError(f"{str(data)[:80]} is not a codec; ids are {', '.join(table)}")
    fields = {k: v for k, v in data.items() if k != "id"}
    try:
        return table[data["id"]](**fields)
    except TypeError as e:
        raise BadArgumentError(f"codec {data['id']}: {e}") from None


def _load(name: str) -> bool:
    """Import the codec that an entry point declares for a name; return whether one exists."""
    if not package_of(name):
        return False
    for point in entry_points(group=GROUP):
        if name == point.name or name.startswith(f"{point.name}."):
            register(_class_of(point))
            return True
    return False


def _class_of(point: EntryPoint) -> type[Codec]:
    """Return the codec class of an entry point, whose name must begin with its package."""
    package = point.dist.name if point.dist is not None else ""
    where = f"entry point {point.name} = {point.value} of the package {package!r}"
    if _plain(package_of(point.name)) != _plain(package):
        raise MissingCodecError(f"{where}: its name must begin with that of the package")
    try:
        found: Any = point.load()
    except Exception as e:
        raise MissingCodecError(f"{where} cannot be imported: {type(e).__name__}: {e}") from e
    if getattr(found, "id", None) != point.name:
        raise MissingCodecError(f"{where}: its id is {getattr(found, 'id', None)!r}")
    codec: type[Codec] = found
    return codec


def _plain(package: str) -> str:
    """Return a package name in normal form, as package indexes compare names."""
    return re.sub(r"[-_.]+", "-", package).lower()
