"""Frozen parameters: stored once or by reference, verified by a hash on resume."""

from __future__ import annotations

import copy
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shrinkpoint as sp
from shrinkpoint import trainers
from shrinkpoint.store import frozen_sets
from shrinkpoint.store.local import LocalFiles
from shrinkpoint.trainers import model_state
from shrinkpoint.trainers.model_state import frozen_digest, frozen_names


def built(seed: int = 0) -> nn.Module:
    """Return a frozen base of 1 MB with a trained head."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.Linear(512, 8))
    model[0].requires_grad_(False)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 512)).square().mean().backward()
        optimizer.step()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


@pytest.mark.parametrize("frozen", ["once", "org/base@1a2b3c"])
def test_each_step_holds_only_what_is_trained(tmp_path: Path, frozen: str) -> None:
    store, model = sp.Store(tmp_path / "a", sp.presets.lossless()), built()
    optimizer = optimizer_of(model)
    for step in (1, 2):
        train(model, optimizer)
        saved = trainers.save(store, step, model, optimizer, frozen=frozen)
        assert saved is not None
        assert saved.raw_nbytes < 200_000 < 512 * 512 * 4  # type: ignore[union-attr]
    assert frozen_names(model) == ["0.weight", "0.bias"]
    assert len(frozen_store(store).steps()) == (1 if frozen == "once" else 0)
    assert store.steps() == [1, 2]
    store.gc(sp.Retention(last=1))
    again = built()
    assert trainers.resume(sp.Store(tmp_path / "a"), again, optimizer_of(again)) == 2
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


@pytest.mark.parametrize("frozen", ["once", "org/base@1a2b3c"])
def test_a_model_without_frozen_parameters_is_stored_whole(tmp_path: Path, frozen: str) -> None:
    store, model = sp.Store(tmp_path / "a", sp.presets.lossless()), nn.Linear(3, 2)
    trainers.save(store, 1, model, frozen=frozen)
    again = nn.Linear(3, 2)
    assert trainers.resume(sp.Store(tmp_path / "a"), again) == 1
    assert torch.equal(again.weight, model.weight)


def test_another_base_is_replaced_by_the_stored_one(tmp_path: Path) -> None:
    store, model = sp.Store(tmp_path), built()
    trainers.save(store, 1, model, frozen="once")
    other = built(seed=1)
    assert trainers.resume(store, other) == 1
    assert torch.equal(other[0].weight, model[0].weight)  # type: ignore[index]


def test_another_base_is_refused_by_reference(tmp_path: Path) -> None:
    store, model = sp.Store(tmp_path), built()
    trainers.save(store, 1, model, frozen="org/base@1a2b3c")
    other = built(seed=1)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(sp.MissingParentError, match="build the model from org/base@1a2b3c"):
        trainers.resume(store, other)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize("how", ["data", "numpy", "memory"])
def test_weights_changed_without_the_knowledge_of_autograd(tmp_path: Path, how: str) -> None:
    """A change that PyTorch's version does not count is stored like any other."""
    model = built()
    model[0].weight = nn.Parameter(model[0].weight.detach().t(), requires_grad=False)  # type: ignore[index, union-attr, assignment]
    model.register_parameter("tied", model[0].weight)  # type: ignore[index, arg-type]
    store = sp.Store(tmp_path)
    trainers.save(store, 1, model, frozen="once")
    weight = model[0].weight  # type: ignore[index]
    version, first = weight._version, weight.detach().clone()
    if how == "data":
        weight.data[3, 4] += 1  # type: ignore[index, operator]
    elif how == "numpy":
        weight.detach().numpy()[3, 4] += 1  # type: ignore[operator]
    else:
        torch.frombuffer(memoryview(weight.detach().t().numpy()), dtype=torch.float32)[7] += 1  # type: ignore[operator]
    assert weight._version == version
    trainers.save(store, 2, model, frozen="once")
    for step, value in ((1, first), (2, weight)):
        again = built(seed=1)
        again.register_parameter("tied", again[0].weight)  # type: ignore[index, arg-type]
        assert trainers.resume(sp.Store(tmp_path), again, step=step) == step
        assert torch.equal(again[0].weight, value)  # type: ignore[index, arg-type]


def test_a_base_that_changed_is_hashed_again(tmp_path: Path) -> None:
    model, store = built(), sp.Store(tmp_path)
    names = frozen_names(model)
    first = frozen_digest(model, names)
    assert frozen_digest(model, names) == first
    with torch.no_grad():
        model[0].weight[0, 0] += 1  # type: ignore[index, operator]
    assert frozen_digest(model, names) != first
    trainers.save(store, 1, model, frozen="once")
    with torch.no_grad():
        model[0].weight[0, 0] += 1  # type: ignore[index, operator]
    trainers.save(store, 2, model, frozen="once")
    assert len(frozen_store(store).steps()) == 2


def frozen_store(store: sp.Store) -> sp.Store:
    """Return the store of the frozen sets."""
    return sp.Store(f"{store.url}/frozen", sp.presets.lossless())


def with_old_sets(folder: Path) -> tuple[sp.Store, nn.Module]:
    """Return a store with two old frozen sets: steps 1 and 3 need one, step 2 the other."""
    store, model = sp.Store(folder), built()
    other = built(seed=1)
    for step, one in ((1, model), (2, other), (3, model)):
        trainers.save(store, step, one, frozen="once")
    assert len(frozen_store(store).steps()) == 2
    make_old(folder)
    return store, model


def make_old(folder: Path) -> None:
    for file in (folder / "frozen").rglob("*"):
        os.utime(file, (time.time() - 2 * 86_400,) * 2)


def test_gc_removes_the_sets_that_no_step_needs(tmp_path: Path) -> None:
    store, model = with_old_sets(tmp_path)
    assert not [name for name in store.gc() if name.startswith("frozen/")]
    store.drop(2)
    would = store.gc(dry_run=True)
    assert len(frozen_store(store).steps()) == 2
    gone = store.gc()
    assert gone == would
    assert sorted(name.split("/")[1] for name in gone if name.startswith("frozen/")) == ["data", "steps", "tags"]
    assert not any((tmp_path / name).exists() for name in gone)
    assert len(list((tmp_path / "frozen/data").iterdir())) == len(frozen_store(store).steps()) == 1
    again = built(seed=2)
    assert trainers.resume(store, again) == 3
    assert torch.equal(again[0].weight, model[0].weight)  # type: ignore[index]
    trainers.save(store, 4, built(seed=1), frozen="once")  # a set that was removed is stored again
    assert trainers.resume(store, built()) == 4


def test_a_retention_frees_the_sets_of_the_steps_that_it_removes(tmp_path: Path) -> None:
    store, _ = with_old_sets(tmp_path)
    assert store.gc(sp.Retention(last=1), dry_run=True) == store.gc(sp.Retention(last=1))
    assert len(frozen_store(store).steps()) == 1


def test_gc_keeps_a_set_whose_step_is_still_being_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = with_old_sets(tmp_path)
    store.drop(2)
    monkeypatch.setattr(frozen_sets, "_marked", {})  # as in another process
    other = built(seed=1)
    kept_out = model_state.frozen_record(other, "once")
    assert kept_out is not None
    model_state.store_once(store, other, kept_out)
    store.gc()
    assert len(frozen_store(store).steps()) == 2


def test_gc_removes_what_a_killed_save_left_among_the_sets(tmp_path: Path) -> None:
    store, _ = with_old_sets(tmp_path)
    for name in ("000000000007-0123456789abcdef.spt", ".tmp-0-000000000007-0123456789abcdef.spt"):
        (tmp_path / "frozen/data" / name).write_bytes(b"half")
    assert store.gc(dry_run=True) == store.gc()
    assert len(list((tmp_path / "frozen/data").iterdir())) == 2
    assert store.verify() == {}


def test_gc_keeps_all_sets_while_a_step_cannot_be_read(tmp_path: Path) -> None:
    store, _ = with_old_sets(tmp_path)
    store.drop(2)
    store.gc(sp.Retention(last=1), dry_run=True)
    file = next((tmp_path / "data").glob("000000000001-*"))
    file.write_bytes(file.read_bytes()[:40])
    store.gc()
    assert len(frozen_store(store).steps()) == 2


def test_gc_keeps_what_a_user_has_pinned_or_tagged(tmp_path: Path) -> None:
    store, _ = with_old_sets(tmp_path)
    first, second = frozen_store(store).steps()
    frozen_store(store).pin(first)
    frozen_store(store).tag("mine", second)
    make_old(tmp_path)
    store.drop(1, 2, 3)
    store.gc()
    assert frozen_store(store).steps() == [first, second]
    frozen_store(store).unpin(first)
    store.gc()
    assert frozen_store(store).steps() == [second]


@pytest.mark.parametrize("frozen", ["", 3])
def test_bad_arguments(tmp_path: Path, frozen: object) -> None:
    with pytest.raises(sp.BadArgumentError, match="frozen is"):
        trainers.save(sp.Store(tmp_path), 1, built(), frozen=frozen)  # type: ignore[arg-type]


def test_a_saver_in_the_background(tmp_path: Path) -> None:
    model = built()
    optimizer = optimizer_of(model)
    with sp.Saver(sp.Store(tmp_path), mode="thread") as saver:
        train(model, optimizer)
        trainers.save(saver, 1, model, optimizer, frozen="once")
    again = built(seed=2)
    assert trainers.resume(sp.Store(tmp_path), again, optimizer_of(again)) == 1
    assert torch.equal(again[0].weight, model[0].weight)  # type: ignore[index]


# ---- settings that are kept on resume


def test_new_settings_are_kept(tmp_path: Path) -> None:
    store, model = sp.Store(tmp_path), nn.Linear(4, 4)
    trainers.save(store, 1, model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    new = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.25, eps=1e-3)
    trainers.resume(store, model, new, keep=("lr", "weight_decay"))
    group = new.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["eps"]) == (0.02, 0.25, 1e-8)


def test_a_schedule_goes_on_with_the_new_base_rate(tmp_path: Path) -> None:
    def run(rate: float) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))

    model, optimizer, scheduler = run(1.0)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    trainers.save(sp.Store(tmp_path), 3, model, optimizer, scheduler=scheduler)
    model, optimizer, scheduler = run(8.0)
    trainers.resume(sp.Store(tmp_path), model, optimizer, scheduler=scheduler, keep=("lr",))
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 2.0  # 8 / 4
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1.6  # 8 / 5


@pytest.mark.parametrize(
    ("keep", "why"),
    [
        ("lr", "must be a sequence"),
        (("learning_rate",), "'learning_rate' is not"),
        (("weight_deca",), "nearest is 'weight_decay'"),
    ],
)
def test_unknown_settings_are_refused(tmp_path: Path, keep: object, why: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(sp.BadArgumentError, match=why):
        trainers.resume(sp.Store(tmp_path), model, torch.optim.AdamW(model.parameters()), keep=keep)  # type: ignore[arg-type]


# ---- operations over a store with frozen sets


@pytest.mark.parametrize("target", ["folder", "memory"])
def test_a_copy_can_be_resumed(tmp_path: Path, target: str) -> None:
    store, model = sp.Store(tmp_path / "run"), built()
    trainers.save(store, 1, model, frozen="once")
    trainers.save(store, 2, built(seed=1), frozen="once")
    url = tmp_path / "copy" if target == "folder" else f"memory://{tmp_path.name}/copy"
    copied = store.copy(url, [1])
    assert len(frozen_store(copied).steps()) == 1, "only the set of the chosen step"
    store.copy(url)
    assert copied.verify() == {}
    again = built(seed=2)
    assert trainers.resume(copied, again, step=1) == 1
    assert torch.equal(again[0].weight, model[0].weight)  # type: ignore[index]
    assert copied.disk_usage() == store.disk_usage()
    assert store.disk_usage().steps > 2 * 512 * 512


@pytest.mark.parametrize("harm", ["altered", "missing data", "no tag", "no folder"])
def test_verify_finds_and_copy_repairs_a_set_that_is_not_intact(tmp_path: Path, harm: str) -> None:
    store, model = sp.Store(tmp_path / "run"), built()
    trainers.save(store, 1, model, frozen="once")
    trainers.save(store, 2, model, frozen=None)
    good = store.copy(tmp_path / "good")
    (data,) = (tmp_path / "run/frozen/data").iterdir()
    if harm == "altered":
        data.write_bytes(data.read_bytes()[:-9] + bytes(9))
    elif harm == "missing data":
        data.unlink()
    elif harm == "no tag":
        next((tmp_path / "run/frozen/tags").iterdir()).unlink()
    else:
        shutil.rmtree(tmp_path / "run/frozen")
    assert list(store.verify()) == [1]
    assert "step 1: its frozen parameters: " in store.verify()[1]
    with pytest.raises((sp.MissingParentError, sp.CorruptDataError), match="step 1: "):
        store.copy(tmp_path / "never", [1])
    assert sp.Store(tmp_path / "never").steps() == []
    with pytest.raises((sp.MissingParentError, sp.CorruptDataError)):
        trainers.resume(sp.Store(tmp_path / "run"), built(seed=1), step=1)
    good.copy(store.url, repair=True)
    assert store.verify() == {}
    again = built(seed=1)
    assert trainers.resume(sp.Store(tmp_path / "run"), again, step=1) == 1
    assert torch.equal(again[0].weight, model[0].weight)  # type: ignore[index]


def test_a_save_stores_a_set_again_that_was_lost(tmp_path: Path) -> None:
    store, model = sp.Store(tmp_path), built()
    trainers.save(store, 1, model, frozen="once")
    next((tmp_path / "frozen/data").iterdir()).unlink()
    trainers.save(store, 2, model, frozen="once")
    assert store.verify() == {}


def test_a_damaged_tag_of_a_set_is_named(tmp_path: Path) -> None:
    store = sp.Store(tmp_path)
    trainers.save(store, 1, built(), frozen="once")
    (tag,) = (tmp_path / "frozen/tags").iterdir()
    tag.write_bytes(b"{")
    assert list(store.verify_labels()) == [f"frozen/tags/{tag.name}"]


def test_sets_of_two_writers_at_one_moment_are_both_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set does not take the number that another process is about to use."""
    store, models = sp.Store(tmp_path), [built(0), built(1)]
    real = LocalFiles.write
    saves = [lambda: trainers.save(sp.Store(tmp_path), 1, models[1], frozen="once")]

    def write(self: LocalFiles, name: str, data: bytes) -> None:
        if saves and self.root.endswith("/frozen") and name.startswith("data/"):
            saves.pop()()
        real(self, name, data)

    monkeypatch.setattr(LocalFiles, "write", write)
    trainers.save(store, 2, models[0], frozen="once")
    for step, model in ((2, models[0]), (1, models[1])):
        again = built(seed=2)
        trainers.resume(store, again, step=step)
        assert torch.equal(again[0].weight, model[0].weight)  # type: ignore[index]


def test_sets_with_numbers_from_zero_are_read_and_copied(tmp_path: Path) -> None:
    """Release 0.1 numbers the sets of a store from 0."""
    for seed in (0, 1):
        store, model = sp.Store(tmp_path / str(seed)), built(seed)
        digest = frozen_digest(model, frozen_names(model))
        tensors = {name: model.state_dict()[name] for name in frozen_names(model)}
        frozen_store(store).save(0, {"model": tensors})
        frozen_store(store).tag(f"frozen-{digest}", 0)
        trainers.save(store, seed + 1, model, frozen="once")
        assert frozen_store(store).steps() == [0]
        store.copy(tmp_path / "both")
    for step in (1, 2):
        again = built(seed=3)
        assert trainers.resume(sp.Store(tmp_path / "both"), again, step=step) == step
        assert torch.equal(again[0].weight, built(step - 1)[0].weight)  # type: ignore[index]


def test_weights_that_change_while_they_are_stored_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, model = sp.Store(tmp_path), built()
    real = model_state.compress

    def compress(*args: Any, **options: Any) -> sp.Checkpoint:
        model[0].weight.data += 1  # type: ignore[index, operator]
        return real(*args, **options)

    monkeypatch.setattr(model_state, "compress", compress)
    with pytest.raises(sp.ShrinkpointError, match="changed while they were saved"):
        trainers.save(store, 1, model, frozen="once")
    assert store.steps() == []


def test_a_link_in_the_place_of_the_sets_is_not_followed(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "run")
    trainers.save(store, 1, built(), frozen="once")
    shutil.move(tmp_path / "run/frozen", tmp_path / "elsewhere")
    (tmp_path / "run/frozen").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError, match="frozen"):
        trainers.resume(sp.Store(tmp_path / "run"), built(seed=1))
