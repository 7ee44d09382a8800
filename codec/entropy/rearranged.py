"""The published delta: cyclic differences (context - symbol) mod B, grouped by context.

Source: Inshrinkerator, section 6.
"""

from __future__ import annotations

import numpy as np

from ...kernels.levels import delta, joint_counts, merge_by_level, split_by_level, undelta
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from .method_ids import REARRANGED
from .plain import decode_plain
from .runlengths import encode_published
from .table import U8


def encode_rearranged(levels: U8, size: int, parent: U8, parent_size: int) -> bytes:
    """Encode cyclic differences, grouped by the parent's level, by run lengths and Huffman."""
    buffer = max(size, parent_size)
    grouped, counts = split_by_level(delta(parent, levels, buffer), parent, parent_size)
    out = Writer()
    out.byte(REARRANGED)
    out.varint(buffer)
    start = 0
    for count in counts:
        if count:
            out.block(encode_published(grouped[start : start + int(count)]))
        start += int(count)
    return out.done()


def decode_rearranged(data: Reader, n: int, context: U8, contexts: int) -> U8:
    """Decode the symbols that `encode_rearranged` coded, uint8 (n,)."""
    buffer = data.varint()
    if not 2 <= buffer <= 256 or buffer < contexts:
        raise CorruptDataError(f"rearranged: a cyclic buffer of {buffer} levels")
    counts = joint_counts(context, context, contexts, contexts).diagonal()
    groups = [decode_plain(data.block(), int(c)) for c in counts if c]
    grouped = np.concatenate(groups) if groups else np.empty(0, np.uint8)
    if grouped.size and int(grouped.max()) >= buffer:
        raise CorruptDataError(f"rearranged: a difference is beyond the cyclic buffer of {buffer}")
    levels: U8 = undelta(context, merge_by_level(grouped, context, contexts), buffer)
    return levels
