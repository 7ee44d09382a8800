"""The released Accelerate: save_state and load_state over our hooks, killed and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shrinkpoint as sp

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed; `make frameworks` has it")

from shrinkpoint.codec.parallel import map_chunks  # noqa: E402
from shrinkpoint.store.compaction import Compaction  # noqa: E402
from shrinkpoint.trainers.accelerate import compress_states  # noqa: E402

from ..forking import Script  # noqa: E402
from .accelerate_run import main  # noqa: E402
from .killing import by_step, run_and_kill  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
RUN, RANKS = (Path(__file__).with_name(f"accelerate_{name}.py") for name in ("run", "ranks"))


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with Script(RUN) as found:
        yield found


@pytest.fixture(scope="module")
def ranks() -> Iterator[Script]:
    with Script(RANKS) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["background"]])
def test_a_killed_run_resumed_equals_one_that_was_not(script: Script, tmp_path: Path, how: list[str]) -> None:
    killed = tmp_path / "killed"
    begun = lambda: (killed / "losses.txt").exists() and len(by_step(killed)) >= 11  # noqa: E731
    run_and_kill(script, killed, 5000, *how, once=begun)
    # A folder whose save was cut off: Accelerate itself refuses to write into it.
    for folder in (tmp_path / "killed" / "checkpoints").iterdir():
        if not (folder / "random_states_0.pkl").exists() or not (folder / "shrinkpoint.json").exists():
            shutil.rmtree(folder)
    steps = len(by_step(tmp_path / "killed")) + 7
    main(tmp_path / "killed", steps, 2 if how else None, bool(how))
    main(tmp_path / "whole", steps)
    assert by_step(tmp_path / "killed") == by_step(tmp_path / "whole")


def test_nothing_raw_is_written_and_rotation_reaches_the_store(tmp_path: Path) -> None:
    accelerator, store = main(tmp_path / "run", 12, limit=2)
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [f.name for f in folders] == ["checkpoint_2", "checkpoint_3"]
    for folder in folders:
        assert not (folder / "model.safetensors").exists()
        assert (folder / "optimizer.bin").stat().st_size < 2000
    assert len(store.steps()) == 2
    assert store.describe(store.steps()[-1]).is_delta
    held = store.load()
    for name, tensor in accelerator._models[0].state_dict().items():
        assert torch.equal(held["models"][0][name], tensor)
    # The stand-in is gone: optimizers answer for themselves again.
    assert set(accelerator._optimizers[0].state_dict()) == {"state", "param_groups"}


def test_in_the_background_a_folder_is_kept_until_the_next_is_complete(tmp_path: Path) -> None:
    project = accelerate.utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = accelerate.Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(5, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    store, home = sp.Store(tmp_path / "store", cfg=sp.presets.lossless()), tmp_path / "checkpoints"
    with sp.Saver(store) as saver:
        hooks = compress_states(accelerator, saver)
        accelerator.save_state()
        hooks.wait()
        before = model.weight.detach().clone()
        assert saver.pid is not None
        os.kill(saver.pid, signal.SIGSTOP)
        accelerator.save_state()
        assert not (home / "checkpoint_1" / "shrinkpoint.json").exists()
        with torch.no_grad():
            model.weight.zero_()
        os.kill(saver.pid, signal.SIGKILL)
        with pytest.raises(sp.MissingParentError, match=r"checkpoint_1: .* its save was cut off; load the one before"):
            accelerator.load_state(str(home / "checkpoint_1"))
        with pytest.raises(ChildProcessError):
            accelerator.save_state()
        # The folder that is left was not removed to make room.
        assert sorted(f.name for f in home.iterdir()) == ["checkpoint_0", "checkpoint_1"]
        accelerator.load_state(str(home / "checkpoint_0"))
        assert torch.equal(model.weight, before)
        # Accelerate would count the folder that was cut off, and remove the only complete one for it.
        project.iteration = 2
        accelerator.save_state()
        assert sorted(f.name for f in home.iterdir()) == ["checkpoint_0", "checkpoint_2"]
        accelerator.save_state()
        hooks.remove()
        assert "save_state" not in vars(accelerator)
        assert sorted(f.name for f in home.iterdir()) == ["checkpoint_2", "checkpoint_3"]
        assert len(store.steps()) == 2
        project.total_limit = 1
        with pytest.raises(sp.BadArgumentError, match="total_limit is 1"):
            compress_states(accelerator, saver)
    project.total_limit = 2
    with sp.Saver(store, keep=sp.Retention()) as saver, pytest.raises(sp.BadArgumentError, match="leave keep= out"):
        compress_states(accelerator, saver)
    assert "save_state" not in vars(accelerator)


def test_rotation_beside_a_saver_that_compacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: object) -> list[int]:
        while True:
            map_chunks(time.sleep, [0.001])

    monkeypatch.setattr(Compaction, "run", run)  # what waited for it would wait for ever
    project = accelerate.utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = accelerate.Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(50, 20)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    store = sp.Store(tmp_path / "store", cfg=sp.presets.lossless(chain=sp.ChainPolicy(None)))
    with sp.Saver(store, mode="thread", compact=1.0) as saver:
        hooks = compress_states(accelerator, saver)
        for number in range(5):
            with torch.no_grad():
                model.weight[number] += 1
            accelerator.save_state()
        hooks.wait()
        assert len(store.steps()) == 2
    weight = model.weight.detach().clone()
    accelerator.load_state(str(tmp_path / "checkpoints" / "checkpoint_4"))
    assert torch.equal(model.weight, weight)


def test_folders_without_a_pointer_and_other_models(tmp_path: Path) -> None:
    def fresh(width: int, *more: torch.nn.Module) -> accelerate.Accelerator:
        accelerator = accelerate.Accelerator(cpu=True)
        model = torch.nn.Linear(width, 2)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), *more)
        return accelerator

    plain = fresh(5)
    plain.save_state(str(tmp_path / "raw"))
    ours = fresh(5)
    hooks = compress_states(ours, sp.Store(tmp_path / "store"))
    ours.load_state(str(tmp_path / "raw"))
    assert torch.equal(ours._models[0].weight, plain._models[0].weight)
    ours.save_state(str(tmp_path / "small"))
    assert (tmp_path / "small" / "shrinkpoint.json").exists()
    other = fresh(5, torch.nn.Linear(1, 1))
    compress_states(other, sp.Store(tmp_path / "store"))
    with pytest.raises(sp.BadArgumentError, match="1 models were saved, 2 are prepared"):
        other.load_state(str(tmp_path / "small"))
    hooks.remove()
    hooks.remove()
    ours.save_state(str(tmp_path / "again"))
    assert (tmp_path / "again" / "model.safetensors").exists()
    with pytest.raises(sp.BadArgumentError, match="saver must be a Saver or a Store"):
        compress_states(ours, tmp_path)  # type: ignore[arg-type]


def trained(width: int = 5, name: str = "0") -> tuple[accelerate.Accelerator, torch.nn.Module, torch.optim.Optimizer]:
    """Return an accelerator that has stepped once, so that its optimizer has moments."""
    accelerator = accelerate.Accelerator(cpu=True)
    bare = torch.nn.Sequential()
    bare.add_module(name, torch.nn.Linear(width, 2))
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=0.1))
    step(accelerator, model, optimizer)
    return accelerator, model, optimizer


def step(accelerator: accelerate.Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    width = next(model.parameters()).shape[1]
    accelerator.backward(model(torch.rand(4, width)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [entry["exp_avg"].clone() for entry in optimizer.state_dict()["state"].values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_load_that_fails_halfway_leaves_nothing_behind(tmp_path: Path) -> None:
    raw, model, optimizer = trained()
    raw.save_state(str(tmp_path / "raw"))
    expected = moments(optimizer)
    ours, model, optimizer = trained()
    compress_states(ours, sp.Store(tmp_path / "store", cfg=sp.presets.lossless()))
    step(ours, model, optimizer)
    ours.save_state(str(tmp_path / "small"))
    (tmp_path / "small" / "optimizer.bin").unlink()
    with pytest.raises(FileNotFoundError):
        ours.load_state(str(tmp_path / "small"))
    ours.load_state(str(tmp_path / "raw"))
    assert same(moments(optimizer), expected)


def test_a_save_that_fails_halfway_leaves_the_optimizer_answering(tmp_path: Path) -> None:
    ours, _, optimizer = trained()
    expected = moments(optimizer)
    hooks = compress_states(ours, sp.Store(tmp_path / "store", cfg=sp.presets.lossless()))

    def broken(*_: object) -> None:
        raise OSError("no space")

    handle = ours.register_save_state_pre_hook(broken)
    with pytest.raises(OSError, match="no space"):
        ours.save_state(str(tmp_path / "a"))
    assert same(moments(optimizer), expected)
    handle.remove()
    ours.save_state(str(tmp_path / "b"))
    assert same(moments(optimizer), expected)
    ours.load_state(str(tmp_path / "b"))
    assert same(moments(optimizer), expected)
    with pytest.raises(sp.BadArgumentError, match="compressed already; say remove"):
        compress_states(ours, sp.Store(tmp_path / "other"))
    hooks.remove()
    assert not {"save_state", "load_state"} & set(vars(ours))
    compress_states(ours, sp.Store(tmp_path / "other")).remove()

    takes = ours.register_save_state_pre_hook(lambda _, weights, __: weights.clear())
    compress_states(ours, sp.Store(tmp_path / "other"))
    with pytest.raises(sp.BadArgumentError, match=r"0 of 1 models were handed over: .* another hook took the weights"):
        ours.save_state(str(tmp_path / "c"))
    takes.remove()


def test_what_only_one_has_is_loaded_past_if_asked(tmp_path: Path) -> None:
    """`load_state(strict=False)` ignores missing entries, but not other shapes."""
    ours, model, _ = trained()
    compress_states(ours, sp.Store(tmp_path / "store", sp.presets.lossless()))
    ours.save_state(str(tmp_path / "a"))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    model.register_buffer("added", torch.ones(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(sp.BadArgumentError, match="added: not in the checkpoint"):
        ours.load_state(str(tmp_path / "a"))
    ours.load_state(str(tmp_path / "a"), strict=False)
    assert all(torch.equal(value, saved.get(name, torch.ones(2))) for name, value in model.state_dict().items())
    with pytest.raises(sp.BadArgumentError, match="added: not in the checkpoint"):
        ours.load_state(str(tmp_path / "a"))


def test_renamed_and_resized_parameters_are_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    ours, _, _ = trained()
    compress_states(ours, sp.Store(tmp_path / "store"))
    ours.save_state(str(tmp_path / "a"))
    for width, name, why in (
        (6, "0", r"0\.weight: shape \(2, 5\) in the checkpoint, \(2, 6\) in the model"),
        (5, "first", r"first\.weight: not in the checkpoint\n.*\n  0\.weight: not in the model"),
    ):
        other, model, optimizer = trained(width, name)
        before = [p.detach().clone() for p in model.parameters()], moments(optimizer)
        compress_states(other, sp.Store(tmp_path / "store"))
        with pytest.raises(sp.BadArgumentError, match=f"nothing was changed(?s:.*){why}"):
            other.load_state(str(tmp_path / "a"))
        assert same([p.detach() for p in model.parameters()], before[0])
        assert same(moments(optimizer), before[1])
    other, model, optimizer = trained()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    compress_states(other, sp.Store(tmp_path / "store"))
    with pytest.raises(sp.BadArgumentError, match=r"groups of \[2\] parameters in the checkpoint, of \[2, 1\] here"):
        other.load_state(str(tmp_path / "a"))


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["background"]])
def test_two_processes_load_what_was_saved_just_now(ranks: Script, tmp_path: Path, how: list[str]) -> None:
    ranks.together(2, tmp_path, *how)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in "01")
    for found in (first, second):
        assert found["weight"]
        assert found["moments"]
        assert found["drawn"]
    assert first["sum"] == second["sum"]
    assert first["own"] != second["own"]
    assert sorted(f.name for f in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    assert len(sp.Store(tmp_path / "store").steps()) == 2


def test_copies_by_another_name_are_not_rotated_away(tmp_path: Path) -> None:
    project = accelerate.utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = accelerate.Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(5, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    store, home = sp.Store(tmp_path / "store", cfg=sp.presets.lossless()), tmp_path / "checkpoints"
    compress_states(accelerator, store)
    kept = {}
    for number in range(5):
        with torch.no_grad():
            model.weight.fill_(number)
        accelerator.save_state()
        if number == 0:
            # Accelerate takes every folder in there for one of its own, by the number at its end.
            shutil.copytree(home / "checkpoint_0", home / "best_99")
            kept[home / "best_99"] = 0
        if number == 1:
            accelerator.project_configuration.automatic_checkpoint_naming = False
            accelerator.save_state(str(tmp_path / "mine"))
            accelerator.project_configuration.automatic_checkpoint_naming = True
            kept[tmp_path / "mine"] = 1
    for folder, value in kept.items():
        accelerator.load_state(str(folder))
        assert torch.equal(model.weight, torch.full((2, 5), float(value)))
