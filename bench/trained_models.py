"""Models trained here: a GPT, a vision transformer, a ResNet.

The GPT reads Python's sources as bytes (pre-norm, AdamW; on a GPU in bfloat16 by autocast); a hundred steps take
seconds on a GPU, minutes on two cores. The other two learn the angle of gratings in noise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .data import Pair

CONTEXT, BATCH = 256, 16
SIDE, CLASSES = 16, 10
"""Pixels of an image's side, and angles of gratings."""
Tree = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Width, number of layers, and steps until the first state.

    Args:
        width: a multiple of 64.
        layers: at least one.
        steps: of training.
    """

    width: int
    layers: int
    steps: int

    @property
    def says(self) -> str:
        return f"GPT of {self.layers} layers of width {self.width}"


LARGE = Size(768, 12, 120)
"""86 million parameters: a state of 1.03 GB."""
MEDIUM = Size(512, 8, 120)
"""26 million parameters: a state of 0.31 GB."""
SMALL = Size(64, 2, 5)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm.

    Args:
        width: a multiple of 64.
        causal: whether a token sees only those before it.
    """

    def __init__(self, width: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = width // 64, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Any:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Logits of the next byte."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, size.width), nn.Embedding(CONTEXT, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, 256)

    def forward(self, x: Tensor) -> Any:
        h = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class ViT(nn.Module):
    """Logits of the class of an image, from patches of 2 x 2 pixels."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(SIDE * SIDE // 4, width))
        self.blocks = nn.ModuleList(Block(width, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Any:
        h = self.patch(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h).mean(1))


class Residual(nn.Module):
    """Two convolutions of 3 x 3 with batch norm, added to their input."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or into != out:
            self.shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(h + self.shortcut(x))


def resnet(width: int, blocks: int) -> nn.Module:
    """Return a ResNet of four stages for small images; (64, 2) is ResNet-18."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    into = width
    for stage in range(4):
        for block in range(blocks):
            out = width << stage
            layers.append(Residual(into, out, 2 if stage and not block else 1))
            into = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, CLASSES))


def states(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], optimizer: torch.optim.Optimizer, at: Sequence[int]
) -> list[Tree]:
    """Train, and return the states of model and optimizer on the host.

    Args:
        model: on its device.
        loss_of: draws a batch and returns the loss of the model.
        optimizer: of the model's parameters.
        at: steps of the states, increasing.
    """
    found: list[Tree] = []
    for step in range(1, at[-1] + 1):
        optimizer.zero_grad()
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step in at:
            state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            found.append(torch.utils._pytree.tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, state))
    return found


def gpt_states(size: Size, device: str, at: Sequence[int]) -> list[Tree]:
    """Train a GPT with AdamW on Python's sources, and return its states at these steps."""
    from shrinkpoint.demo.task import Corpus

    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Corpus().train), dtype=torch.uint8).to(device)
    model = GPT(size).to(device)
    batch = BATCH if device == "cuda" else 2

    def loss_of(model: nn.Module) -> Tensor:
        starts = torch.randint(len(text) - CONTEXT - 1, (batch, 1), device=device)
        window = text[starts + torch.arange(CONTEXT + 1, device=device)].long()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(window[:, :-1]).float()
        return nn.functional.cross_entropy(logits.reshape(-1, 256), window[:, 1:].reshape(-1))

    return states(model, loss_of, torch.optim.AdamW(model.parameters(), lr=3e-4), at)


def trained(size: Size, device: str, *, apart: int = 10) -> Pair:
    """Train a GPT and return the states at `size.steps` and `apart` steps later, on the host.

    Args:
        size: of the model.
        device: "cuda" or "cpu".
        apart: steps between the two states.
    """
    before, after = gpt_states(size, device, (size.steps, size.steps + apart))
    return Pair(before, after, f"{size.says} trained here, steps {size.steps} and {size.steps + apart}")


def _gratings(count: int) -> tuple[Tensor, Tensor]:
    """Draw images [count, 3, SIDE, SIDE] of gratings in noise, and the classes of their angles."""
    classes = torch.randint(CLASSES, (count,))
    angle, phase = classes * (torch.pi / CLASSES), 2 * torch.pi * torch.rand(count, 3, 1, 1)
    line = torch.arange(SIDE) - SIDE / 2
    along = torch.cos(angle)[:, None, None] * line + torch.sin(angle)[:, None, None] * line[:, None]
    return torch.sin(along[:, None] * (1 + torch.rand(count, 1, 1, 1)) + phase) + torch.randn(
        count, 3, SIDE, SIDE
    ), classes


def seeing(kind: str, *, quick: bool) -> Pair:
    """Train on gratings and return the states ten steps apart.

    Args:
        kind: "ViT" (6 layers of width 384, AdamW) or "ResNet-18" (batch norm, Adam).
        quick: a small model, and few steps.
    """
    torch.manual_seed(0)
    if kind == "ViT":
        model: nn.Module = ViT(64, 1) if quick else ViT(384, 6)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    else:
        model = resnet(8, 1) if quick else resnet(64, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(model: nn.Module) -> Tensor:
        images, classes = _gratings(16)
        return nn.functional.cross_entropy(model(images), classes)

    first = 4 if quick else 60
    before, after = states(model, loss_of, optimizer, (first, first + 10))
    return Pair(before, after, f"{kind} trained on gratings here, steps {first} and {first + 10}")
