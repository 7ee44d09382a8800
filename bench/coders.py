"""Cases of the coders on one CPU thread, alone and after quantization.

Those that are not sequential are measured on the GPU, too.

The rate of a coder is in symbols; one symbol stands for a float32 weight, so a Gsym/s is 4 GB/s of weights, and that is
what its share of memcpy is of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from . import peers
from .elementwise import BITS, LEVELS, PREFIX, Place, oracle
from .harness import Case, CheckFailed, Job, Peer, Target, at_least, host, same

PRECISION = 12
"""Bits of the rANS tables."""


def cases(at: Place) -> list[Case]:
    """Every case of this module at one size."""
    entropy = ("zstd entropy stage", "dahuffman", "constriction")
    whole = ("zipnn", "pcodec", "zstd -3")
    symbols = [
        ("huffman_encode", huffman_encode, at_least(0.85, "value"), entropy),
        ("huffman_decode", huffman_decode, at_least(1.4, "value"), entropy),
        ("rans_encode conditional", rans_encode, at_least(0.5, "value"), entropy[2:]),
        ("rans_decode conditional", rans_decode, at_least(0.4, "value"), entropy[2:]),
        ("rle_encode", rle_encode, None, ()),
        ("rle_decode", rle_decode, None, ()),
    ]
    rows = [_case(at, row, "Gsym/s", make, target, others) for row, make, target, others in symbols]
    rows += anywhere(at)
    rows.append(_case(at, "end to end encode", "GB/s", end_to_end_encode, at_least(0.7, "value"), whole))
    rows.append(_case(at, "end to end decode", "GB/s", end_to_end_decode, at_least(1.3, "value"), whole))
    return rows


def anywhere(at: Place) -> list[Case]:
    """The cases that the GPU has, too."""
    rows = (
        ("pack_bits 5", pack_bits),
        ("unpack_bits 5", unpack_bits),
        ("split_octaves", split_octaves),
        ("join_octaves", join_octaves),
    )
    return [_case(at, row, "Gsym/s", make, None, ()) for row, make in rows]


def _case(
    at: Place, row: str, unit: str, make: Callable[[Place], Job], target: Target | None, others: tuple[str, ...]
) -> Case:
    names = (at.device.floor, *others)
    return Case(row, at.n, unit, lambda: make(at), at.device.name, target, names, at.device.missing)


def _job(at: Place, call: Callable[[], object], check: Callable[[], str], others: list[Peer], note: str) -> Job:
    """A job over n symbols, held against copying the n float32 weights they stand for."""
    copy = at.device.copy(4 * at.n)
    floor = Peer(copy.name, copy.make, float(at.n), note="of as many float32 weights")
    return Job(call, check, float(at.n), [floor, *others], f"{note}; data {at.sample.origin}")


def _levels(at: Place) -> tuple[Any, Any]:
    """Levels of one checkpoint, and how often each occurs."""
    levels = at.sample.levels_after(at.n)
    return levels, np.bincount(levels, minlength=LEVELS).astype(np.int64)


def _entropy(counts: Any) -> float:
    """Bits a symbol: the floor in size."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def _back(name: str, result: Any, expected: Any) -> str:
    same(name, result, expected)
    return "round trip"


def _and_oracle(subject: str, function: str, mine: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """Compare with the oracle if there is one; else check the round trip."""
    try:
        reference = oracle(subject)
    except ImportError:
        return ""
    on_host = (host(x) if hasattr(x, "dtype") else x for x in arguments)
    same(function, mine(*arguments, **named), getattr(reference, function)(*on_host, **named))
    return ", prefix = oracle"


def huffman_encode(at: Place) -> Job:
    from shrinkpoint.kernels.huffman import huffman_decode as decode
    from shrinkpoint.kernels.huffman import huffman_encode as encode
    from shrinkpoint.kernels.huffman import huffman_lengths

    levels, counts = _levels(at)
    lengths = huffman_lengths(counts)
    data = encode(levels, lengths)

    def check() -> str:
        said = _back("symbols", decode(data, lengths, at.n), levels)
        return said + _and_oracle("huffman", "huffman_encode", encode, levels[: PREFIX // 8], lengths, streams=4)

    note = f"4 streams, {8 * data.size / at.n:.3f} bits a symbol, entropy {_entropy(counts):.3f}"
    return _job(at, lambda: encode(levels, lengths), check, peers.entropy_coders(levels, counts, decode=False), note)


def huffman_decode(at: Place) -> Job:
    from shrinkpoint.kernels.huffman import huffman_decode as decode
    from shrinkpoint.kernels.huffman import huffman_encode as encode
    from shrinkpoint.kernels.huffman import huffman_lengths

    levels, counts = _levels(at)
    lengths = huffman_lengths(counts)
    data = encode(levels, lengths)

    def check() -> str:
        few = encode(levels[: PREFIX // 8], lengths)
        said = _back("symbols", decode(data, lengths, at.n), levels)
        arguments = (few, lengths, min(at.n, PREFIX // 8), "uint8")
        return said + _and_oracle("huffman", "huffman_decode", decode, *arguments, streams=4)

    others = peers.entropy_coders(levels, counts, decode=True)
    return _job(at, lambda: decode(data, lengths, at.n), check, others, "4 streams, multi-symbol tables")


def _tables(at: Place) -> tuple[Any, Any, Any]:
    """Levels of two checkpoints, and the rANS table of the later given the earlier."""
    from shrinkpoint.kernels.levels import joint_counts
    from shrinkpoint.kernels.rans import rans_frequencies

    previous, current = at.sample.levels_before(at.n), at.sample.levels_after(at.n)
    return previous, current, rans_frequencies(joint_counts(previous, current, LEVELS, LEVELS), PRECISION)


def _rans_job(at: Place, *, decode: bool) -> Job:
    from shrinkpoint.kernels.rans import rans_decode, rans_encode

    previous, current, table = _tables(at)
    data = rans_encode(current, previous, table, PRECISION)
    few = min(at.n, PREFIX // 8)

    def check() -> str:
        said = _back("symbols", rans_decode(data, previous, table, PRECISION, at.n), current)
        arguments = (current[:few], previous[:few], table, PRECISION)
        return said + _and_oracle("rans", "rans_encode", rans_encode, *arguments)

    call = (
        (lambda: rans_decode(data, previous, table, PRECISION, at.n))
        if decode
        else (lambda: rans_encode(current, previous, table, PRECISION))
    )
    others = peers.entropy_coders(current, np.bincount(current, minlength=LEVELS), decode=decode)[2:]
    changed = float((previous != current).mean())
    note = f"{8 * data.size / at.n:.3f} bits a symbol, {changed:.1%} of levels changed"
    return _job(at, call, check, others, note)


def rans_encode(at: Place) -> Job:
    return _rans_job(at, decode=False)


def rans_decode(at: Place) -> Job:
    return _rans_job(at, decode=True)


def _runs(at: Place) -> Any:
    """Input of the published run-length coder: level differences grouped by earlier level."""
    from shrinkpoint.kernels.levels import delta, split_by_level

    previous, current = at.sample.levels_before(at.n), at.sample.levels_after(at.n)
    return split_by_level(delta(previous, current, LEVELS), previous, LEVELS)[0]


def _rle_job(at: Place, *, decode: bool) -> Job:
    from shrinkpoint.kernels.runlength import rle_decode as from_runs
    from shrinkpoint.kernels.runlength import rle_encode as to_runs

    values = _runs(at)
    tokens = to_runs(values)

    def check() -> str:
        said = _back("values", from_runs(tokens, at.n), values)
        return said + _and_oracle("runlength", "rle_encode", to_runs, values[: PREFIX // 8])

    call = (lambda: from_runs(tokens, at.n)) if decode else (lambda: to_runs(values))
    return _job(at, call, check, [], f"{tokens.size / at.n:.3f} tokens a symbol")


def rle_encode(at: Place) -> Job:
    return _rle_job(at, decode=False)


def rle_decode(at: Place) -> Job:
    return _rle_job(at, decode=True)


def _pack_job(at: Place, *, decode: bool) -> Job:
    from shrinkpoint.kernels.packing import pack_bits as pack
    from shrinkpoint.kernels.packing import unpack_bits as unpack

    levels = at.device.array(_levels(at)[0])
    data = pack(levels, 5)

    def check() -> str:
        said = _back("values", unpack(data, 5, at.n), levels)
        return said + _and_oracle("packing", "pack_bits", pack, levels[:PREFIX], 5)

    call = (lambda: unpack(data, 5, at.n)) if decode else (lambda: pack(levels, 5))
    return _job(at, call, check, [], "5 bits a symbol")


def pack_bits(at: Place) -> Job:
    return _pack_job(at, decode=False)


def unpack_bits(at: Place) -> Job:
    return _pack_job(at, decode=True)


def _octaves_job(at: Place, *, decode: bool) -> Job:
    from shrinkpoint.kernels.backend.floats import FORMATS
    from shrinkpoint.kernels.histogram import bucket_index
    from shrinkpoint.kernels.scales import join_octaves as join
    from shrinkpoint.kernels.scales import split_octaves as split

    bits = 1
    buckets = FORMATS["float32"].buckets(bits)
    index = bucket_index(at.device.array(at.sample.before(at.n)), bits)
    octaves = split(index, bits, buckets)
    if octaves is not None:
        streams = {name: at.device.array(getattr(octaves, name)) for name in ("symbols", "negative", "fraction")}
        octaves = dataclasses.replace(octaves, **streams)

    def check() -> str:
        if octaves is None:
            raise CheckFailed("the octaves do not fit a byte")
        said = _back("indices", join(octaves, bits, buckets), index)
        return said + _and_oracle("scales", "split_octaves", split, index[:PREFIX], bits, buckets)

    call = (lambda: join(octaves, bits, buckets)) if decode and octaves else (lambda: split(index, bits, buckets))
    crosses = ", the streams come to the host" if at.device.gpu and not decode else ""
    return _job(at, call, check, [], f"relative error 1/4{crosses}")


def split_octaves(at: Place) -> Job:
    return _octaves_job(at, decode=False)


def join_octaves(at: Place) -> Job:
    return _octaves_job(at, decode=True)


def _encode(at: Place, count: int) -> tuple[Any, Any, Any]:
    """Sketch, codebook, assignment, tables and conditional rANS: (bytes, table, codebook)."""
    from shrinkpoint.kernels.histogram import kept_histogram
    from shrinkpoint.kernels.kmeans import bucket_weights, weighted_kmeans
    from shrinkpoint.kernels.levels import joint_counts
    from shrinkpoint.kernels.quantizer import assign
    from shrinkpoint.kernels.rans import rans_encode, rans_frequencies

    x, previous, limits = at.sample.after(count), at.sample.levels_before(count), at.sample.thresholds
    histogram = kept_histogram(x, limits, BITS)
    values = histogram.values()
    weights = bucket_weights(histogram.counts[:-1], values)
    codebook = np.asarray(weighted_kmeans(values, weights, LEVELS - 2), np.float32)
    levels = assign(x, limits, codebook)
    table = rans_frequencies(joint_counts(previous, levels, LEVELS, LEVELS), PRECISION)
    return rans_encode(levels, previous, table, PRECISION), table, codebook


def _decode(at: Place, data: Any, table: Any, codebook: Any) -> Any:
    from shrinkpoint.kernels.quantizer import dequantize
    from shrinkpoint.kernels.rans import rans_decode

    levels = rans_decode(data, at.sample.levels_before(at.n), table, PRECISION, at.n)
    return dequantize(levels, codebook)


def _end_to_end(at: Place, *, decode: bool) -> Job:
    data, table, codebook = _encode(at, at.n)

    def check() -> str:
        nearest = oracle("quantizer").assign(
            at.sample.after(at.prefix), at.sample.thresholds, codebook.astype(np.float64), gradient=None
        )
        expected = oracle("quantizer").dequantize(nearest, codebook, protected=None)
        same("values", _decode(at, data, table, codebook)[: at.prefix], expected)
        return f"what comes back: {at.says}"

    call = (lambda: _decode(at, data, table, codebook)) if decode else (lambda: _encode(at, at.n))
    bits = 8 * data.size / at.n
    note = f"{LEVELS - 2} codes, codebook refit, {bits:.3f} bits a weight, ratio {32 / bits:.1f}"
    others = peers.lossless_coders(at.sample.after(at.n), decode=decode)
    nbytes = 4 * at.n
    return Job(call, check, float(nbytes), [at.device.copy(nbytes), *others], f"{note}; data {at.sample.origin}")


def end_to_end_encode(at: Place) -> Job:
    return _end_to_end(at, decode=False)


def end_to_end_decode(at: Place) -> Job:
    return _end_to_end(at, decode=True)
