"""Kinds of arrays: dtypes of four libraries, memory layouts, ties, and refused types."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec.state.leaves import LeafSpec

from .common import bits, difference, known, round_trip, through_bytes

SIZES = (0, 1, 7, 64, 65, 1023, 1024, 5001)
# Of the quantized ones, torch makes only quantized tensors, which are refused below.
TORCH = sorted(
    {
        d
        for d in vars(torch).values()
        if isinstance(d, torch.dtype) and not str(d).startswith(("torch.q", "torch.quint"))
    },
    key=str,
)
NUMPY = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble"),
    *(">i2", ">u4", ">i8", ">f2", ">f4", ">f8", ">c8", ">c16", ">U3", ">M8[s]"),
    *("S1", "S3", "S5", "U1", "U2", "U7", "M8[ns]", "M8[D]", "M8[25s]", "m8[us]", "m8[Y]", "M8", "m8"),
]
ML = sorted(n for n, v in vars(ml_dtypes).items() if isinstance(v, type) and issubclass(v, np.generic))


def raw(n: int, *, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


def torch_values(dtype: torch.dtype, n: int) -> torch.Tensor:
    data = raw(n * dtype.itemsize)
    if dtype == torch.bool:
        data &= 1
    return torch.from_numpy(data).view(dtype) if n else torch.empty(0, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_every_torch_dtype(dtype: torch.dtype) -> None:
    exact = sp.presets.lossless()
    for n in SIZES:
        x = torch_values(dtype, n)
        assert difference([x], round_trip([x], exact)) == "", n
    matrix = torch_values(dtype, 24).view(4, 6)
    for view in (matrix, matrix.T, matrix[1:3, ::2], matrix[0, 0], matrix[:, :0], matrix[:1].expand(5, 6)):
        y = round_trip([view], exact)[0]
        assert y.dtype == dtype
        assert y.shape == view.shape
        assert bits(y) == bits(view)
        # Transposed memory is kept; memory with gaps or overlaps becomes contiguous.
        assert y.stride() == (view.stride() if view.shape == (6, 4) else torch.empty(view.shape).stride())


@pytest.mark.parametrize("name", NUMPY)
def test_every_numpy_dtype(name: str) -> None:
    dtype = np.dtype(name)
    for n in SIZES:
        x = np.frombuffer(_legal(dtype, n), dtype)
        assert x.size == n
        assert difference([x], round_trip([x], sp.presets.lossless())) == "", n
        if n:
            again = round_trip([x[0]])[0]
            assert type(again) is type(x[0])
            assert _value_bytes(again) == _value_bytes(x[0])
            assert difference([x[:1].reshape(())], round_trip([x[:1].reshape(())])) == ""


def _value_bytes(x: Any) -> bytes:
    """Return the bytes of a scalar without the padding of long doubles (undefined in NumPy 2.5)."""
    if x.dtype.char in "gG":
        return np.frombuffer(x.tobytes(), np.uint8).reshape(-1, np.dtype(np.longdouble).itemsize)[:, :10].tobytes()
    return bytes(x.tobytes())


def _legal(dtype: np.dtype[Any], n: int) -> bytes:
    """Return random values of this dtype (text holds code points, bool 0 or 1)."""
    data = raw(n * dtype.itemsize)
    if dtype.kind == "b":
        data &= 1
    if dtype.kind == "U":
        return (
            (data.view(np.uint8).view(dtype.byteorder.replace("=", "<") + "u4") % 0xD800)
            .astype(dtype.str[0] + "u4")
            .tobytes()
        )
    return data.tobytes()


@pytest.mark.parametrize("name", ML)
def test_every_extension_dtype(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    for n in (0, 1, 100, 3000):
        x = np.arange(n).astype(dtype)
        assert difference([x], round_trip([x], sp.presets.lossless())) == ""
    assert difference([x[3]], round_trip([x[3]])) == ""
    assert difference([x[:6].reshape(2, 3).T], round_trip([x[:6].reshape(2, 3).T])) == ""


def test_a_dtype_that_is_missing_here_is_no_damage(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = sp.Store(tmp_path / "run", "lossless")
    store.save(1, {"x": np.zeros(9, np.float32)})
    store.save(2, {"x": np.zeros(9, ml_dtypes.bfloat16)})
    store.save(3, {"x": torch.zeros(9, dtype=torch.float8_e5m2)})
    with monkeypatch.context() as patched:
        patched.delattr(torch, "float8_e5m2")
        # Not step 2 with a warning: the run would go on from there.
        with pytest.raises(sp.UnsupportedLeafError, match=r"torch .* has no dtype float8_e5m2"):
            sp.Store(tmp_path / "run").load()
    store.drop(3)
    for module, text in ((None, "needs the package ml_dtypes"), (np, "ml_dtypes installed here has no dtype bfloat16")):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "ml_dtypes", module)
            with pytest.raises(sp.UnsupportedLeafError, match=text):
                sp.Store(tmp_path / "run").load()
    assert sp.Store(tmp_path / "run").load()["x"].dtype == ml_dtypes.bfloat16


def test_empty_text() -> None:
    """Text of zero width has no bytes."""
    state = [np.str_(""), np.bytes_(b""), np.zeros(3, "U0"), np.empty(0, "S0"), np.array([""]), np.zeros((2, 0), "U5")]
    assert difference(state, round_trip(state)) == ""


def test_text_keeps_the_nuls_at_its_end() -> None:
    state = [np.bytes_(b"a\0"), np.bytes_(b"\0"), np.str_("a\0b\0"), np.str_("\0"), np.array(b"a\0"), np.str_("\ud800")]
    back = round_trip(state)
    assert difference(state, back) == ""
    assert [bytes(x) if isinstance(x, bytes) else "".join(x) for x in (*back[:4], back[5])] == [
        b"a\0", b"\0", "a\0b\0", "\0", "\ud800",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_foreign_byte_order_is_kept_or_refused(name: str) -> None:
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    x = np.array([1.0, 2.0, 3.0]).astype(dtype)
    x = x.astype(x.dtype.newbyteorder(">"))
    if name == "bfloat16":
        with pytest.raises(sp.UnsupportedLeafError, match="a/0: bfloat16 in foreign byte order"):
            sp.compress({"a": [x]})
        x = x.astype(x.dtype.newbyteorder("="))
    assert difference([x], round_trip([x])) == ""


def test_numpy_layouts() -> None:
    base = np.arange(120, dtype="f4").reshape(4, 5, 6)
    views = [
        base,
        np.asfortranarray(base),
        base[::-1],
        base[:, ::-2, 1:5:3],
        base.transpose(2, 0, 1),
        np.broadcast_to(base[0, 0], (3, 6)),
        np.lib.stride_tricks.as_strided(base, (4, 4), (0, 8)),
        base[1, 2, 3:4].reshape(()),
        base[:, :0],
        np.broadcast_to(np.float32(3), (2000,)),
        np.frombuffer(bytes(range(33))[1:], "<f4"),  # not aligned, not writable
    ]
    for x in views:
        assert difference([x], round_trip([x], sp.presets.lossless())) == ""


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_a_single_element_of_a_row(dtype: torch.dtype) -> None:
    """A single element with any stride is stored, although torch gives no byte view of it."""
    x = torch.tensor([[5, 1, 7], [0, 1, 1]]).to(dtype)
    for one in (x[:1, 0], x[0, ::2][1:], x[1:, :1].t(), x[:, 1:2][1:]):
        for cfg in (sp.Config(), sp.presets.lossless()):
            assert difference([one], round_trip([one], cfg)) == ""
    if dtype is not torch.bfloat16:
        one = x.numpy()[:1, 0]
        assert difference([one], round_trip([one])) == ""


def test_memory_maps_are_plain_arrays_afterwards(tmp_path: Any) -> None:
    x = np.memmap(tmp_path / "m", np.int32, "w+", shape=(7,))
    x[:] = range(7)
    y = round_trip([x])[0]
    assert type(y) is np.ndarray
    assert y.tolist() == list(range(7))


def test_torch_layouts_and_wrappers() -> None:
    x = torch.arange(24).reshape(4, 6) * torch.tensor(1 + 2j)
    parameter = torch.nn.Parameter(torch.arange(5.0))
    wanting = torch.arange(6.0, requires_grad=True)
    pairs = [
        (x.conj(), x.conj().resolve_conj()),
        (x.conj().imag, x.conj().imag.resolve_neg()),
        (x.T[::2], x.T[::2].contiguous()),
        (parameter, parameter.detach()),
        (torch.nn.Buffer(torch.arange(3)), torch.arange(3)),
        (wanting, wanting.detach()),
        (wanting * 2, (wanting * 2).detach()),
        (torch.tensor(3.0).expand(4, 0, 2), torch.empty(4, 0, 2)),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.zeros(2, 3, 4, 5)),
    ]
    for given_, expected in pairs:
        y = round_trip({"x": given_})["x"]
        assert type(y) is torch.Tensor
        assert not y.requires_grad
        assert y.dtype == expected.dtype
        assert torch.equal(y, expected)


def test_what_comes_back_can_be_written_and_is_nobody_elses() -> None:
    state = {
        "a": torch.arange(5),
        "b": np.arange(2000.0),
        "c": torch.randn(2000),
        "d": np.int64(3),
        "o": {"0": {"exp_avg": torch.randn(3000)}},
    }
    ckpt = sp.compress(state)
    first, second = sp.decompress(ckpt), sp.decompress(ckpt)
    for x in (first["a"], first["b"], first["c"], first["o"]["0"]["exp_avg"]):
        x[:] = -77
    assert difference(second, sp.decompress(ckpt)) == ""
    read = sp.Checkpoint.from_bytes(ckpt.to_bytes())
    third = sp.decompress(read)
    for x in (third["a"], third["b"], third["c"], third["o"]["0"]["exp_avg"]):
        x[:] = -77
    assert difference(second, sp.decompress(read)) == ""


def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    state = {
        "f": jnp.arange(7.0),
        "i": jnp.arange(7),
        "b": jnp.ones((2, 3), bool),
        "h": jnp.linspace(-1, 1, 9).astype(jnp.bfloat16),
        "q": jnp.ones(3, jnp.float8_e4m3fn),
        "c": jnp.ones(4, jnp.complex64) * 1j,
        "0": jnp.asarray(3.5),
        "e": jnp.zeros((3, 0)),
        "k": jax.random.PRNGKey(3),
    }
    back = round_trip(state)
    assert difference(state, back) == ""
    assert all(isinstance(x, jax.Array) for x in back.values())
    large = round_trip({"weight": jnp.linspace(-1, 1, 5000), "h": jnp.linspace(-1, 1, 5000).astype(jnp.bfloat16)})
    assert float(abs(large["weight"] - jnp.linspace(-1, 1, 5000)).max()) < 0.1
    assert large["h"].dtype == jnp.bfloat16
    tied = round_trip([state["f"], {"again": state["f"]}])
    assert tied[0] is tied[1]["again"]
    with pytest.raises(sp.UnsupportedLeafError, match="rng/key"):
        sp.compress({"rng": {"key": jax.random.key(0)}})


def test_strict_arrays() -> None:
    xp = pytest.importorskip("array_api_strict")
    state = {
        "f": xp.arange(7.0),
        "i": xp.arange(7),
        "b": xp.ones((2, 3), dtype=xp.bool),
        "c": xp.ones(3, dtype=xp.complex64),
        "0": xp.asarray(2),
    }
    back = round_trip(state)
    for key, x in state.items():
        assert type(back[key]) is type(x)
        assert back[key].dtype == x.dtype
        assert bool(xp.all(back[key] == x))


def test_ties_survive() -> None:
    w, v = torch.randn(40, 50), np.random.default_rng(0).normal(size=(40, 50))
    state = {
        "emb": w,
        "head": w,
        "param": torch.nn.Parameter(w),
        "t": w.T,
        "part": w[:2],
        "same values": w.clone(),
        "n": v,
        "list": [v, {"x": v.view()}],
        "int": torch.arange(3),
        "as": None,
    }
    state["as"] = state["int"].view(torch.float64)
    kinds = known("emb", "t", "same values", "n")
    for y in (sp.decompress(sp.compress(state, kinds=kinds)), round_trip(state, kinds=kinds)):
        assert y["emb"] is y["head"]
        assert y["emb"] is y["param"]
        assert y["n"] is y["list"][0]
        assert y["n"] is y["list"][1]["x"]
        others = [y["t"], y["part"], y["same values"], y["int"], y["as"]]
        assert len({id(x) for x in [y["emb"], *others]}) == 6
        assert y["t"].shape == (50, 40)
        assert y["as"].dtype == torch.float64
    assert sp.compress(state, kinds=kinds).raw_nbytes == w.nbytes * 3 + v.nbytes + w[:2].nbytes + 48
    both = np.zeros(8, ml_dtypes.float8_e4m3fn)
    two = round_trip([both, both.view(ml_dtypes.float8_e5m2), both.view(ml_dtypes.float8_e4m3fn)])
    assert [x.dtype.name for x in two] == ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fn"]


def test_ties_that_come_and_go_along_a_chain() -> None:
    w, u = torch.randn(40, 50), torch.randn(40, 50)
    cfg = sp.presets.lossless()
    states = [{"a": w, "b": w}, {"a": w, "b": u}, {"a": u, "b": u}, {"b": u, "a": w}]
    prev = read = None
    for state in states:
        prev = sp.compress(state, prev, cfg)
        read = sp.Checkpoint.from_bytes(prev.to_bytes(), read)
        y = sp.decompress(read)
        assert difference(state, y) == ""
        assert (y["a"] is y["b"]) == (state["a"] is state["b"])


def _refused() -> dict[str, Callable[[], Any]]:
    def subclass() -> Any:
        class Tagged(torch.Tensor):
            pass

        return torch.zeros(3).as_subclass(Tagged)

    def freed() -> Any:
        x = torch.ones(5000)
        x.untyped_storage().resize_(0)
        return x

    return {
        "object": lambda: np.array([None, 1], object),
        "structured": lambda: np.zeros(3, [("a", "f4"), ("b", "i4")]),
        "record": lambda: np.zeros(3, [("a", "f4")]).view(np.recarray),
        "void": lambda: np.zeros(3, "V7"),
        "void scalar": lambda: np.void(b"abc"),
        "text of any length": lambda: np.array(["a", "bc"], np.dtypes.StringDType()),
        "masked": lambda: np.ma.array([1, 2], mask=[0, 1]),
        "matrix": lambda: np.asmatrix(np.zeros((2, 2))),
        "sparse": lambda: torch.eye(3).to_sparse(),
        "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
        "meta": lambda: torch.empty(3, device="meta"),
        "mkldnn": lambda: torch.eye(3).to_mkldnn(),
        "quantized": lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
        "uninitialized": lambda: torch.nn.parameter.UninitializedParameter(),
        "uninitialized buffer": lambda: torch.nn.parameter.UninitializedBuffer(),
        "subclass": subclass,
        "nested": lambda: torch.nested.nested_tensor([torch.zeros(3), torch.zeros(4)]),
        "jagged": lambda: torch.nested.nested_tensor([torch.zeros(3), torch.zeros(4)], layout=torch.jagged),
        "freed storage": freed,
    }


@pytest.mark.parametrize("name", _refused())
def test_arrays_without_plain_values_are_refused_by_path(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on making one
        leaf = _refused()[name]()
    with pytest.raises(sp.UnsupportedLeafError, match=r"^model/layers/0: "):
        sp.compress({"model": {"layers": [leaf]}})
    with pytest.raises(sp.UnsupportedLeafError, match=r"^model/1: "):
        sp.compress({"model": [torch.zeros(3), leaf, leaf]})


def test_distributed_tensors_come_back_whole(tmp_path: Any) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available() or sys.platform != "linux":
        pytest.skip("needs gloo")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh = init_device_mesh("cpu", (1,))
        x = torch.arange(24.0).reshape(4, 6)
        for placement in (Shard(0), Replicate()):
            y = round_trip([distribute_tensor(x, mesh, [placement])])[0]
            assert type(y) is torch.Tensor
            assert torch.equal(x, y)
    finally:
        distributed.destroy_process_group()


@given(st.lists(st.sampled_from(["torch", "numpy", "jax"]), min_size=2, max_size=4), st.booleans())
def test_the_library_may_change_along_a_chain(libraries: list[str], exact: bool) -> None:
    jnp = pytest.importorskip("jax.numpy")
    make = {"torch": torch.from_numpy, "numpy": lambda x: x, "jax": jnp.asarray}
    rng = np.random.default_rng(0)
    x = rng.normal(size=2000).astype("f4")
    cfg = sp.presets.lossless() if exact else sp.Config()
    prev = read = None
    for library in libraries:
        x = x + np.float32(0.001) * rng.normal(size=2000).astype("f4")
        state = [make[library](x.copy())]
        prev = sp.compress(state, prev, cfg)
        read = sp.Checkpoint.from_bytes(prev.to_bytes(), read)
        y = sp.decompress(read)
        assert difference(sp.decompress(prev), y) == ""
        assert difference(y, through_bytes(prev, None) if not prev.is_delta else y) == ""
        assert type(y[0]) is type(state[0])
        if exact:
            assert difference(state, y) == ""


def test_arrays_whose_values_are_gone_or_not_there_yet() -> None:
    jnp = pytest.importorskip("jax.numpy")
    import jax

    gone = jnp.ones(4)
    gone.delete()
    with pytest.raises(sp.UnsupportedLeafError, match=r"^a/x: the values of this jax array cannot be read"):
        sp.compress({"a": {"x": gone}})
    with pytest.raises(sp.UnsupportedLeafError, match=r"^x: "):
        jax.jit(lambda x: sp.compress({"x": x}))(jnp.ones(4))
    with pytest.raises(sp.UnsupportedLeafError, match=r"^x: a tensor inside vmap"):
        torch.vmap(lambda x: sp.compress({"x": x}))(torch.ones(2, 3))


def test_tensors_of_zeros_without_memory() -> None:
    zeros = torch._efficientzerotensor(64)
    assert torch.equal(sp.decompress(sp.compress({"x": zeros}))["x"], torch.zeros(64))


def test_the_rows_of_a_matrix_have_a_length() -> None:
    shapes = ((), (5,), (1, 9), (4, 9), (4, 3, 2, 2), (4, 0), (0, 4))
    assert [LeafSpec("numpy", "float32", shape).columns for shape in shapes] == [0, 0, 0, 9, 12, 0, 0]
