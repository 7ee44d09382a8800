"""Read the data of a report from a store: headers of all steps, histograms of one."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..codec.base import CHUNK, Reference
from ..codec.errors import BadArgumentError, ShrinkpointError
from ..codec.evidence.moments import guess
from ..codec.format.bounded_json import loads
from ..codec.parallel import map_chunks
from ..codec.records import ArrayRecord
from ..codec.state.leaves import LeafSpec, is_array
from ..codec.state.tree import flatten
from ..codec.weights.levels import LevelsReference
from ..commands.dcp import load_step
from ..commands.diff import widened
from ..commands.inputs import headers_of_step
from ..store import history
from ..store.files import DAMAGE
from ..store.local import MOST_JSON, read_file
from ..store.urls import open_files

if TYPE_CHECKING:
    from ..store.manifest import Manifest
    from ..store.store import Store

MAX_STEPS = 500
"""Maximum number of steps shown; of more steps, evenly spaced ones with the first and the last."""
MAX_TENSORS = 300
"""Maximum number of histograms shown, those of the largest float arrays."""
MAX_NOTES = 40
"""Maximum number of different choices of codecs shown."""
BINS = 64
"""Maximum number of bins of a histogram."""
FLOATS = ("float16", "bfloat16", "float32", "float64")
HEADER = "header and checksums"
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class Error:
    """Errors of the arrays of one role in one step.

    Args:
        median: median of the arrays' errors.
        largest: their maximum.
    """

    median: float
    largest: float


class Choice(NamedTuple):
    """The storage of arrays of one kind: codec, stream and reason.

    Args:
        kind: category of the arrays.
        codec: the codec chosen.
        stream: the stream format that it wrote.
        why: the rule or evidence that chose the codec.
        note: the codec's note, up to a colon.
    """

    kind: str
    codec: str
    stream: str
    why: str
    note: str


@dataclass(frozen=True, slots=True)
class StepRow:
    """Properties of one step.

    Args:
        manifest: of the step.
        labels: "pinned", and tags.
        parts: category -> stored bytes; they sum to `manifest.stored_nbytes`.
        raw_parts: category -> bytes of the arrays.
        errors: role and measure ("relative L2" or "relative") -> errors.
        choices: number of arrays by choice.
    """

    manifest: Manifest
    labels: tuple[str, ...]
    parts: dict[str, int]
    raw_parts: dict[str, int]
    errors: dict[tuple[str, str], Error]
    choices: Counter[Choice]

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.manifest.step


@dataclass(frozen=True, slots=True)
class Histogram:
    """Equal bins over the finite values of an array, and its codebook.

    Args:
        low: the least finite value.
        high: the largest one.
        counts: number of values in each of `BINS` bins from low to high; one bin if low equals high; empty if all
            values are not finite.
        zeros: number of values that are zero.
        odd: number of values that are not finite.
        codebook: ascending entries; empty for an array without a codebook.
        uses: number of uses of each entry.
        protected: number of values stored in addition to the codebook.
        pruned: number of values set to zero by pruning.
    """

    low: float
    high: float
    counts: tuple[int, ...]
    zeros: int
    odd: int
    codebook: tuple[float, ...] = ()
    uses: tuple[int, ...] = ()
    protected: int = 0
    pruned: int = 0


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array of the step whose histograms are shown."""

    record: ArrayRecord
    category: str
    histogram: Histogram


Decoded = tuple[ArrayRecord, Callable[[], Reference]]
"""An array of a step, and the function that decodes it."""


@dataclass(frozen=True, slots=True)
class Run:
    """The data of a report.

    Args:
        name: the name of the run.
        steps: the steps shown.
        all_steps: number of steps in the store.
        restored: the steps that were restored, in order, where known.
        restores: number of restores.
        tensors: arrays with histograms, largest first.
        all_tensors: number of float arrays.
        tensor_step: the step of these arrays; None where no step is intact.
        curves: name -> (step, value) of the demo's held-out losses.
        searches: results of configuration searches, with their file names.
        problems: messages about unreadable steps.
    """

    name: str
    steps: tuple[StepRow, ...]
    all_steps: int
    restored: tuple[int, ...]
    restores: int
    tensors: tuple[Tensor, ...]
    all_tensors: int
    tensor_step: int | None
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    searches: tuple[tuple[str, Any], ...] = ()
    problems: tuple[str, ...] = ()


def collect(
    store: Store,
    *,
    name: str,
    step: int | str | None = None,
    searches: Iterable[Path] = (),
    results: Path | None = None,
    progress: Progress | None = None,
) -> Run:
    """Read the data of a report: the headers of all steps, and the arrays of one.

    Args:
        store: the store of the run.
        name: the name to show.
        step: step or tag whose arrays are shown; None: the newest intact step.
        searches: files with JSON of `SearchResult.to_json`.
        results: a file that may hold results of the demo, for its losses; ignored if missing.
        progress: called with (step, done, total) after each step.

    Raises:
        BadArgumentError: the step does not exist; a file is not a search result.
        CorruptDataError, MissingParentError, NewerFormatError: `step` cannot be read.
    """
    # Wrong arguments are reported before the store is read.
    found = tuple((str(path), _search(path)) for path in searches)
    if step is not None:
        store.describe(step)
    manifests, unreadable = store.manifests()
    numbers = sorted(manifests.keys() | unreadable.keys())
    shown = _spread(numbers, MAX_STEPS)
    pins, tags = set(store.pins()), store.tags()
    rows: list[StepRow] = []
    problems = {number: unreadable[number] for number in shown if number in unreadable}
    for done, number in enumerate(shown, 1):
        labels = (*(["pinned"] if number in pins else []), *(t for t, at in tags.items() if at == number))
        try:
            if number not in unreadable:
                rows.append(_row(manifests[number], _records(store, manifests[number]), labels))
        except DAMAGE as error:
            problems[number] = str(error)
        if progress is not None:
            progress(number, done, len(shown))
    at, arrays = _newest(store, step, problems)
    tensors, all_tensors = _tensors(arrays)
    return Run(
        name=name,
        steps=tuple(rows),
        all_steps=len(numbers),
        restored=tuple(history.restored_steps(open_files(store.url))),
        restores=store.restores(),
        tensors=tensors,
        all_tensors=all_tensors,
        tensor_step=at,
        curves=_curves(results),
        searches=found,
        problems=tuple(problems[number] for number in sorted(problems)),
    )


def _spread(numbers: Sequence[int], most: int) -> list[int]:
    """At most `most` of the numbers, evenly spaced, with both ends.

    Example:
        >>> _spread(range(10), 4)
        [0, 3, 6, 9]
    """
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[i * (len(numbers) - 1) // (most - 1)] for i in range(most)]


def category(record: ArrayRecord) -> str:
    """The kind of an array, by its name and shape."""
    kind = guess(record.path, record.spec)
    if kind.role == "weight" and record.spec.dtype not in FLOATS:
        return "other state"
    return {"weight": f"{kind.layer} weights", "state": "other state"}.get(kind.role, f"{kind.role}s")


def _records(store: Store, manifest: Manifest) -> list[ArrayRecord]:
    """Return the records of a step, of a sharded one those of all ranks."""
    return [record for ckpt in headers_of_step(store, manifest).values() for record in ckpt.records]


def _row(manifest: Manifest, records: Sequence[ArrayRecord], labels: tuple[str, ...]) -> StepRow:
    parts: Counter[str] = Counter()
    raw: Counter[str] = Counter()
    errors: dict[tuple[str, str], list[float]] = {}
    choices: Counter[Choice] = Counter()
    for record in records:
        kind = category(record)
        parts[kind] += record.nbytes
        raw[kind] += record.spec.nbytes
        choices[Choice(kind, record.codec, record.stream, record.why, record.note.partition(":")[0])] += 1
        if record.measure != "exact":
            role = kind if kind.endswith("moments") else "weights"
            errors.setdefault((role, record.measure), []).append(record.error)
    parts[HEADER] = manifest.stored_nbytes - sum(parts.values())
    found = {key: Error(statistics.median(values), max(values)) for key, values in errors.items()}
    return StepRow(manifest, labels, dict(parts), dict(raw), found, choices)


def _newest(store: Store, step: int | str | None, problems: dict[int, str]) -> tuple[int | None, list[Decoded]]:
    """Return the step whose arrays are shown, and its arrays."""
    if step is not None:
        manifest = store.describe(step)
        return manifest.step, _arrays_of(store, manifest)
    for number in reversed(store.steps()):
        try:
            return number, _arrays_of(store, store.describe(number))
        except DAMAGE as error:
            problems.setdefault(number, str(error))
    return None, []


def _arrays_of(store: Store, manifest: Manifest) -> list[Decoded]:
    """Return the arrays of a step; the shards of a sharded one are joined."""
    if not manifest.shards:
        ckpt = store.read(manifest.step)
        return [(record, partial(ckpt.reference_of, record)) for record in ckpt.records]
    from ..codec.moments.logbuckets import ValuesReference

    # One record stands for all shards of a tensor.
    shards = {record.path: record for record in _records(store, manifest)}
    _, arrays = flatten(load_step(store, manifest.step), is_array)
    found: list[Decoded] = []
    for node in arrays:
        spec = LeafSpec("torch", str(node.value.dtype).removeprefix("torch."), tuple(node.value.shape))
        if node.path in shards:
            values = partial(ValuesReference, node.value.reshape(-1))
            found.append((replace(shards[node.path], spec=spec), values))
    return found


def histogram(memory: Reference, spec: LeafSpec) -> Histogram:
    """Return the histogram of a decoded array of floats.

    Args:
        memory: the array, as `Checkpoint.reference_of` returns it.
        spec: its dtype and shape.

    Example:
        >>> import shrinkpoint as sp
        >>> ckpt = sp.compress([np.array([0.0, 1.0, 1.0, 4.0])])
        >>> found = histogram(ckpt.reference_of(ckpt.records[0]), ckpt.records[0].spec)
        >>> found.low, found.high, found.counts[0], found.counts[16], found.zeros
        (0.0, 4.0, 1, 2, 1)
    """
    flat = memory.values(spec)
    starts = range(0, spec.size, CHUNK)
    low, high, odd, zeros = np.inf, -np.inf, 0, 0
    for start in starts:
        x = widened(flat[start : start + CHUNK])
        finite = x[np.isfinite(x)]
        odd += x.size - finite.size
        zeros += int((finite == 0).sum())
        low, high = float(finite.min(initial=low)), float(finite.max(initial=high))
    counts: Any = np.zeros(0, np.int64)
    if low == high:
        counts = np.array([spec.size - odd])
    elif low < high:
        # Scaled so that the width of a bin is finite for all values.
        scale = 2.0 ** -max(0, int(np.frexp(max(abs(low), abs(high)))[1]) - 1000)
        edges = np.linspace(low * scale, high * scale, BINS + 1)
        counts = np.zeros(BINS, np.int64)
        if (np.diff(edges) > 0).all():
            for start in starts:
                x = widened(flat[start : start + CHUNK])
                counts += np.histogram(x[np.isfinite(x)] * scale, bins=edges)[0]
        else:
            counts = np.array([spec.size - odd])  # the values are closer than float64 can divide
    shape = (low, high) if low <= high else (0.0, 0.0)
    found = Histogram(*shape, tuple(map(int, counts)), zeros, odd)
    if not isinstance(memory, LevelsReference):
        return found
    uses = np.bincount(memory.levels, minlength=memory.size)
    return replace(
        found,
        codebook=tuple(map(float, memory.codebook)),
        uses=tuple(map(int, uses[2:])),
        protected=int(uses[1]),
        pruned=int(uses[0]),
    )


def _tensors(arrays: Sequence[Decoded]) -> tuple[tuple[Tensor, ...], int]:
    found = [(record, decode) for record, decode in arrays if record.spec.dtype in FLOATS and record.spec.size]
    largest = sorted(found, key=lambda array: -array[0].spec.size)[:MAX_TENSORS]

    def one(array: Decoded) -> Tensor:
        record, decode = array
        return Tensor(record, category(record), histogram(decode(), record.spec))

    return tuple(map_chunks(one, largest)), len(found)


def _curves(results: Path | None) -> dict[str, list[tuple[float, float]]]:
    """Return the held-out losses of the demo; empty if the file is missing."""
    if results is None or not results.is_file():
        return {}
    try:
        data = loads(read_file(results, MOST_JSON))["curves"]
        curves = {name: data[key]["readings"] for key, name in (("run", "this run"), ("baseline", "never killed"))}
        return {name: [(float(x), float(y)) for x, y in points] for name, points in curves.items() if points}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _search(path: Path) -> Any:
    from ..searching.result import SearchResult

    try:
        return SearchResult.from_json(loads(read_file(path, MOST_JSON)))
    except (ValueError, TypeError, KeyError, ShrinkpointError) as error:
        raise BadArgumentError(f"{path}: not a search result: {str(error)[:200]}") from None
