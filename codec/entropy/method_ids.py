"""Numbers of the coding methods, which are the first byte of a stream."""

CONSTANT, PACKED, HUFFMAN, PUBLISHED, RANS, CONDITIONAL, REARRANGED, UNCHANGED, ZSTANDARD, STORED, MATRIX = range(11)
SLACK = 1.005
"""Methods within half a percent of the smallest are chosen by decoding speed."""
