"""Kernels take arrays of every library, and return arrays of the same library and device."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shrinkpoint import kernels as k
from shrinkpoint.kernels.backend.arrays import device_of, dtype_name, like, to_host, to_numpy
from shrinkpoint.kernels.errors import BadArgumentError

from .conftest import GPU_HERE, TRITON_HERE
from .test_arguments import CALLS, CENTERS, CODES, COUNTS, LEVELS, MASK, TABLE, THRESHOLDS, WEIGHTS, X

ON_THE_HOST = {
    "exponent_dequantize": {"codebook"},
    "exponent_sums": {"codebook"},
    "grid_values": {"table"},
    "grid_products": {"table"},
    "residual_symbols": {"rows", "columns"},
    "residual_values": {"rows", "columns", "table"},
    "residual_factors": {"sums", "counts"},
    "low_rank_factors": {"heights"},
    "low_rank_predictions": {"heights"},
    "low_rank_differences": {"heights"},
    "rate_distortion_levels": {"codebook", "prices"},
    "settled_bounds": {"codebook", "prices"},
    "unsettled": {"bounds"},
    "Promotion": {"codebook", "table"},
}
"""Arguments that are wanted as NumPy."""
HOST_RESULTS = {"boundaries", "factor_sums", "log_histogram", "kept_histogram", "exponent_buckets", "bucket_weights"}
HOST_RESULTS |= {"prepare", "split_octaves", "log_histogram_many", "kept_histogram_many"}
HOST_AFTER_THE_FIRST = {"grid_symbols", "residual_symbols"}
"""Functions whose results, or all but the first, are NumPy for every library."""
GPU_SUBJECTS = {p.parent.name for p in Path(k.__file__).parent.glob("*/gpu.py")}
assert len(GPU_SUBJECTS) > 10
LISTS = {"problems", "xs", "gradients"}
"""Arguments that are lists of arrays, or of tuples of them."""
OWN_TESTS = {"collect_changes", "collect_and_locate", "locate_changes", "apply_changes", "join_changes"}
"""Functions that take or give a `SparseDelta`, whose counts are NumPy: tests/kernels/test_sparse_delta.py."""
OWN_TESTS |= {"distortion_many", "used_buckets_many", "factors_many", "residual_symbols_many", "residual_values_many"}
OWN_TESTS |= {"uniform_levels_many", "uniform_values_many", "least_losses"}
"""Functions of several arrays in one, whose arguments after the first are NumPy: tests/kernels/test_many.py."""
OWN_ORDER = {"factor_sums", "distortion", "grid_products"}
"""Sums that each back end may add up in its own order."""


def name_of(function: Callable[..., Any]) -> str:
    """Return a public function's name; `assign`, `distortion` and `extrapolate` are modules too."""
    return getattr(function, "__name__", "").rsplit(".", 1)[-1]


def arrays_among(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that may be arrays of any library."""
    wanted = ON_THE_HOST.get(name_of(function), set())
    return {
        name: value
        for name, value in arguments.items()
        if name not in wanted and (isinstance(value, np.ndarray) or name in LISTS)
    }


ANY_LIBRARY = [
    pytest.param(function, arguments, id=f"{number}-{name_of(function)}")
    for number, (function, arguments) in enumerate(CALLS)
    if arrays_among(function, arguments) and name_of(function) not in OWN_TESTS
]


def leaves(result: Any) -> Iterator[Any]:
    """Yield arrays and numbers of a result in order."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = [getattr(result, field.name) for field in dataclasses.fields(result)]
    if isinstance(result, tuple | list):
        for part in result:
            yield from leaves(part)
    else:
        yield result


def converted(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return an argument with every array in it changed."""
    if isinstance(value, list | tuple):
        return type(value)(converted(part, change) for part in value)
    return change(value)


def check(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    make: Callable[[Any], Any],
    back: Callable[[Any], np.ndarray[Any, Any]],
    same: Callable[[Any], bool],
) -> None:
    """Compare a call on arrays of a library with the call on NumPy arrays.

    Args:
        function: a public one.
        arguments: NumPy.
        make: an array of the library from NumPy, maybe of fewer bits.
        back: NumPy again.
        same: whether a result is of the library, and on the right device.
    """
    theirs = {name: converted(value, make) for name, value in arrays_among(function, arguments).items()}
    ours = {name: converted(value, back) for name, value in theirs.items()}
    found = list(leaves(function(**{**arguments, **theirs})))
    expected = list(leaves(function(**{**arguments, **ours})))
    assert len(found) == len(expected)
    name = name_of(function)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        if not isinstance(b, np.ndarray):
            assert type(a) is type(b)
            assert a == (pytest.approx(b) if name in OWN_ORDER else b)
            continue
        if name in HOST_RESULTS or (number and name in HOST_AFTER_THE_FIRST):
            assert isinstance(a, np.ndarray)
        else:
            assert same(a)
            a = back(a)
        narrow = {"int64": "int32"} | ({"float64": "float32"} if name.startswith("weighted_kmeans") else {})
        assert a.dtype == b.dtype or (same is is_jax and dtype_name(a) == narrow.get(dtype_name(b)))
        compare = np.testing.assert_allclose if name in OWN_ORDER else np.testing.assert_array_equal
        compare(a, b.astype(a.dtype))


def is_jax(x: Any) -> bool:
    """Return whether x is a JAX array on the first device."""
    jax = import_module("jax")
    return isinstance(x, jax.Array) and x.device == jax.devices()[0]


@pytest.mark.parametrize(("function", "arguments"), ANY_LIBRARY)
def test_jax_arrays(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """JAX arrays are accepted in the default mode without 64-bit numbers."""
    jnp = pytest.importorskip("jax.numpy")

    def make(x: np.ndarray[Any, Any]) -> Any:
        return jnp.asarray(x.astype({"int64": "int32", "float64": "float32"}.get(x.dtype.name, x.dtype.name)))

    check(function, arguments, make, np.asarray, is_jax)


class Foreign:
    """An array like CuPy's, which becomes a NumPy array only by `get`."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.shape = tuple(values.shape)
        self.dtype = np.dtype(str(values.dtype).rsplit(".", 1)[-1])
        self.device = values.device

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __array_namespace__(self, **_: Any) -> Any:
        library = ModuleType("foreign")
        library.from_dlpack = lambda x: Foreign(torch.from_dlpack(x))  # type: ignore[attr-defined]
        return library

    def get(self) -> np.ndarray[Any, Any]:
        return self.values.cpu().numpy()


@pytest.fixture(params=[pytest.param("foreign", marks=pytest.mark.gpu if GPU_HERE else ())])
def foreign(monkeypatch: pytest.MonkeyPatch) -> Callable[[np.ndarray[Any, Any]], Foreign]:
    """Make an array of a library like CuPy, on a GPU or a stand-in."""
    if not TRITON_HERE:
        pytest.skip("Triton is not installed on this platform")
    if not GPU_HERE:
        for subject in GPU_SUBJECTS:
            import_module(f"shrinkpoint.kernels.{subject}.gpu")
        for name, module in list(sys.modules.items()):
            if name.startswith("shrinkpoint.kernels.") and hasattr(module, "on_gpu"):
                monkeypatch.setattr(module, "on_gpu", lambda x: isinstance(x, Foreign))
    return lambda x: Foreign(torch.from_numpy(x.copy()).to("cuda" if GPU_HERE else "cpu"))


@pytest.mark.parametrize(("function", "arguments"), ANY_LIBRARY)
def test_arrays_that_forbid_numpy(
    function: Callable[..., Any], arguments: dict[str, Any], foreign: Callable[[Any], Foreign]
) -> None:
    subject = function.__module__.rpartition(".")[2]
    on_gpu = vars(import_module(f"{function.__module__}.gpu")) if subject in GPU_SUBJECTS else {}
    if on_gpu.keys().isdisjoint((name_of(function), f"{name_of(function)}_many")):
        given = {name: converted(v, foreign) for name, v in arrays_among(function, arguments).items()}
        with pytest.raises(BadArgumentError, match=r"on a GPU|different devices"):
            function(**{**arguments, **given})
        return
    check(function, arguments, foreign, lambda x: x.get(), lambda x: isinstance(x, Foreign))


def test_a_codebook_that_forbids_numpy(foreign: Callable[[Any], Foreign]) -> None:
    for dtype in ("float16", "float32", "float64"):
        codes = CODES.astype(dtype)
        np.testing.assert_array_equal(k.boundaries(foreign(codes), "float32"), k.boundaries(codes, "float32"))
        np.testing.assert_array_equal(k.assign(X, THRESHOLDS, foreign(codes)), k.assign(X, THRESHOLDS, codes))
        np.testing.assert_array_equal(to_host(foreign(codes)), codes)


class Elsewhere:
    """An array on GPU `number` whose data must not be read."""

    def __init__(self, like: np.ndarray[Any, Any], number: int) -> None:
        self.shape, self.dtype, self.number = like.shape, like.dtype, number

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.number


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: k.difference(x(X), y(X)),
        lambda x, y: k.log_histogram(x(X), 6, gradient=y(X)),
        lambda x, y: k.kept_histogram(x(X), THRESHOLDS, 6, gradient=y(X)),
        lambda x, y: k.log_histogram_many([x(X), y(X)], 6),
        lambda x, y: k.kept_histogram_many([x(X)], [THRESHOLDS], 6, gradients=[y(X)]),
        lambda x, y: k.assign(x(X), THRESHOLDS, CODES, gradient=y(X)),
        lambda x, y: k.dequantize(x(LEVELS), y(CODES)),
        lambda x, y: k.delta(x(LEVELS), y(LEVELS), 6),
        lambda x, y: k.joint_counts(x(LEVELS), y(LEVELS), 6, 6),
        lambda x, y: k.gather(x(X), y(MASK)),
        lambda x, y: k.distortion(x(X), y(X)),
        lambda x, y: k.extrapolate(x(X), y(X), 0.5),
        lambda x, y: k.weighted_kmeans(x(CENTERS), y(WEIGHTS), 3),
        lambda x, y: k.grid_symbols(x(X), y(X), 0.5),
        lambda x, y: k.grid_products(x(X), y(X), x(LEVELS), np.ones(256, "f4")),
        lambda x, y: k.residual_symbols(x(X), np.ones(1, "f4"), np.ones(X.size, "f4"), 0, 2, y(LEVELS)),
        lambda x, y: k.rate_distortion_levels(x(X), y(LEVELS), y(LEVELS), CODES, np.ones((6, 6), "f4")),
        lambda x, y: k.unsettled(x(X), y(LEVELS), y(LEVELS), np.ones((6, 6, 4), "f4")),
    ],
)
def test_two_gpus_are_two_devices(call: Callable[..., Any]) -> None:
    one, other = (lambda a: Elsewhere(a, 0)), (lambda a: Elsewhere(a, 1))
    with pytest.raises(BadArgumentError, match=r"different devices \(GPU [01] and GPU [01]\)"):
        call(one, other)
    with pytest.raises(BadArgumentError, match=r"different devices \((CPU and GPU 1|GPU 1 and CPU)\)"):
        call(lambda a: a, other)


def test_devices_of_arrays() -> None:
    assert device_of(X) == device_of(torch.zeros(2)) == (1, 0)
    assert device_of(Elsewhere(X, 3)) == (2, 3)
    pinned = SimpleNamespace(__dlpack_device__=lambda: (3, 0))
    assert device_of(pinned) == (3, 0)


def test_jax_on_another_device_and_on_several(tmp_path: Any) -> None:
    """JAX arrays stay on their device; arrays on several devices are refused."""
    pytest.importorskip("jax")
    code = """
import json, jax, numpy as np, shrinkpoint.kernels as k
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
first, second = jax.devices()
at = lambda x: jax.device_put(x, second)
x, levels = np.arange(8, dtype="f4"), np.arange(8, dtype="u1")
results = [
    k.split_planes(at(x)), k.bucket_index(at(x), 4), k.assign(at(x), k.Thresholds(), x[:2]), k.rle_encode(at(levels)),
    k.joint_counts(at(levels), at(levels), 8, 8), k.weighted_kmeans(at(x), at(x), 2), *k.row_quantize(at(x[None]), 4),
    k.huffman_lengths(k.joint_counts(at(levels), at(levels), 8, 8)[0]),
]
spread = jax.device_put(x, NamedSharding(Mesh(np.array([first, second]), ("a",)), P("a")))
said = []
for call in (lambda: k.split_planes(spread), lambda: k.log_histogram(spread, 6), lambda: k.delta(levels, spread, 8)):
    try:
        call()
    except k.BadArgumentError as error:
        said.append(str(error))
print(json.dumps([len(results), sum(r.devices() == {second} for r in results), said]))
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results, there, said = json.loads(done.stdout)
    assert there == results
    assert len(said) == 3
    assert all("is not on one device" in message for message in said)


def test_strict_arrays_on_a_device_that_cannot_be_read() -> None:
    strict = pytest.importorskip("array_api_strict")
    x = strict.asarray(X, device=strict.Device("device1"))
    with pytest.raises(BadArgumentError, match=r"array_api_strict.* cannot be read from the CPU: .*device1"):
        k.split_planes(x)


def test_jax_without_64_bits_loses_nothing_silently() -> None:
    jnp = pytest.importorskip("jax.numpy")
    x = jnp.zeros(1)
    narrow = like(np.array([2**31 - 1, -(2**31)]), x)
    assert (dtype_name(narrow), np.asarray(narrow).tolist()) == ("int32", [2**31 - 1, -(2**31)])
    for result in (np.array([2**31]), np.array([1], np.uint64), np.array([0.5])):
        with pytest.raises(BadArgumentError, match=f"the result is {result.dtype}.*jax_enable_x64"):
            like(result, x)
    assert dtype_name(like(np.array([0.1]), x, rounded=True)) == "float32"
    planes = jnp.asarray(k.split_planes(np.arange(3.0)))
    with pytest.raises(BadArgumentError, match="uint64"):
        k.merge_planes(planes, "float64")
    with pytest.raises(BadArgumentError, match="float64"):
        k.bucket_value(jnp.asarray(k.bucket_index(np.ones(2), 4)), 4, "float64")


def test_what_jax_counts_can_be_coded() -> None:
    jnp = pytest.importorskip("jax.numpy")
    levels = jnp.asarray(LEVELS)
    counts = k.joint_counts(levels, levels, 6, 6)
    expected = k.joint_counts(LEVELS, LEVELS, 6, 6)
    table = k.rans_frequencies(counts, 12)
    np.testing.assert_array_equal(table, k.rans_frequencies(expected, 12))
    assert k.coding_cost(counts, table, 12) == k.coding_cost(expected, np.asarray(table), 12)
    assert k.entropy_bits(counts) == k.entropy_bits(expected)
    groups = k.split_by_level(levels, levels, 6)[1]
    np.testing.assert_array_equal(k.huffman_lengths(groups), k.huffman_lengths(np.asarray(groups).astype(np.int64)))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32"])
@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_counts_of_any_width(dtype: str, make: Callable[[Any], Any]) -> None:
    counts = COUNTS.astype(dtype)
    np.testing.assert_array_equal(k.huffman_lengths(make(counts)), k.huffman_lengths(COUNTS))
    wide, narrow = np.tile(COUNTS, (3, 1)), np.tile(counts, (3, 1))
    np.testing.assert_array_equal(k.rans_frequencies(make(narrow), 12), TABLE)
    assert k.coding_cost(make(narrow), make(TABLE), 12) == k.coding_cost(wide, TABLE, 12)
    assert k.entropy_bits(make(narrow)) == k.entropy_bits(wide)
    for refused in (COUNTS.astype(np.uint64), COUNTS.astype(np.float64)):
        with pytest.raises(BadArgumentError, match=r"counts is .*; int64 or "):
            k.huffman_lengths(refused)


def test_tensors_without_memory_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    for call in (k.split_planes, lambda x: k.log_histogram(x, 6), lambda x: k.assign(X, THRESHOLDS, x)):
        with pytest.raises(BadArgumentError, match=r"^(x|codebook) is a torch tensor \(FakeTensor\) without memory"):
            call(fake)
        for within in (torch.vmap(call), torch.func.grad(call)):
            with pytest.raises(BadArgumentError, match=r"is a torch tensor \(Tensor\) without memory of its own"):
                within(torch.ones(2, 3))
    wrapper = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor(torch.ones(3), torch.ones(3))
    with pytest.raises(BadArgumentError, match=r"x is a torch tensor \(TwoTensor\) without memory of its own"):
        k.split_planes(wrapper)
    parameter = torch.nn.Parameter(torch.ones(3))
    assert k.log_histogram(parameter, 6).total == 3


def test_more_elements_than_any_machine_holds_are_a_wrong_argument() -> None:
    certain = np.array([[256]], np.uint32)
    for call in (
        lambda n: k.unpack_bits(b"", 0, n),
        lambda n: k.rans_decode(b"", None, certain, 8, n),
        lambda n: k.rle_decode(np.array([0, 2**31 - 1], np.int32), n),
        lambda n: k.huffman_decode(b"", k.huffman_lengths(np.array([1, 1])), n),
    ):
        for n in (10**13, 2**56):
            with pytest.raises((BadArgumentError, k.CorruptDataError)):
                call(n)


def test_too_little_memory_for_what_is_not_much_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(np, "zeros", full)
    with pytest.raises(MemoryError):
        k.unpack_bits(b"", 0, 100)


def test_numpy_of_torch_and_jax() -> None:
    assert to_numpy(torch.ones(2, dtype=torch.bfloat16)).tolist() == [0x3F80, 0x3F80]
    np.testing.assert_array_equal(to_host(torch.arange(3)), [0, 1, 2])
