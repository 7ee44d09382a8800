"""Numbers of the coding methods, which are the first byte of a stream."""

CONSTANT, PACKED, HUFFMAN, PUBLISHED, RANS, CONDITIONAL, REARRANGED, UNCHANGED, ZSTANDARD, STORED = range(10)
RARE, EXCEPTIONS, MATRIX = 10, 11, 12
SLACK = 1.005
"""Methods within half a percent of the smallest are chosen by decoding speed."""
FEW = 1024
"""Changes that are coded one by one at most: each takes some hundred nanoseconds, and of more a table says enough."""
