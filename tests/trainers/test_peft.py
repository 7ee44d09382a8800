"""LoRA by PEFT: steps hold adapters and optimizer, and restore the trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint import trainers

pytest.importorskip("peft", reason="peft is not installed; `make frameworks` has it")
pytest.importorskip("transformers", reason="transformers is not installed; `make frameworks` has it")

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from shrinkpoint.trainers.transformers import CompressedCheckpoints, expand, newest_complete

pytestmark = pytest.mark.filterwarnings("ignore")
CONFIG = GPT2Config(n_layer=2, n_head=4, n_embd=128, vocab_size=500, n_positions=32, bos_token_id=0, eos_token_id=0)


def base() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(CONFIG)


def lora(seed: int = 1) -> Any:
    model = base()
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0))


class Text(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(16) * (i + 1)) % 500
        return {"input_ids": ids, "labels": ids}


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(16)[None]).logits
    return found


class Compressed(CompressedCheckpoints, Trainer):
    compression = sp.presets.lossless()


def trainer_of(folder: Path, steps: int, **more: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder), max_steps=steps, save_steps=5, report_to=[], use_cpu=True, disable_tqdm=True,
        lr_scheduler_type="constant", **more,
    )  # fmt: skip
    return Compressed(lora(), arguments, train_dataset=Text(), eval_dataset=Text())


def test_trainer(tmp_path: Path) -> None:
    whole = trainer_of(tmp_path / "whole", 10)
    whole.train()
    trainer_of(tmp_path / "a", 5).train()
    resumed = trainer_of(tmp_path / "a", 10)
    resumed.train(resume_from_checkpoint=newest_complete(tmp_path / "a"))
    assert torch.equal(outputs(resumed.model), outputs(whole.model))
    store = sp.Store(tmp_path / "a" / "shrinkpoint")
    sizes = [store.describe(step).raw_nbytes for step in store.steps()]
    # Two layers of 128 x 4 and 4 x 384, three times for Adam's moments, against 2 MB of the model.
    assert max(sizes) < 60_000
    # The adapter of a checkpoint, on the original base, by PEFT itself.
    folder = expand(tmp_path / "a" / "checkpoint-10")
    assert torch.equal(outputs(PeftModel.from_pretrained(base(), folder)), outputs(whole.model))


def test_the_best_model_is_loaded(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, 10, load_best_model_at_end=True, eval_strategy="steps", eval_steps=5, per_device_eval_batch_size=32
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None


def test_another_base_is_refused(tmp_path: Path) -> None:
    trainer_of(tmp_path, 5).train()
    other = trainer_of(tmp_path, 10)
    with torch.no_grad():
        other.model.base_model.model.transformer.wte.weight[0, 0] += 1
    with pytest.raises(sp.MissingParentError, match="are not those of the checkpoint"):
        other.train(resume_from_checkpoint=newest_complete(tmp_path))


def test_plain_loop(tmp_path: Path) -> None:
    model = lora()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    store = sp.Store(tmp_path, sp.presets.lossless())
    for step in (1, 2):
        model(**{k: v[None] for k, v in Text()[step].items()}).loss.backward()
        optimizer.step()
        saved: Any = trainers.save(store, step, model, optimizer, frozen="once")
    assert saved.raw_nbytes < 60_000
    again = lora(seed=2)
    new = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=0.01)
    assert trainers.resume(store, again, new) == 2
    assert torch.equal(outputs(again), outputs(model))


@pytest.mark.parametrize("frozen", ["once", "gpt2@abc"])
def test_accelerate(tmp_path: Path, frozen: str) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed; `make frameworks` has it")
    from shrinkpoint.trainers.accelerate import compress_states

    def prepared(seed: int) -> tuple[Any, Any]:
        accelerator = accelerate.Accelerator(cpu=True)
        model = lora(seed)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        model, _ = accelerator.prepare(model, optimizer)
        store = sp.Store(tmp_path / "store", sp.presets.lossless())
        return model, (accelerator, compress_states(accelerator, store, frozen=frozen))

    model, (accelerator, hooks) = prepared(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1)
    accelerator.save_state(str(tmp_path / "state"))
    expected = outputs(model)
    hooks.remove()
    assert sp.Store(tmp_path / "store").describe(0).raw_nbytes < 60_000
    again, (accelerator, hooks) = prepared(2)
    assert not torch.equal(outputs(again), expected)
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(outputs(again), expected)
    hooks.remove()
