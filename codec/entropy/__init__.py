"""Symbols (one byte each) to bytes: the smallest of several coders, named by the first byte.

    0 constant     the value
    1 packed       width in bits, then the symbols bit-packed
    2 huffman      code lengths, then the code
    3 published    run lengths > 1 distinguished from values by sign, Huffman on top (Inshrinkerator, section 6)
    4 rans         symbol frequencies, then one static rANS stream
    5 conditional  joint frequencies, then a rANS stream conditioned on the context
    6 rearranged   cyclic differences (context - symbol) mod B, one group per context, each by a method from 0 to 4
    7 unchanged    every symbol equals its context
    8 zstandard    a zstandard frame
    9 stored       the symbols themselves
    10 matrix      a low-rank prediction and classes of rows and columns, then differences in these contexts

The context is known to both sides (the level in the parent checkpoint). docs/format.md has the bytes. From below:
`table`, `plain` (0 to 4, 8, 9), `matrices` (10), `coders` (all, those that need a context among them), `blocks` (on a
GPU).
"""

from types import ModuleType as _Module

from .blocks import CodedBlock, Later, decoded_there, most_bytes
from .coders import decode, encode, encode_levels, encode_rearranged, in_context, is_rearranged
from .matrices import ALONE, Matrix, Numbers
from .plain import (
    CONDITIONAL,
    CONSTANT,
    HUFFMAN,
    MATRIX,
    PACKED,
    PUBLISHED,
    RANS,
    REARRANGED,
    SAMPLE,
    STORED,
    UNCHANGED,
    ZSTANDARD,
    coded,
    encode_huffman,
    encode_published,
    sample,
)
from .table import counts_of, rans_bytes, sampled_bits

__all__ = sorted(name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _Module))
