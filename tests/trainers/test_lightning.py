"""The released Lightning: its Trainer and ModelCheckpoint over our plugin."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shrinkpoint as sp

pytest.importorskip("lightning", reason="lightning is not installed; `make frameworks` has it")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset

from shrinkpoint.trainers import lightning as adapter
from shrinkpoint.trainers import processes
from shrinkpoint.trainers.lightning import CompressedCheckpoints, CompressedIO, load_from_checkpoint
from shrinkpoint.trainers.loop import RanksChangedWarning

from ..forking import Script
from .killing import by_step, run_and_kill
from .lightning_run import AVERAGES, Model, Normed, Searching, averaged, fit
from .watching import bounds_handed_to_savers

pytestmark = pytest.mark.filterwarnings("ignore")
RUN = Path(__file__).with_name("lightning_run.py")
DATA = torch.randn(16, 64, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with Script(RUN) as found:
        yield found


def finals(folder: Path) -> list[str]:
    return (folder / "losses.txt").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["background"]])
def test_a_killed_run_resumed_equals_one_that_was_not(script: Script, tmp_path: Path, how: list[str]) -> None:
    killed, kept = tmp_path / "killed", 1 if how else 2
    run_and_kill(
        script, killed, 5000, *how, once=lambda: len(list(killed.glob("*.ckpt"))) >= kept and len(finals(killed)) >= 14
    )
    epochs = len(by_step(tmp_path / "killed")) // 4 + 2
    newest = max((tmp_path / "killed").glob("*.ckpt"), key=lambda p: p.stat().st_mtime)
    fit(tmp_path / "killed", epochs, newest)
    fit(tmp_path / "whole", epochs)
    assert by_step(tmp_path / "killed") == by_step(tmp_path / "whole")


def test_checkpoints_are_deltas_and_rotate(tmp_path: Path) -> None:
    model = fit(tmp_path / "run", 5, cfg=sp.Config())
    files = sorted((tmp_path / "run").glob("*.ckpt"))
    store = sp.Store(tmp_path / "run" / "shrinkpoint")
    assert len(files) == 2
    assert len(store.steps()) == 2
    assert all(store.describe(step).is_delta for step in store.steps())
    assert all(file.stat().st_size < 1000 for file in files)
    again = load_from_checkpoint(Model, max(files, key=lambda p: p.stat().st_mtime))
    assert again.hparams == model.hparams == {"width": 64, "rate": 0.01}
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.allclose(a, b, atol=0.1 * float(b.detach().abs().max()))
    held = {file: json.loads(file.read_text())["step"] for file in files}
    assert sorted(held.values()) == store.steps()
    CompressedIO().remove_checkpoint(files[0])
    assert not files[0].exists()
    assert store.steps() == [held[files[1]]]


def test_a_trainer_of_pytorch_lightning_takes_them_too(tmp_path: Path) -> None:
    other = pytest.importorskip("pytorch_lightning", reason="only Lightning's other name is installed")

    class Small(other.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    def run(epochs: int, resume: Path | None = None) -> torch.Tensor:
        torch.manual_seed(epochs if resume else 0)
        trainer = other.Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[CompressedIO(sp.presets.lossless())],
            callbacks=[
                other.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1),
                CompressedCheckpoints(sensitivity=2),
            ],
        )
        model = Small()
        trainer.fit(model, DataLoader(TensorDataset(DATA), batch_size=4, shuffle=True), ckpt_path=resume)
        return model.layer.weight.detach()

    assert other.Trainer is not pl.Trainer
    whole = run(3)
    (second,) = tmp_path.glob("epoch=1-*.ckpt")
    assert sp.Store(tmp_path / "shrinkpoint").describe(1).is_delta
    assert torch.equal(run(3, second), whole)
    assert not torch.equal(load_from_checkpoint(Small, second).layer.weight, whole)


def test_saving_in_a_thread(tmp_path: Path) -> None:
    model = fit(tmp_path / "run", 3, plugin=AsyncCheckpointIO(CompressedIO(sp.presets.lossless())))
    newest = max((tmp_path / "run").glob("*.ckpt"), key=lambda p: p.stat().st_mtime)
    again = load_from_checkpoint(Model, newest)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def frozen(plugin: CompressedIO) -> int:
    """Stop the worker of a plugin, so that its next save stays in flight; return its id."""
    (saver,) = plugin._savers.values()
    pid = saver._saver.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_nothing_is_removed_before_the_next_one_is_durable(tmp_path: Path, end: signal.Signals) -> None:
    plugin = CompressedIO(sp.presets.lossless(), background=True)
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    plugin.save_checkpoint({"state_dict": {"a": torch.full((99,), 1.0)}}, first)
    assert plugin.load_checkpoint(first)["state_dict"]["a"].tolist() == [1.0] * 99
    pid = frozen(plugin)
    live = torch.full((99,), 2.0)
    plugin.save_checkpoint({"state_dict": {"a": live}}, second)
    live.zero_()
    plugin.remove_checkpoint(first)
    assert first.exists()
    assert not second.exists()
    os.kill(pid, end)
    if end == signal.SIGKILL:
        with pytest.raises(ChildProcessError):
            plugin.teardown()
        assert not second.exists()
        assert CompressedIO().load_checkpoint(first)["state_dict"]["a"].tolist() == [1.0] * 99
    else:
        plugin.teardown()
        assert not first.exists()
        assert CompressedIO().load_checkpoint(second)["state_dict"]["a"].tolist() == [2.0] * 99
        assert sp.Store(tmp_path / "shrinkpoint").steps() == [1]
    plugin.save_checkpoint({"state_dict": {"a": live}}, second)
    assert CompressedIO().load_checkpoint(second)["state_dict"]["a"].tolist() == [0.0] * 99
    plugin.teardown()


def test_a_fit_in_the_background_leaves_all_durable(tmp_path: Path) -> None:
    model = fit(tmp_path / "run", 5, plugin=CompressedIO(background=True))
    files = sorted((tmp_path / "run").glob("*.ckpt"))
    store = sp.Store(tmp_path / "run" / "shrinkpoint")
    assert len(files) == len(store.steps()) == 2
    assert all(store.describe(step).is_delta for step in store.steps())
    for a, b in zip(model.parameters(), load_from_checkpoint(Model, files[-1]).parameters(), strict=True):
        assert torch.allclose(a, b, atol=0.1 * float(b.detach().abs().max()))
    resumed = fit(tmp_path / "run", 6, files[-1], plugin=CompressedIO(background=True))
    assert resumed is not model
    assert store.describe(store.steps()[-1]).is_delta


def test_chains_are_compacted_between_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = bounds_handed_to_savers(monkeypatch, adapter)
    cfg = sp.presets.lossless(chain=sp.ChainPolicy(None))
    model = fit(tmp_path / "run", 6, plugin=CompressedIO(cfg, background=True, compact=1.0))
    assert bounds == [1.0]
    store = sp.Store(tmp_path / "run" / "shrinkpoint")
    assert len(store.steps()) == 2
    assert store.verify() == {}
    newest = max((tmp_path / "run").glob("*.ckpt"), key=lambda p: p.stat().st_mtime)
    again = load_from_checkpoint(Model, newest)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    with pytest.raises(sp.BadArgumentError, match=r"compact: .* say background=True"):
        CompressedIO(compact=2.0)


def test_a_process_that_ends_without_teardown_finishes_the_save(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from shrinkpoint.trainers.lightning import CompressedIO; "
        "plugin = CompressedIO(background=True); "
        "plugin.save_checkpoint({'state_dict': {'a': torch.arange(99.0)}}, sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.ckpt")], check=True, timeout=600)
    assert CompressedIO().load_checkpoint(tmp_path / "a.ckpt")["state_dict"]["a"].tolist() == list(range(99))


def test_a_folder_can_be_moved_and_a_file_alone_cannot(tmp_path: Path) -> None:
    fit(tmp_path / "run", 2)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    file = next((tmp_path / "elsewhere").glob("*.ckpt"))
    assert "state_dict" in CompressedIO().load_checkpoint(file)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "x.ckpt").write_bytes(file.read_bytes())
    with pytest.raises(sp.MissingParentError, match="together with its store"):
        CompressedIO().load_checkpoint(tmp_path / "alone" / "x.ckpt")


def test_lightnings_own_checkpoints_are_read_too(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(2)}}, tmp_path / "x.ckpt")
    assert CompressedIO().load_checkpoint(tmp_path / "x.ckpt")["state_dict"]["a"].tolist() == [1, 1]
    with pytest.raises(FileNotFoundError):
        CompressedIO().load_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(sp.BadArgumentError, match="not a checkpoint of shrinkpoint"):
        load_from_checkpoint(Model, tmp_path / "x.ckpt")


def test_the_same_path_saved_again(tmp_path: Path) -> None:
    plugin = CompressedIO(sp.presets.lossless())
    for value in (1.0, 2.0, 3.0):
        plugin.save_checkpoint({"state_dict": {"a": torch.full((99,), value)}}, tmp_path / "last.ckpt")
        found = plugin.load_checkpoint(tmp_path / "last.ckpt", map_location="cpu")
        assert found["state_dict"]["a"].tolist() == [value] * 99
    assert len(sp.Store(tmp_path / "shrinkpoint").steps()) == 1
    with pytest.raises(sp.UnsupportedLeafError, match="hyper_parameters/names"):
        plugin.save_checkpoint({"hyper_parameters": {"names": {"x"}}}, tmp_path / "bad.ckpt")
    assert not (tmp_path / "bad.ckpt").exists()


def test_the_last_checkpoint_as_a_link(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path / "run", save_top_k=1, monitor="loss", save_last="link")
    fit(tmp_path / "run", 4, checkpoint=keep)
    for file in (tmp_path / "run").glob("*.ckpt"):
        assert "state_dict" in CompressedIO().load_checkpoint(file)


def test_sensitivity_reaches_the_codec(tmp_path: Path) -> None:
    """Gradient averages change which weights the codec protects."""
    cfg = sp.presets.inshrinkerator(protect=0.05, prune=0.0)
    trained, stored = [], []
    for how in (4, None):
        model = fit(tmp_path / str(how), 1, cfg=cfg, sensitivity=how, width=256)
        again = load_from_checkpoint(Model, next((tmp_path / str(how)).glob("*.ckpt")))
        trained.append(model.first.weight.detach())
        stored.append(again.first.weight.detach())
    assert torch.equal(*trained)
    assert not torch.equal(*stored)
    # Protected weights are kept in half the bits; all others are those of a few bins.
    protected = [(one - trained[0]).abs() <= 2**-8 * trained[0].abs() for one in stored]
    assert 0.03 < float((protected[0] & ~protected[1]).float().mean()) < 0.2


def test_layer_types_and_gradients_are_handed_over(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Watching(CompressedIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            seen.append((self.grads, self.kinds))
            super().save_checkpoint(checkpoint, path, storage_options)

    fit(tmp_path / "run", 1, plugin=Watching(), sensitivity=4)
    grads, kinds = seen[-1]
    assert sorted(grads) == ["first.bias", "first.weight", "last.bias", "last.weight"]
    assert kinds["first.weight"].layer == "linear"


@pytest.mark.parametrize(("background", "ahead"), [(False, None), (True, None), (False, True), (True, True)])
def test_what_a_search_finds_is_what_checkpoints_are_compressed_with(
    tmp_path: Path, background: bool, ahead: bool | None
) -> None:
    searching, folder = Searching(), tmp_path / "run"
    cfg = sp.Config(ahead=ahead)
    every = ModelCheckpoint(folder, save_top_k=-1, monitor="epoch", mode="max")
    how: dict[str, Any] = {"search": searching, "sensitivity": 4, "width": 256}
    fit(folder, 3, plugin=CompressedIO(cfg, background=background), checkpoint=every, **how)
    fit(tmp_path / "plain", 3, width=256)
    # The trials do not change the run.
    assert finals(folder) == finals(tmp_path / "plain")
    store, found = sp.Store(folder / "shrinkpoint"), searching.found
    assert len(found) == len(store.steps()) == 3
    assert [g["last"] for g in searching.given] == [None, *found[:-1]]
    parents = [None if g["prev"] is None else g["prev"].id for g in searching.given]
    assert parents == [None, *(store.read(step).id for step in store.steps()[:-1])]
    assert all(len(g["grads"]) == 4 and g["kinds"]["first.weight"].layer == "linear" for g in searching.given)
    # Extrapolated where the plugin is to be, and the average is not in another process; four steps an epoch.
    known = ahead and not background
    assert found[1].config.ahead is bool(known)
    assert [g["options"].earlier.steps for g in searching.given if "options" in g] == (
        [None, 4.0, 7.6] if known else []
    )
    for step, one in zip(store.steps(), found, strict=True):
        state = store.load(step, count=False)
        assert one.met
        assert one.baseline is not None
        assert searching.evaluate(state) / one.baseline - 1 == pytest.approx(one.degradation, abs=1e-6)
        assert sp.SearchResult.from_json(json.loads(state["callbacks"]["CompressedCheckpoints"]["search"])) == one
    # A run that resumes goes on from the search of the checkpoint that it resumed, and counts the restore.
    newest = max(folder.glob("*.ckpt"), key=lambda p: p.stat().st_mtime)
    again = Searching()
    fit(
        folder,
        4,
        newest,
        plugin=CompressedIO(cfg, background=background),
        checkpoint=every,
        **(how | {"search": again}),
    )
    assert len(again.found) == 1
    assert again.given[0]["last"] == found[-1].restored()
    assert again.given[0]["prev"].id == store.read(store.steps()[2]).id
    assert again.found[0].restores == 1


def test_a_search_is_stored_without_generators_too(tmp_path: Path) -> None:
    first, again = Searching(), Searching()
    every = ModelCheckpoint(tmp_path, save_top_k=-1, monitor="epoch", mode="max")
    how: dict[str, Any] = {"checkpoint": every, "rng": False}
    fit(tmp_path, 1, search=first, **how)
    (newest,) = tmp_path.glob("*.ckpt")
    fit(tmp_path, 2, newest, search=again, **how)
    assert again.given[0]["last"] == first.found[-1].restored()
    # A checkpoint from before a search holds no search to continue.
    callback = CompressedCheckpoints(rng=False, search=first)
    callback.load_state_dict(callback.state_dict())
    assert callback.found is None


def test_a_search_needs_the_plugin(tmp_path: Path) -> None:
    with pytest.raises(
        sp.BadArgumentError, match=r"not within AsyncCheckpointIO; take CompressedIO\(background=True\)"
    ):
        fit(tmp_path / "async", 1, plugin=AsyncCheckpointIO(CompressedIO()), search=Searching())
    with pytest.raises(sp.BadArgumentError, match="CompressedIO, which is not among the plugins"):
        fit(tmp_path / "run", 1, plugin=TorchCheckpointIO(), search=Searching())


def test_gradients_are_those_of_the_batch_and_counted_as_lightning_counts(tmp_path: Path, monkeypatch: Any) -> None:
    """Lightning makes them in a closure within the optimizer's step."""
    used: list[dict[str, torch.Tensor]] = []
    seen: list[Any] = []
    counts: list[tuple[int, int]] = []

    class Watching(CompressedIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            seen.append(self.grads)
            super().save_checkpoint(checkpoint, path, storage_options)

    def before(self: Model, optimizer: Any) -> None:
        used.append({n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None})

    class Counting(ModelCheckpoint):
        def on_train_batch_end(self, trainer: Any, *args: Any, **named: Any) -> None:
            found = next(c for c in trainer.callbacks if isinstance(c, CompressedCheckpoints))
            counts.append((trainer.global_step, found._tracker.batch))
            super().on_train_batch_end(trainer, *args, **named)

    monkeypatch.setattr(Model, "on_before_optimizer_step", before)
    keep = Counting(tmp_path / "run", save_top_k=-1, monitor="epoch", mode="max")
    fit(tmp_path / "run", 2, plugin=Watching(), checkpoint=keep, sensitivity=4)
    assert len(used) == 8
    for number, found in enumerate(seen[:2]):
        expected = {n: torch.zeros_like(g) for n, g in used[0].items()}
        for one in used[: 4 * (number + 1)]:
            expected = {n: 0.9 * one[n] + 0.1 * g for n, g in expected.items()}
        for name, g in expected.items():
            torch.testing.assert_close(found[name], g, rtol=1e-4, atol=1e-7)
    assert counts == [(n, n) for n in range(1, 9)]


def found_by(folder: Path) -> list[sp.SearchResult]:
    """Return the search results of two processes, after a check that they are equal."""
    mine, other = (json.loads((folder / rank / "found.json").read_text()) for rank in "01")
    found = [sp.SearchResult.from_json(one) for one in mine]
    # Their clocks are their own.
    assert found == [
        dataclasses.replace(
            sp.SearchResult.from_json(b), **{n: getattr(a, n) for n in ("seconds", "finished", "process", "share")}
        )
        for a, b in zip(found, other, strict=True)
    ]
    return found


def checkpoints(folder: Path, epoch: int) -> list[Path]:
    return sorted(folder.glob(f"epoch={epoch}-*.ckpt"))


@pytest.mark.parametrize(
    ("which", "ddp"),
    [
        *((which, False) for which in AVERAGES),
        *(pytest.param(which, True, marks=pytest.mark.slow) for which in ("ema", "swa")),
    ],
)
def test_averages_of_weights_go_on_where_they_were(script: Script, tmp_path: Path, which: str, ddp: bool) -> None:
    """A run resumed with a weight average of Lightning has equal losses and weights."""

    def run(*resume: Path) -> None:
        if ddp:
            script.together(2, tmp_path, 6, "average", which, *resume)
        else:
            averaged(tmp_path, 6, which, *resume)

    run()
    (early,), (late,) = checkpoints(tmp_path, 3), checkpoints(tmp_path, 5)
    run(early)
    for home in [tmp_path / rank for rank in "01"] if ddp else [tmp_path]:
        # Lightning's `StochasticWeightAveraging` adds an epoch for the norms.
        steps, epochs = 2 if ddp else 4, 6 + (which == "swa")
        lines = finals(home)
        assert len(lines) == steps * (2 * epochs - 4)
        assert lines[steps * epochs :] == lines[steps * 4 : steps * epochs]
    # Lightning gives the second file of a name another one.
    again = next(path for path in checkpoints(tmp_path, 5) if path != late)
    whole, resumed = (CompressedIO().load_checkpoint(path) for path in (late, again))
    for place in ("state_dict", "current_model_state"):
        assert whole.get(place, {}).keys() == resumed.get(place, {}).keys()
        for name, tensor in whole.get(place, {}).items():
            assert torch.equal(tensor, resumed[place][name])
    if which == "swa":
        mine, other = (state["callbacks"]["StochasticWeightAveraging"] for state in (whole, resumed))
        assert mine["n_averaged"] == other["n_averaged"] > 1
        assert mine["average_model_state"].keys() == whole["state_dict"].keys()
    else:
        assert whole["averaging_state"]["n_averaged"] == resumed["averaging_state"]["n_averaged"] > 1
        assert any(not torch.equal(t, whole["current_model_state"][n]) for n, t in whole["state_dict"].items())


def test_averages_in_the_place_of_the_model_are_compressed_as_weights(tmp_path: Path) -> None:
    cfg = sp.presets.inshrinkerator(protect=0.05, prune=0.0)
    seen: list[Any] = []

    class Watching(CompressedIO):
        def gradients(self, state: dict[str, Any]) -> Any:
            seen.append(super().gradients(state))
            return seen[-1]

    averaged(tmp_path, 2, "ema", plugin=Watching(cfg), sensitivity=4, width=256)
    assert list(seen[-1]) == ["state_dict", "current_model_state"]
    assert "first.weight" in seen[-1]["current_model_state"]
    store = sp.Store(tmp_path / "shrinkpoint")
    rows = {row.path: row for row in store.read(store.steps()[-1]).summary()}
    for name in ("first", "last"):
        both = [rows[f"{place}/{name}.weight"] for place in ("state_dict", "current_model_state")]
        # Kinds are of one tree, the model's place in the file, where Lightning puts the averages.
        assert [row.stream for row in both] == ["levels", "bytes"]
    averages = load_from_checkpoint(Normed, checkpoints(tmp_path, 1)[0])
    stored = store.load(store.steps()[-1], count=False)["state_dict"]
    assert all(torch.equal(tensor, stored[name]) for name, tensor in averages.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["background", "ahead"])
def test_two_processes_search_together(script: Script, tmp_path: Path, how: str) -> None:
    """Two processes search and save the state of the first, although buffers differ."""
    folder = tmp_path / "run"
    for where, epochs, what in (("run", 2, how), ("plain", 3, "none")):
        script.together(2, tmp_path / where, epochs, "search", what)
    found = found_by(folder)
    assert len(found) == 2
    assert all(one.met and {t.rank for t in one.trials} == {0, 1} for one in found)
    assert [one.config.ahead for one in found] == [how == "ahead"] * 2
    (newest,) = folder.glob("*.ckpt")
    state = CompressedIO().load_checkpoint(newest)
    assert sp.SearchResult.from_json(json.loads(state["callbacks"]["CompressedCheckpoints"]["search"])) == found[-1]
    store = sp.Store(folder / "shrinkpoint")
    assert store.describe(store.steps()[-1]).is_delta
    judge = Searching(Normed)
    assert judge.evaluate(state) / found[-1].baseline - 1 == pytest.approx(found[-1].degradation, abs=1e-6)
    script.together(2, folder, 3, "search", "plain", newest)
    (again,) = found_by(folder)
    assert again.restores == 1
    for rank in "01":  # until it resumes from lossy state, the run equals one without a search
        assert finals(folder / rank)[:4] == finals(tmp_path / "plain" / rank)[:4]


@pytest.mark.slow
def test_a_sharded_model_killed_and_resumed_equals_one_that_was_not(script: Script, tmp_path: Path) -> None:
    """A killed and resumed FSDP2 run equals an uninterrupted one."""
    killed, how = tmp_path / "killed", "background"

    def is_enough() -> bool:
        return len(list(killed.glob("*.ckpt"))) >= 1 and all(
            (killed / rank / "losses.txt").exists() and len(finals(killed / rank)) >= 9 for rank in "01"
        )

    run_and_kill(script, killed, 5000, "sharded", how, once=is_enough)
    epochs = max(len(by_step(killed / rank)) for rank in "01") // 2 + 2
    newest = max(killed.glob("*.ckpt"), key=lambda p: p.stat().st_mtime)
    for folder, more in ((killed, [newest]), (tmp_path / "whole", [])):
        script.together(2, folder, epochs, "sharded", how, *more)
    for rank in "01":
        assert by_step(killed / rank) == by_step(tmp_path / "whole" / rank)
    # All of it is there when `fit` returns, whole, and the raw file that Lightning was given is gone.
    assert list(killed.glob("*.raw")) == []
    (last,) = killed.glob(f"epoch={epochs - 1}-*.ckpt")
    state = CompressedIO().load_checkpoint(last)
    other = CompressedIO().load_checkpoint(next((tmp_path / "whole").glob(last.name)))
    assert list(state["state_dict"]) == ["first.weight", "first.bias", "last.weight", "last.bias"]
    for name, value in state["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name])
    for number, value in state["optimizer_states"][0]["state"].items():
        assert torch.equal(value["exp_avg"], other["optimizer_states"][0]["state"][number]["exp_avg"])
    # What the first process cannot load is an error on both.
    broken = killed / "broken.ckpt"
    broken.write_text(last.read_text().replace('"step": ', '"step": 9'))
    script.together(2, killed, epochs + 1, "sharded", how, broken, fails=True)
    for rank, what in (("0", "MissingParentError: .*points to step 9"), ("1", "the first process cannot load it")):
        assert re.search(what, (killed / rank / "error.txt").read_text())
    # One process alone, whose model is not in parts, goes on with it.
    fit(tmp_path / "alone", epochs + 1, last)
    assert finals(tmp_path / "alone")


@pytest.mark.slow
def test_a_sharded_model_is_searched(script: Script, tmp_path: Path) -> None:
    """A sharded model is searched as a whole state, with averages of all gradients."""
    script.together(2, tmp_path, 2, "sharded", "search")
    found = found_by(tmp_path)
    assert all(one.met and {t.rank for t in one.trials} == {0, 1} for one in found)
    store = sp.Store(tmp_path / "shrinkpoint")
    for step, one in zip(store.steps(), found, strict=True):
        state = store.load(step, count=False)
        assert Searching().evaluate(state) / one.baseline - 1 == pytest.approx(one.degradation, abs=1e-6)


REFUSED = "writes or reads checkpoints by itself, past CompressedIO; take ModelParallelStrategy"


@pytest.mark.slow
def test_what_saves_past_the_plugin_is_refused_before_it_trains(script: Script, tmp_path: Path) -> None:
    script.together(2, tmp_path, 1, "sharded", "distributed", fails=True)
    for rank in "01":
        error = (tmp_path / rank / "error.txt").read_text()
        assert error.startswith(f"BadArgumentError: strategy: ModelParallelStrategy {REFUSED}")
    assert list(tmp_path.rglob("*.ckpt")) == list(tmp_path.rglob("losses.txt")) == []


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy"])
@pytest.mark.parametrize("plugin", [CompressedIO, lambda: AsyncCheckpointIO(CompressedIO())])
def test_strategies_that_need_a_gpu_are_refused(package: str, name: str, plugin: Any) -> None:
    """Unsupported strategies are refused when fitting begins."""
    kind: Any = getattr(pytest.importorskip(f"{package}.strategies"), name)
    strategy = object.__new__(kind)
    strategy._checkpoint_io = plugin()
    with pytest.raises(sp.BadArgumentError, match=f"strategy: {name} {REFUSED}"):
        strategy.setup(SimpleNamespace(state=SimpleNamespace(fn="fit")))
    # Without the plugin it is Lightning's own method, which then misses attributes.
    strategy._checkpoint_io = TorchCheckpointIO()
    with pytest.raises(AttributeError):
        strategy.setup(SimpleNamespace(state=SimpleNamespace(fn="fit")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "on_first", "on_second"),
    [
        ("fails", "search failed on rank 1: .*no data", "evaluate raised OSError at the state itself: no data"),
        ("dies", "the process group failed during the search", None),
        ("alone", "rank 1 has found another configuration than rank 0; hand `group` on", "rank 1 has found another"),
        ("elsewhere", "search failed on rank 1: MissingParentError", "process 1 cannot read step 0 of .*all must see"),
    ],
)
def test_a_search_that_fails_on_one_process_fails_on_all(
    script: Script, tmp_path: Path, how: str, on_first: str, on_second: str | None
) -> None:
    script.together(2, tmp_path, 2, "search", how, fails=True)
    assert re.search(on_first, (tmp_path / "0" / "error.txt").read_text())
    if on_second is not None:
        assert re.search(on_second, (tmp_path / "1" / "error.txt").read_text())
    # The earlier checkpoint is there.
    assert ["epoch=0" in p.name for p in tmp_path.rglob("*.ckpt")] == [True] * (how != "alone")


@pytest.mark.slow
def test_each_process_goes_on_with_its_own_random_numbers(script: Script, tmp_path: Path) -> None:
    """Each of two processes resumes with its own random numbers."""
    script.together(2, tmp_path / "whole", 4, "ddp")
    script.together(2, tmp_path / "half", 2, "ddp")
    newest = max((tmp_path / "half").glob("*.ckpt"), key=lambda p: p.stat().st_mtime)
    script.together(2, tmp_path / "half", 4, "ddp", newest)
    lines = [by_step(tmp_path / "whole" / rank) for rank in "01"]
    assert lines[0] != lines[1]
    assert len(lines[0]) == 8
    assert [by_step(tmp_path / "half" / rank) for rank in "01"] == lines
    # One process alone has no generators of its own there.
    newest = max((tmp_path / "half").glob("*.ckpt"), key=lambda p: p.stat().st_mtime)
    callback = CompressedCheckpoints()
    with pytest.warns(RanksChangedWarning, match="saved by 2 processes, resumed by 1"):
        callback.load_state_dict(CompressedIO().load_checkpoint(newest)["callbacks"][callback.state_key])


def test_a_process_that_fails_does_not_wait_for_the_others(monkeypatch: Any) -> None:
    """A failed process saves its own generators without a collective."""
    monkeypatch.setattr(processes, "world", lambda: 2)
    callback, trainer = CompressedCheckpoints(), SimpleNamespace(strategy=SimpleNamespace(checkpoint_io=CompressedIO()))
    with pytest.raises(ValueError, match="process group has not been initialized"):
        callback.state_dict()
    callback.on_exception(trainer, pl.LightningModule(), KeyboardInterrupt())
    assert len(callback.state_dict()["rng"]) == 1


class Tuned(Model):
    """A model whose batch size is tuned."""

    def __init__(self) -> None:
        super().__init__(64, 0.01)
        self.batch_size, self.rate = 2, 0.01

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=self.batch_size)


@pytest.mark.parametrize("background", [False, True])
def test_the_tuner_puts_the_very_weights_back(tmp_path: Path, background: bool) -> None:
    model, callback = Tuned(), CompressedCheckpoints()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, plugins=[CompressedIO(background=background)], callbacks=[callback],
        enable_checkpointing=False,
    )  # fmt: skip
    tuner = Tuner(trainer)
    found = tuner.lr_find(model, num_training=12, attr_name="rate")
    assert len(found.results["loss"]) > 1
    tuner.scale_batch_size(model, mode="power", max_trials=2)
    assert model.batch_size > 2
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
    assert list(tmp_path.iterdir()) == []
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    trainer.strategy.checkpoint_io.teardown()
    assert "state_dict" in CompressedIO().load_checkpoint(tmp_path / "end.ckpt")


def test_what_spawned_processes_hand_over_is_exact(tmp_path: Path) -> None:
    weights = {"first.weight": torch.randn(64, 64)}
    plugin = CompressedIO()
    plugin.save_checkpoint(weights, tmp_path / ".temp.ckpt")
    assert [p.name for p in tmp_path.iterdir()] == [".temp.ckpt"]
    assert torch.equal(plugin.load_checkpoint(tmp_path / ".temp.ckpt")["first.weight"], weights["first.weight"])
    plugin.remove_checkpoint(tmp_path / ".temp.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_copy_by_another_name_keeps_its_step(tmp_path: Path) -> None:
    plugin = CompressedIO(sp.presets.lossless())
    plugin.save_checkpoint({"state_dict": {"a": torch.arange(99.0)}}, tmp_path / "a.ckpt")
    (tmp_path / "best").write_bytes((tmp_path / "a.ckpt").read_bytes())
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert plugin.load_checkpoint(tmp_path / "best")["state_dict"]["a"].tolist() == list(range(99))
    plugin.remove_checkpoint(tmp_path / "best")
    assert sp.Store(tmp_path / "shrinkpoint").steps() == []


class _Order(enum.Enum):
    FIRST = "first"


@dataclasses.dataclass
class _Part:
    rate: float
    where: Path


def _fitted(tmp_path: Path, **parameters: Any) -> Path:
    class Net(pl.LightningModule):
        def __init__(self, **parameters: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 8)), batch_size=4)
    trainer = pl.Trainer(
        max_steps=1, logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        enable_checkpointing=False, plugins=[CompressedIO()],
    )  # fmt: skip
    trainer.fit(Net(**parameters), data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def test_hyperparameters_with_an_obvious_plain_form_get_it(tmp_path: Path) -> None:
    path = _fitted(tmp_path, order=_Order.FIRST, part=_Part(0.1, Path("x/y")), data=Path("a"), rates=(0.1, 2))
    found = CompressedIO().load_checkpoint(path)["hyper_parameters"]
    assert found == {"order": "first", "part": {"rate": 0.1, "where": "x/y"}, "data": "a", "rates": (0.1, 2)}
    tuned = tmp_path / f".lr_find_{36 * '0'}.ckpt"  # the tuner's own
    CompressedIO().save_checkpoint({"hyper_parameters": {"order": _Order.FIRST}}, tuned)
    assert CompressedIO().load_checkpoint(tuned) == {"hyper_parameters": {"order": "first"}}


def test_hyperparameters_that_cannot_be_stored_are_reported_when_fitting_begins(tmp_path: Path) -> None:
    with pytest.raises(sp.BadArgumentError, match=r"(?s)names.*dtype") as raised:
        _fitted(tmp_path, names={"x"}, dtype=torch.float32, rate=0.1)
    assert "rate" not in str(raised.value)
    assert not (tmp_path / "shrinkpoint").exists()


class _Slashed(Model):
    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = super().training_step(batch, number)
        self.log("val/loss", loss)
        return loss


def test_a_metric_with_a_slash_takes_one_store_and_leaves_no_folders(tmp_path: Path) -> None:
    """Each file stands in a folder of its own then; the callback's `dirpath` decides where the store is."""
    keep = ModelCheckpoint(
        tmp_path, "{epoch}-{val/loss:.5f}", monitor="val/loss", save_top_k=2, save_on_train_epoch_end=True
    )
    trainer = pl.Trainer(
        max_epochs=4, plugins=[CompressedIO()], callbacks=[keep, CompressedCheckpoints()], logger=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(_Slashed(64, 0.01), DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=8))
    assert [p.parent for p in tmp_path.rglob("shrinkpoint")] == [tmp_path]
    files = list(tmp_path.rglob("*.ckpt"))
    assert len(files) == len(sp.Store(tmp_path / "shrinkpoint").steps()) == 2
    assert {p.name for p in tmp_path.iterdir() if p.is_dir()} == {"shrinkpoint", *(f.parent.name for f in files)}
    assert load_from_checkpoint(_Slashed, keep.best_model_path).hparams["width"] == 64
