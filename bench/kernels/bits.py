"""Bits of arrays: a copy, packed values and masks, byte planes, differences."""

from __future__ import annotations

from functools import partial

import numpy as np

from shrinkpoint.kernels import packing, planes

from ..harness import Case, Job, host, same
from .place import FEW, PREFIX, Call, Place, comes_back, oracle

_FLOATS = {"dtype": "float32"}


def cases(at: Place) -> list[Case]:
    """Return the cases of both subjects, and of a copy to new memory, where page faults count."""
    return [
        at.case("copy to new memory", lambda: fresh(at)),
        at.case("split_planes", lambda: at.compared(Call("planes.split_planes", (at.pair()[0],)), 8)),
        at.case("merge_planes", lambda: merge(at)),
        at.case("difference", lambda: difference(at)),
        at.case("undifference", lambda: undifference(at)),
        at.case("split_categories", lambda: split(at), on="cpu"),
        at.case("join_categories", lambda: join(at), on="cpu"),
        at.case("pack_bits 5", lambda: bits(at, decode=False), unit="Gsym/s"),
        at.case("unpack_bits 5", lambda: bits(at, decode=True), unit="Gsym/s"),
        at.case("pack_mask", lambda: mask(at, decode=False)),
        at.case("unpack_mask", lambda: mask(at, decode=True)),
        at.case("changed_mask", lambda: changed(at)),
        at.case("gather", lambda: moved(at, back=False)),
        at.case("scatter", lambda: moved(at, back=True)),
    ]


def fresh(at: Place) -> Job:
    """Copy to newly allocated memory."""
    (x,) = at.arrays(at.sample.before(at.n))
    copied = x.clone if at.device.gpu else x.copy
    return at.job(copied, comes_back("copy", copied, x, "all"), 8)


# ------------------------------------------------------------------------------------------------------------ packing


def bits(at: Place, *, decode: bool) -> Job:
    """Pack levels in five bits."""
    on_host = at.sample.levels_after(at.n)
    levels = at.device.array(on_host)
    data = packing.pack_bits(levels, 5)
    few = lambda: (packing.pack_bits(levels[:PREFIX], 5), oracle("packing").pack_bits(on_host[:PREFIX], 5))  # noqa: E731
    calls = partial(packing.pack_bits, levels, 5), partial(packing.unpack_bits, data, 5, at.n)
    return at.coding(*calls, levels, few, "5 bits a symbol", decoding=decode)


def mask(at: Place, *, decode: bool) -> Job:
    """Pack the mask of the elements whose level changed."""
    before, after = at.levels()
    flags = before != after
    packed = np.packbits(flags, bitorder="little")
    given, wanted = (packed, flags) if decode else (flags, packed)
    (x,) = at.arrays(given)
    call = (lambda: packing.unpack_mask(x, at.n)) if decode else (lambda: packing.pack_mask(x))
    check = comes_back("flags" if decode else "bits", call, wanted, "all come back" if decode else "all = NumPy")
    return at.job(call, check, 1.125, width=1, note=f"{flags.mean():.1%} set")


def changed(at: Place) -> Job:
    """Find the bfloat16 values that changed."""
    before, after = at.patterns()
    return at.compared(Call("packing.changed_mask", (after, before)), 4.125, width=2, note=_note(at))


def _note(at: Place) -> str:
    before, after = at.patterns()
    return f"bfloat16, {float((before != after).mean()):.0%} changed"


def moved(at: Place, *, back: bool) -> Job:
    """Take the changed values out, or put them back."""
    before, after = at.patterns()
    previous, current = at.arrays(before, after)
    packed = packing.changed_mask(current, previous)
    values = packing.gather(current, packed)
    call = partial(packing.scatter, previous, packed, values) if back else partial(packing.gather, current, packed)
    wanted, says = (after, "all come back") if back else (after[before != after], "all = NumPy")
    check = comes_back("values", call, wanted, says)
    return at.job(call, check, 4.125 if back else 2.125, width=2, note=_note(at))


# ------------------------------------------------------------------------------------------------------------- planes


def merge(at: Place) -> Job:
    """Put planes together."""
    values = at.sample.before(at.n)
    (x,) = at.arrays(values)
    found = planes.split_planes(x)

    def check() -> str:
        same("planes", planes.split_planes(x[: at.prefix]), oracle("planes").split_planes(values[: at.prefix]))
        same("patterns", host(planes.merge_planes(found, "float32")).view(np.float32), values)
        return f"{at.says}, all come back"

    return at.job(lambda: planes.merge_planes(found, "float32"), check, 8)


def difference(at: Place) -> Job:
    """Subtract ordered patterns."""
    return at.compared(Call("planes.difference", at.pair()[::-1], ("arithmetic",), named=_FLOATS), 12)


def undifference(at: Place) -> Job:
    """Add differences to patterns."""
    before, after = at.pair()
    steps = planes.difference(after, before)
    call = Call("planes.undifference", (steps, before), ("arithmetic",), named=_FLOATS, back=lambda x: (x, after))
    return at.compared(call, 12)


def split(at: Place) -> Job:
    """Split differences into categories and open bits."""
    steps = planes.difference(*at.pair()[::-1])
    call = Call("planes.split_categories", (steps,), (2,), first=min(at.n, FEW))
    return at.compared(call, 8, note="differences of float32")


def join(at: Place) -> Job:
    """Join categories and open bits."""
    values = planes.difference(*at.pair()[::-1])
    categories, extra = planes.split_categories(values, 2)
    call = lambda: planes.join_categories(categories, extra, 2, "uint32")  # noqa: E731
    return at.job(call, comes_back("values", call, values), 8, note="differences of float32")
