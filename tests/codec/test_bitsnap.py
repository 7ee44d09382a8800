"""BitSnap: exact changes at the published sizes, clusters of optimizer states, bases."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec.errors import CorruptDataError
from shrinkpoint.codec.lossless.changed import FULL, MASKED
from shrinkpoint.codec.rebase import rebase
from shrinkpoint.kernels.cluster import cluster_dequantize, cluster_quantize

from .common import bits, difference, put_together, small_chunks, take_apart, through_bytes

PUBLISHED = sp.Config([("*", sp.Changed("published"))])
SMALLEST = sp.Config([("*", sp.Changed())])
N = 8000


def weights(dtype: str = "bfloat16", n: int = N, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(getattr(torch, dtype))


def with_changes(x: torch.Tensor, count: int, seed: int = 1) -> torch.Tensor:
    """Return a copy with exactly `count` changed elements at random positions."""
    at = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(seed))[:count]
    y = x.clone()
    pattern = y.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    pattern[at] = pattern[at] ^ 1
    return y


def row(ckpt: sp.Checkpoint) -> Any:
    return ckpt.summary()[0]


def form(ckpt: sp.Checkpoint) -> int:
    return int(ckpt.pieces_of(ckpt.records[0])[0][0])


# ------------------------------------------------------------------------------------------------ what changed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("share", [0.0, 0.03125, 0.15, 0.5, 0.9])
def test_sizes_are_the_published_ones(dtype: str, share: float) -> None:
    """Sizes are n / 8 + 2 changed bytes: 16 times smaller at best, nearly 5 times at 15 %."""
    x = weights(dtype)
    base = sp.compress({"w": x}, cfg=PUBLISHED)
    assert row(base).stored_bytes == pytest.approx(2 * N, abs=8)
    changed = round(share * N)
    ckpt = sp.compress({"w": with_changes(x, changed)}, base, PUBLISHED)
    assert form(ckpt) == MASKED
    assert row(ckpt).stored_bytes == pytest.approx(N / 8 + 2 * changed, abs=8)
    assert row(ckpt).codec == "changed"
    assert row(ckpt).error == 0
    assert row(ckpt).note == f"{100 * share:.3g} % changed"
    assert torch.equal(through_bytes(ckpt, base)["w"], with_changes(x, changed))
    # Entropy coding may only make it smaller; the mask has an entropy of its own.
    small = sp.compress({"w": with_changes(x, changed)}, base, SMALLEST)
    assert row(small).stored_bytes <= row(ckpt).stored_bytes
    assert torch.equal(through_bytes(small, base)["w"], with_changes(x, changed))


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 15 / 16), ("float32", 31 / 32), ("float64", 63 / 64)])
def test_the_break_even(dtype: str, limit: float) -> None:
    """An array is stored in full once a mask is not smaller: at 15/16 of 16-bit values."""
    n = 64_000
    x = weights(dtype, n)
    base = sp.compress({"w": x}, cfg=PUBLISHED)
    for changed, expected in ((int(limit * n) - 16, MASKED), (int(limit * n), FULL), (n, FULL)):
        y = with_changes(x, changed)
        ckpt = sp.compress({"w": y}, base, PUBLISHED)
        assert form(ckpt) == expected, changed
        assert ("in full" in row(ckpt).note) == (expected == FULL)
        assert row(ckpt).stored_bytes <= x.numel() * x.element_size() + 8
        assert bits(through_bytes(ckpt, base)["w"]) == bits(y)


@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    st.sampled_from([0.0, 0.001, 0.5, 1.0]),
    st.sampled_from([PUBLISHED, SMALLEST]),
    st.sampled_from([104, 400, 1 << 22]),
)
def test_every_bit_survives(seed: int, dtype: str, share: float, cfg: sp.Config, chunk: int) -> None:
    """Any pattern, share of changes and chunk boundary is restored exactly over either parent."""
    rng = np.random.default_rng(seed)
    own = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    n = int(rng.integers(1024, 1200))
    chain = [np.frombuffer(rng.bytes(n * own.itemsize), own).copy()]
    for _ in range(2):
        fresh = np.frombuffer(rng.bytes(n * own.itemsize), own)
        chain.append(np.where(rng.random(n) < share, fresh, chain[-1]))
    with small_chunks(chunk):
        first = prev = None
        for x in chain:
            ckpt = sp.compress({"w": x}, prev, cfg)
            assert bits(through_bytes(ckpt, prev)["w"]) == bits(x)
            assert ckpt.to_bytes() == sp.compress({"w": x}, prev, cfg).to_bytes()
            prev = sp.Checkpoint.from_bytes(ckpt.to_bytes(), prev)
            first = first or prev
        assert prev is not None
        assert first is not None
        against = sp.compress({"w": chain[-1]}, first, cfg)
        for parent in (None, first):
            anew = rebase(prev, parent)
            assert bits(through_bytes(anew, parent)["w"]) == bits(chain[-1])
        assert bits(through_bytes(against, first)["w"]) == bits(chain[-1])


def test_other_systems_as_parent_and_child() -> None:
    x, y = weights(), with_changes(weights(), 100)
    exact = sp.compress({"w": x}, cfg=sp.presets.lossless())
    over = sp.compress({"w": y}, exact, PUBLISHED)
    assert form(over) == MASKED
    under = sp.compress({"w": x}, over, sp.presets.lossless())
    assert row(under).stored_bytes < 500
    levels = sp.compress({"w": x}, cfg=sp.Config(), kinds={"w": "linear"})
    beside = sp.compress({"w": y}, levels, PUBLISHED)
    assert form(beside) == FULL  # levels have no bits to compare with
    for ckpt, prev, z in ((over, exact, y), (under, over, x), (beside, levels, y)):
        assert torch.equal(through_bytes(ckpt, prev)["w"], z)


# ------------------------------------------------------------------------------------------------ clusters


def moment(n: int = 20_000, seed: int = 2, dtype: str = "float32") -> np.ndarray[Any, Any]:
    own = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return (np.random.default_rng(seed).normal(1e-5, 1e-4, n)).astype(own)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("clusters", [1, 2, 7, 16])
@pytest.mark.parametrize("coder", ["published", "smallest"])
def test_clusters_are_the_kernels(dtype: str, clusters: int, coder: str) -> None:
    x = moment(dtype=dtype)
    ckpt = sp.compress({"w": x}, cfg=sp.Config([("*", sp.Clusters(clusters, coder))]))
    y = through_bytes(ckpt)["w"]
    wide = cluster_dequantize(*cluster_quantize(x, clusters))
    assert y.dtype == x.dtype
    assert bits(y) == bits(wide.astype(x.dtype))
    a, b = x.astype("f8"), y.astype("f8")
    relative, squared = (float(s) for s in re.findall(r"[\d.]+(?:e[+-]?\d+)?", row(ckpt).note))
    nonzero = a != 0
    assert relative == pytest.approx(np.mean(np.abs(b - a)[nonzero] / np.abs(a[nonzero])), rel=0.01)
    assert squared == pytest.approx(np.mean((b - a) ** 2), rel=0.01)
    error = np.linalg.norm(b - a) / np.linalg.norm(a)
    assert error <= row(ckpt).error <= 1.02 * error
    assert (row(ckpt).codec, row(ckpt).measure) == ("clusters", "relative L2")


def test_sixteen_clusters_take_a_byte_and_a_half() -> None:
    """16 clusters take 1.5 bytes an element, as published; entropy coding makes them smaller."""
    x = moment()
    published = sp.compress({"w": x}, cfg=sp.Config([("*", sp.Clusters(coder="published"))]))
    assert row(published).stored_bytes == pytest.approx(1.5 * x.size + 8 * 16, abs=16)
    smallest = sp.compress({"w": x}, cfg=sp.Config([("*", sp.Clusters())]))
    assert row(smallest).stored_bytes < 0.97 * row(published).stored_bytes
    assert difference(sp.decompress(published), sp.decompress(smallest)) == ""


def test_clusters_of_a_chunk() -> None:
    """Each chunk of a large array has its own clusters."""
    x = np.concatenate([moment(1024), moment(1024) + np.float32(100)])
    cfg = sp.Config([("*", sp.Clusters())])
    whole = row(sp.compress({"w": x}, cfg=cfg)).error
    with small_chunks(1024):
        ckpt = sp.compress({"w": x}, cfg=cfg)
        assert len(ckpt.records[0].group.lengths) == 2
        assert row(ckpt).error < whole
        assert difference(through_bytes(ckpt), sp.decompress(ckpt)) == ""


@pytest.mark.parametrize("odd", [np.nan, np.inf, 1e300])
def test_what_has_no_clusters_is_exact(odd: float) -> None:
    x = moment(dtype="float64")
    x[3] = odd
    ckpt = sp.compress({"w": x}, cfg=sp.Config([("*", sp.Clusters())]))
    assert row(ckpt).stream == "bytes"
    assert "exact: " in row(ckpt).note
    assert bits(through_bytes(ckpt)["w"]) == bits(x)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_clusters_would_round_beyond_the_largest_number_is_exact(dtype: str) -> None:
    most = float(np.finfo(np.float32).max)
    found = set()
    for seed in range(40):
        rng = np.random.default_rng(seed)
        x = np.minimum(np.abs(rng.standard_normal((64, 64))) * most * 10 ** -rng.uniform(0, 1), most).astype(dtype)
        ckpt = sp.compress({"w": x}, cfg=sp.Config([("*", sp.Clusters(2))]))
        assert np.isfinite(through_bytes(ckpt)["w"]).all()
        assert row(ckpt).error < 0.5
        found.add(row(ckpt).stream)
    assert found == {"bytes", "clusters"}


def test_a_subnormal_element_makes_no_warning() -> None:
    x = moment()
    x[:2] = 1e-44
    ckpt = sp.compress({"w": x}, cfg=sp.Config([("*", sp.Clusters())]))
    assert re.search(r"MRE [\d.]+e\+", row(ckpt).note)


def test_an_error_target_is_kept() -> None:
    x = moment()
    for cfg in (
        sp.Config([("*", sp.Clusters(2))], max_rel_error=1e-5),
        sp.Config([("*", sp.Clusters(2, max_error=1e-5))], max_rel_error=0.9),
    ):
        ckpt = sp.compress({"w": x}, cfg=cfg)
        assert "error target 1e-05" in row(ckpt).note
        assert bits(sp.decompress(ckpt)["w"]) == bits(x)
    assert row(sp.compress({"w": x}, cfg=sp.Config([("*", sp.Clusters())], max_rel_error=0.1))).codec == "clusters"


# ------------------------------------------------------------------------------------------------ the preset


def mixed(t: int) -> dict[str, Any]:
    """Mixed precision as Megatron saves it: 16-bit weights, float32 masters and moments."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(40, 60, generator=g)
    later = torch.Generator().manual_seed(100 + t)
    w = w + 1e-3 * t * torch.randn(40, 60, generator=later)
    m = 1e-3 * torch.randn(40, 60, generator=later)
    return {
        "model": {"fc.weight": w.bfloat16(), "head.weight": 3 * w.double(), "norm.weight": torch.ones(40) + t},
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(t)), "exp_avg": m, "exp_avg_sq": m.square()}},
            "fp32_from_fp16_params": [[w]],
        },
        "iteration": t,
    }


def test_the_preset_takes_each_array_as_the_paper_does() -> None:
    cfg = sp.presets.bitsnap(max_cached_iteration=4)
    base = sp.compress(mixed(0), cfg=cfg)
    codecs = {r.path: r.stream for r in sp.compress(mixed(1), base, cfg).summary()}
    assert codecs == {
        "model/fc.weight": "changed",
        "model/head.weight": "changed",  # not half precision, and yet model state: exact
        "model/norm.weight": "bytes",
        "optimizer/state/0/step": "bytes",
        "optimizer/state/0/exp_avg": "clusters",
        "optimizer/state/0/exp_avg_sq": "clusters",
        "optimizer/fp32_from_fp16_params/0/0": "clusters",
    }
    exact_masters = sp.compress(mixed(1), base, sp.presets.bitsnap(master=())).summary()
    assert {r.stream for r in exact_masters if "fp32_from" in r.path} == {"changed"}


NAMES = ("webmaster_proj.weight", "master.weight", "optimus.weight", "optimizer.weight")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_model_tensors_are_exact_whatever_they_are_called(dtype: str) -> None:
    cfg = sp.presets.bitsnap()
    named = {name: weights(dtype, 2500, i).reshape(50, 50) for i, name in enumerate(NAMES)}
    nested = {name.split(".")[0]: {"weight": x} for name, x in named.items()}
    for state in (
        named,
        {"model": named},
        {"model": nested, "optimizer": {}},
        {"app": {"model": nested}},
        {"state_dict": {"master": nested}},
        {"model_state_dict": {"optim": {"state": nested}}},
    ):
        ckpt = sp.compress(state, cfg=cfg)
        assert {r.measure for r in ckpt.summary()} == {"exact"}
        assert difference(through_bytes(ckpt), state) == ""


@pytest.mark.parametrize(
    "path",
    [
        "optimizer/fp32_from_fp16_params/0/0",
        "optimizer/master/model/dense/kernel",
        "optim/master/fc.weight",
        "app/optimizer/copies/0",
        "optimizer_state_dict/fp32_flat_groups/0",
        "zero/single/fp32_groups/0",
        "master_params/0",
        "amp/master_weights",
    ],
)
def test_masters_are_what_an_optimizer_keeps_in_float32(path: str) -> None:
    for dtype, codec in (("float32", "clusters"), ("bfloat16", "changed"), ("float64", "changed")):
        state: Any = weights(dtype, 2500).reshape(50, 50)
        for key in reversed(path.split("/")):
            state = {key: state}
        assert row(sp.compress(state, cfg=sp.presets.bitsnap())).codec == codec
        assert row(sp.compress(state, cfg=sp.presets.bitsnap(master=[path]))).codec == codec
        assert row(sp.compress(state, cfg=sp.presets.bitsnap(master=["else/*"]))).codec == "changed"


@pytest.mark.parametrize("arguments", [{"clusters": 0}, {"clusters": 17}, {"max_cached_iteration": 0}, {"master": "x"}])
def test_arguments_out_of_range(arguments: dict[str, Any]) -> None:
    with pytest.raises(sp.BadArgumentError, match=next(iter(arguments))):
        sp.presets.bitsnap(**arguments)


@pytest.mark.parametrize("make", [lambda: sp.Changed("x"), lambda: sp.Clusters(coder="x"), lambda: sp.Changed(None)])
def test_coders_out_of_range(make: Any) -> None:
    with pytest.raises(sp.BadArgumentError, match="coder"):
        make()


def test_a_store_takes_bases_and_deltas_against_them() -> None:
    store = sp.Store("memory://bitsnap", cfg=sp.presets.bitsnap(max_cached_iteration=3))
    saved = [store.save(t, mixed(t)) for t in range(7)]
    assert [s.is_delta for s in saved] == [False, True, True, False, True, True, False]
    assert saved[1].checkpoint.parent_id == saved[2].checkpoint.parent_id == saved[0].checkpoint.id
    for t in range(7):
        loaded = sp.Store("memory://bitsnap").load(t)
        assert difference(loaded["model"], mixed(t)["model"]) == ""
        assert loaded["iteration"] == t


def jumping(step: int, jumps: tuple[int, ...]) -> torch.Tensor:
    """Return 16-bit weights that are redrawn at the given steps, and change a little at others."""
    last = max([0, *(j for j in jumps if j <= step)])
    x = weights(n=1 << 17, seed=last)
    for i in range(last + 1, step + 1):
        x = with_changes(x, 1000, seed=i)
    return x


@pytest.mark.parametrize("beside", [False, True])
def test_a_jump_is_a_base(beside: bool) -> None:
    """After a jump of the weights a base is stored, and later deltas are small again."""
    url = f"memory://bitsnap-jump-{beside}"
    store = sp.Store(url, sp.presets.bitsnap())
    saved = []
    for step in range(7):
        state: dict[str, Any] = {"model": {"weight": jumping(step, (2, 5)), "norm.weight": torch.arange(500.0)}}
        if beside:
            state["optimizer"] = {"state": {0: {"exp_avg": weights("float32", 1 << 15, step)}}}
        saved.append(store.save(step, state))
        if step == 3:
            store = sp.Store(url, sp.presets.bitsnap())
            store.load()
        assert torch.equal(sp.Store(url).load(step)["model"]["weight"], state["model"]["weight"])
    assert [s.is_delta for s in saved] == [False, True, False, True, True, False, True]
    moments = 1.6 * (1 << 15) * beside
    assert all(s.nbytes < (1 << 14) + 3 * 2000 + 2000 + moments for s in saved if s.is_delta)


@pytest.mark.parametrize(("share", "is_delta"), [(0.9, True), (0.95, False), (1.0, False)])
def test_the_share_from_which_a_store_falls_back(share: float, is_delta: bool) -> None:
    store = sp.Store(f"memory://bitsnap-{share}", sp.presets.bitsnap())
    x = weights(n=1 << 17)
    store.save(0, {"w": x})
    saved = store.save(1, {"w": with_changes(x, round(share * x.numel()))})
    assert saved.is_delta == is_delta
    # `compress` is given its parent: it has no say in this.
    parent = sp.compress({"w": x}, cfg=store.cfg)
    assert sp.compress({"w": with_changes(x, round(share * x.numel()))}, parent, store.cfg).is_delta


# ------------------------------------------------------------------------------------------------ hostile bytes


def _delta(cfg: sp.Config) -> tuple[dict[str, Any], bytes, sp.Checkpoint]:
    x = weights(n=1200)
    base = sp.compress({"w": x}, cfg=cfg)
    delta = sp.compress({"w": with_changes(x, 300)}, base, cfg)
    header, chunks = take_apart(delta.to_bytes())
    return header, b"".join(chunks), base


CORRUPT = {
    "empty": lambda b: b"",
    "unknown form": lambda b: b"\x07" + b[1:],
    "mask too short": lambda b: b"\x01\x02\x09\x00",
    "mask of another size": lambda b: b"\x01\x96\x01\x09" + b[4:152],
    "a value too few": lambda b: b[:-2],
    "a value too many": lambda b: b + b"\0\0",
    "one bit more in the mask": lambda b: b[:10] + bytes([255 - b[10]]) + b[11:],
    "full, too short": lambda b: b"\x00\x00\x09" + bytes(2399),
    "full, a difference": lambda b: b"\x00\x03",
    "length beyond": lambda b: b"\x01\xff\xff\xff\xff\x7f" + b[4:],
}


@pytest.mark.parametrize("name", CORRUPT)
def test_hostile_masks(name: str) -> None:
    header, body, base = _delta(PUBLISHED)
    assert body[:4] == b"\x01\x97\x01\x09"  # masked; a block of 151 bytes; stored
    piece = CORRUPT[name](body)
    header["groups"][0]["b"] = [len(piece)]
    with pytest.raises(CorruptDataError):
        sp.Checkpoint.from_bytes(put_together(header, [piece]), base)


def test_a_mask_without_a_parent_and_of_strange_items() -> None:
    header, body, _ = _delta(PUBLISHED)
    base = sp.compress({"w": np.zeros(150, np.complex128)})
    header["arrays"][0].update({"d": "complex128", "l": "numpy", "s": [150]})
    header["parent"] = base.id
    with pytest.raises(CorruptDataError, match="items of 16 bytes"):
        sp.Checkpoint.from_bytes(put_together(header, [body]), base)
    header, body, _ = _delta(PUBLISHED)
    header["parent"] = None
    header["groups"][0].pop("p")
    with pytest.raises(CorruptDataError, match="without a parent"):
        sp.decompress(sp.Checkpoint.from_bytes(put_together(header, [body])))


RANGES = bytes(4 * 32)
LABELS = b"\x02\x00\x00"  # constant 0

CLUSTERS = {
    "empty": b"",
    "no clusters": b"\x00" + LABELS * 2,
    "too many": b"\x11" + bytes(8 * 17) + LABELS * 2,
    "ranges cut short": b"\x10" + RANGES[:-1],
    "a range that is not finite": b"\x01" + np.array([np.nan, 1], "<f4").tobytes() + LABELS * 2,
    "a label beyond": b"\x01" + bytes(8) + b"\x02\x00\x01" + LABELS,
    "codes missing": b"\x01" + bytes(8) + LABELS,
    "bytes after": b"\x01" + bytes(8) + LABELS * 2 + b"\0",
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_hostile_clusters(name: str) -> None:
    header, _ = take_apart(sp.compress({"w": moment(1200)}, cfg=sp.Config([("*", sp.Clusters())])).to_bytes())
    header["groups"][0]["b"] = [len(CLUSTERS[name])]
    with pytest.raises(CorruptDataError):
        sp.decompress(sp.Checkpoint.from_bytes(put_together(header, [CLUSTERS[name]])))
    good = b"\x01" + bytes(8) + LABELS * 2
    header["groups"][0]["b"] = [len(good)]
    assert not sp.decompress(sp.Checkpoint.from_bytes(put_together(header, [good])))["w"].any()
    header["arrays"][0]["d"] = "int32"
    with pytest.raises(CorruptDataError, match="int32"):
        sp.decompress(sp.Checkpoint.from_bytes(put_together(header, [good])))


@pytest.mark.parametrize("seed", range(3))
def test_damaged_pieces_raise_or_decode(seed: int) -> None:
    rng = np.random.default_rng(seed)
    clusters = sp.compress({"w": moment(1200)}, cfg=sp.Config([("*", sp.Clusters())]))
    header, chunks = take_apart(clusters.to_bytes())
    for plain, data, base in ((header, b"".join(chunks), None), _delta(SMALLEST), _delta(PUBLISHED)):
        for _ in range(100):
            bad = bytearray(data)
            for _ in range(int(rng.integers(1, 4))):
                bad[int(rng.integers(len(bad)))] = int(rng.integers(256))
            try:
                found = sp.decompress(sp.Checkpoint.from_bytes(put_together(plain, [bytes(bad)]), base))
            except CorruptDataError:
                continue
            assert found["w"].shape == (1200,)
