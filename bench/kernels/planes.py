"""Lossless coding's first steps: byte planes, differences, categories."""

from __future__ import annotations

import numpy as np

from shrinkpoint.kernels import planes as kernels

from ..harness import Case, Job, host, same
from .place import FEW, Call, Place, comes_back, oracle

_FLOATS = {"dtype": "float32"}


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject."""
    return [
        at.case("split_planes", lambda: at.compared(Call("planes.split_planes", (at.pair()[0],)), 8)),
        at.case("merge_planes", lambda: merge(at)),
        at.case("difference", lambda: difference(at)),
        at.case("undifference", lambda: undifference(at)),
        at.case("split_categories", lambda: split(at), on="cpu"),
        at.case("join_categories", lambda: join(at), on="cpu"),
    ]


def merge(at: Place) -> Job:
    """Put planes together."""
    values = at.sample.before(at.n)
    (x,) = at.arrays(values)
    planes = kernels.split_planes(x)

    def check() -> str:
        same("planes", kernels.split_planes(x[: at.prefix]), oracle("planes").split_planes(values[: at.prefix]))
        same("patterns", host(kernels.merge_planes(planes, "float32")).view(np.float32), values)
        return f"{at.says}, all come back"

    return at.job(lambda: kernels.merge_planes(planes, "float32"), check, 8)


def difference(at: Place) -> Job:
    """Subtract ordered patterns."""
    before, after = at.pair()
    return at.compared(Call("planes.difference", (after, before), ("arithmetic",), named=_FLOATS), 12)


def undifference(at: Place) -> Job:
    """Add differences to patterns."""
    before, after = at.pair()
    steps = kernels.difference(after, before)
    call = Call("planes.undifference", (steps, before), ("arithmetic",), named=_FLOATS, back=lambda x: (x, after))
    return at.compared(call, 12)


def split(at: Place) -> Job:
    """Split differences into categories and open bits."""
    before, after = at.pair()
    call = Call("planes.split_categories", (kernels.difference(after, before),), (2,), first=min(at.n, FEW))
    return at.compared(call, 8, note="differences of float32")


def join(at: Place) -> Job:
    """Join categories and open bits."""
    before, after = at.pair()
    values = kernels.difference(after, before)
    categories, extra = kernels.split_categories(values, 2)

    def call() -> object:
        return kernels.join_categories(categories, extra, 2, "uint32")

    return at.job(call, comes_back("values", call, values), 8, note="differences of float32")
