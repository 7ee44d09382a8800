"""Run lengths of level differences grouped by the earlier level, as published."""

from __future__ import annotations

from shrinkpoint.kernels import levels
from shrinkpoint.kernels import runlength as kernels

from ..harness import Case, Job, same
from .place import LEVELS, PREFIX, Place, oracle


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject."""
    return [
        at.case("rle_encode", lambda: coded(at, decode=False), unit="Gsym/s", on="cpu"),
        at.case("rle_decode", lambda: coded(at, decode=True), unit="Gsym/s", on="cpu"),
    ]


def coded(at: Place, *, decode: bool) -> Job:
    """Code runs, or restore them."""
    previous, current = at.levels()
    values = levels.split_by_level(levels.delta(previous, current, LEVELS), previous, LEVELS)[0]
    tokens, few = kernels.rle_encode(values), values[: PREFIX // 8]

    def check() -> str:
        same("values", kernels.rle_decode(tokens, at.n), values)
        same("rle_encode", kernels.rle_encode(few), oracle("runlength").rle_encode(few))
        return "round trip, prefix = oracle"

    call = (lambda: kernels.rle_decode(tokens, at.n)) if decode else (lambda: kernels.rle_encode(values))
    return at.symbols(call, check, [], f"{tokens.size / at.n:.3f} tokens a symbol")
