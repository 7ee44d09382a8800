"""The plan of a checkpoint: codec, parent and evidence of each array, before encoding.

`compress`, `search` and the DCP writer call the same `plan`. Evidence, codecs, parents, moment pairs, importance and
copies are found here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import glob
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..kernels.backend.arrays import to_place_of
from ..kernels.backend.floats import FORMATS
from .base import Codec, Leaf, Reference
from .config import Config, Rule, UnmatchedRuleWarning, is_lossless
from .deduplication import copies
from .embeddings.rows import Rows
from .errors import BadArgumentError, ShrinkpointWarning
from .evidence.gather import Evidence, gather
from .evidence.kind import LAYERS, ROLES, SEVERAL_TREES, TINY, Match, by_path, touched_rows
from .evidence.moments import Arrays
from .inputs import Inputs, entries
from .lossless.exact import Exact
from .moments.clusters import Clusters
from .moments.firstmoment import LARGEST_ERROR, FirstMoment
from .moments.logbuckets import LogBuckets
from .moments.secondmoment import SecondMoment
from .state.casting import FLOATS
from .state.leaves import SEQUENCES, read_leaf
from .weights.exponent import ExponentDelta
from .weights.importance import with_importance, with_lead
from .weights.quantize import Quantize

_TARGETED = (Clusters, ExponentDelta, FirstMoment, LogBuckets, Rows, SecondMoment)
_MUCH = 0.2
"""Share of the float bytes that may stay exact for want of evidence without a warning."""
_GLANCE = 2000
"""Number of paths that are compared with a rule without a match."""


class UnknownArraysWarning(ShrinkpointWarning):
    """Much of a state stays exact because the role of its arrays is unknown.

    Args:
        message: the arrays, and the arguments that make them lossy.
        command_line: the same with options of commands; default: `message`.
    """

    def __init__(self, message: str, command_line: str | None = None) -> None:
        super().__init__(message)
        self._command_line = message if command_line is None else command_line

    def for_command_line(self) -> str:
        """Return the message with the options of commands in place of Python arguments."""
        return self._command_line


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """Plan of one array: evidence, codec, parent, moment pair, and original of a copy.

    Args:
        leaf: its values, and further inputs of its codec.
        evidence: the role of the array, and the source of that knowledge.
        codec: the codec that will encode it, with the targets of the configuration.
        why: the rule or the evidence that chose the codec.
        parent: reference that a delta is coded against; None for a base.
        pair: of a first moment, the number of its second moment; else None.
        original: number of the array that this one is a copy of; None: not a copy.
        note: remark for the summary if it may surprise that the array is exact, or "".
    """

    leaf: Leaf
    evidence: Evidence
    codec: Codec
    why: str
    parent: Reference | None = None
    pair: int | None = None
    original: int | None = None
    note: str = ""


def plan(inputs: Inputs, cfg: Config) -> list[ArrayPlan]:
    """Return the plan of each array.

    Args:
        inputs: the arguments of `compress`, taken apart.
        cfg: rules and targets.

    Raises:
        BadArgumentError: a gradient or earlier values of another shape than their weight, or not of a float dtype.
        UnsupportedLeafError: an array that cannot be stored.
    """
    arrays = _read(inputs)
    evidence = gather(inputs.nodes, arrays, inputs.kinds) if inputs.evidence is None else inputs.evidence
    # For a parent that is a base, the rows touched since the base count.
    touched = touched_rows(arrays.paths, inputs.kinds, inputs.prev is None or not inputs.prev.is_delta)
    leaves: list[Leaf] = []
    codecs: list[Codec] = []
    whys: list[str] = []
    targeted: dict[Codec, Codec] = {}
    for node, spec, flat, known in zip(inputs.arrays, arrays.specs, arrays.flats, evidence, strict=True):
        codec, why = cfg.codec_for(node.path, spec, known)
        leaves.append(
            Leaf(node.path, node.key, spec, known.kind, flat, touched=touched.get(node.path), entry=known.entry)
        )
        if codec not in targeted:
            targeted[codec] = _with_targets(codec, cfg)
        codecs.append(targeted[codec])
        whys.append(why)
    notes = _notes(leaves, codecs, cfg, inputs.kinds)
    leaves = _with_companions(inputs, leaves, codecs)
    pairs = _moment_pairs(leaves)
    if inputs.prev is None and inputs.is_whole:
        _warn_of_unmatched(cfg.rules, arrays.paths)
        _warn_of_unknown(leaves, evidence, whys, cfg)
    leaves = with_lead(leaves, codecs, pairs, None if inputs.past_weights is None else inputs.past_weights.steps)
    leaves = with_importance(leaves, [isinstance(codec, Quantize) and bool(codec.rate) for codec in codecs])
    copied = copies(leaves, codecs)
    prev = inputs.prev
    parents = [None if prev is None else prev.parent_reference(leaf.key, leaf.spec) for leaf in leaves]
    columns = zip(leaves, evidence, codecs, whys, parents, notes, strict=True)
    return [
        ArrayPlan(leaf, known, codec, why, parent, pairs.get(i), copied.get(i), note)
        for i, (leaf, known, codec, why, parent, note) in enumerate(columns)
    ]


def gathered(inputs: Inputs) -> Inputs:
    """Return inputs with the evidence of their arrays, for plans of parts of them."""
    return dataclasses.replace(inputs, evidence=gather(inputs.nodes, _read(inputs), inputs.kinds))


def _read(inputs: Inputs) -> Arrays:
    read = [read_leaf(node.value, node.path) for node in inputs.arrays]
    paths, specs = [node.path for node in inputs.arrays], [spec for spec, _ in read]
    held = [node.exact or spec.library in SEQUENCES for node, spec in zip(inputs.arrays, specs, strict=True)]
    return Arrays(paths, specs, [flat for _, flat in read], held)


def _notes(leaves: Sequence[Leaf], codecs: Sequence[Codec], cfg: Config, kinds: Mapping[str, Any] | None) -> list[str]:
    """Return a remark for each exact array that may be an embedding, or "".

    There are remarks only under rules that quantize embeddings by rows.
    """
    if not any(r.match == "embedding" and isinstance(r.codec, Rows) and not r.codec.lossless for r in cfg.rules):
        return [""] * len(leaves)
    notes = []
    for leaf, codec in zip(leaves, codecs, strict=True):
        shape = leaf.spec.shape
        tall = len(shape) == 2 and shape[0] > shape[1] and leaf.spec.size >= TINY and leaf.spec.dtype in FLOATS
        exact = isinstance(codec, Exact) and leaf.entry is None and leaf.kind.layer == "linear"
        unknown = tall and exact and not (kinds and by_path(kinds, leaf.path))
        notes.append("exact: not known for an embedding, by its name or by kinds" if unknown else "")
    return notes


def _with_companions(inputs: Inputs, leaves: list[Leaf], codecs: Sequence[Codec]) -> list[Leaf]:
    """Add gradient and earlier values to the leaf of each weight that is quantized."""
    gradient_of = entries(inputs.grads, inputs.arrays)
    earlier_of = entries({} if inputs.past_weights is None else inputs.past_weights.weights, inputs.arrays)
    found = []
    for leaf, codec in zip(leaves, codecs, strict=True):
        gradient, before = _companion(leaf, gradient_of, "grads"), _companion(leaf, earlier_of, "earlier")
        if isinstance(codec, Quantize) and not (gradient is None and before is None):
            leaf = dataclasses.replace(leaf, gradient=gradient, earlier=before)
        found.append(leaf)
    return found


def _companion(leaf: Leaf, entry: Callable[[str], Match | None], name: str) -> Any:
    """Return the array of an argument that belongs to a weight, or None.

    It is flat and on the weight's device.
    """
    match = entry(leaf.path) if leaf.entry is None else None
    if match is None:
        return None
    path = f"{name}/{match.key}"
    spec, values = read_leaf(match.value, path)
    if spec.shape != leaf.spec.shape:
        raise BadArgumentError(f"{leaf.path}: {path} has shape {spec.shape}, not {leaf.spec.shape}")
    if spec.dtype not in FORMATS:
        raise BadArgumentError(f"{leaf.path}: {path} has dtype {spec.dtype}; one of {', '.join(FORMATS)} is needed")
    return to_place_of(values, leaf.flat)


def _warn_of_unmatched(rules: Sequence[Rule], paths: Sequence[str]) -> None:
    """Warn of each rule that matches no array, with the nearest path or kind.

    Rules for kinds, and globs that begin with `*` ("*/exp_avg"), cause no warning.
    """
    known = {*ROLES, *LAYERS, *(rule.match.removeprefix("*/") for rule in rules if rule.match.startswith("*/"))}
    for rule in rules if paths else ():
        if rule.match in known or rule.match.startswith("*"):
            continue
        if any(fnmatch.fnmatchcase(path, rule.match) for path in paths):
            continue
        if (meant := next((path for path in paths if fnmatch.fnmatchcase(path, f"*/{rule.match}")), None)) is not None:
            hint = f"globs are for whole paths, such as {meant}; '*/{rule.match}' matches it"
        elif "." not in rule.match and (
            kind := next(iter(difflib.get_close_matches(rule.match.lower(), (*ROLES, *LAYERS), 1, 0.8)), None)
        ):
            hint = f"did you mean the kind {kind!r}?"
        else:
            nearest = difflib.get_close_matches(rule.match, paths[:_GLANCE], 1, 0.0)[0]
            hint = f"the nearest path is {nearest}"
        warnings.warn(f"rule {rule.match!r} matches no array of this state: {hint}", UnmatchedRuleWarning, stacklevel=2)


def _warn_of_unknown(leaves: Sequence[Leaf], evidence: Sequence[Evidence], whys: Sequence[str], cfg: Config) -> None:
    """Warn if much of a state stays exact because the role of its arrays is unknown."""
    total, unknown = 0, []
    for leaf, known, why in zip(leaves, evidence, whys, strict=True):
        total += leaf.spec.nbytes if leaf.spec.dtype in FORMATS else 0
        if known.is_unknown and why == known.why and len(leaf.spec.shape) >= 2 and leaf.path:  # no rule names ""
            weight = dataclasses.replace(known.kind, role="weight")
            as_weight = dataclasses.replace(known, kind=weight, source="name")
            if not is_lossless(cfg.codec_for(leaf.path, leaf.spec, as_weight)[0]):
                unknown.append(leaf)
    size = sum(leaf.spec.nbytes for leaf in unknown)
    if size <= _MUCH * total:
        return
    largest = sorted(unknown, key=lambda leaf: -leaf.spec.nbytes)[:3]
    several = {known.why for known in evidence if known.why.startswith(SEVERAL_TREES)}
    if several:
        message = (
            f"{size / total:.0%} of the float bytes stay exact: {min(several)}. Put the part that they are "
            f"of into their keys: kinds={{PART + name: kind for name, kind in sp.kinds(model, optimizer).items()}}"
        )
        warnings.warn(UnknownArraysWarning(message), stacklevel=2)
        return
    found = (
        f"{size / total:.0%} of the float bytes stay exact, because nothing says what these arrays are: "
        f"{', '.join(leaf.path for leaf in largest)}{', ...' if len(unknown) > 3 else ''}. "
        "If they are trained weights, "
    )
    pattern = glob.escape(largest[0].path)
    with_rule = dataclasses.replace(cfg, rules=(Rule(pattern, Quantize()), *cfg.rules))
    warnings.warn(
        UnknownArraysWarning(
            f"{found}pass kinds=sp.kinds(model, optimizer), or cfg=sp.Config([({pattern!r}, sp.Quantize())])",
            f"{found}write this to a file and pass it as --config FILE.json, without --preset, with a rule for each "
            f"of them (a shell glob): {json.dumps(with_rule.to_json())}",
        ),
        stacklevel=2,
    )


def _moment_pairs(leaves: Sequence[Leaf]) -> dict[int, int]:
    """Return for each first moment the number of its second moment, if grids take its dtype."""
    seconds = {
        (leaf.entry.owner, leaf.spec): j
        for j, leaf in enumerate(leaves)
        if leaf.kind.role == "second moment" and leaf.entry is not None
    }
    pairs = {}
    for i, leaf in enumerate(leaves):
        if leaf.entry is not None and leaf.entry.is_update and leaf.spec.dtype in ("float32", "bfloat16"):
            pairs[i] = seconds.get((leaf.entry.owner, leaf.spec))
    return {i: j for i, j in pairs.items() if j is not None}


def _with_targets(codec: Codec, cfg: Config) -> Codec:
    """Return the codec with the configuration's error target and rate unless it has its own."""
    if isinstance(codec, Quantize):
        max_error = cfg.max_rel_error if codec.max_error is None else codec.max_error
        return dataclasses.replace(codec, max_error=max_error, rate=cfg.rate if codec.rate is None else codec.rate)
    if isinstance(codec, FirstMoment) and codec.max_error is None and (cfg.max_rel_error or 1) > LARGEST_ERROR:
        return codec
    if isinstance(codec, _TARGETED) and codec.max_error is None:
        return dataclasses.replace(codec, max_error=cfg.max_rel_error)
    return codec
