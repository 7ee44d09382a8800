"""Asymmetric numeral systems on the GPU: one program a block of symbols, one lane a state.

A step codes a symbol with each state. What orders the words of a step among themselves are the rows of a stream: four
rows of 16 states of a wide one, and the states themselves of one with four. The number of words in each row takes a
byte of one integer, so that a single scan finds the place of each word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..backend.arrays import to_host
from ..backend.gpu import Launch, like, on, tensor
from ..errors import BadArgumentError, CorruptDataError
from . import START, STATES, WIDE_STATES, Block

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..backend.arrays import Array

CODE = Launch(block=WIDE_STATES, warps=1)
FIELDS = tl.constexpr(10)
"""Numbers that a program reads of its block."""
EVERY_ROW = tl.constexpr(0x01010101)
CORRUPT, BAD_CONTEXT, BAD_SYMBOL, ABSENT = (tl.constexpr(1 << k) for k in range(4))
"""Faults that a program finds."""


@triton.jit
def places(flag, LANES: tl.constexpr):
    """Count the flags up to each lane's row, in its row, before it in its row, and of all."""
    shift = (tl.arange(0, LANES) // (LANES // 4)) * 8
    own = flag.to(tl.int32) << shift
    total = tl.sum(own, axis=0)
    sums = total.to(tl.int64) * EVERY_ROW
    within = ((tl.cumsum(own, axis=0) >> shift) & 255) - flag.to(tl.int32)
    return (sums >> shift) & 255, (total >> shift) & 255, within, (sums >> 24) & 255


@triton.jit
def row_of(contexts_ptr, i, inside, rows, CONTEXTS: tl.constexpr):
    """Row of the table for each symbol, within the table, and whether its context is not."""
    if CONTEXTS:
        context = tl.load(contexts_ptr + i, mask=inside, other=0).to(tl.int32)
        return tl.minimum(context, rows - 1), context >= rows
    else:
        return tl.zeros_like(i).to(tl.int32), i < 0


@triton.jit
def entry_of(symbols_ptr, contexts_ptr, entries_ptr, inverses_ptr, i, n, rows, columns, CONTEXTS: tl.constexpr):
    """Entry and inverse of the table for each symbol, and its fault or 0."""
    inside = (i >= 0) & (i < n)
    symbol = tl.load(symbols_ptr + i, mask=inside, other=0).to(tl.int32)
    row, outside = row_of(contexts_ptr, i, inside, rows, CONTEXTS)
    at = row * columns + tl.minimum(symbol, columns - 1)
    inverse = tl.load(inverses_ptr + at)
    wrong = tl.where(outside, BAD_CONTEXT, tl.where(symbol >= columns, BAD_SYMBOL, tl.where(inverse == 0, ABSENT, 0)))
    return tl.load(entries_ptr + at), inverse, tl.where(inside, wrong, 0)


@triton.jit
def encode_kernel(
    symbols_ptr, contexts_ptr, entries_ptr, inverses_ptr, fields_ptr, words_ptr, states_ptr, found_ptr,
    CONTEXTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Encode a block from its end; `found` becomes its number of words and its fault.

    The words of a wide stream begin at the start of their room, those of a stream with four states end at its end.
    """
    program = tl.program_id(0).to(tl.int64)
    field = fields_ptr + program * FIELDS
    n, rows, columns = tl.load(field), tl.load(field + 1).to(tl.int32), tl.load(field + 2).to(tl.int32)
    precision = tl.load(field + 3)
    symbols_ptr += tl.load(field + 4)
    contexts_ptr += tl.load(field + 5)
    entries_ptr += tl.load(field + 6)
    inverses_ptr += tl.load(field + 6)
    words_ptr += tl.load(field + 7)
    lane = tl.arange(0, LANES)
    bits: tl.constexpr = 31 if LANES == 64 else 32
    x = tl.full((LANES,), 1 << (bits - 16), tl.int64)
    wrong = tl.zeros((LANES,), tl.int32)
    count = n * 0
    i = (n - 1) // LANES * LANES + lane
    entry, inverse, now = entry_of(
        symbols_ptr, contexts_ptr, entries_ptr, inverses_ptr, i, n, rows, columns, CONTEXTS
    )  # fmt: skip
    for _ in range(0, n, LANES):
        # The next step's table is read before this step needs its states.
        next_entry, next_inverse, following = entry_of(
            symbols_ptr, contexts_ptr, entries_ptr, inverses_ptr, i - LANES, n, rows, columns, CONTEXTS
        )
        wrong |= now
        inside = i < n
        f = (entry & 0xFFFF).to(tl.int64) + 1
        full = inside & (x >= f << (bits - precision))
        up_to_row, _, within, all_rows = places(full, LANES)
        if LANES == 64:
            at = count + all_rows - up_to_row + within
        else:
            at = n - 1 - (count + all_rows - up_to_row)
        tl.store(words_ptr + at, (x & 0xFFFF).to(tl.int16), mask=full)
        count += all_rows
        x = tl.where(full, x >> 16, x)
        # Exact, and below 2**64: see `cpu._encode_table`.
        quotient = ((x.to(tl.uint64) * inverse.to(tl.uint64)) >> (32 + precision).to(tl.uint64)).to(tl.int64)
        start = (entry >> 16).to(tl.int64) & 0xFFFF
        x = tl.where(inside, x + start + quotient * ((n * 0 + 1 << precision) - f), x)
        entry, inverse, now = next_entry, next_inverse, following
        i -= LANES
    tl.store(states_ptr + program * LANES + lane, x.to(tl.int32))
    tl.store(found_ptr + 2 * program, count)
    tl.store(found_ptr + 2 * program + 1, tl.max(wrong, axis=0).to(tl.int64))


@triton.jit
def bytes_at(data_ptr, at, inside, COUNT: tl.constexpr):
    """Little-endian integers of some bytes, int64."""
    value = tl.zeros_like(at)
    for k in tl.static_range(COUNT):
        value |= tl.load(data_ptr + at + k, mask=inside, other=0).to(tl.int64) << (8 * k)
    return value


@triton.jit
def decode_kernel(
    data_ptr, contexts_ptr, entries_ptr, slots_ptr, fields_ptr, out_ptr, found_ptr,
    CONTEXTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Decode a block; `found` becomes its fault.

    Words beyond the data are not read, and contexts beyond the table take its last row.
    """
    program = tl.program_id(0).to(tl.int64)
    field = fields_ptr + program * FIELDS
    n, rows, columns = tl.load(field), tl.load(field + 1).to(tl.int32), tl.load(field + 2).to(tl.int32)
    precision, size = tl.load(field + 3).to(tl.int32), tl.load(field + 8)
    data_ptr += tl.load(field + 4)
    contexts_ptr += tl.load(field + 5)
    entries_ptr += tl.load(field + 6)
    slots_ptr += tl.load(field + 7)
    out_ptr += tl.load(field + 9)
    lane = tl.arange(0, LANES)
    least: tl.constexpr = 1 << 15 if LANES == 64 else 1 << 16
    header = tl.where(size > 0, 4 * LANES, 0).to(tl.int64)
    words = (size - header) // 2
    x = bytes_at(data_ptr, 4 * lane.to(tl.int64), 4 * lane < size, 4)
    x = tl.where(header > 0, x, least)
    wrong = (x < least) | (x >= (x * 0 + least) << 16)
    if LANES == 4:
        wrong |= (size == header) & (header > 0) & (tl.max(x, axis=0) == least)
    if LANES == 64:
        x = x.to(tl.int32)
    outside = wrong & False
    count = n * 0
    i = lane.to(tl.int64)
    row, strange = row_of(contexts_ptr, i, i < n, rows, CONTEXTS)
    for _ in range(0, n, LANES):
        next_row, following = row_of(contexts_ptr, i + LANES, i + LANES < n, rows, CONTEXTS)
        inside = i < n
        outside |= inside & strange
        slot = (x & ((1 << precision) - 1)).to(tl.int32)
        symbol = tl.load(slots_ptr + ((row << precision) | slot)).to(tl.int32)
        entry = tl.load(entries_ptr + row * columns + symbol)
        wrong |= inside & (entry == -1)
        y = ((entry & 0xFFFF) + 1) * (x >> precision) + (slot - ((entry >> 16) & 0xFFFF))
        short = inside & (y < least)
        up_to_row, of_row, within, all_rows = places(short, LANES)
        if LANES == 64:
            at = words - count - up_to_row + within
        else:
            at = count + up_to_row - of_row
        there = short & (at >= 0) & (at < words)
        wrong |= short & ~there
        word = bytes_at(data_ptr, header + 2 * at, there, 2).to(x.dtype)
        x = tl.where(inside, tl.where(short, (y << 16) | word, y), x)
        count += all_rows
        tl.store(out_ptr + i, symbol.to(tl.uint8), mask=inside)
        row, strange = next_row, following
        i += LANES
    wrong |= (x != least) | (count != words)
    found = tl.where(outside, BAD_CONTEXT, tl.where(wrong, CORRUPT, 0))
    tl.store(found_ptr + program, tl.max(found, axis=0))


class _Tables:
    """Tables of several blocks, one after another.

    Args:
        blocks: whose tables they are.
        device: where they are needed.

    Entries are f - 1 | start << 16 by context and symbol, and -1 for a symbol that does not occur.
    """

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        self.device = device
        self.tables = [to_host(block.frequencies).astype(np.int64) for block in blocks]
        for f, block in zip(self.tables, blocks, strict=True):
            if (((sums := f.sum(axis=1)) != 0) & (sums != 1 << block.precision)).any():
                raise BadArgumentError(f"a row of frequencies sums to neither 0 nor {1 << block.precision}")
        self.precisions = [block.precision for block in blocks]
        self.starts = np.cumsum([0, *(f.size for f in self.tables)])[:-1]
        self.firsts = np.cumsum([0, *(f.shape[0] << p for f, p in self._each())])[:-1]

    def _each(self) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
        return zip(self.tables, self.precisions, strict=True)

    def _joined(self, parts: Sequence[np.ndarray[Any, Any]], dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([p.reshape(-1) for p in parts]).astype(dtype)).to(self.device)

    def entries(self) -> torch.Tensor:
        """Entries of all tables, int32."""
        found = []
        for f in self.tables:
            rows, peak = np.arange(f.shape[0]), f.argmax(axis=1)
            others = f.copy()
            others[rows, peak] = 0
            start = others.cumsum(axis=1) - others + f[rows, peak][:, None]
            start[rows, peak] = 0
            found.append(np.where(f > 0, (f - 1) | (start << 16), 0xFFFFFFFF))
        return self._joined([e.astype(np.uint32).view(np.int32) for e in found], np.int32)

    def inverses(self) -> torch.Tensor:
        """Ceiling of `2**(32 + precision) / f` for each entry, 0 for f = 0, int64."""
        scaled = [((1 << (32 + p)) + f - 1) // np.maximum(f, 1) * (f > 0) for f, p in self._each()]
        return self._joined(scaled, np.int64)

    def slots(self) -> torch.Tensor:
        """Symbol of each slot of all rows, uint8; made on the device."""
        orders, lengths = [], []
        for f, p in self._each():
            rows = np.arange(f.shape[0])[:, None]
            keys = np.tile(np.arange(f.shape[1]), (f.shape[0], 1))
            keys[rows[:, 0], f.argmax(axis=1)] = -1
            order = keys.argsort(axis=1)
            length = f[rows, order]
            length[:, 0] += (1 << p) * (f.sum(axis=1) == 0)
            orders.append(order)
            lengths.append(length)
        size = sum(f.shape[0] << p for f, p in self._each())
        return self._joined(orders, np.uint8).repeat_interleave(self._joined(lengths, np.int64), output_size=size)


def _alike(blocks: Sequence[Block]) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Yield the numbers of blocks that one launch codes, and the constants of the launch."""
    groups: dict[tuple[int, bool], list[int]] = {}
    for number, block in enumerate(blocks):
        groups.setdefault((block.states, block.contexts is not None), []).append(number)
    for (states, contexts), group in groups.items():
        yield group, {"CONTEXTS": contexts, "LANES": states, **CODE.options}


def _fields(
    blocks: Sequence[Block], tables: _Tables, arrays: Sequence[torch.Tensor], contexts: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Numbers of each block, int64 on the host.

    They are n, rows, columns, precision, distances of arrays and of the table, and three to fill.
    """
    fields = torch.zeros((len(blocks), FIELDS.value), dtype=torch.int64, device="cpu")
    for k, (block, f) in enumerate(zip(blocks, tables.tables, strict=True)):
        places = [own[k].data_ptr() - own[0].data_ptr() for own in (arrays, contexts)]
        row = (arrays[k].numel(), *f.shape, block.precision, *places, int(tables.starts[k]))
        fields[k, : len(row)] = torch.tensor(row)
    return fields


def _starts(sizes: Sequence[int]) -> torch.Tensor:
    """Positions where parts of these sizes begin, one after another."""
    return torch.tensor([0, *sizes[:-1]]).cumsum(0)


def _raise(found: Sequence[int], sizes: Sequence[int]) -> None:
    """Raise the error that a program found, if any."""
    for wrong, n in zip(found, sizes, strict=True):
        if wrong & BAD_CONTEXT.value:
            raise BadArgumentError("contexts holds one that is beyond the rows of frequencies")
        if wrong & BAD_SYMBOL.value:
            raise BadArgumentError("symbols holds one that is beyond the columns of frequencies")
        if wrong & ABSENT.value:
            raise BadArgumentError("symbols holds one whose frequency in its context is zero")
        if wrong:
            raise CorruptDataError(f"the bytes are not {n} rANS symbols of these frequencies")


def rans_encode_many(blocks: Sequence[Block]) -> list[Array]:
    """See `shrinkpoint.kernels.rans.rans_encode_many`."""
    found: dict[int, Array] = {}
    for group, constants in _alike(blocks):
        some = [blocks[number] for number in group]
        symbols = [tensor(block.data) for block in some]
        contexts = [s if b.contexts is None else tensor(b.contexts) for b, s in zip(some, symbols, strict=True)]
        device, lanes = symbols[0].device, constants["LANES"]
        tables = _Tables(some, device)
        fields = _fields(some, tables, symbols, contexts)
        sizes = fields[:, 0].tolist()
        fields[:, 7] = _starts(sizes)
        words = torch.empty(sum(sizes), dtype=torch.int16, device=device)
        states = torch.empty((len(some), lanes), dtype=torch.int32, device=device)
        results = torch.empty((len(some), 2), dtype=torch.int64, device=device)
        with on(symbols[0]):
            encode_kernel[(len(some),)](
                symbols[0], contexts[0], tables.entries(), tables.inverses(), fields.to(device),
                words, states, results, **constants,
            )  # fmt: skip
        counts, wrong = results.T.tolist()
        _raise(wrong, sizes)
        for k, (number, count) in enumerate(zip(group, counts, strict=True)):
            begin = int(fields[k, 7]) + (0 if lanes == WIDE_STATES else sizes[k] - count)
            own = words[begin : begin + count].view(torch.uint8)
            is_certain = lanes == STATES and count == 0 and bool((states[k] == START).all())
            parts = [] if is_certain else [states[k].view(torch.uint8), own]
            found[number] = like(torch.cat(parts) if parts else own, blocks[number].data)
    return [found[number] for number in range(len(blocks))]


def rans_decode_many(blocks: Sequence[Block], sizes: Sequence[int]) -> list[Array]:
    """See `shrinkpoint.kernels.rans.rans_decode_many`."""
    found: dict[int, Array] = {}
    for group, constants in _alike(blocks):
        some, numbers = [blocks[number] for number in group], [sizes[number] for number in group]
        data = [tensor(block.data) for block in some]
        for own, block in zip(data, some, strict=True):
            empty = block.states == STATES and not own.numel()
            if own.numel() % 2 or (own.numel() < 4 * block.states and not empty):
                raise CorruptDataError(f"{own.numel()} bytes are not {block.states} rANS states and words")
        contexts = [d if b.contexts is None else tensor(b.contexts) for b, d in zip(some, data, strict=True)]
        device = data[0].device
        tables = _Tables(some, device)
        fields = _fields(some, tables, data, contexts)
        fields[:, 8], fields[:, 0] = fields[:, 0].clone(), torch.tensor(numbers)
        fields[:, 7], fields[:, 9] = torch.from_numpy(tables.firsts), _starts(numbers)
        out = torch.empty(sum(numbers), dtype=torch.uint8, device=device)
        wrong = torch.empty(len(some), dtype=torch.int32, device=device)
        with on(data[0]):
            decode_kernel[(len(some),)](
                data[0], contexts[0], tables.entries(), tables.slots(), fields.to(device), out, wrong, **constants,
            )  # fmt: skip
        _raise(wrong.tolist(), numbers)
        for number, own in zip(group, out.split(numbers), strict=True):
            found[number] = like(own, blocks[number].data)
    return [found[number] for number in range(len(blocks))]


def rans_encode(
    symbols: Array, contexts: Array | None, frequencies: Array, precision: int, lanes: int = STATES
) -> Array:
    """See `shrinkpoint.kernels.rans.rans_encode`."""
    return rans_encode_many([Block(symbols, contexts, frequencies, precision, lanes)])[0]


def rans_decode(
    data: Array, contexts: Array | None, frequencies: Array, precision: int, n: int, lanes: int = STATES
) -> Array:
    """See `shrinkpoint.kernels.rans.rans_decode`."""
    return rans_decode_many([Block(data, contexts, frequencies, precision, lanes)], [n])[0]
