"""Models of many small tensors: what a call costs beside the work, against one tensor of the same total."""

from __future__ import annotations

from collections.abc import Callable

from .elementwise import BITS, Place
from .harness import Case, Job, Peer, same

TENSORS = 500
SMALL = 10_000


def cases(at: Place) -> list[Case]:
    """Each row's peer is the same kernel on one tensor of all elements."""
    peers = ("one tensor", at.device.floor)
    return [
        Case(
            f"{TENSORS} tensors: {name}",
            total(at),
            "GB/s",
            _make(at, make),
            at.device.name,
            None,
            peers,
            at.device.missing,
        )
        for name, make in (("log_histogram", histogram), ("assign", assign))
    ]


def total(at: Place) -> int:
    """Elements of the model: `TENSORS * SMALL`, fewer where there is not as much data."""
    return min(TENSORS * SMALL, at.n) // TENSORS * TENSORS


def _make(
    at: Place, make: Callable[[Place], tuple[Callable[[], object], Callable[[], object], Callable[[], str]]]
) -> Callable[[], Job]:
    def build() -> Job:
        each, one, check = make(at)
        nbytes = 4 * total(at)
        peer = Peer("one tensor", lambda: one, note="the same kernel, all elements in one call")
        note = f"{TENSORS} calls of {total(at) // TENSORS:,} elements"
        return Job(each, check, float(nbytes), [peer, at.device.copy(nbytes)], note)

    return build


def histogram(at: Place) -> tuple[Callable[[], object], Callable[[], object], Callable[[], str]]:
    from shrinkpoint.kernels.histogram import log_histogram, merge

    whole = at.device.array(at.sample.before(total(at)))
    parts = [whole[i : i + total(at) // TENSORS] for i in range(0, total(at), total(at) // TENSORS)]

    def check() -> str:
        merged = merge(*(log_histogram(part, BITS, signed=True) for part in parts))
        same("counts", merged, log_histogram(whole, BITS, signed=True))
        return "merged counts = counts of one tensor"

    return (
        lambda: [log_histogram(part, BITS, signed=True) for part in parts],
        lambda: log_histogram(whole, BITS, signed=True),
        check,
    )


def assign(at: Place) -> tuple[Callable[[], object], Callable[[], object], Callable[[], str]]:
    from shrinkpoint.kernels.assign import assign as levels_of

    limits, codebook = at.sample.thresholds, at.sample.codebook
    whole = at.device.array(at.sample.before(total(at)))
    step = total(at) // TENSORS
    parts = [whole[i : i + step] for i in range(0, total(at), step)]

    def check() -> str:
        levels = levels_of(whole, limits, codebook)
        for number, part in enumerate(parts):
            same("levels", levels_of(part, limits, codebook), levels[number * step : (number + 1) * step])
        return "levels = levels of one tensor"

    return (
        lambda: [levels_of(part, limits, codebook) for part in parts],
        lambda: levels_of(whole, limits, codebook),
        check,
    )
