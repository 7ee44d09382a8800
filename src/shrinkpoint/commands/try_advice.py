"""What `try` says below its table: why arrays are exact, what would help, and what to call."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..codec.checkpoint import Row
    from .trials import Trial

LITTLE = 1.1
"""Ratio of two sizes below which the smaller one gains little."""
_MUCH = 0.2
"""Share of the bytes whose arrays nobody has described from which `advice` says how to describe them."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason for which arrays are exact at the default level.

    Args:
        why: the reason.
        share: of the bytes of the state.
        arrays: their number.
        largest: path of the largest one.
        is_unknown: whether it is that nothing says what they are.
    """

    why: str
    share: float
    arrays: int
    largest: str
    is_unknown: bool


def reasons(rows: Sequence[Row]) -> list[Reason]:
    """Return the reasons of exact arrays, those of the most bytes first.

    Args:
        rows: `summary()` at the default level.
    """
    from ..codec.evidence.reasons import NOTHING, SEVERAL_TREES, UNMATCHED

    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.measure == "exact" and row.raw_bytes:
            groups.setdefault(row.why.removeprefix("exact: "), []).append(row)
    raw = sum(row.raw_bytes for row in rows)
    found = [
        Reason(
            why,
            sum(row.raw_bytes for row in group) / raw,
            len(group),
            max(group, key=lambda row: row.raw_bytes).path,
            why in (NOTHING, UNMATCHED) or why.startswith(SEVERAL_TREES),
        )
        for why, group in groups.items()
    ]
    return sorted(found, key=lambda reason: -reason.share)


def advice(lossless: Trial, default: Trial, exact: Sequence[Reason]) -> list[str]:
    """Return paragraphs that say what is not gained, and what to do about it.

    Args:
        lossless, default: results of these levels.
        exact: see `reasons`.
    """
    unknown = [reason for reason in exact if reason.is_unknown]
    share = sum(reason.share for reason in unknown)
    is_lossy = any(row.measure != "exact" for row in default.rows)
    found = []
    if not is_lossy:
        found.append(
            f"Nothing is gained by the lossy levels: all levels are lossless here, {lossless.ratio:.2f} x. They change "
            "an array only where something says what it is, such as an optimizer's entries, and nothing does so here."
        )
    elif lossless.nbytes < LITTLE * default.nbytes:
        found.append(
            f"Little is gained by the default level: {default.ratio:.2f} x; lossless is {lossless.ratio:.2f} x."
        )
    elif share > _MUCH:
        found.append(f"More could be gained: nothing says what {share:.0%} of the bytes are.")
    if share > _MUCH:
        pattern = glob.escape(unknown[0].largest)
        found.append(
            "If these are trained weights, save the optimizer's state in the same checkpoint, or say so in Python: "
            "kinds=sp.kinds(model, optimizer), or a rule for them, such as "
            f"cfg=sp.Config([({pattern!r}, sp.Quantize())]). `shrinkpoint compress` takes such a configuration as "
            "--config FILE.json, which Config.to_json() writes."
        )
    if lossless.ratio < LITTLE:
        found.append(f"Little is gained without loss: {lossless.ratio:.2f} x. The bytes of these arrays look random.")
    if default.delta_nbytes is not None and default.delta_nbytes > default.nbytes / LITTLE:
        found.append("The delta is not smaller than a base: the two checkpoints are not near each other.")
    return found


def calls(checkpoint: Path, following: Path | None, level: str, *, is_model: bool) -> dict[str, str]:
    """Return the lines to paste, by their language.

    Args:
        checkpoint, following: as given to the command.
        level: to be used.
        is_model: whether the checkpoint is a folder with a model's files.
    """
    preset = "sp.Config()" if level == "default" else f"sp.presets.{level}()"
    if is_model:
        source = str(checkpoint)
        return {"Python": f"sp.save_pretrained({source!r}, {source.rstrip('/') + '-small'!r}, cfg={preset})"}
    words = ["shrinkpoint", "compress", str(checkpoint)]
    if following is not None and _have_steps(checkpoint, following):
        words += [str(following), "run", "--step-from-name"]
    else:
        words += [f"{checkpoint.name.removesuffix(checkpoint.suffix) or checkpoint.name}.spt"]
    return {
        "Python": f'store = sp.Store("run", {preset}); store.save(step, state)',
        "command line": shlex.join([*words, "--preset", level.replace("_", "-")]),
    }


def recommended(trials: Sequence[Trial]) -> str:
    """Return the safest level that is much smaller than a safer one.

    Example: exact weights, unless they gain little over lossless.
    """
    lossless, exact_weights = trials[0], trials[1]
    return "exact_weights" if lossless.nbytes > LITTLE * exact_weights.nbytes else "lossless"


def _have_steps(*paths: Path) -> bool:
    """Return whether the names of checkpoints give their steps."""
    from ..codec.errors import BadArgumentError
    from .convert import steps_from_names

    try:
        steps_from_names(paths)
    except BadArgumentError:
        return False
    return True
