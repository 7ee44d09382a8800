"""Log buckets as an elementwise quantizer: bucket index of a float, and bucket midpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arguments import array, check_arrays, integer
from .arrays import back_end, dtype_name
from .floats import format_named
from .quantizer import dtype_name_of

if TYPE_CHECKING:
    from .arrays import Array


def _checked_bits(bits: int, dtype: str) -> int:
    fmt = format_named(dtype)
    limit = min(fmt.mantissa, (2**30 // fmt.octaves).bit_length() - 1)  # the largest index, 2 J + 1, is an int32
    return integer(f"{dtype}: bits", bits, 0, limit)


def bucket_index(x: Array, bits: int) -> Array:
    """Position of each element in the signed log-bucket layout of `docs/kernels.md`.

    `J - j` for negative x in magnitude bucket j, `J` for both zeros, `J + j` for positive x, `2 J + 1` for infinities
    and NaNs; `J = FORMATS[dtype].buckets(bits)`.

    Args:
        x: any shape, float16, bfloat16, float32 or float64.
        bits: sub-bucket bits, 0 ... min(mantissa, 21) (18 for float64): `2**bits` buckets an octave.

    Returns:
        int32, shape and library of x.

    Raises:
        BadArgumentError: bits out of range or another dtype.

    Example:
        >>> import numpy as np
        >>> bucket_index(np.array([0.0, 1.0, 2.0, -1.0, np.nan], dtype=np.float32), 0).tolist()
        [277, 427, 428, 127, 555]

    Source: LC-Checkpoint, section 3 (exponent buckets), with sub-buckets.
    """
    check_arrays(x=x)
    return back_end(x, "logbucket").bucket_index(x, _checked_bits(bits, dtype_name(x)))


def bucket_value(index: Array, bits: int, dtype: Any) -> Array:
    """Midpoint of each bucket; for finite x within `2**-(bits + 1) |x|` of the original.

    Args:
        index: int32, any shape, as `bucket_index` returns it; numbers outside 0 ... 2 J (2 J + 1 too) give NaN.
        bits: as given to `bucket_index`.
        dtype: dtype of the values (a name such as "float32", or a dtype): float16, bfloat16, float32 or float64.

    Returns:
        Values of that dtype, shape and library of `index`; zeros are +0, NaN is the positive quiet one without payload.

    Raises:
        BadArgumentError: bits out of range, another dtype, or an index that is not int32.

    Example:
        >>> import numpy as np
        >>> bucket_value(np.array([277, 427, 127], dtype=np.int32), 0, "float32").tolist()
        [0.0, 1.5, -1.5]
    """
    array("index", index, ("int32",))
    name = dtype_name_of(dtype)
    bits = _checked_bits(bits, name)
    return back_end(index, "logbucket").bucket_value(index, bits, name)
