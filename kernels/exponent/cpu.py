"""Exponent buckets on the CPU: one table look-up per element by sign and exponent."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend.arrays import Array, dtype_name, like, to_numpy
from ..backend.floats import format_named
from ..backend.jit import njit_in_place
from ..backend.widen import widened
from ..planes.cpu import as_values, patterns
from . import Buckets, Promotion, unknown_level

PART = 1 << 15
"""Elements that are widened at once: they stay in the second-level cache."""
LANES = 4
"""Counters per bucket, so that equal neighbours do not wait for each other's increment to reach memory."""


def exponent_differences(current: Array, previous: Array) -> Array:
    """See `shrinkpoint.kernels.exponent.exponent_differences`."""
    name = dtype_name(current)
    x, y = patterns(current), patterns(previous)
    out = np.empty(x.size, {"bfloat16": "u2", "float16": "f4"}.get(name, name))
    for start in range(0, x.size, PART):
        part = slice(start, start + PART)
        steps = np.empty(x[part].size, np.float32) if name == "bfloat16" else out[part]
        _subtract(_floats(x[part], name), _floats(y[part], name), steps)
        if name == "bfloat16":
            _to_bfloat16(steps.view(np.uint32), out[part])
    return like(out.reshape(current.shape), current, dtype="bfloat16" if name == "bfloat16" else None)


def exponent_buckets(x: Array) -> Buckets:
    """See `shrinkpoint.kernels.exponent.exponent_buckets`."""
    fmt = format_named(dtype_name(x))
    u = patterns(x)
    fields = 1 << fmt.exponent
    counts = np.zeros((LANES, 2 * fields + 1), np.int64)
    lowest = np.full(2 * fields + 1, np.iinfo(u.dtype).max, u.dtype)
    highest = np.zeros(2 * fields + 1, u.dtype)
    _count(u, u.dtype.type(fmt.mantissa), counts, lowest, highest)
    total = counts.sum(axis=0)
    lowest[total == 0] = 0
    magnitudes = [a[:-1].reshape(2, fields).astype(np.int64) for a in (lowest, highest)]
    return Buckets(total[:-1].reshape(2, fields), magnitudes[0], magnitudes[1], int(total[-1]), fmt.name)


def exponent_quantize(x: Array, promotion: Promotion) -> Array:
    """See `shrinkpoint.kernels.exponent.exponent_quantize`."""
    u = patterns(x)
    levels = np.empty(u.size, promotion.table.dtype)
    _quantize(u, u.dtype.type(format_named(promotion.format).mantissa), promotion.table, levels)
    return like(levels.reshape(x.shape), x)


def exponent_dequantize(levels: Array, codebook: np.ndarray[Any, Any]) -> Array:
    """See `shrinkpoint.kernels.exponent.exponent_dequantize`."""
    v = to_numpy(levels).reshape(-1)
    _check_levels(v, codebook.size)
    out = np.empty(v.size, codebook.dtype)
    _look_up(v, np.ascontiguousarray(codebook), out)
    return like(out.reshape(levels.shape), levels)


def exponent_sums(previous: Array, levels: Array, codebook: np.ndarray[Any, Any]) -> Array:
    """See `shrinkpoint.kernels.exponent.exponent_sums`."""
    fmt = format_named(dtype_name(previous))
    u, v = patterns(previous), to_numpy(levels).reshape(-1)
    _check_levels(v, codebook.size)
    steps, out, kind = _floats(np.ascontiguousarray(codebook), fmt.name), np.empty_like(u), u.dtype.type
    infinity, quiet = kind(((1 << fmt.exponent) - 1) << fmt.mantissa), kind(1 << (fmt.mantissa - 1))
    for start in range(0, u.size, PART):
        part = slice(start, start + PART)
        x, rounded = _floats(u[part], fmt.name), out[part]
        sums = rounded.view(x.dtype) if fmt.width > 16 else np.empty(x.size, np.float32)
        _add(x, v[part], steps, sums)
        if fmt.name == "bfloat16":
            _to_bfloat16(sums.view(np.uint32), rounded)
        elif fmt.name == "float16":
            with np.errstate(all="ignore"):
                rounded.view(np.float16)[:] = sums
        _keep(u[part], v[part], infinity, quiet, rounded)
    return as_values(out.reshape(previous.shape), previous)


def _floats(u: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return the floats with these patterns; those of 16 bits as float32."""
    values: np.ndarray[Any, Any] = widened(u if dtype == "bfloat16" else u.view(dtype), dtype)
    return values


def _check_levels(levels: np.ndarray[Any, Any], entries: int) -> None:
    top = int(levels.max()) if levels.size else 0
    if top >= entries:
        raise unknown_level(top, entries)


@njit_in_place
def _count(u: Any, mantissa: Any, counts: Any, lowest: Any, highest: Any) -> None:
    """Count patterns by lane and bucket; the last bucket counts the zeros."""
    kind = u.dtype.type
    magnitude_mask = kind(kind(1) << kind(8 * u.itemsize - 1)) - kind(1)
    zeros = counts.shape[1] - 1
    for i in range(u.size):
        magnitude = kind(u[i] & magnitude_mask)
        bucket = np.int64(u[i] >> mantissa) if magnitude else zeros
        counts[i % LANES, bucket] += 1
        if magnitude < lowest[bucket]:
            lowest[bucket] = magnitude
        if magnitude > highest[bucket]:
            highest[bucket] = magnitude


@njit_in_place
def _quantize(u: Any, mantissa: Any, table: Any, levels: Any) -> None:
    kind = u.dtype.type
    magnitude_mask = kind(kind(1) << kind(8 * u.itemsize - 1)) - kind(1)
    for i in range(u.size):
        level = table[np.int64(u[i] >> mantissa)]
        levels[i] = level if u[i] & magnitude_mask else table.dtype.type(0)


@njit_in_place
def _look_up(levels: Any, codebook: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = codebook[levels[i]]


@njit_in_place
def _subtract(x: Any, y: Any, out: Any) -> None:
    for i in range(out.size):
        step = x[i] - y[i]
        out[i] = step if step == step else out.dtype.type(np.inf)


@njit_in_place
def _add(x: Any, levels: Any, steps: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = x[i] + steps[levels[i]]


@njit_in_place
def _to_bfloat16(bits: Any, out: Any) -> None:
    """Round patterns of float32 that are not NaN to the nearest of bfloat16, halves to even."""
    for i in range(out.size):
        odd = (bits[i] >> np.uint32(16)) & np.uint32(1)
        out[i] = np.uint16(np.uint32(bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@njit_in_place
def _keep(old: Any, levels: Any, infinity: Any, quiet: Any, out: Any) -> None:
    """Put the old patterns where the level is 0, and the specified NaNs."""
    kind = old.dtype.type
    sign = kind(kind(1) << kind(8 * old.itemsize - 1))
    for i in range(out.size):
        own = out[i]
        own = kind(infinity | quiet | sign) if kind(own & ~sign) > infinity else own
        own = kind(old[i] | quiet) if kind(old[i] & ~sign) > infinity else own
        out[i] = old[i] if levels[i] == 0 else own
