"""numcodecs: arrays as bytes that stand alone, for Zarr 2, kerchunk and direct use.

    codec = numcodecs.get_codec({"id": "shrinkpoint.quantize", "max_error": 0.05})

numcodecs finds the codecs by the entry points of this package. `trainers.zarr` has those for Zarr 3.

The bytes are a checkpoint of one array (`docs/format.md`): checksums, limits and the promise of the format hold for
them, and `sp.Checkpoint.from_bytes` reads them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..codec import base
from ..codec.checkpoint import Checkpoint, decompress
from ..codec.compress import compress
from ..codec.config import Config
from ..codec.errors import CorruptDataError
from ..codec.extras import install
from ..codec.lossless.exact import Exact
from ..codec.moments.logbuckets import FINEST, LogBuckets
from ..codec.weights.quantize import Quantize
from ..kernels.backend import arguments
from . import required

with required("these codecs need numcodecs", install("numcodecs")):
    from numcodecs.abc import Codec
    from numcodecs.compat import ensure_ndarray, ndarray_copy

Array = npt.NDArray[Any]
KEY = "array"


def encode_array(x: Array, codec: base.Codec) -> bytes:
    """Return the bytes of one array.

    Args:
        x: any shape; numbers, booleans, dates or strings of fixed length.
        codec: stores it; arrays that a lossy codec is not for (integers, fewer than 1,024 elements) are exact.

    Raises:
        UnsupportedLeafError: a dtype that cannot be stored without pickle.

    Example:
        >>> x = np.linspace(0, 1, 5000, dtype=np.float32)
        >>> bool((decode_array(encode_array(x, Exact())) == x).all())
        True
    """
    return compress({KEY: np.asarray(x)}, cfg=Config([("*", codec)])).to_bytes()


def decode_array(data: Any, dtype: np.dtype[Any] | None = None, shape: tuple[int, ...] | None = None) -> Array:
    """Return the array of `encode_array`; one of another dtype or shape is not allocated.

    Args:
        data: a buffer of bytes.
        dtype: that the array must have; None: any.
        shape: that the array must have; None: any.

    Raises:
        CorruptDataError: altered or truncated bytes, a delta, several arrays, another dtype or shape.
        NewerFormatError: a newer version wrote the bytes.
    """
    stored = Checkpoint.from_bytes(bytes(data))
    if stored.is_delta:
        raise CorruptDataError("chunk: it is a delta, which needs its parent; the bytes of an array stand alone")
    rows = stored.summary()
    if [row.path for row in rows] != [KEY]:
        raise CorruptDataError(f"chunk: it holds {len(rows)} arrays, not one array {KEY!r}")
    (row,) = rows
    if shape is not None and row.shape != shape:
        raise CorruptDataError(f"chunk: an array of shape {row.shape}, not {shape}")
    if dtype is not None and row.dtype not in (dtype.name, dtype.str):
        raise CorruptDataError(f"chunk: an array of dtype {row.dtype}, not {dtype.name}")
    state = decompress(stored)
    x = state.get(KEY) if isinstance(state, dict) and len(state) == 1 else None
    if not isinstance(x, np.ndarray):
        raise CorruptDataError("chunk: it holds more than one NumPy array")
    return x


@dataclass(frozen=True)
class ExactSettings:
    """Settings of the exact codec: none."""

    name: ClassVar[str] = "shrinkpoint.exact"

    @property
    def codec(self) -> base.Codec:
        """The codec of the library."""
        return Exact()


@dataclass(frozen=True)
class QuantizeSettings:
    """Settings of the quantizer.

    Args:
        max_error: relative L2 error that a chunk may have, in (0, 1); default 0.05.

    Raises:
        BadArgumentError: a value out of range.
    """

    max_error: float = 0.05
    name: ClassVar[str] = "shrinkpoint.quantize"

    def __post_init__(self) -> None:
        arguments.check_field(self, "max_error", arguments.number, 0, 1, open_low=True, open_high=True)

    @property
    def codec(self) -> base.Codec:
        """The codec of the library."""
        return Quantize(max_error=self.max_error)


@dataclass(frozen=True)
class LogBucketsSettings:
    """Settings of log buckets.

    Args:
        max_error: relative error that each element may have, in [2**-17, 0.5]; default 0.05. It is rounded down to a
            power of two.

    Raises:
        BadArgumentError: a value out of range.
    """

    max_error: float = 0.05
    name: ClassVar[str] = "shrinkpoint.log_buckets"

    def __post_init__(self) -> None:
        arguments.check_field(self, "max_error", arguments.number, FINEST, 0.5)

    @property
    def codec(self) -> base.Codec:
        """The codec of the library."""
        return LogBuckets(alpha=self.max_error)


class _Arrays(Codec):  # type: ignore[misc]
    """A codec of arrays whose settings are fields; subclasses add them."""

    def encode(self, buf: Any) -> bytes:
        """Return the bytes of an array, in the order of its memory; bytes count as uint8.

        Raises:
            UnsupportedLeafError: a dtype that cannot be stored without pickle.
        """
        x = ensure_ndarray(buf)
        return encode_array(x.T if x.flags.f_contiguous else x, self.codec)

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Return the array of `encode`, flat as from the codecs of numcodecs, or copy it to `out`.

        Raises:
            CorruptDataError: bytes that `encode` did not write.
        """
        x = decode_array(memoryview(ensure_ndarray(buf)).cast("B")).reshape(-1)
        return x if out is None else ndarray_copy(x, out)


@dataclass(frozen=True, repr=False)
class ExactArrays(ExactSettings, _Arrays):
    """Arrays stored without loss, by byte planes and entropy coding of their numbers.

    Example:
        >>> import numpy as np
        >>> codec = ExactArrays()
        >>> codec.decode(codec.encode(np.arange(5)))
        array([0, 1, 2, 3, 4])
    """

    codec_id: ClassVar[str] = ExactSettings.name


@dataclass(frozen=True, repr=False)
class QuantizedArrays(QuantizeSettings, _Arrays):
    """Arrays of floats as levels of a codebook, with a bound for each one's L2 error.

    Integers and arrays below 1,024 elements are exact.

    Example:
        >>> QuantizedArrays(max_error=0.1)
        QuantizedArrays(max_error=0.1)
    """

    codec_id: ClassVar[str] = QuantizeSettings.name


@dataclass(frozen=True, repr=False)
class LogBucketsArrays(LogBucketsSettings, _Arrays):
    """Arrays of floats in log buckets, with a bound for the relative error of each element.

    Integers and arrays below 1,024 elements are exact.

    Example:
        >>> LogBucketsArrays().get_config()
        {'id': 'shrinkpoint.log_buckets', 'max_error': 0.05}
    """

    codec_id: ClassVar[str] = LogBucketsSettings.name
