"""Reasons that files store as numbers.

They are part of format version 1 and must not change: a file numbers its own texts from the end of this list, so a
longer list would change the reasons in older files.
"""

from __future__ import annotations

NOTHING = "nothing says what it is"
UNMATCHED = "the optimizer's parameters could not be matched"
FROZEN = "frozen: no optimizer entry belongs to it"
UNKNOWN_ENTRY = "an optimizer entry that is not a known moment"
SEVERAL_TREES = "kinds fit several parts of the state: "
SHORT_RECORDS = "no layer's weights: less than 16 values in the second longest axis"
CODEBOOK = "the codebook of a vector quantizer"
TRAINED = "structure: an optimizer entry belongs to it"
NAMED = "name and shape of a layer's weights"
FIRST = "structure: first moment of an optimizer"
SECOND = "structure: second moment of an optimizer"

REASONS = (
    NOTHING,
    UNMATCHED,
    FROZEN,
    UNKNOWN_ENTRY,
    SHORT_RECORDS,
    CODEBOOK,
    TRAINED,
    NAMED,
    FIRST,
    SECOND,
    "kinds: linear",
    "kinds: convolution",
    "kinds: attention",
    "kinds: embedding",
    "kinds: norm",
    "kinds: bias",
    "kinds: other",
    "kinds: state",
    "kinds: first moment",
    "kinds: second moment",
    "exact: norm",
    "exact: bias",
    "exact: less than 1024 elements",
    "exact: less than 64 elements",
    "exact: an update subtracts the square of an average from it",
    "exact: it holds NaN",
    "exact: a second moment is never negative",
    "exact: its parameter has another shape",
    "exact: part of a tensor subclass",
    "exact: float64",
    "exact: int64",
    "exact: int32",
    "exact: uint8",
    "exact: bool",
    "rule '*'",
    "rule 'weight'",
    "rule 'first moment'",
    "rule 'second moment'",
    "rule 'embedding'",
)
"""The standard reasons; a file names one by its number here."""
