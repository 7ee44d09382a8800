"""numcodecs: arrays as bytes, for Zarr 2, kerchunk and direct use.

    codec = numcodecs.get_codec({"id": "shrinkpoint.quantize", "max_error": 0.05})

numcodecs finds the codecs by the entry points of this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..codec.extras import install
from . import required
from .array_codecs import ExactSettings, LogBucketsSettings, QuantizeSettings, decode_array, encode_array

with required("these codecs need numcodecs", install("numcodecs")):
    from numcodecs.abc import Codec
    from numcodecs.compat import ensure_ndarray, ndarray_copy


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
