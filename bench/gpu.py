"""Cases of a GPU: all codebooks in one launch, a billion parameters, coders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from . import codebooks, coders, many
from .elementwise import BITS, Place, oracle
from .harness import Case, Job, Peer, at_least, at_most, same

TENSORS = 100
CODEBOOKS = f"{TENSORS} exact codebooks K = {codebooks.CODES}, one launch"
_STATE = 1_000_000_000
_STATE_TENSORS = 100
_BYTES_A_PARAMETER = 26  # 12 of the state, 12 of its copy, and the temporary memory of the largest tensor
_MOMENT_BITS = 1


def cases(at: Place) -> list[Case]:
    """Cases of this module; without a GPU they are reported as not measured."""
    size = _STATE if at.device.missing else parameters()
    state = (at.device.floor, "plain torch")
    return [
        Case(
            CODEBOOKS,
            TENSORS,
            "ms",
            lambda: _codebooks(at),
            at.device.name,
            at_most(5.0),
            ("cpu, one by one",),
            at.device.missing,
        ),
        *(
            Case(
                f"quantize a state, codebooks {how}",
                size,
                "GB/s",
                partial(_state, at, size, refit=refit),
                at.device.name,
                at_least(1 / times),
                state,
                at.device.missing,
            )
            for how, refit, times in (("frozen", False, 4), ("refit", True, 6))
        ),
        *coders.anywhere(at),
        *many.cases(at),
    ]


def parameters() -> int:
    """A billion, or as many as fit this GPU."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    return min(_STATE, int(0.9 * free) // _BYTES_A_PARAMETER // _STATE_TENSORS * _STATE_TENSORS)


def _codebooks(at: Place) -> Job:
    from shrinkpoint.kernels.kmeans import weighted_kmeans_many

    step = min(at.n // TENSORS, 1_000_000)
    on_host = [codebooks.problem(at.sample.before(at.n)[i * step : (i + 1) * step]) for i in range(TENSORS)]
    problems = [(at.device.array(centers), at.device.array(weights)) for centers, weights in on_host]

    def check() -> str:
        mine = weighted_kmeans_many(problems[:8], codebooks.CODES)
        same("codebooks", mine, weighted_kmeans_many(on_host[:8], codebooks.CODES))
        return "8 codebooks = the CPU's"

    def one_by_one() -> Callable[[], object]:
        return lambda: weighted_kmeans_many(on_host, codebooks.CODES)

    note = f"problems of {on_host[0][0].size:,} buckets; data {at.sample.origin}"
    return Job(
        lambda: weighted_kmeans_many(problems, codebooks.CODES), check, 1.0, [Peer("cpu, one by one", one_by_one)], note
    )


def _state(at: Place, size: int, *, refit: bool) -> Job:
    """Return weights to levels and moments to buckets, tensor by tensor, 12 bytes a parameter."""
    import torch

    from shrinkpoint.codec.weights.codebook import Problem, solve_together
    from shrinkpoint.kernels.histogram import bucket_index, log_histogram_many
    from shrinkpoint.kernels.kmeans import bucket_weights
    from shrinkpoint.kernels.quantizer import assign

    limits, codebook = at.sample.thresholds, at.sample.codebook
    step = size // _STATE_TENSORS
    seed = at.device.array(at.sample.before(min(at.n, step)))
    weights = seed.repeat(-(-size // seed.numel()))[:size].view(_STATE_TENSORS, step)
    first, second = weights * 0.01, (weights * 0.01).square()

    def fitted() -> list[Any]:
        found = []
        for histogram in log_histogram_many(list(weights), BITS, signed=True):
            used = np.flatnonzero(histogram.counts[:-1])
            centers = histogram.values()[used]
            found.append(Problem(centers, bucket_weights(histogram.counts[used], centers), codebook.size, "exact", 0))
        return [torch.from_numpy(codes).to(seed) for codes in solve_together(found, seed)]

    def quantize(tensors: int = _STATE_TENSORS) -> Any:
        books = fitted() if refit else [codebook] * _STATE_TENSORS
        out = []
        for number in range(tensors):
            levels = assign(weights[number], limits, books[number])
            out = [levels, *(bucket_index(moment[number], _MOMENT_BITS) for moment in (first, second))]
        return out

    def check() -> str:
        few = min(step, 1 << 16)
        book = fitted()[0].double().cpu().numpy() if refit else codebook.astype(np.float64)
        host = [moment[0, :few].cpu().numpy() for moment in (weights, first, second)]
        expected = [
            oracle("quantizer").assign(host[0], limits, book, gradient=None),
            *(oracle("histogram").bucket_index(x, _MOMENT_BITS) for x in host[1:]),
        ]
        same("levels and indices", [part[:few] for part in quantize(1)], expected)
        return f"{few:,} elements of each kind = oracle"

    def plain() -> Callable[[], object]:
        return lambda: _plain(weights, (first, second), torch.from_numpy(codebook).cuda(), refit=refit)

    nbytes = 12 * size
    copied = at.device.copy(min(nbytes, 4 << 30))
    note = "12 bytes a parameter: weights to levels, both moments to log buckets"
    return Job(lambda: quantize(), check, float(nbytes), [copied, Peer("plain torch", plain, note=_PLAIN)], note)


_PLAIN = "bucketize; log2 buckets of the moments; a refit is one Lloyd step from the old codes"


def _plain(weights: Any, moments: tuple[Any, Any], codes: Any, *, refit: bool) -> Any:
    """Quantize weights and moments with plain torch operations, as a peer."""
    import torch

    out = None
    for number in range(weights.shape[0]):
        book = codes
        levels = torch.bucketize(weights[number], 0.5 * (book[1:] + book[:-1]), out_int32=True)
        if refit:
            sums = torch.zeros_like(book).index_add_(0, levels, weights[number])
            book = sums / torch.bincount(levels, minlength=book.numel()).clamp(min=1)
            levels = torch.bucketize(weights[number], 0.5 * (book[1:] + book[:-1]), out_int32=True)
        out = levels.to(torch.uint8)
        for moment in moments:
            exponent = torch.floor(2 * torch.log2(moment[number].abs())).clamp(-300, 300)
            out = torch.copysign(exponent + 301, moment[number]).to(torch.int32)
    return out
