"""Triton kernels that each preset launches, both ways, waits of the host, and copies to it.

Without a GPU torch's CPU tensors pass for CUDA ones and Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.deduplication import _GLANCE as EVIDENCE
from shrinkpoint.codec.entropy import blocks
from shrinkpoint.kernels import rans as kernels_of_rans
from shrinkpoint.kernels.backend import arrays
from shrinkpoint.kernels.backend.arrays import is_torch
from shrinkpoint.kernels.huffman import cpu as huffman
from shrinkpoint.kernels.rans import cpu as rans
from shrinkpoint.kernels.rans import gpu as gpu_rans

from . import test_gpu
from .test_gpu import HERE, check_same_bytes, moments, pytestmark, to

__all__ = ["pytestmark"]

device = test_gpu.device
SHAPE = (800, 1280)
SIZE = SHAPE[0] * SHAPE[1]
MATRIX = (520, 260)
"""Larger than the arrays of a group."""


def subject_of(function: Any) -> str:
    """Return the folder of a kernel's module."""
    return str(function.__module__.split(".")[-2])


@dataclass
class Trace:
    """Launches by kernel, with and without its subject, waits, and the copies to the host."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: int = 0
    copies: list[tuple[str, int]] = field(default_factory=list)

    def clear(self) -> None:
        self.launches.clear()
        self.copies.clear()
        self.waits = 0

    def bytes_crossed(self) -> int:
        return sum(torch.empty(0, dtype=getattr(torch, name)).element_size() * size for name, size in self.copies)


@pytest.fixture
def trace(device: str, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """Record what happens to tensors on the device."""
    found = Trace()
    if HERE:
        from triton.runtime.jit import JITFunction as Launcher

        name = "run"
    else:
        from triton.runtime.interpreter import GridExecutor as Launcher

        name = "__call__"
    launch = getattr(Launcher, name)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = self.fn.__name__
        found.launches.update([name, f"{subject_of(self.fn)}.{name}"])
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(Launcher, name, launched)

    def watch(method: str) -> None:
        real = getattr(torch.Tensor, method)

        def seen(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if x.is_cuda or not HERE:
                found.waits += 1
                found.copies.append((str(x.dtype).removeprefix("torch."), x.numel()))
            return real(x, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, method, seen)

    for method in ("cpu", "item", "tolist"):
        watch(method)
    if HERE:
        move = torch.Tensor.copy_

        def moved(place: torch.Tensor, x: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if x.is_cuda and not place.is_cuda:
                found.waits += 1
                found.copies.append((str(x.dtype).removeprefix("torch."), x.numel()))
            return move(place, x, non_blocking)

        monkeypatch.setattr(torch.Tensor, "copy_", moved)
    return found


def state(t: int, dtype: torch.dtype = torch.float32, shape: tuple[int, int] = SHAPE) -> dict[str, Any]:
    """Return a weight that moves a little each step, and its moments."""
    drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    weight = 0.02 * (drawn[0] + 0.01 * t * drawn[1])
    entry = moments(shape, 3, dtype)
    entry["exp_avg"] = entry["exp_avg"] * (1 + 0.1 * t)
    return {"model": {"fc.weight": weight.to(dtype)}, "optimizer": {"state": {0: entry}}}


def tables(t: int) -> dict[str, Any]:
    """Return an embedding and its second moment; at step 1 every third row has moved."""
    draw = torch.Generator().manual_seed(1)
    table = {"weight": torch.randn(TABLE, generator=draw), "square": torch.rand(TABLE, generator=draw)}
    moved = (torch.arange(TABLE[0]) % 3 == 0)[:, None]
    return {key: torch.where(moved, x * (1 + 0.01 * t), x) for key, x in table.items()}


TABLE = (2100, 40)
KINDS = {"weight": sp.Kind("embedding"), "square": sp.Kind("embedding", "second moment")}
MOMENTS = {
    "factors": {"symbols_kernel", "values_kernel", "products_kernel"},
    "log buckets": {"index_kernel", "split_kernel"},
}
EXACT = ({"planes.split_kernel"}, {"planes.difference_kernel"})
WEIGHTS = {"count_kernel", "assign_kernel", "values_kernel", "distortion_kernel"}
MULTIPLES = {"count_kernel", "squares_kernel", "multiples_kernel", "distortion_kernel"}
GROUPED = {"subtract_kernel", "count_keys_kernel", "regroup_kernel"}
CLUSTERS = {"sums_kernel", "label_kernel", "encode_kernel", "decode_kernel"}
PRESETS: dict[str, tuple[sp.Config, set[str], set[str]]] = {
    "default": (sp.Config(), WEIGHTS | MOMENTS["factors"], set()),
    "precise": (sp.presets.precise(), MULTIPLES | MOMENTS["factors"], set()),
    "exact weights": (sp.presets.exact_weights(), MOMENTS["factors"] | EXACT[0], EXACT[1]),
    "lossless": (sp.presets.lossless(), *EXACT),
    "compact": (sp.presets.compact(), WEIGHTS | MOMENTS["factors"] | {"choose_kernel", "pairs_kernel"}, set()),
    "inshrinkerator": (
        sp.presets.inshrinkerator(alpha=0.1),
        WEIGHTS | MOMENTS["log buckets"] | {"lloyd_kernel"},
        GROUPED,
    ),
    "inshrinkerator, exact codebooks": (
        sp.Config([("*weight", sp.Quantize(bins=2, solver="exact", coder="published"))]),
        WEIGHTS | {"exact_kernel"},
        GROUPED,
    ),
    "lc_checkpoint": (
        sp.presets.lc_checkpoint(3),
        set(),
        {"differences_kernel", "extremes_kernel", "quantize_kernel", "sums_kernel"},
    ),
    "bitsnap": (
        sp.presets.bitsnap(),
        CLUSTERS | {"pack_kernel"},
        {"packing.pack_mask_kernel", "packing.gather_kernel"},
    ),
}
"""Kernels that a base launches, and more that a delta launches."""


@pytest.mark.parametrize("name", PRESETS)
def test_the_kernels_of_a_preset_run_on_the_device(name: str, trace: Trace, device: str) -> None:
    cfg, of_base, of_delta = PRESETS[name]
    base = sp.compress(to(state(0, shape=MATRIX), device), cfg=cfg)
    assert of_base - set(trace.launches) == set()
    trace.clear()
    sp.compress(to(state(1, shape=MATRIX), device), base, cfg)
    assert of_delta - set(trace.launches) == set()


MOST = {
    "default": (3.5, 40),
    "precise": (4.5, 40),
    "exact weights": (6.5, 40),
    "lc_checkpoint": (9.5, 40),
    "bitsnap": (8, 40),
}
"""Bytes a parameter that cross to the host, and waits, of a weight and its moments."""


@pytest.mark.parametrize("name", MOST)
def test_no_lossy_array_crosses_before_its_symbols(name: str, trace: Trace, device: str) -> None:
    cfg, bytes_a_parameter, waits = PRESETS[name][0], *MOST[name]
    base = sp.compress(to(state(0), device), cfg=cfg)
    for prev in (base, None):
        trace.clear()
        sp.compress(to(state(1), device), prev, cfg)
        assert trace.bytes_crossed() <= bytes_a_parameter * SIZE
        assert trace.waits <= waits
        assert [(dtype, size) for dtype, size in trace.copies if dtype.startswith("float") and size > SIZE // 8] == []


@pytest.fixture
def sent(device: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record dtype and size of each array copied from the host to the device."""
    found: list[tuple[str, int]] = []

    def note(x: Any) -> None:
        found.append((str(x.dtype).removeprefix("torch."), x.size if isinstance(x, np.ndarray) else x.numel()))

    copy, move, place = torch.Tensor.copy_, torch.Tensor.to, arrays.placed_with

    def copied(room: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not HERE or (room.is_cuda and not x.is_cuda):
            note(x)
        return copy(room, x, *args, **kwargs)

    def moved(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        there: torch.Tensor = move(x, *args, **kwargs)
        if there.is_cuda and not x.is_cuda:
            note(x)
        return there

    def placed(x: Any, other: Any) -> Any:
        if isinstance(x, np.ndarray) and is_torch(other):
            note(x)
        return place(x, other)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    if not HERE:
        for name, module in list(sys.modules.items()):
            if name.startswith("shrinkpoint.") and hasattr(module, "placed_with"):
                monkeypatch.setattr(module, "placed_with", placed)
    return found


LEVELS = {"quantizer.values_kernel": 1}
FACTORS = {"scales.values_kernel": 1}
FINE = {"moment_grid.values_kernel": 1, **FACTORS}
LOGARITHMS = {"scales.join_kernel": 2, "histogram.value_kernel": 2, "packing.unpack_kernel": 4}
MERGED = {"planes.merge_kernel": 1}
ADDED = {"planes.undifference_kernel": 1}
REGROUPED = {f"levels.{name}_kernel": 1 for name in ("count_keys", "pairs", "regroup", "subtract")}
BACK: dict[str, tuple[dict[str, int], dict[str, int], dict[str, int], tuple[float, float, float]]] = {
    "default": ({**LEVELS, **FINE}, {}, {}, (3.1, 3.1, 3.1)),
    "precise": ({"multiples.values_kernel": 1, **FINE}, {}, {}, (4.1, 4.1, 4.1)),
    "exact weights": (FINE, MERGED, ADDED, (6.1, 6.1, 10.1)),
    "lossless": ({}, {"planes.merge_kernel": 3}, {"planes.undifference_kernel": 2}, (12.1, 12.1, 20.1)),
    "compact": ({**LEVELS, **FINE}, {}, {}, (3.1, 3.1, 3.1)),
    "inshrinkerator": ({**LEVELS, **LOGARITHMS}, {}, REGROUPED, (4.9, 4.9, 5.9)),
    "lc_checkpoint": (FACTORS, {"planes.merge_kernel": 2}, {"exponent.sums_kernel": 2}, (9.1, 9.1, 11.1)),
    "bitsnap": ({"cluster.decode_kernel": 2, "packing.unpack_kernel": 2}, {}, {}, (7.1, 7.1, 7.1)),
}
"""Of a weight and its moments: launches that make values; further ones of a base and of a delta that are read from
bytes; and the bounds of bytes a parameter that are sent of a checkpoint in memory, a base, and a delta.

Of a checkpoint in memory exact arrays are there. The parent of an exact array, or its levels, are sent with a delta.
"""
CHECKS = {"quantizer.protected_kernel", "scales.count_kernel"}


def values_kernels(trace: Trace) -> dict[str, int]:
    return {name: n for name, n in trace.launches.items() if "." in name and name not in CHECKS}


@pytest.mark.parametrize("name", BACK)
def test_values_are_made_on_the_device(name: str, request: pytest.FixtureRequest) -> None:
    """Only symbols are sent; the values are those of the host to the bit."""
    (launches, of_base, of_delta, bounds), cfg = BACK[name], PRESETS[name][0]
    base = sp.compress(state(0, shape=MATRIX), cfg=cfg)
    delta = sp.compress(state(1, shape=MATRIX), base, cfg)
    values = [sp.decompress(ckpt) for ckpt in (base, delta)]
    device, trace, sent = (request.getfixturevalue(key) for key in ("device", "trace", "sent"))
    for ckpt, parent, expected, more, bound in (
        (base, None, values[0], of_base, bounds[1]),
        (delta, base, values[1], of_delta, bounds[2]),
    ):
        for read in (ckpt, sp.Checkpoint(ckpt.to_bytes(), None)):
            room = to(torch.utils._pytree.tree_map(torch.zeros_like, expected), device)
            trace.clear()
            sent.clear()
            sp.decompress(read, None if read is ckpt else parent, out=room)
            assert values_kernels(trace) == (launches if read is ckpt else launches | more)
            n = MATRIX[0] * MATRIX[1]
            assert [x for x in sent if x[0].startswith("float") and x[1] > n // 8] == []
            size = sum(np.dtype(dtype).itemsize * count for dtype, count in sent)
            assert size <= (bounds[0] if read is ckpt else bound) * n
            assert trace.copies == [] or max(count for _, count in trace.copies) < n // 8
            for x, y in zip(*map(torch.utils._pytree.tree_leaves, (room, expected)), strict=True):
                assert torch.equal(x.cpu(), y)


MASKED = {"packing.count_kernel", "packing.scatter_kernel", "planes.merge_kernel"}
APPLIED = {f"sparse_delta.{name}_kernel" for name in ("count", "mark", "flag_count", "apply")}
CHANGES: dict[str, tuple[sp.Config, int, set[str], float]] = {
    "all": (sp.presets.lossless(), 1, {"planes.undifference_kernel"}, 4.01),
    "some": (sp.presets.lossless(), 10, APPLIED, 3.01),
    "few": (sp.presets.lossless(), 100, APPLIED, 2.11),
    "mask": (sp.Config([("*", sp.Changed())]), 10, MASKED, 2.33),
}
"""Configuration, one of how many elements changes, kernels, and the bound of bytes an element that are sent."""


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_applied_on_the_device(name: str, request: pytest.FixtureRequest) -> None:
    """The parent's bytes are sent, two an element, and the changes."""
    cfg, share, launches, bound = CHANGES[name]
    shape = (1024, 1100)
    few = torch.arange(shape[0] * shape[1]).reshape(shape) % share == 0
    states = [state(t, torch.bfloat16, shape)["model"]["fc.weight"] for t in (0, 1)]
    base = sp.compress({"w": states[0]}, cfg=cfg)
    delta = sp.compress({"w": torch.where(few, states[1], states[0])}, base, cfg)
    expected = sp.decompress(delta)["w"]
    device, trace, sent = (request.getfixturevalue(key) for key in ("device", "trace", "sent"))
    room = torch.zeros(shape, dtype=torch.bfloat16).to(device)
    sent.clear()
    trace.clear()
    sp.decompress(sp.Checkpoint(delta.to_bytes(), None), base, out={"w": room})
    assert set(values_kernels(trace)) == launches
    assert trace.waits <= 1
    assert sum(np.dtype(dtype).itemsize * n for dtype, n in sent) <= bound * few.numel()
    assert torch.equal(room.cpu().view(torch.int16), expected.view(torch.int16))


LAYERS = 24


SMALL = {"lossless": (4, 4.01, 0), "default": (4, 2.5, 1), "inshrinkerator": (3, 4, 2 * LAYERS)}
"""Groups of arrays, the bound of bytes an element that are sent, and waits.

Arrays that are coded alone wait for the number of their protected values. Without a GPU codebooks, which are torch
tensors on the host, count as copied.
"""


@pytest.mark.parametrize("name", SMALL)
def test_small_arrays_are_restored_together(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of small arrays is sent at once, and goes to the tensors in a single launch."""
    (groups, nbytes, waits), drawn = SMALL[name], torch.Generator().manual_seed(1)
    model = {f"{i}.weight": 0.02 * torch.randn(48 + i, 64, generator=drawn) for i in range(LAYERS)}
    entries = {i: moments(tuple(x.shape), i) for i, x in enumerate(model.values())}
    states = {"model": model, "optimizer": {"state": entries}}
    chain = [sp.compress(states, cfg=PRESETS[name][0])]
    states["model"] = {key: 1.001 * x for key, x in model.items()}
    chain.append(sp.compress(states, chain[0], PRESETS[name][0]))
    values = [sp.decompress(ckpt) for ckpt in chain]
    filled: list[int] = []
    real = torch._foreach_copy_

    def fill(rooms: Any, parts: Any) -> Any:
        filled.append(len(rooms))
        return real(rooms, parts)

    monkeypatch.setattr(torch, "_foreach_copy_", fill)
    device, trace, sent = (request.getfixturevalue(key) for key in ("device", "trace", "sent"))
    for ckpt, parent, expected in ((chain[0], None, values[0]), (chain[1], chain[0], values[1])):
        room = to(torch.utils._pytree.tree_map(torch.zeros_like, expected), device)
        for recorded in (sent, filled, trace):
            recorded.clear()
        sp.decompress(sp.Checkpoint(ckpt.to_bytes(), None), parent, out=room)
        assert filled == groups * [LAYERS], "weights, two moments, steps"
        size, elements = (
            sum(np.dtype(dtype).itemsize * n for dtype, n in sent),
            3 * sum(x.numel() for x in model.values()),
        )
        assert size <= (2 if parent and name == "lossless" else 1) * nbytes * elements
        assert name == "inshrinkerator" or len([n for _, n in sent if n > 500]) <= 4 * groups
        assert trace.waits <= waits
        for x, y in zip(*map(torch.utils._pytree.tree_leaves, (room, expected)), strict=True):
            assert torch.equal(x.cpu(), y)


def test_tensors_are_filled_though_another_thread_resolves_the_checkpoint(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {"weight": torch.arange(300_000, dtype=torch.int32)}
    ckpt = sp.Checkpoint.from_bytes(sp.compress(expected).to_bytes())
    real = sp.Checkpoint.kept_references

    def overtaken(self: sp.Checkpoint, group: Any) -> Any:
        monkeypatch.setattr(sp.Checkpoint, "kept_references", real)
        found = real(self, group)
        for record in self.members_of(group):
            self.parent_reference(record.key, record.spec)
        return found

    monkeypatch.setattr(sp.Checkpoint, "kept_references", overtaken)
    room = to({"weight": torch.zeros(300_000, dtype=torch.int32)}, device)
    sp.decompress(ckpt, out=room)
    assert torch.equal(room["weight"].cpu(), expected["weight"])


PACKED = {"rows.quantize_kernel": 1, "packing.pack_kernel": 1}
UNPACKED = {"packing.unpack_kernel": 1, "rows.dequantize_kernel": 1}
ERROR = {"error_sums.distortion_kernel": 1}
GRID = {"multiples.squares_kernel": 1, "multiples.multiples_kernel": 1}
VALUES = {"multiples.values_kernel": 1}
ROWS, COLUMNS = TABLE
BUCKETS = 35458
MOVED, ROW = ROWS // 3, 8 + COLUMNS // 2
GROUPS: dict[str, tuple[sp.Config, str, list[dict[str, int]], list[list[tuple[str, int]]]]] = {
    "rows": (
        sp.presets.check_n_run(4),
        "weight",
        [
            {**PACKED, **UNPACKED, **ERROR},
            {**PACKED, **dict.fromkeys(UNPACKED, 2), **ERROR},
            UNPACKED,
        ],
        [
            [("float32", 256 * COLUMNS), ("uint8", ROWS * (ROW + 8)), ("float64", 3)],
            [("uint8", ROWS * (8 + 1)), ("uint8", MOVED * ROW), ("float64", 3)],
            [],
        ],
    ),
    "exact rows": (
        sp.presets.check_n_run(4),
        "square",
        [{}, {}, {}],
        [
            [("uint8", ROWS * COLUMNS * 4)],
            [("bool", ROWS), ("uint8", MOVED * COLUMNS * 4)],
            [],
        ],
    ),
    "multiples": (
        sp.presets.precise(),
        "weight",
        [{"histogram.count_kernel": 1, **GRID, **VALUES, **ERROR}] * 2 + [VALUES],
        [[("int32", BUCKETS), ("float64", 2), ("int16", ROWS * COLUMNS), ("float64", 3)]] * 2 + [[]],
    ),
}
"""Configuration, array, and of a base, a delta and the way back all launches and copies; the host waits for each copy.

The rows' styles are found on 256 sampled rows. With the codes come hashes of 8 bytes a row, and two numbers a record.
"""


@pytest.mark.parametrize("name", GROUPS)
def test_launches_and_waits_of_a_group(name: str, request: pytest.FixtureRequest) -> None:
    """Bytes are those of the host, and so are the values that are restored on the device."""
    cfg, key, launches, copies = GROUPS[name]
    states = [{key: tables(t)[key]} for t in (0, 1)]

    def chain(device: str, seen: Callable[[], None] = lambda: None) -> list[sp.Checkpoint]:
        found: list[sp.Checkpoint] = []
        for one in states:
            found.append(sp.compress(to(one, device), found[-1] if found else None, cfg, kinds={key: KINDS[key]}))
            seen()
        return found

    expected = chain("cpu")
    device, trace = request.getfixturevalue("device"), request.getfixturevalue("trace")
    steps: list[tuple[dict[str, int], list[tuple[str, int]]]] = []

    def seen() -> None:
        here = {name: n for name, n in trace.launches.items() if "." in name}
        # The save's evidence are the first elements of arrays.
        steps.append((here, [(dtype, size) for dtype, size in trace.copies if size != EVIDENCE]))
        trace.clear()

    found = chain(device, seen)
    check_same_bytes(found, expected)
    values, room = sp.decompress(expected[1])[key], torch.zeros(TABLE).to(device)
    trace.clear()
    read = sp.Checkpoint.from_bytes(found[1].to_bytes(), found[0])
    assert sp.decompress(read, found[0], out={key: room})[key] is room
    seen()
    assert torch.equal(room.cpu(), values)
    assert steps == list(zip(launches, copies, strict=True))


def test_multiples_beyond_two_bytes_follow(request: pytest.FixtureRequest) -> None:
    """An outlier does not widen all that crosses; bytes and values are the host's."""
    states = [{"weight": tables(t)["weight"]} for t in (0, 1)]
    for t, one in enumerate(states):
        one["weight"][5, 7], one["weight"][-1, -1] = 300.0 + t, -300.0
    cfg, kinds = sp.presets.precise(), {"weight": KINDS["weight"]}
    expected = [sp.compress(states[0], cfg=cfg, kinds=kinds)]
    expected.append(sp.compress(states[1], expected[0], cfg, kinds=kinds))
    device, trace = request.getfixturevalue("device"), request.getfixturevalue("trace")
    found = [sp.compress(to(states[0], device), cfg=cfg, kinds=kinds)]
    trace.clear()
    found.append(sp.compress(to(states[1], device), found[0], cfg, kinds=kinds))
    check_same_bytes(found, expected)
    assert found[1].records[0].meta["w"] == 4
    positions, values = 2 * 8, 2 * 4
    assert trace.copies[-3:] == [("int16", ROWS * COLUMNS), ("uint8", positions + values), ("float64", 3)]
    room = {"weight": torch.zeros(TABLE).to(device)}
    assert torch.equal(sp.decompress(found[1], out=room)["weight"].cpu(), sp.decompress(expected[1])["weight"])


SHARES = {"few changes": 100, "some changes": 10}
"""One of so many elements changes: changes are remembered, or, of some, applied to a copy of the parent."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["lossless", "bitsnap", *SHARES])
def test_exact_arrays_cross_once(name: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    """All that crosses is what the kernels of planes, differences, masks or changes return.

    The bytes are those of the host, and the reference of the next delta equals the array.
    """
    cfg = sp.Config([("*", sp.Changed())]) if name == "bitsnap" else sp.presets.lossless()
    before, now = state(0, dtype), state(1, dtype)
    if name in SHARES:
        few = torch.arange(SIZE).reshape(SHAPE) % SHARES[name] == 7
        now = torch.utils._pytree.tree_map(lambda x, y: torch.where(few, y, x) if y.dim() else y, before, now)
    base = sp.compress(before, cfg=cfg)
    expected = {"delta": sp.compress(now, base, cfg), "base": sp.compress(now, cfg=cfg)}
    device, trace = request.getfixturevalue("device"), request.getfixturevalue("trace")
    parents = {"delta": sp.compress(to(before, device), cfg=cfg), "base": None}
    for kind, parent in parents.items():
        trace.clear()
        found = sp.compress(to(now, device), parent, cfg)
        launches, is_delta = trace.launches, kind == "delta"
        changed = 2 if is_delta else 3  # second moments are those of the parent
        changes = {
            "lossless": launches["planes.difference_kernel"],
            "bitsnap": launches["packing.gather_kernel"],
            "changes": launches["sparse_delta.collect_kernel"],
        }
        assert changes == {key: changed if is_delta and key in name else 0 for key in changes}
        assert (launches["sparse_delta.apply_kernel"] > 0) is (is_delta and name == "few changes")
        assert is_delta or launches["planes.split_kernel"] == 3
        share = 0.15 + 5 / SHARES[name] if name in SHARES and is_delta else 1.15
        assert trace.bytes_crossed() <= share * changed * SIZE * dtype.itemsize
        check_same_bytes([found], [expected[kind]])
        pairs = zip(*map(torch.utils._pytree.tree_leaves, (sp.decompress(found), now)), strict=True)
        assert all(torch.equal(x.cpu(), y) for x, y in pairs)


@pytest.fixture
def device_coding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the device code symbols, also blocks that take the interpreter a second."""
    monkeypatch.setattr(blocks, "LEAST", BLOCK[0] * BLOCK[1])
    blocks.set_device_coding(True)
    yield
    blocks.set_device_coding(None)


BLOCK = (90, 64)


def coded(device: str, cfg: sp.Config, note: Callable[[], None] = lambda: None) -> list[sp.Checkpoint]:
    """Compress a base and a delta of a matrix that is one block; call `note` after each."""
    chain: list[sp.Checkpoint] = []
    for t in (0, 1):
        chain.append(sp.compress(to(state(t, shape=BLOCK), device), chain[-1] if chain else None, cfg))
        note()
    return chain


def refused(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a coder of the host that refuses a whole block."""

    def coder(symbols: Any, *args: Any, **kwargs: Any) -> Any:
        assert symbols.shape[0] < BLOCK[0] * BLOCK[1], "a block is coded on the host"
        return real(symbols, *args, **kwargs)

    return coder


@pytest.mark.parametrize("name", ["default", "compact"])
def test_symbols_are_coded_on_the_device(
    name: str, request: pytest.FixtureRequest, device_coding: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only references of the next delta cross: levels, and symbols of second moments, once.

    Blocks of a state are coded in one launch. The bytes are those of the host with the same setting.
    """
    cfg, size = PRESETS[name][0], BLOCK[0] * BLOCK[1]
    expected = coded("cpu", cfg)
    device, trace = request.getfixturevalue("device"), request.getfixturevalue("trace")

    def check() -> None:
        assert trace.launches["encode_kernel"] in (1, 2)  # with contexts, and without
        assert len([n for dtype, n in trace.copies if dtype == "uint8" and n == size]) == 2
        trace.clear()

    with monkeypatch.context() as patch:
        for module, function in ((rans, "rans_encode"), (huffman, "huffman_encode")):
            patch.setattr(module, function, refused(getattr(module, function)))
        found = coded(device, cfg, check)
    check_same_bytes(found, expected)


@pytest.mark.parametrize("name", ["default", "exact weights"])
def test_symbols_are_decoded_on_the_device(
    name: str, device_coding: None, trace_of_decoding: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into tensors on the device, and only with the setting; the values are the host's."""
    place = "cuda" if HERE else "cpu"
    base, delta = coded("cpu", PRESETS[name][0])
    for parent, ckpt in ((None, base), (base, delta)):
        blob = ckpt.to_bytes()
        expected = sp.decompress(sp.Checkpoint.from_bytes(blob, parent))
        assert not trace_of_decoding
        into = to(torch.utils._pytree.tree_map(torch.zeros_like, expected), place)
        found = sp.decompress(sp.Checkpoint(blob, None), parent, out=into)
        assert 0 < trace_of_decoding["decode_kernel"] <= 3
        for x, y in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
            assert torch.equal(x.cpu(), y)
        blocks.set_device_coding(False)
        trace_of_decoding.clear()
        sp.decompress(sp.Checkpoint(blob, None), parent, out=into)
        assert not trace_of_decoding
        blocks.set_device_coding(True)


@pytest.fixture
def trace_of_decoding(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches by kernel; without a GPU tensors pass for CUDA ones where blocks are decoded."""
    if not HERE:
        monkeypatch.setattr(blocks, "on_gpu", is_torch)
        monkeypatch.setattr(kernels_of_rans, "on_gpu", is_torch)
    launches: Counter[str] = Counter()
    real = gpu_rans.rans_decode_many

    def seen(*args: Any) -> Any:
        launches["decode_kernel"] += 1
        return real(*args)

    monkeypatch.setattr(gpu_rans, "rans_decode_many", seen)
    return launches


def test_without_the_setting_the_host_codes(device: str, trace: Trace) -> None:
    sp.compress(to(state(0, shape=BLOCK), device))
    assert trace.launches["encode_kernel"] == 0
