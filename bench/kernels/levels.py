"""Levels of two checkpoints: counts, groups, differences, run lengths."""

from __future__ import annotations

from shrinkpoint.kernels import levels as kernels
from shrinkpoint.kernels import runlength

from .. import peers
from ..harness import Case, Job, same
from .place import LEVELS, PREFIX, Call, Place, oracle


def cases(at: Place) -> list[Case]:
    """Return the cases of the subjects."""
    sort = ("torch.sort",) if at.device.gpu else ("np.argsort", "torch.sort")
    return [
        at.case("joint_counts", lambda: at.compared(Call("levels.joint_counts", at.levels(), (LEVELS, LEVELS)), 2)),
        at.case("split_by_level", lambda: split(at), at.target(0.45, 0.60), sort),
        at.case("merge_by_level", lambda: merge(at), at.target(0.45, 0.60), sort),
        at.case("delta", lambda: delta(at)),
        at.case("undelta", lambda: undelta(at)),
        at.case("rle_encode", lambda: runs(at, decode=False), unit="Gsym/s", on="cpu"),
        at.case("rle_decode", lambda: runs(at, decode=True), unit="Gsym/s", on="cpu"),
    ]


def split(at: Place) -> Job:
    """Group levels by the levels before."""
    before, after = at.levels()
    others = peers.sorting(at.device, at.device.array(before))
    return at.compared(Call("levels.split_by_level", (after, before), (LEVELS,)), 3, others)


def merge(at: Place) -> Job:
    """Put grouped levels back."""
    keys, values = at.arrays(*at.levels())
    grouped, _ = kernels.split_by_level(values, keys, LEVELS)

    def check() -> str:
        before, after = (part[: at.prefix] for part in at.levels())
        part, _ = kernels.split_by_level(values[: at.prefix], keys[: at.prefix], LEVELS)
        same("groups", part, oracle("levels").split_by_level(after, before, LEVELS)[0])
        same("merged", kernels.merge_by_level(part, keys[: at.prefix], LEVELS), after)
        same("merged", kernels.merge_by_level(grouped, keys, LEVELS), values)
        return f"{at.says}, all merge back"

    others = peers.unsorting(at.device, keys, grouped)
    return at.job(lambda: kernels.merge_by_level(grouped, keys, LEVELS), check, 3, others)


def delta(at: Place) -> Job:
    """Subtract levels."""
    before, after = at.levels()
    (previous,) = at.arrays(before)
    back = lambda steps: (kernels.undelta(previous, steps, LEVELS), after)  # noqa: E731
    return at.compared(Call("levels.delta", (before, after), (LEVELS,), back=back), 3)


def undelta(at: Place) -> Job:
    """Add differences to levels."""
    before, after = at.levels()
    steps = kernels.delta(before, after, LEVELS)
    return at.compared(Call("levels.undelta", (before, steps), (LEVELS,), back=lambda found: (found, after)), 3)


def runs(at: Place, *, decode: bool) -> Job:
    """Code runs of differences grouped by the earlier level, or restore them."""
    previous, current = at.levels()
    values = kernels.split_by_level(kernels.delta(previous, current, LEVELS), previous, LEVELS)[0]
    tokens, few = runlength.rle_encode(values), values[: PREFIX // 8]

    def check() -> str:
        same("values", runlength.rle_decode(tokens, at.n), values)
        same("rle_encode", runlength.rle_encode(few), oracle("runlength").rle_encode(few))
        return "round trip, prefix = oracle"

    call = (lambda: runlength.rle_decode(tokens, at.n)) if decode else (lambda: runlength.rle_encode(values))
    return at.symbols(call, check, [], f"{tokens.size / at.n:.3f} tokens a symbol")
