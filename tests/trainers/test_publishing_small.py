"""Publishing of adapters alone, and of quantized weights with their scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.trainers.publishing.checkpoint_folder import CheckpointFolder

RANK, HIDDEN, LAYERS = 16, 512, 8


def adapters(seed: int) -> dict[str, torch.Tensor]:
    """Rank-16 adapters of the query and value projections, with the names that PEFT gives."""
    g = torch.Generator().manual_seed(seed)
    state = {}
    for layer in range(LAYERS):
        for name in ("q_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            state[f"{prefix}.lora_A.weight"] = (0.02 * torch.randn(RANK, HIDDEN, generator=g)).bfloat16()
            state[f"{prefix}.lora_B.weight"] = (0.02 * torch.randn(HIDDEN, RANK, generator=g)).bfloat16()
    return state


def stepped(state: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Move a share of the elements by one unit of the last place."""
    g, moved = torch.Generator().manual_seed(seed), {}
    for name, tensor in state.items():
        width = torch.uint8 if tensor.element_size() == 1 else torch.int16
        moved[name] = tensor.clone()
        moved[name].view(width)[torch.rand(tensor.shape, generator=g) < share] += 1
    return moved


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Compare bits."""
    return all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)


def test_a_delta_of_adapters_takes_kilobytes(tmp_path: Path) -> None:
    now = adapters(0)
    served = {name: torch.zeros_like(t) for name, t in now.items()}
    publisher, raw = sp.Publisher(tmp_path), sum(2 * t.numel() for t in now.values())
    base = publisher.publish(0, now)
    subscriber = sp.Subscriber(tmp_path, served)
    subscriber.update()
    assert same(now, served)
    for version in range(1, 6):
        now = stepped(now, 0.01, version)
        done = publisher.publish(version, now)
        assert subscriber.update() == version
        assert same(now, served)
        changed = 0.01 * raw / 2
        assert done.nbytes < 12 * 1024 < base.nbytes / 20  # 2621 changes of 262,144 values
        assert 8 * done.nbytes < 40 * changed  # less than positions of 32 bits alone, with all headers
        assert subscriber.last is not None
        assert not subscriber.last.from_base
    folder = CheckpointFolder(tmp_path, tmp_path / "adapters")
    assert folder.update() == 5
    from safetensors.torch import load_file

    files = {name: t for file in (tmp_path / "adapters").glob("*.safetensors") for name, t in load_file(file).items()}
    assert same(now, files)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("late", [False, True])
def test_quantized_weights_with_scales(tmp_path: Path, dtype: torch.dtype, late: bool) -> None:
    """A scale that changes with its weights arrives in the same version, never in another one."""
    g = torch.Generator().manual_seed(0)
    weights = 0.02 * torch.randn(256, 512, generator=g)

    def quantized(w: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = w.abs().reshape(2, 128, 512).amax(dim=(1, 2)) / 448
        return {
            "w": (w / scale.repeat_interleave(128)[:, None]).to(dtype),
            "w_scale_inv": scale,
            "norm": w[0].bfloat16(),
        }

    publisher = sp.Publisher(tmp_path)
    base = publisher.publish(0, quantized(weights))
    served = {name: torch.zeros_like(t) for name, t in quantized(weights).items()}
    subscriber = sp.Subscriber(tmp_path, served)
    if not late:
        subscriber.update()
    for version in range(1, 4):
        weights = weights + 2e-5 * torch.randn(weights.shape, generator=g)
        done = publisher.publish(version, quantized(weights))
        assert done.nbytes < base.nbytes / 3
        if not late:
            subscriber.update()
            assert same(quantized(weights), served)
    assert subscriber.update() == 3
    assert same(quantized(weights), served)
    assert torch.equal(served["w_scale_inv"], quantized(weights)["w_scale_inv"])
