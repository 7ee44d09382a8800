"""Rare changes against expected symbols."""

from __future__ import annotations

from shrinkpoint.kernels import sparse_changes as kernels

from ..harness import Case, Job, same
from .place import FEW, Place, oracle

_CHANGES = 1000


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject."""
    return [
        at.case("rare_encode", lambda: coded(at, decode=False), on="cpu"),
        at.case("rare_decode", lambda: coded(at, decode=True), on="cpu"),
    ]


def coded(at: Place, *, decode: bool) -> Job:
    """Code a thousand changes, or apply them."""
    expected = at.sample.levels_before(at.n)
    symbols = expected.copy()
    symbols[:: -(-at.n // _CHANGES)] += 1
    data = kernels.rare_encode(symbols, expected)

    def check() -> str:
        part = symbols[:FEW], expected[:FEW]
        same("changes", kernels.rare_encode(*part), oracle("sparse_changes").rare_encode(*part))
        same("symbols", kernels.rare_decode(data, expected), symbols)
        return f"{min(FEW, at.n):,} elements = oracle, all come back"

    call = (lambda: kernels.rare_decode(data, expected)) if decode else (lambda: kernels.rare_encode(symbols, expected))
    changes = int((symbols != expected).sum())
    return at.job(call, check, 2, width=1, note=f"{changes} changes, {8 * data.size / changes:.1f} bits each")
