"""Thinned steps keep all but moments, to the bit; whole ones never lose anything."""

from __future__ import annotations

import json
import sys
import uuid
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec.checkpoint import Checkpoint
from shrinkpoint.codec.evidence.kind import Kind
from shrinkpoint.codec.rebase import has_moments, moments, rebase
from shrinkpoint.store.files import seal
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.retention import Retention
from shrinkpoint.store.store import ThinnedCheckpointWarning
from tests.store.common import lossless, manifest_path
from tests.store.test_crash import run_module
from tests.store.thinning_states import LACKS, equal, is_thinned, state, thinned

pytestmark = pytest.mark.filterwarnings("ignore::shrinkpoint.store.store.ThinnedCheckpointWarning")
ALL = {"every": 1}


def filled(url: str | Path, steps: int, cfg: sp.Config | None = None) -> sp.Store:
    store = sp.Store(url, lossless() if cfg is None else cfg)
    for step in range(steps):
        store.save(step, state(step))
    return store


def whole(store: sp.Store) -> set[int]:
    """Return the whole steps, after a check of all steps."""
    assert store.verify() == {}
    reader = sp.Store(store.url)
    return {step for step in reader.steps() if not is_thinned(reader, step)}


# ----------------------------------------------------------------------------------------------------- what a moment is

M = np.linspace(-1, 1, 128 * 64, dtype=np.float32).reshape(128, 64)


def dropped(tree: Any, cfg: Any = "lossless", **options: Any) -> set[str]:
    """Return the paths of the moments of a tree."""
    ckpt = sp.compress(tree, cfg=cfg, **options)
    found = moments(ckpt)
    assert has_moments(ckpt) or not found
    paths = {ckpt.records[i].path for i in found}
    rest = Checkpoint.from_bytes(rebase(ckpt, None, found.keys()).to_bytes())
    before, after = ({r.path: c.values_of(r).tobytes() for r in c.records} for c in (ckpt, rest))
    assert after == {path: data for path, data in before.items() if path not in paths}
    assert rest.identity == ckpt.identity
    sp.decompress(rest)
    return paths


def test_moments_by_structure() -> None:
    entries = {"step": 3, "exp_avg": 0.1 * M, "exp_avg_sq": M * M, "max_exp_avg_sq": M * M, "z": M + 1}
    tree = {"model": {"w": M[::-1].copy()}, "ema": {"w": M + 2}, "optimizer": {"state": {"w": entries}}}
    both = {"optimizer/state/w/exp_avg", "optimizer/state/w/exp_avg_sq"}
    assert dropped(tree) == both
    assert dropped(tree, sp.Config()) == both
    assert dropped({"x": {"w": {"exp_avg": M}, "v": {"exp_avg_sq": M * M}}}) == set()
    assert dropped({"model": {"exp_avg": M, "momentum": M}}) == set()


def test_moments_by_kinds() -> None:
    tree = {"w": M[::-1].copy(), "first": 0.1 * M, "second": M * M, "exp_avg": 0.2 * M, "ema": M + 2}
    kinds = {
        "w": Kind("linear"),
        "first": Kind("linear", "first moment"),
        "second": Kind("linear", "second moment"),
        "exp_avg": Kind("linear", "state"),
    }
    assert dropped(tree, sp.Config(), kinds=kinds) == {"first", "second"}
    # A rule by path leaves no record of the role, and nothing in the tree says it.
    assert dropped(tree, kinds=kinds) == set()


def test_an_average_of_weights_under_the_name_of_a_moment_is_kept() -> None:
    tree = {"model": {"w": M}, "optimizer": {"state": {"w": {"exp_avg": 0.999 * M, "square_avg": M * M}}}}
    assert dropped(tree) == {"optimizer/state/w/square_avg"}
    assert dropped(tree, sp.Config()) <= {"optimizer/state/w/square_avg"}


def test_small_moments_and_lists() -> None:
    small = {"exp_avg": np.ones(40, np.float32), "exp_avg_sq": np.ones(40, np.float32)}
    tree = {"model": [np.arange(40.0)], "optimizer": {"state": {0: small}, "param_groups": [{"params": [0]}]}}
    assert dropped(tree, sp.Config()) == dropped(tree) == {"optimizer/state/0/exp_avg", "optimizer/state/0/exp_avg_sq"}


def test_what_another_array_needs_is_kept() -> None:
    """An array that is stored as a copy of a moment keeps it."""
    entries = {"exp_avg": M, "exp_avg_sq": M * M}
    tree = {"a": {"state": {"w": entries}, "param_groups": []}, "z": {"copy": M.copy()}}
    assert dropped(tree) == {"a/state/w/exp_avg", "a/state/w/exp_avg_sq"}
    # A moment is never the original of a copy; an array that `kinds=` calls a state may be.
    kinds = {"a/state/w/exp_avg": Kind("linear", "state")}
    assert sp.compress(tree, cfg="lossless", kinds=kinds).records[2].stream == "copy"
    assert dropped(tree, kinds=kinds) == {"a/state/w/exp_avg_sq"}


@pytest.mark.parametrize("preset", [None, "precise", "compact", "exact_weights", "lossless"])
def test_real_optimizers(preset: str | None) -> None:
    torch = pytest.importorskip("torch")
    from shrinkpoint.trainers.training_state import TrainingState

    for made in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(48, 80), torch.nn.Linear(80, 40))
        optimizer = made(model.parameters(), **({"momentum": 0.9} if made is torch.optim.SGD else {}))
        run = TrainingState(model, optimizer)
        prev = below = None
        for step in range(3):
            model(torch.randn(8, 48)).square().mean().backward()
            optimizer.step()
            tree = run.tree(step)
            ckpt = sp.compress(tree, prev, cfg=preset, kinds=run.kinds(tree))
            found = moments(ckpt)
            count = {torch.optim.AdamW: 8, torch.optim.SGD: 4, torch.optim.Adagrad: 0}[made]
            assert len(found) == count
            part = Checkpoint.from_bytes(rebase(ckpt, below, found.keys()).to_bytes(), below)
            values = {r.path: ckpt.values_of(r) for i, r in enumerate(ckpt.records) if i not in found}
            assert [r.path for r in part.records] == list(values)
            assert all(bool((part.values_of(r) == values[r.path]).all()) for r in part.records)
            assert part.nbytes < ckpt.nbytes or not found
            prev, below = ckpt, part


# ------------------------------------------------------------------------------------------------------------ the rule


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "3"])
def test_rules_that_are_none(value: Any) -> None:
    with pytest.raises(sp.BadArgumentError, match="thin_after"):
        Retention(thin_after=value)


@pytest.mark.parametrize("against", ["previous", "base"])
@pytest.mark.parametrize("base_every", [None, 4])
def test_gc(against: str, base_every: int | None, tmp_path: Path) -> None:
    store = filled(tmp_path, 12, lossless(against=against, base_every=base_every))
    store.pin(1)
    store.tag("best", 5)
    store.gc(Retention(last=4, every=3, thin_after=2), dry_run=True)
    assert whole(store) == set(range(12))
    store.gc(Retention(last=4, every=3, thin_after=2))
    assert store.steps() == [0, 1, 3, 5, 6, 8, 9, 10, 11]
    assert whole(store) == {1, 5, 10, 11}
    # A second run changes nothing.
    files = sorted(tmp_path.rglob("*.*"))
    store.gc(Retention(last=4, every=3, thin_after=2))
    assert sorted(tmp_path.rglob("*.*")) == files
    # The run continues, from the head it had.
    store.save(12, state(12))
    store.unpin(1)
    store.gc(Retention(every=1, thin_after=1))
    assert whole(store) == {5, 12}


def test_steps_are_thinned_one_by_one(tmp_path: Path) -> None:
    """Thinned steps stay deltas over thinned ones, also if each is thinned by a run of its own."""
    store = sp.Store(tmp_path, lossless())
    for step in range(8):
        store.save(step, state(step))
        store.gc(Retention(**ALL, thin_after=2))
        assert whole(store) == set(range(max(0, step - 1), step + 1))
    found = store.manifests()[0]
    assert [found[step].is_delta for step in range(6)] == [False] + [True] * 5
    assert store.compact(2.0)
    assert whole(store) == {6, 7}


def test_a_whole_step_is_readable_after_everything_below_was_thinned(tmp_path: Path) -> None:
    """Compaction takes no thinned step for the parent of a whole one."""
    store = filled(tmp_path, 6)
    store.pin(4)
    store.gc(Retention(**ALL, thin_after=1))
    assert whole(store) == {4, 5}
    for cost in (3.0, 1.5, 1.0):
        store.compact(cost)
        assert whole(store) == {4, 5}
        store.gc()
        assert whole(store) == {4, 5}


def test_damaged_steps_do_not_count(tmp_path: Path) -> None:
    """The newest intact step stays whole; a damaged one is not touched."""
    store = filled(tmp_path, 4, lossless(base_every=1))
    newest = tmp_path / "data" / store.describe(3).file
    newest.write_bytes(newest.read_bytes()[:-1])
    store.gc(Retention(**ALL, thin_after=1))
    assert not store.describe(3).lacks
    reader = sp.Store(tmp_path)
    assert [is_thinned(reader, step) for step in range(3)] == [True, True, False]


def test_both_ends_of_a_run_that_went_back(tmp_path: Path) -> None:
    filled(tmp_path, 6)
    again = sp.Store(tmp_path, lossless())
    again.load(1)
    with pytest.warns(sp.StoreWarning, match="leaves steps 3, 4, 5 behind"):
        again.save(2, state(2) | {"more": 1})
    again.gc(Retention(**ALL, thin_after=1))
    lacks = {step: bool(m.lacks) for step, m in again.manifests()[0].items()}
    assert lacks == {0: True, 1: True, 2: False, 3: True, 4: True, 5: False}
    # The thinned steps are still known to be left behind.
    with pytest.warns(sp.StoreWarning, match="3, 4, 5"):
        assert sp.Store(tmp_path).load()["more"] == 1


def test_a_head_whose_base_was_thinned(tmp_path: Path) -> None:
    """A save over a base that another process has thinned needs no removed array."""
    store = filled(tmp_path, 3, lossless(against="base"))
    other = sp.Store(tmp_path)
    other.gc(Retention(last=1, thin_after=1, every=1))
    assert whole(other) == {2}
    for step in (3, 4):
        store.save(step, state(step))
        assert whole(store) == set(range(2, step + 1))
    again = sp.Store(tmp_path, lossless(against="base"))
    again.load(1)
    again.save(5, state(5))
    assert again.describe(5).is_delta
    assert 5 in whole(again)


def test_a_step_that_is_saved_again_is_whole(tmp_path: Path) -> None:
    store = filled(tmp_path, 3)
    store.gc(Retention(**ALL, thin_after=1))
    again = sp.Store(tmp_path, lossless())
    again.load(0)
    for step in (1, 2, 3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it leaves the steps above behind
            again.save(step, state(step))
    assert whole(again) == {1, 2, 3}


def test_states_without_moments_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = sp.Store(tmp_path, lossless())
    for step in range(4):
        store.save(step, {"model": {"w": M + step}})
    store.gc(Retention(**ALL, thin_after=1))
    assert not any(m.lacks for m in store.manifests()[0].values())
    monkeypatch.setattr("shrinkpoint.store.retention.opener", None)  # their headers are not read again
    store.gc(Retention(**ALL, thin_after=1))


def test_a_pin_that_comes_while_a_step_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shrinkpoint.store import retention

    store = filled(tmp_path, 3)
    real = retention.Thinning.prepare

    def prepare(self: Any, *args: Any) -> Any:
        found = real(self, *args)
        sp.Store(tmp_path).pin(0)
        return found

    monkeypatch.setattr(retention.Thinning, "prepare", prepare)
    store.gc(Retention(**ALL, thin_after=1))
    assert whole(store) == {0, 2}


def test_files_that_another_process_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared files that are gone before the commit are not named by a manifest."""
    from shrinkpoint.store import retention

    store = filled(tmp_path, 3)
    real = retention.Thinning.prepare

    def prepare(self: Any, root: Any, lease: Any) -> Any:
        found = real(self, root, lease)
        for entry, manifest in found[:1]:
            assert entry.manifest.step == 0
            (tmp_path / "data" / manifest.file).unlink()
        return found

    monkeypatch.setattr(retention.Thinning, "prepare", prepare)
    store.gc(Retention(**ALL, thin_after=1))
    assert whole(store) == {0, 1, 2}
    monkeypatch.undo()
    store.gc(Retention(**ALL, thin_after=1))
    assert whole(store) == {2}


OPERATIONS = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 3)),
    st.tuples(st.just("gc"), st.tuples(st.integers(1, 4), st.sampled_from([None, 1, 2, 3]), st.integers(1, 4))),
    st.tuples(st.sampled_from(["pin", "unpin", "tag", "drop", "reopen"]), st.integers(0, 20)),
    st.tuples(st.just("compact"), st.sampled_from([1.0, 1.5, 2.5])),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(OPERATIONS, max_size=25), st.sampled_from(["previous", "base"]), st.sampled_from([None, 3]))
def test_any_order_of_operations(operations: list[Any], against: str, base_every: int | None) -> None:
    """The steps, and which of them are whole, are those of a simple model."""
    url = f"memory://{uuid.uuid4()}"
    store = sp.Store(url, lossless(against=against, base_every=base_every))
    model: dict[int, bool] = {}  # step -> whether it is whole
    pins: set[int] = set()
    tags: dict[str, int] = {}
    newest = 0
    for name, value in operations:
        steps = sorted(model)
        one = steps[value % len(steps)] if steps and isinstance(value, int) else None
        if name == "save":
            for _ in range(value):
                newest += 1
                store.save(newest, state(newest))
                model[newest] = True
        elif name == "gc" and steps:
            last, every, after = value
            store.gc(Retention(last, every, thin_after=after))
            keep = pins | set(tags.values()) | set(steps[-last:]) | {s for s in steps if every and s % every == 0}
            model = {s: m for s, m in model.items() if s in keep}
            fresh = sorted(s for s, is_whole in model.items() if is_whole)
            stay = pins | set(tags.values()) | set(fresh[-after:])
            model = {s: m and s in stay for s, m in model.items()}
        elif name == "compact":
            store.compact(value)
        elif one is None:
            continue
        elif name == "reopen":
            store = sp.Store(url, lossless(against=against, base_every=base_every))
            store.load(count=False)
        elif name == "pin":
            store.pin(one)
            pins.add(one)
        elif name == "unpin":
            store.unpin(one)
            pins.discard(one)
        elif name == "tag":
            store.tag("best", one)
            tags["best"] = one
        elif name == "drop" and one not in pins | set(tags.values()) and one != newest:
            store.drop(one)
            del model[one]
        assert store.steps() == sorted(model)
        assert {s for s in store.steps() if not store.describe(s).lacks} == {s for s, m in model.items() if m}
    if model:
        assert whole(store) == {s for s, m in model.items() if m}


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
def test_kills() -> None:
    """A kill at any change of a file leaves each step whole or thinned."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found = run_module("thinning_kills", folder)
    assert found["kills"] > 100
    assert len(found["thinned_before_the_kill"]) > 4


# ------------------------------------------------------------------------------------------------------------- reading


def test_loading_says_what_is_missing(tmp_path: Path) -> None:
    store = filled(tmp_path, 3)
    store.gc(Retention(**ALL, thin_after=1))
    with pytest.warns(ThinnedCheckpointWarning, match="step 1 was thinned: it lacks 1 first moment, 1 second moment"):
        assert equal(store.load(1), thinned(state(1)))
    assert store.lacks == LACKS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(store.load(1, "model/*")) == ["model"]
        store.load()
        assert store.lacks == ()
    with pytest.raises(sp.BadArgumentError, match=r"no path matches '.*exp_avg'; .*; step 1 was thinned: it lacks"):
        store.load(1, "*/exp_avg")
    out = thinned(state(2))
    with pytest.warns(ThinnedCheckpointWarning):
        assert store.load(1, out=out)["model"]["w"] is out["model"]["w"]
    assert equal(out["model"], state(1)["model"])


def test_resume(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from shrinkpoint import trainers
    from shrinkpoint.trainers.loop import PartNotRestoredWarning

    def parts() -> tuple[Any, Any]:
        model = torch.nn.Linear(48, 40)
        return model, torch.optim.SGD(model.parameters(), momentum=0.9)

    model, optimizer = parts()
    store = sp.Store(tmp_path)
    weights = {}
    for step in range(3):
        model(torch.randn(8, 48)).square().mean().backward()
        optimizer.step()
        trainers.save(store, step, model, optimizer)
        weights[step] = store.load(step, "model/*", count=False)["model"]
    store.gc(Retention(**ALL, thin_after=1))
    new, moments_ = parts()
    before = new.weight.detach().clone()
    with pytest.raises(sp.BadArgumentError, match=r"step 1 was thinned: it lacks 2 first moments of.*Whole steps: 2"):
        trainers.resume(store, new, moments_, step=1)
    assert torch.equal(new.weight, before)
    assert not moments_.state
    assert trainers.resume(store, new, moments_) == 2
    with pytest.warns(PartNotRestoredWarning, match="optimizer"):
        assert trainers.resume(store, new, step=1) == 1
    assert torch.equal(new.weight, weights[1]["weight"])
    store.drop(2)
    with pytest.raises(sp.BadArgumentError, match="was thinned"), sp.Run(tmp_path, *parts()):
        pass


def test_saver(tmp_path: Path) -> None:
    store = sp.Store(tmp_path, lossless())
    with sp.Saver(store, keep=Retention(last=2, every=2, thin_after=2)) as saver:
        for step in range(6):
            saver.save(step, state(step)).result()
            saver.wait()
    store.gc(Retention(last=2, every=2, thin_after=2))
    assert store.steps() == [0, 2, 4, 5]
    assert whole(store) == {4, 5}


def test_copy(tmp_path: Path) -> None:
    full = filled(tmp_path / "full", 4)
    full.copy(tmp_path / "thin")
    thin = sp.Store(tmp_path / "thin")
    thin.gc(Retention(**ALL, thin_after=1))
    assert whole(thin) == {3}
    assert whole(thin.copy(tmp_path / "other")) == {3}
    assert whole(thin.copy(tmp_path / "full", repair=False)) == set(range(4))
    assert whole(full.copy(tmp_path / "other", [1, 2])) == {1, 2, 3}
    assert whole(full.copy(tmp_path / "thin")) == set(range(4))


def test_frozen_parameters(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from shrinkpoint import trainers

    model = torch.nn.Sequential(torch.nn.Linear(48, 40), torch.nn.Linear(40, 40))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    store = sp.Store(tmp_path)
    for step in range(3):
        model(torch.randn(8, 48)).square().mean().backward()
        optimizer.step()
        trainers.save(store, step, model, optimizer, frozen="once")
    store.gc(Retention(**ALL, thin_after=1))
    assert store.verify() == {}
    assert store.describe(0).lacks
    target = store.copy(tmp_path / "copy", [0])
    assert target.verify() == {}
    fresh = torch.nn.Sequential(torch.nn.Linear(48, 40), torch.nn.Linear(40, 40))
    with pytest.warns(trainers.loop.PartNotRestoredWarning, match="optimizer"):
        trainers.resume(target, fresh, step=0)
    assert torch.equal(fresh[0].weight, model[0].weight)


def test_hostile_manifests(tmp_path: Path) -> None:
    store = filled(tmp_path, 2)
    store.gc(Retention(**ALL, thin_after=1))
    path = manifest_path(tmp_path, 0)
    fields = {k: v for k, v in json.loads(path.read_text()).items() if k != "checksum"}
    assert fields["version"] == 3
    assert fields["lacks"] == {"first moment": 1, "second moment": 1}
    Manifest.from_bytes(seal(fields), 0)
    for change in (
        {"lacks": {}},
        {"lacks": {"first moment": 0}},
        {"lacks": {"first moment": True}},
        {"lacks": {"first\x1b[0m": 1}},
        {"lacks": [["first moment", 1]]},
        {"lacks": 5},
        {"version": 1},
        {"version": 2},
        {"shards": {"000000000000-0123456789abcdef.spt": 5}},
        {"version": 2, "shards": {"000000000000-0123456789abcdef.spt": 5}},
    ):
        with pytest.raises(sp.CorruptDataError, match="malformed"):
            Manifest.from_bytes(seal(fields | change), 0)
    with pytest.raises(sp.NewerFormatError):
        Manifest.from_bytes(seal(fields | {"version": 4}), 0)


def test_commands(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from shrinkpoint.__main__ import app

    filled(tmp_path, 4)

    def call(*args: str) -> str:
        done = CliRunner().invoke(app, [*args, str(tmp_path)])
        assert done.exit_code == 0, done.output
        return done.output

    assert "2 steps would be thinned" in call("gc", "--thin-after", "2", "--dry-run")
    assert not any(one["lacks"] for one in json.loads(call("ls", "--json"))["steps"])
    assert json.loads(call("gc", "--thin-after", "2", "--json"))["thinned_steps"] == [0, 1]
    listed = [one["lacks"] for one in json.loads(call("ls", "--json"))["steps"]]
    assert listed == [dict(LACKS), dict(LACKS), {}, {}]
    assert "base, thinned (no first moments or second moments)" in call("ls")
    assert "thinned: it lacks 1 first moment, 1 second moment" in call("info", "--step", "0")
    assert "4 checkpoints checked, 0 not intact" in call("verify")
