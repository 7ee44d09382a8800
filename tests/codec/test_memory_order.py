"""Permuted arrays come back with their strides: column-major, channels_last, Fortran."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.rebase import rebase
from shrinkpoint.codec.state.leaves import memory_order, read_leaf
from shrinkpoint.store.saver.snapshot import Arena, plan, rebuild, take

from .common import bits, put_together, take_apart, through_bytes

LOSSLESS = sp.presets.lossless()


def filled(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def last(x: torch.Tensor) -> torch.Tensor:
    return x.to(memory_format=torch.channels_last)


PERMUTED: dict[str, Any] = {
    "columns": filled(40, 50).T,
    "small": filled(2, 3).T,
    "one row": filled(9, 1).T,
    "channels last": last(filled(8, 5, 3, 3)),
    "one channel": last(filled(8, 1, 3, 3)),
    "one pixel": last(filled(8, 16, 1, 1)),
    "volume": filled(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "three": filled(4, 5, 6).permute(2, 0, 1),
    "bfloat16": filled(40, 50).bfloat16().T,
    "int8": filled(40, 50).to(torch.int8).T,
    "conjugate": torch.complex(filled(4, 5), filled(4, 5, seed=1)).mH,
    "parameter": torch.nn.Parameter(filled(40, 50).T),
    "unit axis": filled(4, 5).T[:, None],
    "fortran": np.asfortranarray(np.arange(600.0).reshape(20, 30)),
    "moved": np.arange(60, dtype=np.int32).reshape(3, 4, 5).transpose(2, 0, 1),
    "big endian": np.asfortranarray(np.arange(600.0).reshape(20, 30)).astype(">f4", order="K"),
    "text": np.array([["a", "bc", "d"], ["e", "f", "gh"]]).T,
}
CONTIGUOUS: dict[str, Any] = {
    "expanded": filled(1, 50).expand(7, 50),
    "every other": filled(40, 50).T[::2],
    "part": filled(40, 50)[:, :20].T,
    "overlapping": filled(200).as_strided((20, 20), (3, 5)),
    "empty": torch.empty(0, 5).T,
    "scalar": torch.tensor(3.0),
    "rows, as columns": filled(50, 40),
    "reversed": np.arange(600.0).reshape(20, 30)[::-1].T,
    "broadcast": np.broadcast_to(np.arange(6.0), (4, 6)).T,
    "half": np.arange(600.0).reshape(20, 30)[:, ::2].T,
}
"""Arrays with gaps or overlaps in memory, or with nothing to permute."""


def strides(x: Any) -> tuple[int, ...]:
    return x.stride() if isinstance(x, torch.Tensor) else x.strides


def is_contiguous(x: Any) -> bool:
    return bool(x.is_contiguous() if isinstance(x, torch.Tensor) else x.flags.c_contiguous)


@pytest.mark.parametrize("name", PERMUTED)
def test_a_permuted_array_keeps_its_strides(name: str) -> None:
    """In memory, from bytes, as a delta, and as a base that was made of a delta."""
    x = PERMUTED[name]
    base = sp.compress({"x": x, "t": 0}, cfg=LOSSLESS)
    delta = sp.compress({"x": x, "t": 1}, base, LOSSLESS)
    found = [sp.decompress(base), through_bytes(base), sp.decompress(delta), through_bytes(rebase(delta))]
    for y in (state["x"] for state in found):
        assert (y.dtype, y.shape, strides(y)) == (x.dtype, x.shape, strides(x))
        assert bits(y) == bits(x)
    found[0]["x"][...] = found[0]["x"]  # memory of its own


@pytest.mark.parametrize("name", CONTIGUOUS)
def test_memory_with_gaps_or_overlaps_becomes_contiguous(name: str) -> None:
    """The header has no order then, as for a contiguous array."""
    x = CONTIGUOUS[name]
    ckpt = sp.compress({"x": x}, cfg=LOSSLESS)
    y = through_bytes(ckpt)["x"]
    assert is_contiguous(y)
    assert bits(y) == bits(x)
    assert "o" not in ckpt.header["arrays"][0]


def test_axes_of_length_one_need_no_order() -> None:
    """NumPy ignores their strides; torch does not, so that a convolution stays in channels_last."""
    assert memory_order(np.asfortranarray(np.zeros((5, 1)))) == ()
    assert memory_order(torch.zeros(5, 1, 1)) == ()
    assert memory_order(last(torch.zeros(8, 1, 3, 3))) == (0, 2, 3, 1)


def network() -> dict[str, Any]:
    """Return a convolution in channels_last and a matrix by columns, with their moments by Adam."""
    weights = {"conv.weight": last(filled(32, 16, 3, 3)), "fc.weight": filled(60, 50).T}
    moments = {i: {"exp_avg": 0.1 * w, "exp_avg_sq": w * w} for i, w in enumerate(weights.values())}
    return {"model": weights, "optimizer": {"state": moments}}


@pytest.mark.parametrize("level", ["default", "precise", "exact_weights", "compact", "lossless"])
def test_values_do_not_depend_on_the_order(level: str) -> None:
    """Coded are the values of contiguous copies; moments are in the order of their weights."""
    state = network()
    tree = torch.utils._pytree.tree_map(lambda x: x.contiguous(), state)
    cfg = sp.Config() if level == "default" else getattr(sp.presets, level)()
    ckpt, plain = sp.compress(state, cfg=cfg), sp.compress(tree, cfg=cfg)
    assert [bytes(p) for r in ckpt.records for p in ckpt.pieces_of(r)] == [
        bytes(p) for r in plain.records for p in plain.pieces_of(r)
    ]
    found, wanted = through_bytes(ckpt), through_bytes(plain)
    torch.utils._pytree.tree_map(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), found, wanted)
    assert torch.utils._pytree.tree_map(strides, found) == torch.utils._pytree.tree_map(strides, state)


def test_small_permuted_arrays_are_coded_together() -> None:
    state = {f"{i}": filled(6, 7, seed=i).T if i % 2 else filled(7, 6, seed=i) for i in range(12)}
    ckpt = sp.compress(state, cfg=LOSSLESS)
    assert len(ckpt.groups) == 1
    found = through_bytes(ckpt)
    assert all(strides(found[name]) == strides(x) and torch.equal(found[name], x) for name, x in state.items())


def test_the_order_may_change_from_parent_to_delta() -> None:
    """A delta finds a parent of another order, and unchanged values cost nothing."""
    x = filled(200, 300)
    chain: list[sp.Checkpoint] = []
    for made in (x.T, x.T.contiguous(), x.T):
        chain.append(sp.compress({"x": made}, chain[-1] if chain else None, LOSSLESS))
    assert [strides(sp.decompress(ckpt)["x"]) for ckpt in chain] == [(1, 300), (200, 1), (1, 300)]
    assert all(ckpt.is_delta and ckpt.nbytes < 1000 for ckpt in chain[1:])
    assert all(torch.equal(sp.decompress(ckpt)["x"], x.T) for ckpt in chain)


def test_out_may_be_permuted_and_keeps_its_order(tmp_path: Path) -> None:
    """Arrays of `out` may be in the order of the stored ones, or in another one."""
    state = {"w": last(filled(8, 5, 3, 3)), "n": np.asfortranarray(np.arange(600.0).reshape(20, 30)), "c": filled(4, 5)}
    store = sp.Store(tmp_path / "a", cfg=LOSSLESS)
    store.save(1, state)
    ckpt = sp.compress(state, cfg=LOSSLESS)
    for load in (lambda out: sp.decompress(ckpt, out=out), lambda out: store.load(1, out=out)):
        same = {"w": torch.zeros_like(state["w"]), "n": np.zeros_like(state["n"]), "c": torch.zeros(4, 5)}
        other = {"w": torch.zeros(8, 5, 3, 3), "n": np.zeros((20, 30)), "c": torch.zeros(5, 4).T}
        for out in (same, other):
            before = {name: strides(x) for name, x in out.items()}
            got = load(out)
            assert all(got[name] is x and bits(x) == bits(state[name]) for name, x in out.items())
            assert {name: strides(x) for name, x in out.items()} == before


def test_a_snapshot_copies_memory_as_it_is() -> None:
    """The trainer does not wait for a transposition; the other process sees the same order."""
    arena = Arena()
    planned = plan({"state": PERMUTED | CONTIGUOUS})
    tensors = {name: x for name, x in PERMUTED.items() if isinstance(x, torch.Tensor) and not x.is_conj()}
    sources = dict(zip(PERMUTED | CONTIGUOUS, planned.sources, strict=True))
    assert all(sources[name].pointer == x.data_ptr() for name, x in tensors.items())
    made = take(planned, arena)
    found = rebuild(type(made).from_json(made.to_json()), arena)["state"]
    for name, x in (PERMUTED | CONTIGUOUS).items():
        assert bits(found[name]) == bits(x), name
        assert name in CONTIGUOUS or strides(found[name]) == strides(x), name
    assert sp.compress(found, cfg=LOSSLESS).id == sp.compress(PERMUTED | CONTIGUOUS, cfg=LOSSLESS).id
    arena.close()


def test_reading_in_memory_order_does_not_copy() -> None:
    x = last(filled(8, 5, 3, 3))
    spec, flat = read_leaf(x, "x", in_memory=True)
    assert flat.data_ptr() == x.data_ptr()
    assert spec.order == (0, 2, 3, 1)
    assert torch.equal(read_leaf(x, "x")[1], x.reshape(-1))


@pytest.mark.parametrize(
    ("record", "order", "message"),
    [
        ("m", [0, 0], r"m: torch has no order \[0, 0\] of 2 dimensions"),
        ("m", [1, 2], r"m: torch has no order"),
        ("m", [0], r"m: torch has no order"),
        ("m", [], r"m: torch has no order \[\] of 2"),
        ("m", [1, 0, 2], r"m: torch has no order"),
        ("m", [1, -1], r"m: its record is malformed"),
        ("m", "10", r"m: its record is malformed"),
        ("m", [1, 0.0], r"m: its record is malformed"),
        ("m", [True, False], r"m: its record is malformed"),
        ("m", list(range(10**5)), r"m: torch has no order .* of 2 dimensions"),
        ("l", [0], r"l: list has no order \[0\] of 1 dimensions"),
        ("s", [], r"s: numpy scalar has no order"),
    ],
)
def test_hostile_orders_are_refused_by_path(record: str, order: Any, message: str) -> None:
    blob = sp.compress({"m": filled(40, 50), "l": [0.5] * 100, "s": np.float32(3)}, cfg=LOSSLESS).to_bytes()
    header, chunks = take_apart(blob)
    header["arrays"]["mls".index(record)]["o"] = order
    with pytest.raises(sp.CorruptDataError, match=message):
        sp.Checkpoint.from_bytes(put_together(header, chunks))


class Projected(torch.optim.Optimizer):
    """Adam in the eigenspaces of averaged products of gradients, as SOAP, whose bases QR gives."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    state |= {f"product{i}": 1e-3 * torch.eye(n) for i, n in enumerate(p.shape)}
                    state |= {f"basis{i}": torch.eye(n) for i, n in enumerate(p.shape)}
                for i, product in enumerate((p.grad @ p.grad.T, p.grad.T @ p.grad)):
                    state[f"product{i}"].lerp_(product, 0.1)
                    state[f"basis{i}"] = torch.linalg.qr(state[f"product{i}"] @ state[f"basis{i}"])[0]
                left, right = state["basis0"], state["basis1"]
                projected = left.T @ p.grad @ right
                state["exp_avg"].lerp_(projected, 0.1)
                state["exp_avg_sq"].lerp_(projected.square(), 0.01)
                p.sub_(group["lr"] * (left @ (state["exp_avg"] / state["exp_avg_sq"].sqrt().add(1e-8)) @ right.T))


class Training:
    """A network of matrices on data of its own."""

    def __init__(self, image: bool) -> None:
        torch.manual_seed(0)
        if image:
            first, make = torch.nn.Conv2d(3, 16, 3, padding=1), torch.optim.AdamW
            body = torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 3), torch.nn.Flatten())
            self.model, self.inputs = body.to(memory_format=torch.channels_last), last(torch.randn(8, 3, 9, 9))
        else:
            layers = [torch.nn.Linear(n, m, bias=False) for n, m in ((48, 96), (96, 64), (64, 8))]
            self.model, make = torch.nn.Sequential(layers[0], torch.nn.Tanh(), *layers[1:]), Projected
            self.inputs = torch.randn(32, 48)
        self.optimizer = make(self.model.parameters(), lr=1e-2)

    def run(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = (self.model(self.inputs) - 1).square().mean()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Any) -> Training:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        return self


@pytest.mark.parametrize("image", [False, True], ids=["SOAP-like", "channels_last"])
@pytest.mark.parametrize("how", ["store", "saver"])
def test_a_training_with_permuted_states_resumes_to_the_bit(image: bool, how: str, tmp_path: Path) -> None:
    """At `lossless`, with the projections of an optimizer, and with moments in channels_last."""
    training = Training(image)
    store = sp.Store(tmp_path / "a", cfg=LOSSLESS)
    training.run(10)
    if how == "store":
        store.save(10, training.state())
    else:
        with sp.Saver(store) as saver:
            saver.save(10, training.state())
    orders = {memory_order(x) for entry in training.optimizer.state.values() for x in entry.values() if x.ndim > 1}
    assert orders >= ({(0, 2, 3, 1)} if image else {(1, 0)})
    restored = store.load(10)
    assert torch.utils._pytree.tree_map_only(torch.Tensor, strides, restored) == torch.utils._pytree.tree_map_only(
        torch.Tensor, strides, training.state()
    )
    resumed = Training(image).load(restored)
    assert resumed.run(40) == training.run(40)
    for a, b in zip(resumed.model.parameters(), training.model.parameters(), strict=True):
        assert torch.equal(a, b)
