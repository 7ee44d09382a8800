"""The lossless stream transform in torch's own DCP writer and reader."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.trainers.dcp.stream import BLOCK, Lossless, registry

pytestmark = pytest.mark.filterwarnings("ignore")


class _Kept(io.BytesIO):
    """A file in memory that stays readable after torch closes it."""

    def close(self) -> None: ...


def stored(data: bytes, cut: int = 1 << 16) -> bytes:
    out = _Kept()
    stream = Lossless().transform_to(out)
    for start in range(0, len(data), cut):
        stream.write(data[start : start + cut])
    stream.close()
    return out.getvalue()


def read(data: bytes) -> bytes:
    return Lossless().transform_from(io.BytesIO(data)).read()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 7), st.integers(0, 7))
def test_every_byte_comes_back(data: bytes, times: int, cut: int) -> None:
    data = data * times
    assert read(stored(data, cut + 1)) == data


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_block_boundaries(extra: int) -> None:
    data = np.random.default_rng(0).bytes(2 * BLOCK + extra)
    assert read(stored(data)) == data


def test_floats_get_smaller_than_by_zstd_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {"w": torch.randn(512, 512), "half": torch.randn(512, 512).bfloat16(), "step": 3, "int": torch.arange(999)}
    sizes = {}
    for name, extensions in (("plain", []), ("zstd", [_zstd()]), ("ours", [Lossless()])):
        writer = dcp.FileSystemWriter(str(tmp_path / name), _extensions=extensions)
        dcp.save(state, storage_writer=writer, no_dist=True)
        sizes[name] = sum(path.stat().st_size for path in (tmp_path / name).glob("*.distcp"))
    found = {k: 0 if k == "step" else torch.zeros_like(v) for k, v in state.items()}  # type: ignore[call-overload]
    reader = dcp.FileSystemReader(str(tmp_path / "ours"), _extension_registry=registry())
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert found["step"] == 3
    assert all(torch.equal(found[name], state[name]) for name in ("w", "half", "int"))
    assert sizes["ours"] < 0.95 * sizes["zstd"] < sizes["plain"]


def _zstd() -> object:
    from torch.distributed.checkpoint._extension import ZStandard

    return ZStandard()


@pytest.mark.parametrize("place", [0, 4, 5, 9, 13, 40, -20, -9, -5, -1])
def test_an_altered_stream_is_an_error(place: int) -> None:
    data = bytearray(stored(np.linspace(0, 1, 5000, dtype=np.float32).tobytes()))
    data[place] ^= 0x41
    with pytest.raises(sp.CorruptDataError):
        read(bytes(data))


@pytest.mark.parametrize("kept", [0, 3, 8, 100, -1, -9])
def test_a_truncated_stream_is_an_error(kept: int) -> None:
    data = stored(np.linspace(0, 1, 5000, dtype=np.float32).tobytes())
    with pytest.raises(sp.CorruptDataError):
        read(data[:kept])


def test_arguments_and_versions() -> None:
    with pytest.raises(sp.BadArgumentError, match="level is 20"):
        Lossless(20)
    with pytest.raises(sp.CorruptDataError, match="version 2"):
        registry().from_descriptor_list(["shrinkpoint.lossless/2"])
