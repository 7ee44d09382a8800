"""Models of many small tensors: the cost of a tensor against one tensor of the same total."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .elementwise import BITS, Place
from .harness import Case, Job, Peer, same

TENSORS = 500
SMALL = 10_000


ONE = "one tensor"
EACH = "a call each"


@dataclass(frozen=True)
class Ways:
    """Calls that do the same work on many tensors, on one tensor, and tensor by tensor.

    Args:
        many: on all tensors of the model.
        one: on one tensor of all their elements.
        check: raises CheckFailed where `many` computes something else than `one`.
        calls: how `many` is called.
        each: on each tensor in a call of its own, where `many` is one call.
    """

    many: Callable[[], object]
    one: Callable[[], object]
    check: Callable[[], str]
    calls: str
    each: Callable[[], object] | None = None


def cases(at: Place) -> list[Case]:
    """Cases of many tensors, each with the same kernel on one tensor as its peer."""
    return [
        Case(
            row(name),
            total(at),
            "GB/s",
            _make(at, make),
            at.device.name,
            None,
            (ONE, *others, at.device.floor),
            at.device.missing,
        )
        for name, make, others in (
            ("log_histogram", histogram, (EACH,)),
            ("kept_histogram", kept, (EACH,)),
            ("assign", assign, ()),
        )
    ]


def row(name: str) -> str:
    """Row name of a kernel."""
    return f"{TENSORS} tensors: {name}"


def total(at: Place) -> int:
    """Elements of the model: `TENSORS * SMALL`, fewer where there is not as much data."""
    return min(TENSORS * SMALL, at.n) // TENSORS * TENSORS


def _make(at: Place, make: Callable[[Place], Ways]) -> Callable[[], Job]:
    def build() -> Job:
        ways = make(at)
        nbytes = 4 * total(at)
        peers = [Peer(ONE, lambda: ways.one, note="the same kernel, all elements in one tensor")]
        if ways.each is not None:
            each = ways.each
            peers.append(Peer(EACH, lambda: each, note=f"{TENSORS} calls of one tensor"))
        note = f"{ways.calls} of {total(at) // TENSORS:,} elements"
        return Job(ways.many, ways.check, float(nbytes), [*peers, at.device.copy(nbytes)], note)

    return build


def histogram(at: Place) -> Ways:
    from shrinkpoint.kernels.histogram import log_histogram, log_histogram_many

    return _sketched(
        at,
        lambda parts: log_histogram_many(parts, BITS, signed=True),
        lambda x: log_histogram(x, BITS, signed=True),
    )


def kept(at: Place) -> Ways:
    from shrinkpoint.kernels.histogram import kept_histogram, kept_histogram_many

    limits = at.sample.thresholds
    return _sketched(
        at,
        lambda parts: kept_histogram_many(parts, [limits] * TENSORS, BITS),
        lambda x: kept_histogram(x, limits, BITS),
    )


def _sketched(at: Place, many: Callable[[list[Any]], list[Any]], one: Callable[[Any], Any]) -> Ways:
    """Calls that sketch all tensors at once, one tensor of the same total, and each alone."""
    from shrinkpoint.kernels.histogram import merge

    whole, parts = _tensors(at)

    def check() -> str:
        same("counts", merge(*many(parts)), one(whole))
        return "merged counts = counts of one tensor"

    each = lambda: [one(part) for part in parts]  # noqa: E731
    return Ways(lambda: many(parts), lambda: one(whole), check, f"one call with {TENSORS} tensors", each)


def assign(at: Place) -> Ways:
    from shrinkpoint.kernels.quantizer import assign as levels_of

    limits, codebook = at.sample.thresholds, at.sample.codebook
    whole, parts = _tensors(at)
    step = total(at) // TENSORS

    def check() -> str:
        levels = levels_of(whole, limits, codebook)
        for number, part in enumerate(parts):
            same("levels", levels_of(part, limits, codebook), levels[number * step : (number + 1) * step])
        return "levels = levels of one tensor"

    return Ways(
        lambda: [levels_of(part, limits, codebook) for part in parts],
        lambda: levels_of(whole, limits, codebook),
        check,
        f"{TENSORS} calls",
    )


def _tensors(at: Place) -> tuple[Any, list[Any]]:
    """All elements as one array, and as the arrays of the model."""
    whole = at.device.array(at.sample.before(total(at)))
    step = total(at) // TENSORS
    return whole, [whole[i : i + step] for i in range(0, total(at), step)]
