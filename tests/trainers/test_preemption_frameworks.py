"""Preemption through Transformers, Accelerate and Lightning, and a resumed run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.trainers import Preemption
from shrinkpoint.trainers.preemption import Preempted

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("background", [False, True])
def test_transformers(tmp_path: Path, background: bool) -> None:
    for name in ("transformers", "accelerate"):
        pytest.importorskip(name, reason=f"{name} is not installed; `make frameworks` has it")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from shrinkpoint.trainers.transformers import CompressedCheckpoints, PreemptionCallback, newest_complete

    class Compressed(CompressedCheckpoints, Trainer):
        compression = sp.presets.lossless()

    class Signal(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            if state.global_step == 6:
                os.kill(os.getpid(), signal.SIGUSR2)

    class Text(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            ids = (torch.arange(16) * (i + 1)) % 100
            return {"input_ids": ids, "labels": ids}

    def trainer(folder: Path, *callbacks: Any) -> Any:
        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=1, n_head=2, n_embd=32, vocab_size=100, n_positions=32, bos_token_id=0, eos_token_id=0
        )
        arguments = TrainingArguments(
            str(folder), max_steps=10, save_steps=4, report_to=[], use_cpu=True, disable_tqdm=True
        )
        made = Compressed(GPT2LMHeadModel(config), arguments, train_dataset=Text(), callbacks=list(callbacks))
        made.background = background
        return made

    whole = trainer(tmp_path / "whole")
    whole.train()
    with pytest.raises(Preempted) as ended, Preemption(("SIGUSR2",)) as preemption:
        trainer(tmp_path / "a", Signal(), PreemptionCallback(preemption)).train()
    preemption.close()
    assert (ended.value.code, ended.value.step) == (75, 7)
    newest = newest_complete(tmp_path / "a")
    assert newest is not None
    assert newest.endswith("checkpoint-7")
    resumed = trainer(tmp_path / "a")
    resumed.train(resume_from_checkpoint=newest)
    for mine, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed; `make frameworks` has it")
    from shrinkpoint.trainers.accelerate import compress_states

    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    with sp.Saver(sp.Store(tmp_path / "store")) as saver:
        hooks = compress_states(accelerator, saver)
        preemption = Preemption(("SIGUSR2",))
        hooks.check(preemption, 1, str(tmp_path / "one"))
        assert not (tmp_path / "one").exists()
        os.kill(os.getpid(), signal.SIGUSR2)
        with pytest.raises(Preempted):
            hooks.check(preemption, 2, str(tmp_path / "two"))
        preemption.close()
        assert (tmp_path / "two" / "shrinkpoint.json").exists()
        before = model.weight.detach().clone()
        model.weight.data.zero_()
        accelerator.load_state(str(tmp_path / "two"))
        assert torch.allclose(model.weight, before)
        hooks.remove()


@pytest.mark.parametrize("background", [False, True])
def test_lightning(tmp_path: Path, background: bool) -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed; `make frameworks` has it")
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from shrinkpoint.trainers.lightning import CompressedCheckpoints, CompressedIO

    class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    class Signal(Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(320.0).reshape(40, 8) / 320), batch_size=4
    )

    def trainer(folder: Path, *callbacks: Any) -> Any:
        return pl.Trainer(
            max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
            callbacks=[ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1), *callbacks],
            plugins=[CompressedIO(sp.presets.lossless(), background=background)],
        )  # fmt: skip

    torch.manual_seed(0)
    net = Net()
    with pytest.raises(Preempted) as ended, Preemption() as preemption:
        trainer(tmp_path / "a", Signal(), CompressedCheckpoints(preemption=preemption)).fit(net, data)
    preemption.close()
    assert (ended.value.code, ended.value.step) == (75, 6)
    assert (tmp_path / "a" / "last-preempted.ckpt").exists()
    found = CompressedIO().load_checkpoint(tmp_path / "a" / "last-preempted.ckpt")
    assert found["global_step"] == 6
    assert torch.equal(found["state_dict"]["layer.weight"], net.layer.weight)
    again = trainer(tmp_path / "a", CompressedCheckpoints())
    again.fit(Net(), data, ckpt_path="last")  # Lightning finds it
    assert again.global_step > 10
