"""Compaction keeps every step bit for bit, later deltas decode, and restores are cheap."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.store import compaction
from shrinkpoint.store.compaction import LEAST_SHARE, digit_base, without_lowest_digit
from shrinkpoint.store.files import StoreWarning
from shrinkpoint.store.retention import Retention
from shrinkpoint.store.store import NotCompactedWarning
from tests.codec.common import difference
from tests.store.common import data_path, fill, listing, lossless, manifest_path, same, state


def digits(number: int, base: int) -> int:
    return sum(d != "0" for d in np.base_repr(number, base)) if base <= 36 else sum(1 for _ in _walk(number, base))


def _walk(number: int, base: int) -> Any:
    while number:
        yield number
        number = without_lowest_digit(number, base)


@given(st.integers(1, 10**6), st.integers(2, 36))
def test_clearing_digits(number: int, base: int) -> None:
    text = np.base_repr(number, base)
    stripped = text.rstrip("0")
    expected = stripped[:-1] + "0" + text[len(stripped) :]
    assert without_lowest_digit(number, base) == int(expected, base)
    assert len(list(_walk(number, base))) == digits(number, base)


@given(st.integers(1, 3000), st.integers(1, 8))
def test_digit_base_is_the_least(steps: int, depth: int) -> None:
    base = digit_base(steps, depth)
    assert all(len(list(_walk(i, base))) <= depth for i in range(steps))
    assert base == 2 or any(len(list(_walk(i, base - 1))) > depth for i in range(steps))


@pytest.mark.parametrize("against", ["previous", "base"])
@pytest.mark.parametrize("cost", [1.0, 2.0, 3.0, 4.5])
def test_costs_and_bits(against: str, cost: float, tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path, lossless(against=against)), *range(0, 60, 2))
    highest = max(store.describe(step).restore_cost for step in store.steps())
    assert highest == (30.0 if against == "previous" else 2.0)
    told: list[tuple[int, int, int]] = []
    moved = store.compact(cost, lambda *now: told.append(now))
    assert moved == sorted(set(moved))
    assert bool(moved) == (highest > cost)
    assert [done for _, done, _ in told] == list(range(1, len(told) + 1))
    assert not told or told[-1][1:] == (30, 30)
    assert store.compact(cost) == []
    for _ in range(2):
        other = sp.Store(tmp_path, lossless(against=against))
        assert other.steps() == list(range(0, 60, 2))
        assert other.verify() == {}
        for step in other.steps():
            m = other.describe(step)
            assert m.restore_cost <= cost
            assert 1 + len(m.parents) * LEAST_SHARE <= cost + 1e-9 or len(m.parents) <= 1
            assert same(other.load(step, count=False), step)
        store.gc()
    # The object that had saved goes on from where it was, and so does a new one.
    assert store.save(60, state(60)).is_delta
    other.load(58, count=False)
    assert other.save(61, state(61)).is_delta
    final = sp.Store(tmp_path)
    assert final.verify() == {}
    assert same(final.load(60), 60)
    assert same(final.load(61), 61)


@pytest.mark.parametrize(
    "cfg",
    [
        *(sp.Config(), sp.Config(rate=0.01), sp.presets.inshrinkerator(), sp.presets.lossless()),
        *(sp.presets.lc_checkpoint(), sp.presets.bitsnap(), sp.presets.check_n_run(bits=4)),
    ],
    ids=["default", "rate", "inshrinkerator", "lossless", "lc_checkpoint", "bitsnap", "check_n_run"],
)
def test_deltas_over_what_was_compacted_decode_as_before(cfg: sp.Config, tmp_path: Path) -> None:
    """Deltas over a compacted step decode, and new deltas are equal, for lossy codecs too.

    All three stores start a new average of the weights (under a rate): it belongs to the object, not to the chain.
    """
    rules, chain = cfg.rules, sp.ChainPolicy(None)
    cfg = sp.Config(rules, max_rel_error=cfg.max_rel_error, rate=cfg.rate, chain=chain)

    kinds = {"model/weight": "linear", "token_embedding.weight": "embedding", "half": "linear"}

    def trained(step: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(0)
        w = torch.randn(70, 80, generator=g)
        for i in range(step):
            w += 0.01 * torch.randn(70, 80, generator=torch.Generator().manual_seed(i))
        m, v = torch.randn(70, 80, generator=g) * 1e-3, torch.rand(70, 80, generator=g) * 1e-6
        return {
            "model": {"weight": w, "token_embedding.weight": w * 2, "half": w.bfloat16(), "norm": w[0].clone()},
            "optimizer": {"state": {0: {"exp_avg": m, "exp_avg_sq": v}}},
        }

    one, two = sp.Store(tmp_path / "one", cfg), sp.Store(tmp_path / "two", cfg)
    for step in range(12):
        for store in (one, two):
            store.save(step, trained(step), kinds=kinds)
    assert one.compact(2.0)
    one.gc()
    again = sp.Store(one.url, cfg)
    for store in (one, again, two):
        store.load(11, count=False)
    for step in (12, 13):
        saved = [store.save(step, trained(step), kinds=kinds).checkpoint for store in (one, again, two)]
        assert saved[0].to_bytes() == saved[1].to_bytes() == saved[2].to_bytes()
    for step in two.steps():
        assert difference(two.load(step, count=False), sp.Store(one.url).load(step, count=False)) == ""
    assert sp.Store(one.url).verify() == {}


def test_trees_of_chains(tmp_path: Path) -> None:
    """Compaction keeps all steps of a store with branches, a replaced base and a second base."""
    store = fill(sp.Store(tmp_path, lossless()), *range(10))
    store.load(4, count=False)
    fill(store, *range(20, 28))
    store.load(22, count=False)
    fill(store, *range(40, 48))
    fill(sp.Store(tmp_path, lossless()), 0)
    fill(sp.Store(tmp_path, lossless()), *range(60, 63))
    before = {step: store.load(step, count=False) for step in store.steps()}
    assert set(store.compact(3.0)) <= set(before) - {60, 61, 62}
    store.gc()
    assert store.verify() == {}
    for step, expected in before.items():
        assert difference(expected, store.load(step, count=False)) == ""
        assert store.describe(step).restore_cost <= 3


def test_steps_that_are_gone_are_merged_away(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path, lossless()), *range(21))
    store.gc(Retention(last=1, every=10))
    assert store.steps() == [0, 10, 20]
    assert len(list((tmp_path / "data").iterdir())) == 21
    assert store.compact(3.0) == [10, 20]
    store.gc()
    assert len(list((tmp_path / "data").iterdir())) == 3
    assert all(same(store.load(step), step) for step in (0, 10, 20))
    # Without its base a chain gets a new one.
    store.drop(0)
    store.compact(1.0)
    store.gc()
    assert [store.describe(step).is_delta for step in (10, 20)] == [False, False]
    assert all(same(store.load(step), step) for step in (10, 20))


def test_what_is_damaged_stays_as_it_is(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path, lossless()), *range(12))
    path = data_path(tmp_path, 7)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(NotCompactedWarning, match=r"7, 8, 9, 10, 11 not .*: step 7: .*; step 8: below it, step 7: "):
        assert set(store.compact(2.0)) <= set(range(7))
    assert sorted(store.verify()) == [7, 8, 9, 10, 11]
    store.gc()
    assert all(same(store.load(step, count=False), step) for step in range(7))
    path.unlink()
    with pytest.warns(NotCompactedWarning, match="step 7: its file .* is missing"):
        store.compact(2.0)
    manifest_path(tmp_path, 3).write_bytes(b"{}")
    with pytest.warns(NotCompactedWarning, match="steps 3, 7, .*; step 7: "):
        store.compact(1.0)


def test_a_step_saved_again_meanwhile_wins(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path, lossless()), *range(12))
    done = False

    def meanwhile(step: int, *_: int) -> None:
        nonlocal done
        if step == 3 and not done:
            done = True
            with pytest.warns(StoreWarning, match="step 8 is saved below steps 9, 10, 11"):
                sp.Store(tmp_path, lossless()).save(8, state(88))

    assert 8 not in store.compact(2.0, meanwhile)
    for _ in range(2):
        assert same(store.load(8, count=False), 88)
        assert all(same(store.load(step, count=False), step) for step in range(12) if step != 8)
        store.gc()


def test_loads_beside_compaction_and_collection(tmp_path: Path) -> None:
    """A load finds the new files if compaction replaces those of its manifest."""
    store = fill(sp.Store(tmp_path, lossless()), *range(12))
    reader = sp.Store(tmp_path)
    files, real = reader._files, reader._files.read
    moved = False

    def read(name: str) -> bytes:
        nonlocal moved
        if name.startswith("data/") and not moved:
            moved = True
            store.compact(2.0)
            store.gc()
        return real(name)

    for load in (lambda: reader.load(11), reader.load, lambda: reader.load(11, "*")):
        moved = False
        files.read = read  # type: ignore[method-assign]
        assert same(load(), 11)
        store = fill(sp.Store(tmp_path, lossless()), *range(12))
    assert reader.verify() == {}


def test_a_header_is_read_where_its_step_has_moved_to(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path, lossless()), 0, 1, 2)
    before, _ = store.manifests()
    assert store.compact(1.0) == [1, 2]
    store.gc()
    assert not (tmp_path / "data" / before[2].file).exists()
    assert [store.header(m).identity for m in before.values()] == [m.identity for m in before.values()]
    store.drop(2)
    store.gc()
    with pytest.raises(sp.MissingParentError, match=r"step 2: it was removed"):
        store.header(before[2])


def test_a_restated_file_that_is_not_the_same_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fill(sp.Store(tmp_path, lossless()), *range(8))
    before = listing(tmp_path)
    other = sp.compress(state(77), cfg=lossless())
    monkeypatch.setattr(compaction, "rebase", lambda ckpt, prev, without: other)
    with pytest.raises(sp.CorruptDataError, match="other values"):
        store.compact(1.0)
    assert listing(tmp_path) == before


def test_few_checkpoints_are_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compaction holds as many checkpoints as the step's number has non-zero digits."""
    held: list[int] = []
    real = compaction.Compaction._step

    def step(self: Any, *arguments: Any) -> Any:
        live = real(self, *arguments)
        held.append(len(live))
        return live

    monkeypatch.setattr(compaction.Compaction, "_step", step)
    fill(sp.Store(tmp_path, lossless()), *range(40)).compact(3.0)
    assert len(held) == 40
    assert max(held) == 3


@pytest.mark.parametrize("cost", [0.9, 0, -1, 2e6, float("nan"), "3", None, True])
def test_costs_that_are_none(cost: Any, tmp_path: Path) -> None:
    with pytest.raises(sp.BadArgumentError, match="max_cost"):
        sp.Store(tmp_path).compact(cost)


def test_a_cost_of_any_kind_of_number(tmp_path: Path) -> None:
    assert fill(sp.Store(tmp_path, lossless()), 0, 1).compact(np.float64(1)) == [1]


@settings(max_examples=20)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.sampled_from([1.0, 2.0, 2.5, 3.0, 5.0]), st.data())
def test_any_tree(parents: list[int], cost: float, data: st.DataObject) -> None:
    """Compaction keeps all steps of chains with any branches and gaps."""
    store = sp.Store(f"memory://any-tree-{next(_COUNTER)}", lossless())
    store.save(0, state(0, 40))
    for step, parent in enumerate(parents, 1):
        store.load(min(parent, step - 1), count=False)
        store.save(step, state(step, 40))
    gone = data.draw(st.sets(st.sampled_from(store.steps()), max_size=len(parents)))
    store.drop(*gone)
    store.compact(cost)
    store.gc()
    assert store.steps() == [s for s in range(len(parents) + 1) if s not in gone]
    for step in store.steps():
        assert store.describe(step).restore_cost <= cost
        assert same(store.load(step, count=False), step)


_COUNTER = itertools.count()
