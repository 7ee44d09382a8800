"""Float formats as integers: field widths, and log buckets, which are shifted bit patterns."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import BadArgumentError
from .arguments import instance, number


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A binary interchange format: `width` bits = sign + `exponent` bits + `mantissa` bits."""

    name: str
    width: int
    exponent: int
    mantissa: int

    @property
    def bias(self) -> int:
        """Exponent bias; also the largest unbiased exponent of a finite value."""
        return (1 << (self.exponent - 1)) - 1

    @property
    def lowest_exponent(self) -> int:
        """Unbiased exponent of the smallest subnormal: value `2**lowest_exponent`."""
        return 1 - self.bias - self.mantissa

    @property
    def octaves(self) -> int:
        """Number of octaves from the smallest subnormal to the largest finite value."""
        return self.bias - self.lowest_exponent + 1

    def buckets(self, bits: int) -> int:
        """Number J of nonzero magnitude buckets with `2**bits` linear sub-buckets an octave."""
        return self.octaves << bits


FORMATS: dict[str, FloatFormat] = {
    f.name: f
    for f in (
        FloatFormat("float16", 16, 5, 10),
        FloatFormat("bfloat16", 16, 8, 7),
        FloatFormat("float32", 32, 8, 23),
        FloatFormat("float64", 64, 11, 52),
    )
}


def format_named(name: str) -> FloatFormat:
    """Return the format of dtype `name`; raise BadArgumentError if it has no log buckets."""
    if not isinstance(name, str) or name not in FORMATS:
        raise BadArgumentError(f"dtype {name} has no log buckets; one of {', '.join(FORMATS)} is needed")
    return FORMATS[name]


def bits_for(alpha: float, fmt: FloatFormat) -> int:
    """Smallest number of sub-bucket bits that keeps the relative error within `alpha`.

    That is the smallest b with `2**-(b + 1) <= alpha`, capped at the mantissa.

    Args:
        alpha: relative error asked for, 0 < alpha < 1; 0.01 gives b = 6.
        fmt: the float format; at `b == fmt.mantissa` a bucket holds one value and the error is zero.

    Raises:
        BadArgumentError: alpha is not in (0, 1).
    """
    alpha = number("alpha", alpha, 0, 1, open_low=True, open_high=True)
    instance("fmt", fmt, FloatFormat)
    exponent = math.frexp(alpha)[1]  # 2**(exponent - 1) <= alpha, and no greater power of two
    return min(max(-exponent, 0), fmt.mantissa)
