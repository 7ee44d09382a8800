"""Packed bits: narrow values, masks, changed elements."""

from __future__ import annotations

import numpy as np

from shrinkpoint.kernels import packing as kernels

from ..harness import Case, Job, same
from .place import PREFIX, Call, Place, comes_back, oracle


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject."""
    return [
        at.case("pack_bits 5", lambda: bits(at, decode=False), unit="Gsym/s"),
        at.case("unpack_bits 5", lambda: bits(at, decode=True), unit="Gsym/s"),
        at.case("pack_mask", lambda: mask(at, decode=False)),
        at.case("unpack_mask", lambda: mask(at, decode=True)),
        at.case("changed_mask", lambda: changed(at)),
        at.case("gather", lambda: moved(at, back=False)),
        at.case("scatter", lambda: moved(at, back=True)),
    ]


def bits(at: Place, *, decode: bool) -> Job:
    """Pack levels in five bits."""
    levels = at.device.array(at.sample.levels_after(at.n))
    data = kernels.pack_bits(levels, 5)

    def check() -> str:
        same("values", kernels.unpack_bits(data, 5, at.n), levels)
        few = at.sample.levels_after(at.n)[:PREFIX]
        same("pack_bits", kernels.pack_bits(levels[:PREFIX], 5), oracle("packing").pack_bits(few, 5))
        return "round trip, prefix = oracle"

    call = (lambda: kernels.unpack_bits(data, 5, at.n)) if decode else (lambda: kernels.pack_bits(levels, 5))
    return at.symbols(call, check, [], "5 bits a symbol")


def mask(at: Place, *, decode: bool) -> Job:
    """Pack the mask of the elements whose level changed."""
    before, after = at.levels()
    flags = before != after
    packed = np.packbits(flags, bitorder="little")
    given, wanted = (packed, flags) if decode else (flags, packed)
    (x,) = at.arrays(given)
    call = (lambda: kernels.unpack_mask(x, at.n)) if decode else (lambda: kernels.pack_mask(x))
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
    packed = kernels.changed_mask(current, previous)
    values = kernels.gather(current, packed)
    if back:
        call = lambda: kernels.scatter(previous, packed, values)  # noqa: E731
        return at.job(call, comes_back("values", call, after), 4.125, width=2, note=_note(at))
    call = lambda: kernels.gather(current, packed)  # noqa: E731
    check = comes_back("values", call, after[before != after], "all = NumPy")
    return at.job(call, check, 2.125, width=2, note=_note(at))
