"""Kernels in a row: weights to bytes and back on the CPU, a whole state on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shrinkpoint.kernels import histogram, kmeans, quantizer, rans
from shrinkpoint.kernels import levels as level_kernels

from .. import peers
from ..harness import Case, Job, Peer, at_least, same
from .entropy import PRECISION
from .place import BITS, LEVELS, Place, oracle

_PARAMETERS, _TENSORS = 1_000_000_000, 100
_BYTES_A_PARAMETER = 26  # 12 of the state, 12 of its copy, and the temporary memory of the largest tensor
_MOMENT_BITS = 1
_SOME = 4_000_000
"""Elements that exact coders get at most."""
_PLAIN = "bucketize; log2 buckets of the moments; a refit is one Lloyd step from the old codes"


def cases(at: Place) -> list[Case]:
    """Return the cases of several kernels."""
    whole = ("zipnn", "pcodec", "zstd -3")
    state = Place(at.device, at.sample, _PARAMETERS if at.device.missing or not at.device.gpu else parameters())
    return [
        at.case("end to end encode", lambda: end_to_end(at, decode=False), at_least(0.7, "value"), whole, on="cpu"),
        at.case("end to end decode", lambda: end_to_end(at, decode=True), at_least(1.3, "value"), whole, on="cpu"),
        *(
            state.case(
                f"quantize a state, codebooks {how}", partial(_state, at, state.n, refit=refit), at_least(1 / times),
                ("plain torch",), on="gpu",
            )
            for how, refit, times in (("frozen", False, 4), ("refit", True, 6))
        ),
    ]  # fmt: skip


def end_to_end(at: Place, *, decode: bool) -> Job:
    """Sketch, codebook, assignment, tables and conditional rANS, or back."""
    limits, previous = at.sample.thresholds, at.sample.levels_before(at.n)

    def encode() -> tuple[Any, Any, Any]:
        x = at.sample.after(at.n)
        sketch = histogram.kept_histogram(x, limits, BITS)
        values = sketch.values()
        fitted = kmeans.weighted_kmeans(values, kmeans.bucket_weights(sketch.counts[:-1], values), LEVELS - 2)
        codebook = np.asarray(fitted, np.float32)
        levels = quantizer.assign(x, limits, codebook)
        table = rans.rans_frequencies(level_kernels.joint_counts(previous, levels, LEVELS, LEVELS), PRECISION)
        return rans.rans_encode(levels, previous, table, PRECISION), table, codebook

    data, table, codebook = encode()

    def restored() -> Any:
        return quantizer.dequantize(rans.rans_decode(data, previous, table, PRECISION, at.n), codebook)

    def check() -> str:
        x, codes = at.sample.after(at.prefix), codebook.astype(np.float64)
        nearest = oracle("quantizer").assign(x, limits, codes, gradient=None)
        expected = oracle("quantizer").dequantize(nearest, codebook, protected=None)
        same("values", restored()[: at.prefix], expected)
        return f"what comes back: {at.says}"

    bits = 8 * data.size / at.n
    note = f"{LEVELS - 2} codes, codebook refit, {bits:.3f} bits a weight, ratio {32 / bits:.1f}"
    some = at.sample.after(at.n)[:_SOME]
    note = "exact" if some.size == at.n else f"exact, on the first {some.size:,} elements"
    others = peers.coder_peers([some], ("zipnn", "pcodec", "zstd -3"), decode=decode, note=note)
    floors = [at.device.copy(4 * at.n), *others]
    return Job(restored if decode else encode, check, 4.0 * at.n, floors, f"{note}; data {at.sample.origin}")


def parameters() -> int:
    """A billion, or as many as fit this GPU."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    return min(_PARAMETERS, int(0.9 * free) // _BYTES_A_PARAMETER // _TENSORS * _TENSORS)


def _state(at: Place, size: int, *, refit: bool) -> Job:
    """Return weights to levels and moments to buckets, tensor by tensor, 12 bytes a parameter."""
    import torch

    from shrinkpoint.codec.weights.codebook import Problem, solve_together

    limits, codebook, step = at.sample.thresholds, at.sample.codebook, size // _TENSORS
    seed = at.device.array(at.sample.before(min(at.n, step)))
    weights = seed.repeat(-(-size // seed.numel()))[:size].view(_TENSORS, step)
    moments = weights * 0.01, (weights * 0.01).square()

    def fitted() -> list[Any]:
        problems = []
        for sketch in histogram.log_histogram_many(list(weights), BITS, signed=True):
            used = np.flatnonzero(sketch.counts[:-1])
            centers = sketch.values()[used]
            shares = kmeans.bucket_weights(sketch.counts[used], centers)
            problems.append(Problem(centers, shares, codebook.size, "exact", 0))
        return [torch.from_numpy(codes).to(seed) for codes in solve_together(problems, seed)]

    def quantize(tensors: int = _TENSORS) -> Any:
        books, out = fitted() if refit else [codebook] * _TENSORS, []
        for number in range(tensors):
            levels = quantizer.assign(weights[number], limits, books[number])
            out = [levels, *(histogram.bucket_index(moment[number], _MOMENT_BITS) for moment in moments)]
        return out

    def check() -> str:
        few = min(step, 1 << 16)
        book = fitted()[0].double().cpu().numpy() if refit else codebook.astype(np.float64)
        host = [part[0, :few].cpu().numpy() for part in (weights, *moments)]
        expected = [oracle("quantizer").assign(host[0], limits, book, gradient=None)]
        expected += [oracle("histogram").bucket_index(x, _MOMENT_BITS) for x in host[1:]]
        same("levels and indices", [part[:few] for part in quantize(1)], expected)
        return f"{few:,} elements of each kind = oracle"

    def plain() -> Callable[[], object]:
        return lambda: _plain(weights, moments, torch.from_numpy(codebook).cuda(), refit=refit)

    nbytes = 12 * size
    others = [at.device.copy(min(nbytes, 4 << 30)), Peer("plain torch", plain, note=_PLAIN)]
    note = "12 bytes a parameter: weights to levels, both moments to log buckets"
    return Job(quantize, check, float(nbytes), others, note)


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
