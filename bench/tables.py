"""Cases of the kernels that work on a table; their time does not depend on an array.

Counts, codebooks, frequencies, code lengths, factors. In microseconds a call, on one CPU thread: a save of many small
arrays calls them some dozens of times for each. Those with an oracle are compared with it, the others with the plain
definition by NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import peers
from .elementwise import BITS, LEVELS, Place, oracle
from .harness import Case, CheckFailed, Job, Peer, near, same

_PRECISION = 12
_ROUNDING = 1e-12


def cases(at: Place) -> list[Case]:
    """Every case of this module; the tables are those of `at.n` elements."""
    rows: list[tuple[str, Callable[[Place], Job], tuple[str, ...]]] = [
        ("merge", merge, ()),
        ("quantile", quantile, ()),
        ("bucket_weights", bucket_weights, ("NumPy",)),
        ("prepare", prepare, ()),
        ("boundaries", boundaries, ()),
        ("settled_bounds", settled_bounds, ()),
        ("residual_factors", residual_factors, ()),
        ("merge_buckets", merge_buckets, ()),
        ("promote", promote, ()),
        ("huffman_lengths", huffman_lengths, ("dahuffman",)),
        ("huffman_codes", huffman_codes, ()),
        ("pack_lengths", lambda here: _lengths(here, unpack=False), ("zstd -19",)),
        ("unpack_lengths", lambda here: _lengths(here, unpack=True), ("zstd -19",)),
        ("rans_frequencies", rans_frequencies, ()),
        ("entropy_bits", entropy_bits, ("NumPy",)),
        ("coding_cost", coding_cost, ("NumPy",)),
        ("pack_frequencies", lambda here: _frequencies(here, unpack=False), ("zstd -19",)),
        ("unpack_frequencies", lambda here: _frequencies(here, unpack=True), ("zstd -19",)),
    ]
    return [
        Case(row, at.n, "us", lambda make=make: make(at), at.device.name, None, others)  # type: ignore[misc]
        for row, make, others in rows
    ]


def _job(
    at: Place, call: Callable[[], object], check: Callable[[], str], note: str, others: Sequence[Peer] = ()
) -> Job:
    return Job(call, check, 1.0, others, f"{note}; data {at.sample.origin}")


def _numpy(call: Callable[[], object]) -> Peer:
    return Peer("NumPy", lambda: call, note="the definition, unchecked")


def _sketch(at: Place) -> Any:
    from shrinkpoint.kernels.histogram import log_histogram

    return log_histogram(at.sample.before(at.n), BITS, signed=True)


def _buckets(at: Place) -> tuple[Any, Any]:
    """Counts and values of the sketch's buckets."""
    sketch = _sketch(at)
    return sketch.counts[:-1], sketch.values()


def _filled(counts: Any) -> str:
    return f"{np.count_nonzero(counts):,} of {counts.size:,} buckets"


def merge(at: Place) -> Job:
    from shrinkpoint.kernels.histogram import log_histogram
    from shrinkpoint.kernels.histogram import merge as merged

    x, whole = at.sample.before(at.n), _sketch(at)
    halves = [log_histogram(part, BITS, signed=True) for part in (x[: at.n // 3], x[at.n // 3 :])]

    def check() -> str:
        same("counts", merged(*halves), whole)
        return "two parts = the whole"

    return _job(at, lambda: merged(*halves), check, f"two sketches, {_filled(whole.counts)}")


def quantile(at: Place) -> Job:
    from shrinkpoint.kernels.histogram import quantile as value_at

    sketch, some = _sketch(at), at.sample.before(at.n)

    def check() -> str:
        for q in (0.0, 0.01, 0.5, 0.999, 1.0):
            exact = float(np.quantile(some, q, method="lower"))
            if abs(value_at(sketch, q) - exact) > 2.0 ** -(BITS + 1) * abs(exact):
                raise CheckFailed(f"quantile {q} is {value_at(sketch, q)}, in truth {exact}")
        return "five quantiles within their bound"

    return _job(at, lambda: value_at(sketch, 0.999), check, _filled(sketch.counts))


def bucket_weights(at: Place) -> Job:
    from shrinkpoint.kernels.kmeans import bucket_weights as weights_of

    counts, values = _buckets(at)
    used = counts > 0

    def plain() -> Any:
        size = np.abs(np.where(used, values, 0.0))
        return 0.2 * counts / counts.sum() + 0.8 * size / size.sum()

    def check() -> str:
        near("weights", weights_of(counts, values), plain(), _ROUNDING)
        return "= NumPy"

    return _job(at, lambda: weights_of(counts, values), check, _filled(counts), [_numpy(plain)])


def prepare(at: Place) -> Job:
    from shrinkpoint.kernels.kmeans import bucket_weights as weights_of
    from shrinkpoint.kernels.kmeans import prepare as prepared

    counts, values = _buckets(at)
    weights = weights_of(counts, values)

    def check() -> str:
        x, w, exponent = prepared(values, weights)
        same("centers", np.ldexp(x, exponent), values[weights > 0].astype(np.float64))
        near("weights", w / w.sum(), weights[weights > 0] / weights.sum(), _ROUNDING)
        return "centers and shares are those given"

    return _job(at, lambda: prepared(values, weights), check, _filled(counts))


def boundaries(at: Place) -> Job:
    from shrinkpoint.kernels.quantizer import boundaries as between

    codebook, some = at.sample.codebook, at.sample.before(at.prefix)

    def check() -> str:
        nearest = np.abs(some[:, None].astype(np.float64) - codebook).argmin(axis=1)
        same("codes", np.searchsorted(between(codebook, "float32"), some, side="right"), nearest)
        return f"{some.size:,} elements = the nearest code"

    return _job(at, lambda: between(codebook, "float32"), check, f"{codebook.size} codes")


def settled_bounds(at: Place) -> Job:
    from shrinkpoint.kernels.rate_distortion import settled_bounds as bounds_of

    codebook = at.sample.codebook
    bits = -np.log2(_joint(at) + 1.0) + np.log2(at.n + 1.0)
    prices = (1e-4 * bits).astype(np.float32)

    def check() -> str:
        same("bounds", bounds_of(codebook, prices), oracle("rate_distortion").settled_bounds(codebook, prices, 0.0))
        return "= oracle"

    return _job(at, lambda: bounds_of(codebook, prices), check, f"{LEVELS} x {LEVELS} pairs")


def residual_factors(at: Place) -> Job:
    from shrinkpoint.kernels.scales import residual_factors as factors_of

    counts = np.zeros(256)
    counts[2:] = np.bincount(at.sample.before(at.n).view(np.uint8)[::4], minlength=256)[2:]
    sums = counts * 2.0**15

    def check() -> str:
        # Elements at the center of their cell have the cell's ratio, a power of two if it is whole octaves away.
        whole = (counts > 0) & (np.arange(256) % 4 == 0)
        expected = np.exp2((np.flatnonzero(whole) - 128) / 4.0).astype("f4")
        same("factors", factors_of(sums, counts, 0.25)[whole], expected)
        return "whole octaves = powers of two"

    return _job(at, lambda: factors_of(sums, counts, 0.25), check, "256 symbols, a quarter of an octave a cell")


def _exponents(at: Place) -> tuple[Any, Any]:
    from shrinkpoint.kernels.exponent import exponent_buckets

    steps = at.sample.after(at.n) - at.sample.before(at.n)
    return steps, [exponent_buckets(part) for part in (steps[: at.n // 3], steps[at.n // 3 :])]


def merge_buckets(at: Place) -> Job:
    from shrinkpoint.kernels.exponent import exponent_buckets
    from shrinkpoint.kernels.exponent import merge_buckets as merged

    steps, parts = _exponents(at)

    def check() -> str:
        same("buckets", merged(*parts), exponent_buckets(steps))
        return "two parts = the whole"

    return _job(at, lambda: merged(*parts), check, "two arrays")


def promote(at: Place) -> Job:
    from shrinkpoint.kernels.exponent import merge_buckets
    from shrinkpoint.kernels.exponent import promote as promoted

    steps, parts = _exponents(at)
    buckets = merge_buckets(*parts)

    def check() -> str:
        found = promoted(buckets, 3).codebook.view(np.float32)
        exponents = np.frexp(np.abs(steps))[1]
        for value in found[1:]:
            members = np.abs(steps[(exponents == np.frexp(abs(value))[1]) & (np.sign(steps) == np.sign(value))])
            # The middle of two patterns of one octave is that of their values, rounded once.
            near("value", abs(value), np.float32((float(members.min()) + float(members.max())) / 2), _ROUNDING)
        return f"{found.size - 1} values = the middle of what they stand for"

    return _job(at, lambda: promoted(buckets, 3), check, "3 bits")


def _byte_counts(at: Place) -> Any:
    """Counts of the bytes of float32 weights, where most of 256 symbols occur."""
    return np.bincount(at.sample.before(at.n).view(np.uint8), minlength=256).astype(np.int64)


def huffman_lengths(at: Place) -> Job:
    from shrinkpoint.kernels.huffman import huffman_lengths as lengths_of

    counts = _byte_counts(at)

    def check() -> str:
        same("lengths", lengths_of(counts), oracle("huffman").huffman_lengths(counts))
        return "= oracle"

    def other() -> Callable[[], object]:
        codec = peers.library("dahuffman").HuffmanCodec
        frequencies = {symbol: int(count) for symbol, count in enumerate(counts) if count}
        return lambda: codec.from_frequencies(frequencies)

    theirs = Peer("dahuffman", other, note="the codes too, of any length")
    return _job(at, lambda: lengths_of(counts), check, "256 symbols", [theirs])


def huffman_codes(at: Place) -> Job:
    from shrinkpoint.kernels.huffman import huffman_codes as codes_of
    from shrinkpoint.kernels.huffman import huffman_lengths as lengths_of

    lengths = lengths_of(_byte_counts(at))

    def check() -> str:
        same("codes", codes_of(lengths), oracle("huffman").huffman_codes(lengths))
        return "= oracle"

    return _job(at, lambda: codes_of(lengths), check, "256 symbols")


def _lengths(at: Place, *, unpack: bool) -> Job:
    from shrinkpoint.kernels.huffman import huffman_lengths as lengths_of
    from shrinkpoint.kernels.huffman import pack_lengths, unpack_lengths

    lengths = lengths_of(_byte_counts(at))
    data = pack_lengths(lengths)

    def check() -> str:
        same("bytes", np.frombuffer(data, np.uint8), np.frombuffer(oracle("huffman").pack_lengths(lengths), np.uint8))
        same("lengths", unpack_lengths(data, 256), lengths)
        return "= oracle, comes back"

    call = (lambda: unpack_lengths(data, 256)) if unpack else (lambda: pack_lengths(lengths))
    return _job(at, call, check, f"256 lengths in {len(data)} bytes", [_zstd(lengths.tobytes(), unpack=unpack)])


def _zstd(table: bytes, *, unpack: bool) -> Peer:
    """Peer that compresses or decompresses the same table by zstandard at level 19."""

    def make() -> Callable[[], object]:
        z = peers.library("zstandard")
        compressor = z.ZstdCompressor(level=19)
        if not unpack:
            return lambda: compressor.compress(table)
        packed, out = compressor.compress(table), z.ZstdDecompressor()
        return lambda: out.decompress(packed)

    size = len(peers.library("zstandard").ZstdCompressor(level=19).compress(table))
    return Peer("zstd -19", make, note=f"of {len(table):,} bytes, {size:,} bytes")


def _joint(at: Place) -> Any:
    """Counts of (earlier level, later level) pairs."""
    from shrinkpoint.kernels.levels import joint_counts

    return joint_counts(at.sample.levels_before(at.n), at.sample.levels_after(at.n), LEVELS, LEVELS)


_OF_LEVELS = f"{LEVELS} x {LEVELS} counts"


def rans_frequencies(at: Place) -> Job:
    from shrinkpoint.kernels.rans import rans_frequencies as table_of

    counts = _joint(at)

    def check() -> str:
        same("frequencies", table_of(counts, _PRECISION), oracle("rans").rans_frequencies(counts, _PRECISION))
        return "= oracle"

    return _job(at, lambda: table_of(counts, _PRECISION), check, _OF_LEVELS)


def entropy_bits(at: Place) -> Job:
    from shrinkpoint.kernels.rans import entropy_bits as bits_of

    counts = _joint(at)

    def plain() -> float:
        present = np.where(counts > 0, counts, 1)
        return float((counts * np.log2(np.maximum(counts.sum(axis=1, keepdims=True), 1) / present)).sum())

    def check() -> str:
        near("bits", bits_of(counts), oracle("rans").entropy_bits(counts), _ROUNDING)
        near("bits", bits_of(counts), plain(), _ROUNDING)
        return f"= oracle and NumPy to {_ROUNDING:g}"

    return _job(at, lambda: bits_of(counts), check, _OF_LEVELS, [_numpy(plain)])


def coding_cost(at: Place) -> Job:
    from shrinkpoint.kernels.rans import coding_cost as cost_of
    from shrinkpoint.kernels.rans import rans_frequencies as table_of

    counts = _joint(at)
    table = table_of(counts, _PRECISION)

    def plain() -> float:
        return float((counts * (_PRECISION - np.log2(np.where(counts > 0, table, 1)))).sum())

    def check() -> str:
        near(
            "bits", cost_of(counts, table, _PRECISION), oracle("rans").coding_cost(counts, table, _PRECISION), _ROUNDING
        )
        near("bits", cost_of(counts, table, _PRECISION), plain(), _ROUNDING)
        return f"= oracle and NumPy to {_ROUNDING:g}"

    return _job(at, lambda: cost_of(counts, table, _PRECISION), check, _OF_LEVELS, [_numpy(plain)])


def _frequencies(at: Place, *, unpack: bool) -> Job:
    from shrinkpoint.kernels.rans import pack_frequencies, unpack_frequencies
    from shrinkpoint.kernels.rans import rans_frequencies as table_of

    table = table_of(_joint(at), _PRECISION)
    data = pack_frequencies(table, _PRECISION)

    def check() -> str:
        expected = oracle("rans").pack_frequencies(table, _PRECISION)
        same("bytes", np.frombuffer(data, np.uint8), np.frombuffer(expected, np.uint8))
        same("frequencies", unpack_frequencies(data, LEVELS, LEVELS, _PRECISION), table)
        return "= oracle, comes back"

    call = (
        (lambda: unpack_frequencies(data, LEVELS, LEVELS, _PRECISION))
        if unpack
        else (lambda: pack_frequencies(table, _PRECISION))
    )
    theirs = _zstd(table.astype(np.uint16).tobytes(), unpack=unpack)
    return _job(at, call, check, f"{LEVELS} x {LEVELS} frequencies in {len(data)} bytes", [theirs])
