"""Lightning as it is on the registry: its Trainer and ModelCheckpoint, over our plugin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shrinkpoint as sp

pytest.importorskip("lightning", reason="lightning is not installed")

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from shrinkpoint.trainers.lightning import CompressedIO, load_from_checkpoint

from .lightning_run import Model, fit

pytestmark = pytest.mark.filterwarnings("ignore")
RUN = Path(__file__).with_name("lightning_run.py")


def finals(folder: Path) -> list[str]:
    return (folder / "losses.txt").read_text().splitlines()


def by_step(folder: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    for line in finals(folder):
        assert found.setdefault(int(line.split()[0]), line) == line
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["background"]])
def test_a_killed_run_resumed_equals_one_that_was_not(tmp_path: Path, how: list[str]) -> None:
    command = [sys.executable, str(RUN), str(tmp_path / "killed"), "500", *how]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 120
    kept = 1 if how else 2
    while len(list((tmp_path / "killed").glob("*.ckpt"))) < kept or len(finals(tmp_path / "killed")) < 14:
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
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
    steps = store.steps()
    CompressedIO().remove_checkpoint(files[0])
    assert store.steps() == [step for step in steps if step != json.loads(files[1].read_text())["step"]] or (
        store.steps() == [json.loads(files[1].read_text())["step"]]
    )


def test_saving_in_a_thread(tmp_path: Path) -> None:
    model = fit(tmp_path / "run", 3, plugin=AsyncCheckpointIO(CompressedIO(sp.presets.lossless())))
    newest = max((tmp_path / "run").glob("*.ckpt"), key=lambda p: p.stat().st_mtime)
    again = load_from_checkpoint(Model, newest)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def frozen(plugin: CompressedIO) -> int:
    """Stop the worker of a plugin, so that its next save stays in flight; its process id."""
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


def test_a_process_that_ends_without_teardown_finishes_the_save(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from shrinkpoint.trainers.lightning import CompressedIO; "
        "plugin = CompressedIO(background=True); "
        "plugin.save_checkpoint({'state_dict': {'a': torch.arange(99.0)}}, sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.ckpt")], check=True, timeout=120)
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
    with pytest.raises(sp.UnsupportedLeafError, match="hyper_parameters/path"):
        plugin.save_checkpoint({"hyper_parameters": {"path": Path("x")}}, tmp_path / "bad.ckpt")
    assert not (tmp_path / "bad.ckpt").exists()


def test_the_last_checkpoint_as_a_link(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path / "run", save_top_k=1, monitor="loss", save_last="link")
    fit(tmp_path / "run", 4, checkpoint=keep)
    for file in (tmp_path / "run").glob("*.ckpt"):
        assert "state_dict" in CompressedIO().load_checkpoint(file)


def test_sensitivity_reaches_the_codec(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Watching(CompressedIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            seen.append((self.grads, self.kinds))
            super().save_checkpoint(checkpoint, path, storage_options)

    fit(tmp_path / "run", 1, plugin=Watching(), sensitivity=4)
    grads, kinds = seen[-1]
    assert sorted(grads) == ["first.bias", "first.weight", "last.bias", "last.weight"]
    assert kinds["first.weight"].layer == "linear"
