"""Where a kernel is measured, and the jobs that hold its result against the oracle's.

A rate is the bytes of the numbers an array stands for, 4 an element for float32 weights and for levels of such, over
the time, and its share is held against copying as many bytes. Each check compares a prefix with the oracle bit for bit,
sums of float64 to a billionth. With an inverse, the whole output of the round trip is compared with the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import numpy as np

from ..data import CODES, Sample
from ..harness import Array, Case, CheckFailed, Device, Job, Peer, Target, agree, at_least, same

PREFIX = (1 << 16) + 1
"""Elements that are compared with the oracle."""
FEW = 1 << 14
"""Elements that are compared with an oracle that goes one by one."""
BITS = 6
"""Sub-bucket bits of the sketch: relative error 1 %."""
LEVELS = CODES + 2
COLUMNS = 64
"""Elements of a row of a matrix."""
ROWS = f"rows of {COLUMNS}"
ROUNDING = 1e-9
Check = Callable[[], str]


def oracle(subject: str) -> Any:
    """The reference back end of a subject."""
    return import_module(f"shrinkpoint.kernels.{subject}.reference")


@dataclass(frozen=True)
class Call:
    """A call of a kernel, and what its result is compared with.

    Args:
        kernel: "subject.function".
        values: its arrays, on the host; the oracle gets a prefix of each.
        settings: the arguments after them.
        full: the oracle's arguments after the arrays, which have no defaults; None: the same settings.
        named: arguments by name, of both; of an array among them the oracle gets a prefix, too.
        first: length of the prefix along the first axis; None: the usual one.
        within: share by which float64 results may differ.
        back: returns the inverse of the whole result, and its expected value.
    """

    kernel: str
    values: tuple[Any, ...]
    settings: tuple[Any, ...] = ()
    full: tuple[Any, ...] | None = None
    named: Mapping[str, Any] = field(default_factory=dict)
    first: int | None = None
    within: float = 0.0
    back: Callable[[Any], tuple[Any, Any]] | None = None


@dataclass(frozen=True)
class Place:
    """Device, data and number of elements of a case."""

    device: Device
    sample: Sample
    n: int

    @property
    def prefix(self) -> int:
        return min(self.n, PREFIX)

    @property
    def says(self) -> str:
        """Text for a passed check: the number of elements compared."""
        return f"{self.prefix:,} elements = oracle"

    def few(self, most: int) -> Place:
        """The same place with at most so many elements."""
        return Place(self.device, self.sample, min(self.n, most))

    def arrays(self, *values: Any) -> list[Array]:
        """The arrays on this device."""
        return [self.device.array(x) for x in values]

    def target(self, cpu: float, gpu: float) -> Target:
        """Target for the share of a copy, by device."""
        return at_least(gpu if self.device.gpu else cpu)

    def case(
        self,
        row: str,
        make: Callable[[], Job],
        target: Target | None = None,
        others: Sequence[str] = (),
        *,
        unit: str = "GB/s",
        on: Literal["", "cpu", "gpu"] = "",
    ) -> Case:
        """Return a case, on one kind of device alone if it says so; the first peer of a rate is the copy."""
        names = tuple(others) if unit in ("us", "ms") else (self.device.floor, *others)
        return Case(row, self.n, unit, make, self.device.name, target, names, self.device.missing, on=on)

    def job(
        self, call: Callable[[], object], check: Check, moves: float, others: Sequence[Peer] = (), *,
        width: int = 4, note: str = "",
    ) -> Job:  # fmt: skip
        """Return a job over n elements of `width` bytes, `moves` bytes an element."""
        nbytes = width * self.n
        said = f"{moves:g} bytes an element move; data {self.sample.origin}"
        notes = f"{note}; {said}" if note else said
        return Job(call, check, float(nbytes), [self.device.copy(nbytes), *others], notes)

    def compared(self, call: Call, moves: float, others: Sequence[Peer] = (), *, width: int = 4, note: str = "") -> Job:
        """Return the job of a kernel whose result is compared with the oracle's."""
        subject, name = call.kernel.split(".")
        function = getattr(import_module(f"shrinkpoint.kernels.{subject}"), name)
        arrays, part = self.arrays(*call.values), call.first or self.prefix
        named = {name: self.device.array(x) if isinstance(x, np.ndarray) else x for name, x in call.named.items()}

        def run() -> Any:
            return function(*arrays, *call.settings, **named)

        def cut(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: x[:part] if hasattr(x, "shape") else x for name, x in values.items()}

        def check() -> str:
            further = call.settings if call.full is None else call.full
            expected = getattr(oracle(subject), name)(*(x[:part] for x in call.values), *further, **cut(call.named))
            result = function(*(x[:part] for x in arrays), *call.settings, **cut(named))
            agree(name, result, expected, call.within)
            said = f"{part:,} {'rows' if call.values[0].ndim > 1 else 'elements'} = oracle"
            if call.back is not None:
                same("round trip", *call.back(run()))
                said += ", all come back"
            return said + (f", sums to {call.within:g}" if call.within else "")

        return self.job(run, check, moves, others, width=width, note=note)

    def symbols(self, call: Callable[[], object], check: Check, others: Sequence[Peer], note: str) -> Job:
        """Return a job over n symbols, held against copying the n float32 weights they stand for."""
        copy = self.device.copy(4 * self.n)
        floor = Peer(copy.name, copy.make, float(self.n), note="of as many float32 weights")
        return Job(call, check, float(self.n), [floor, *others], f"{note}; data {self.sample.origin}")

    def coding(
        self, encode: Callable[[], Any], decode: Callable[[], Any], symbols: Any, few: Callable[[], tuple[Any, Any]],
        note: str, others: Sequence[Peer] = (), *, decoding: bool,
    ) -> Job:  # fmt: skip
        """Return a job of an encoder of n symbols, or of its decoder.

        Args:
            encode, decode: the calls.
            symbols: that the decoder restores.
            few: what encoder and oracle give for a prefix.
            note: of the job.
            others: its peers.
            decoding: whether it is the decoder's.
        """

        def check() -> str:
            same("symbols", decode(), symbols)
            same("prefix", *few())
            return "round trip, prefix = oracle"

        return self.symbols(decode if decoding else encode, check, others, note)

    def table(
        self, call: Callable[[], Any], expected: Callable[[], Any], note: str, *,
        seen: Callable[[Any], Any] = lambda found: found, within: float = 0.0, says: str = "= oracle",
        others: Sequence[Peer] = (),
    ) -> Job:  # fmt: skip
        """Return a job on a table, whose time does not depend on an array; `seen` of its result is compared."""

        def check() -> str:
            agree("table", seen(call()), expected(), within)
            return says + (f" to {within:g}" if within else "")

        return Job(call, check, 1.0, others, f"{note}; data {self.sample.origin}")

    # ------------------------------------------------------------------------------------------------------------ data

    def pair(self) -> tuple[Any, Any]:
        """The weights of both checkpoints."""
        return self.sample.before(self.n), self.sample.after(self.n)

    def levels(self) -> tuple[Any, Any]:
        """The levels of both checkpoints."""
        return self.sample.levels_before(self.n), self.sample.levels_after(self.n)

    def patterns(self) -> tuple[Any, Any]:
        """Upper halves of both checkpoints' float32 patterns; a tenth to a half differ."""
        before, after = (np.ascontiguousarray(x.view(np.uint16)[1::2]) for x in self.pair())
        return before, after

    def matrix(self) -> Any:
        """The weights as rows of a matrix."""
        return self.sample.before(self.n)[: self.n // COLUMNS * COLUMNS].reshape(-1, COLUMNS)

    def steps(self) -> Any:
        """Differences of the weights of both checkpoints."""
        return self.sample.after(self.n) - self.sample.before(self.n)

    def joint(self) -> Any:
        """Counts of (earlier level, later level) pairs."""
        from shrinkpoint.kernels import levels

        return levels.joint_counts(*self.levels(), LEVELS, LEVELS)


def numpy_peer(call: Callable[[], object]) -> Peer:
    """The definition of a table by NumPy."""
    return Peer("NumPy", lambda: call, note="the definition, unchecked")


def comes_back(name: str, result: Callable[[], Any], expected: Any, says: str = "all come back") -> Check:
    """Return the check that a round trip restores its input."""

    def check() -> str:
        same(name, result(), expected)
        return says

    return check


def require(met: bool, message: str) -> None:
    """Raise CheckFailed with the message unless a condition is met."""
    if not met:
        raise CheckFailed(message)
