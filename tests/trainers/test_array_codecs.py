"""Zarr and numcodecs: round trips, bounds, chunks, every dtype, hostile bytes."""

from __future__ import annotations

import doctest
import json
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shrinkpoint as sp

zarr = pytest.importorskip("zarr", reason="zarr is not installed; `make frameworks` has it")
numcodecs = pytest.importorskip("numcodecs")

from shrinkpoint.trainers import numcodecs as arrays  # noqa: E402
from shrinkpoint.trainers import zarr as chunks  # noqa: E402
from shrinkpoint.trainers.numcodecs import decode_array, encode_array  # noqa: E402
from tests.pages import run_page  # noqa: E402

HOME = Path(__file__).parents[2]
POINTS = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]
BOUNDED = [(kind, error) for kind in ("quantize", "log_buckets") for error in (0.2, 0.03)]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    """Register the codecs of this checkout's entry points, not those of an installed copy."""
    for name, where in POINTS["zarr.codecs"].items():
        zarr.registry.register_codec(name, _loaded(where))
    for where in POINTS["numcodecs.codecs"].values():
        numcodecs.registry.register_codec(_loaded(where))


def _loaded(where: str) -> Any:
    module, name = where.split(":")
    return getattr(import_module(module), name)


def drawn(dtype: str, shape: tuple[int, ...] = (130, 90)) -> Any:
    values = 20 * np.random.default_rng(0).standard_normal(shape)
    return (values + 1j * values[::-1] if dtype.startswith("complex") else values).astype(dtype)


def bounded(kind: str, error: float, x: Any, y: Any) -> bool:
    """Whether y keeps to the bound of a lossy codec, and is not merely exact."""
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if kind == "quantize":
        return bool(0 < np.linalg.norm(a - b) <= error * np.linalg.norm(a))
    return bool(np.abs(a - b).max() > 0 and (np.abs(a - b) <= error * np.abs(a)).all())


def test_entry_points_have_the_names_of_their_classes() -> None:
    assert POINTS["zarr.codecs"].keys() == POINTS["numcodecs.codecs"].keys()
    for group, attribute in (("zarr.codecs", "name"), ("numcodecs.codecs", "codec_id")):
        for name, where in POINTS[group].items():
            assert getattr(_loaded(where), attribute) == name


@pytest.mark.parametrize("module", [chunks, arrays])
def test_examples(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


@pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification")
@pytest.mark.parametrize("dtype", [*DTYPES, ">f4", "datetime64[s]", "U3"])
def test_every_dtype_comes_back_from_zarr(dtype: str, tmp_path: Path) -> None:
    x = drawn("int64").astype(dtype) if dtype[0] in "dU" else drawn(dtype)
    z = zarr.create_array(
        tmp_path, shape=x.shape, chunks=(50, 40), dtype=x.dtype, serializer=chunks.ExactChunks(), compressors=None
    )
    z[:] = x
    again = zarr.open_array(tmp_path, mode="r")
    assert type(again.metadata.codecs[0]) is chunks.ExactChunks
    assert np.array_equal(again[:], x)
    assert np.array_equal(again[45:60, 35:41], x[45:60, 35:41])


@pytest.mark.parametrize("dtype", [*DTYPES, ">f4", "datetime64[s]", "S4"])
def test_every_dtype_comes_back_from_numcodecs(dtype: str) -> None:
    x = drawn("int64").astype(dtype) if dtype[0] in "dS" else drawn(dtype)
    codec = numcodecs.get_codec({"id": "shrinkpoint.exact"})
    for given in (x, np.asfortranarray(x), x[::3, 1:]):
        back = codec.decode(codec.encode(given))
        assert back.dtype == given.dtype
        assert np.array_equal(back, given.reshape(-1, order="A"))
    out = np.empty_like(x)
    assert codec.decode(codec.encode(x), out=out) is out
    assert np.array_equal(out, x)


@pytest.mark.parametrize(("kind", "error"), BOUNDED)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_bounds_hold_in_every_chunk(kind: str, error: float, dtype: str, tmp_path: Path) -> None:
    x = drawn(dtype, (200, 150))
    x[:64] *= 100  # chunks of different scales: the bound is of each
    codec = chunks.QuantizedChunks(error) if kind == "quantize" else chunks.LogBucketsChunks(error)
    z = zarr.create_array(tmp_path, shape=x.shape, chunks=(64, 64), dtype=dtype, serializer=codec, compressors=None)
    z[:] = x
    again = zarr.open_array(tmp_path, mode="r")
    assert again.metadata.codecs[0] == codec
    for i in range(0, 192, 64):
        for j in range(0, 128, 64):
            cut = slice(i, i + 64), slice(j, j + 64)
            assert bounded(kind, error, x[cut], again[cut])
    assert z.nbytes_stored() < 0.8 * x.nbytes


@pytest.mark.parametrize(("kind", "error"), BOUNDED)
def test_bounds_hold_in_numcodecs_and_what_is_not_finite_stays(kind: str, error: float) -> None:
    x = drawn("float32")
    x[0, :3] = np.nan, np.inf, -np.inf
    codec = numcodecs.get_codec({"id": f"shrinkpoint.{kind}", "max_error": error})
    assert numcodecs.get_codec(codec.get_config()) == codec
    back = codec.decode(codec.encode(x))
    assert np.array_equal(back[:3], x[0, :3], equal_nan=True)
    assert bounded(kind, error, x[1:].reshape(-1), back[x.shape[1] :])
    few = drawn("float32", (7, 5))
    assert np.array_equal(codec.decode(codec.encode(few)), few.reshape(-1))
    whole = drawn("int32")
    assert np.array_equal(codec.decode(codec.encode(whole)), whole.reshape(-1))


@pytest.mark.parametrize("order", ["C", "F"])
def test_zarr_2_takes_the_numcodecs(order: str, tmp_path: Path) -> None:
    x = drawn("float32")
    z = zarr.create_array(
        tmp_path, shape=x.shape, chunks=(64, 64), dtype="float32", zarr_format=2, order=order,
        compressors=arrays.ExactArrays(),
    )  # fmt: skip
    z[:] = x
    assert json.loads((tmp_path / ".zarray").read_text())["compressor"] == {"id": "shrinkpoint.exact"}
    assert np.array_equal(zarr.open_array(tmp_path, mode="r")[:], x)


def test_many_chunks_at_once_empty_arrays_and_scalars(tmp_path: Path) -> None:
    x = drawn("float32", (1024, 512))
    z = zarr.create_array(
        tmp_path / "many", shape=x.shape, chunks=(64, 64), dtype="float32", serializer=chunks.QuantizedChunks(),
        compressors=None,
    )  # fmt: skip
    z[:] = x
    assert bounded("quantize", 0.05, x, z[:])
    for shape in ((), (0, 3)):
        z = zarr.create_array(
            tmp_path / f"{len(shape)}", shape=shape, dtype="float32", serializer=chunks.ExactChunks(), compressors=None
        )
        z[...] = 3.0
        assert z[...].shape == shape
        assert np.all(z[...] == 3.0)


@pytest.mark.parametrize("error", [0.0, 1.0, -0.1, float("nan"), "0.1", None])
def test_settings_are_checked(error: Any) -> None:
    for make in (chunks.QuantizedChunks, chunks.LogBucketsChunks, arrays.QuantizedArrays, arrays.LogBucketsArrays):
        with pytest.raises(sp.BadArgumentError, match="max_error"):
            make(max_error=error)


def test_objects_are_refused() -> None:
    with pytest.raises(sp.UnsupportedLeafError):
        arrays.ExactArrays().encode(np.array([{}, []], dtype=object))


# ------------------------------------------------------------------------------------------------------ hostile bytes


def test_altered_and_truncated_bytes_are_refused() -> None:
    x = drawn("float32")
    data = encode_array(x, sp.Exact())
    rng = np.random.default_rng(0)
    for cut in (0, 1, 7, len(data) // 2, len(data) - 1):
        with pytest.raises(sp.ShrinkpointError):
            decode_array(data[:cut])
    for _ in range(200):
        wrong = bytearray(data)
        wrong[rng.integers(len(data))] ^= 1 << rng.integers(8)
        with pytest.raises(sp.ShrinkpointError):
            decode_array(wrong)
    with pytest.raises(sp.ShrinkpointError):
        arrays.ExactArrays().decode(data + b"\0")


def test_other_checkpoints_are_no_chunks() -> None:
    x = drawn("float32")
    base = sp.compress({"array": x}, cfg=sp.presets.lossless())
    delta = sp.compress({"array": x + 1}, base, sp.presets.lossless())
    several = sp.compress({"array": x, "b": x * 2}, cfg=sp.presets.lossless())
    scalar = sp.compress({"array": x, "step": 3}, cfg=sp.presets.lossless())
    other = sp.compress({"b": x}, cfg=sp.presets.lossless())
    for stored, why in ((delta, "delta"), (several, "2 arrays"), (scalar, "more than one"), (other, "not one array")):
        with pytest.raises(sp.CorruptDataError, match=why):
            decode_array(stored.to_bytes())


def test_a_chunk_of_another_array_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    z = zarr.create_array(
        tmp_path, shape=(64, 64), chunks=(64, 64), dtype="float32", serializer=chunks.ExactChunks(), compressors=None
    )
    z[:] = drawn("float32", (64, 64))
    (chunk,) = [p for p in (tmp_path / "c").rglob("*") if p.is_file()]
    monkeypatch.setattr("shrinkpoint.trainers.numcodecs.decompress", None)
    for wrong, why in ((np.zeros((1 << 14, 1 << 12), np.float32), "shape"), (np.zeros((64, 64)), "dtype float64")):
        chunk.write_bytes(encode_array(wrong, sp.Exact()))
        with pytest.raises(sp.CorruptDataError, match=why):
            zarr.open_array(tmp_path, mode="r")[:]


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(HOME / "docs" / "trainers" / "zarr.md")
