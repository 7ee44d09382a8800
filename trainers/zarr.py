"""Zarr 3: chunks of an array stored exactly, quantized, or in log buckets.

    zarr.create_array(store, shape=..., chunks=..., dtype="float32", serializer=QuantizedChunks(max_error=0.05),
                      compressors=None)

The codecs take the place of Zarr's `bytes` codec, because they need the numbers; no compressor is needed behind them.
Zarr finds them by the entry points of this package when it opens an array.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from ..codec.extras import install
from . import required

with required("these codecs need Zarr 3", install("zarr")):
    from zarr.abc.codec import ArrayBytesCodec
    from zarr.core.common import parse_named_configuration

    from .numcodecs import ExactSettings, LogBucketsSettings, QuantizeSettings, decode_array, encode_array


class _Chunks(ArrayBytesCodec):  # type: ignore[misc]
    """An array-to-bytes codec whose settings are fields; subclasses add them."""

    is_fixed_size = False

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Return the codec that an array's metadata describe."""
        _, settings = parse_named_configuration(data, cls.name, require_configuration=False)
        return cls(**(settings or {}))

    def to_dict(self) -> dict[str, Any]:
        """Return the codec as it stands in an array's metadata."""
        return {"name": self.name, "configuration": asdict(self)}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        """Raise NotImplementedError, Zarr's way to say that sizes differ."""
        raise NotImplementedError

    def _encode_sync(self, chunk: Any, spec: Any) -> Any:
        x = chunk.as_numpy_array()
        # Metadata of Zarr 3 state no byte order, so the file holds the machine's, which the format makes portable.
        x = x.astype(x.dtype.newbyteorder("="), copy=False)
        return spec.prototype.buffer.from_bytes(encode_array(x, self.codec))

    def _decode_sync(self, data: Any, spec: Any) -> Any:
        dtype = np.dtype(spec.dtype.to_native_dtype())
        x = decode_array(data.to_bytes(), dtype.newbyteorder("="), tuple(spec.shape))
        return spec.prototype.nd_buffer.from_numpy_array(x.astype(dtype, copy=False))

    async def _encode_single(self, chunk: Any, spec: Any) -> Any:
        return await asyncio.to_thread(self._encode_sync, chunk, spec)

    async def _decode_single(self, data: Any, spec: Any) -> Any:
        return await asyncio.to_thread(self._decode_sync, data, spec)


@dataclass(frozen=True)
class ExactChunks(ExactSettings, _Chunks):
    """Chunks stored without loss, by byte planes and entropy coding of their numbers.

    Example:
        >>> import zarr
        >>> codec = ExactChunks()
        >>> z = zarr.create_array({}, shape=(100, 50), chunks=(50, 50), dtype="f4", serializer=codec, compressors=None)
        >>> z[:] = 3.0
        >>> float(z[99, 49])
        3.0
    """


@dataclass(frozen=True)
class QuantizedChunks(QuantizeSettings, _Chunks):
    """Chunks of floats as levels of a codebook, with a bound for each one's L2 error.

    Integers and chunks below 1,024 elements are exact.

    Example:
        >>> QuantizedChunks(max_error=0.1).to_dict()
        {'name': 'shrinkpoint.quantize', 'configuration': {'max_error': 0.1}}
    """


@dataclass(frozen=True)
class LogBucketsChunks(LogBucketsSettings, _Chunks):
    """Chunks of floats in log buckets, with a bound for the relative error of each element.

    Integers and chunks below 1,024 elements are exact.

    Example:
        >>> LogBucketsChunks(max_error=0.01).max_error
        0.01
    """
