"""Lines below the table of `try`: reasons of exact arrays, remedies, and calls to paste."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..codec.errors import BadArgumentError
from ..codec.evidence.kind import NOTHING, UNMATCHED
from .convert import steps_from_names
from .output import listed

if TYPE_CHECKING:
    from ..codec.display import Row
    from .trials import Trial

_IMPORT = "import shrinkpoint as sp"
_LITTLE = 1.1
"""Ratio of two sizes below which the smaller one gains little."""
_MUCH = 0.2
"""Share of the bytes in arrays of unknown role from which `advice` has a remedy."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that was read.

    Args:
        path: as given.
        kind: "file" (also a DCP folder), "model" (a folder of safetensors files), or "trainer" (the same with the
            optimizer's state).
        state: its arrays and plain values.
        refused: why other values are left out, one reason a value.
    """

    path: Path
    kind: str
    state: Any
    refused: list[str]


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason for which arrays are exact at the default level.

    Args:
        why: the reason.
        share: of the bytes of the state.
        arrays: their number.
        largest: path of the largest one.
        is_unknown: whether the role of the arrays is unknown.
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
            why in (NOTHING, UNMATCHED),
        )
        for why, group in groups.items()
    ]
    return sorted(found, key=lambda reason: -reason.share)


def advice(lossless: Trial, default: Trial, exact: Sequence[Reason], sources: Sequence[Source]) -> list[str]:
    """Return paragraphs on levels that gain little, and on remedies.

    Args:
        lossless, default: results of these levels.
        exact: see `reasons`.
        sources: the checkpoint, and perhaps a later one.
    """
    unknown = [reason for reason in exact if reason.is_unknown]
    share = sum(reason.share for reason in unknown)
    is_lossy = any(row.measure != "exact" for row in default.rows)
    found = []
    if not is_lossy:
        found.append(
            "Nothing is gained by the lossy levels: all arrays are exact, for the reasons above, and every level is "
            f"{lossless.ratio:.2f} x lossless."
        )
    elif lossless.nbytes < _LITTLE * default.nbytes:
        found.append(
            f"Little is gained by the default level: {default.ratio:.2f} x; lossless is {lossless.ratio:.2f} x."
        )
    elif share > _MUCH:
        found.append(f"More could be gained: nothing says what {share:.0%} of the bytes are.")
    if share > _MUCH:
        pattern = glob.escape(unknown[0].largest)
        is_matched = all(reason.why != UNMATCHED for reason in unknown)
        optimizer = "save the optimizer's state in the same checkpoint, or " if is_matched else ""
        found.append(
            "An array changes only where something names its kind, as an optimizer's entry does. If these are "
            f"trained weights, {optimizer}say so in Python: kinds=sp.kinds(model, optimizer), or a rule "
            f"for each, such as cfg=sp.Config([({pattern!r}, sp.Quantize())]). `shrinkpoint compress` takes such a "
            "configuration as --config FILE.json, which Config.to_json() writes."
        )
    if lossless.ratio < _LITTLE:
        found.append(f"Little is gained without loss: {lossless.ratio:.2f} x. The bytes of these arrays look random.")
    if default.delta_nbytes is not None and default.delta_nbytes > default.nbytes / _LITTLE:
        found.append("The delta is not smaller than a base: the two checkpoints are not near each other.")
    for source in sources:
        if source.refused:
            found.append(
                f"`compress` and `Store.save` refuse {source.path} until these values are plain ones; they are left "
                f"out here: {listed(source.refused, 3)}."
            )
    return found


def calls(sources: Sequence[Source], level: str) -> dict[str, list[str]]:
    """Return the lines to paste, by their language.

    Args:
        sources: the checkpoint, and perhaps a later one.
        level: to be used.
    """
    source = sources[0]
    preset = "sp.Config()" if level == "default" else f"sp.presets.{level}()"
    if source.kind == "trainer":
        callback = f"trainer.add_callback(CompressCallback({preset}))"
        return {"Python": [_IMPORT, "from shrinkpoint.trainers.transformers import CompressCallback", callback]}
    if source.kind == "model":
        folder = str(source.path)
        return {"Python": [_IMPORT, f"sp.save_pretrained({folder!r}, {folder + '-small'!r}, cfg={preset})"]}
    found = {"Python": [_IMPORT, f'sp.Store("run", {preset}).save(step, state)']}
    if source.refused:
        return found
    if len(sources) > 1 and _have_steps([s.path for s in sources]):
        words = [*(str(s.path) for s in sources), "run", "--step-from-name"]
    else:
        words = [str(source.path), f"{source.path.stem}.spt"]
    words = ["shrinkpoint", "compress", *words, "--preset", level.replace("_", "-")]
    return found | {"command line": [shlex.join(words)]}


def recommended(trials: Sequence[Trial]) -> str:
    """Return the level for a first run: exact weights, or lossless where those gain little."""
    lossless, exact_weights = trials[0], trials[1]
    return "exact_weights" if lossless.nbytes > _LITTLE * exact_weights.nbytes else "lossless"


def _have_steps(paths: Sequence[Path]) -> bool:
    """Return whether the names of checkpoints give their steps."""
    try:
        steps_from_names(paths)
    except BadArgumentError:
        return False
    return True
