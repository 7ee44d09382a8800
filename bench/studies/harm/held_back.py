"""Families that never chose a setting and judge the levels.

Optimizers that torch does not have come from `pytorch_optimizer` and `schedulefree`, which a family imports when its
training begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..workloads import BETAS, Run, Workload
from .families import (
    FAMILIES,
    NEAR_ZERO,
    SENSITIVE,
    Family,
    digit_images,
    first,
    on_clicks,
    on_digits,
    on_text,
    supervised,
)


class _Autoencoder(nn.Module):
    """A variational autoencoder of images, with transposed convolutions."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.hidden = hidden
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(256, 2 * hidden),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(hidden, 256), nn.ReLU(), nn.Unflatten(1, (64, 2, 2)), nn.ConvTranspose2d(64, 32, 4, 2, 1),
            nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Any:
        """Return the means of the images, decoded from the means of their codes."""
        return self.decoder(self.encoder(images)[:, : self.hidden])

    def bound(self, images: Tensor, noise: Tensor) -> Tensor:
        """Return the negative evidence bound of images of variance 0.1, a pixel."""
        mean, spread = self.encoder(images).chunk(2, dim=1)
        found = self.decoder(mean + noise * torch.exp(0.5 * spread))
        apart = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(dim=1).mean()
        bound: Tensor = 5 * F.mse_loss(found, images) + apart / images[0].numel()
        return bound


def vae() -> Family:
    """A variational autoencoder with transposed convolutions, 0.06 M parameters, by AMSGrad."""

    def batch(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        images = digit_images(rng, 64)
        return images, torch.from_numpy(rng.standard_normal((64, 16), dtype=np.float32))

    @cache
    def held_out() -> list[tuple[Tensor, Tensor]]:
        rng = np.random.default_rng(23)
        images = digit_images(None, 500)
        return [(images, torch.from_numpy(rng.standard_normal((500, 16), dtype=np.float32))) for _ in range(4)]

    loss: Any = lambda model, given: model.bound(*given)  # noqa: E731
    adam = partial(torch.optim.Adam, amsgrad=True)
    workload = Workload("VAE", _Autoencoder, batch, loss, held_out, 500, 2e-3, optimizer=adam, decay=0.0, end=NEAR_ZERO)
    return Family(workload, first, itemgetter(0), classifies=False)


class _Experts(nn.Module):
    """Eight experts in stacked arrays, two for each example."""

    def __init__(self, inputs: int = 64, width: int = 64, experts: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.router = nn.Linear(inputs, experts)
        self.up = nn.Parameter(torch.randn(experts, inputs, width) / inputs**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, width) / width**0.5)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Any:
        x = images.flatten(1)
        shares, chosen = self.router(x).softmax(-1).topk(2)
        hidden = torch.einsum("bi,eiw->bew", x, self.up).relu()
        values = torch.einsum("bew,ewv->bev", hidden, self.down)
        picked = values.gather(1, chosen[..., None].expand(-1, -1, values.shape[-1]))
        return self.head((shares[..., None] * picked).sum(1).relu())


# ------------------------------------------------------------------------------------------------------------ diffusion

_TIMES = 100
_Example = tuple[Tensor, Tensor, Tensor]


class _Denoiser(nn.Module):
    """A convolutional network that predicts the noise in an image, given the time."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 2 * width))
        self.into, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.back = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.out = nn.Conv2d(2 * width, 1, 3, padding=1)
        self.norm = nn.GroupNorm(8, 2 * width)

    def forward(self, images: Tensor, times: Tensor) -> Any:
        angles = times[:, None].float() / _TIMES * math.pi * torch.arange(1, 9)
        moment = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        wide = F.silu(self.into(images))
        low = F.silu(self.down(wide) + moment[..., None, None])
        low = low + F.silu(self.norm(self.middle(low)))
        return self.out(torch.cat([wide, F.silu(self.back(low))], dim=1))


def _noised(rng: np.random.Generator, images: Tensor) -> _Example:
    """Return images with noise of random times, the times, and the noise."""
    times = torch.from_numpy(rng.integers(0, _TIMES, len(images)))
    left = torch.cumprod(1 - torch.linspace(1e-3, 0.1, _TIMES), 0)[times].view(-1, 1, 1, 1)
    noise = torch.from_numpy(rng.standard_normal(tuple(images.shape), dtype=np.float32))
    return left.sqrt() * (2 * images - 1) + (1 - left).sqrt() * noise, times, noise


def diffusion() -> Family:
    """A diffusion model of digits, 0.1 M parameters, judged by its average of decay 0.98."""

    @cache
    def held_out() -> list[_Example]:
        rng = np.random.default_rng(29)
        return [_noised(rng, digit_images(None, 500)) for _ in range(4)]

    def outputs(model: nn.Module, given: Any) -> Any:
        return model(given[0], given[1])

    batch = lambda rng: _noised(rng, digit_images(rng, 64))  # noqa: E731
    more: dict[str, Any] = {"optimizer": partial(torch.optim.AdamW, betas=BETAS), "decay": 0.01, "average": 0.98}
    more |= {"outputs": outputs, "targets": itemgetter(2), "classifies": False, "end": NEAR_ZERO}
    return supervised("diffusion, EMA", _Denoiser, batch, held_out, 500, 2e-3, **more)


# ------------------------------------------------------------------------------------------------------------- adapters

_RANK = 16
"""Smallest rank at which an adapter of this model's matrices is not too small to change."""


class _Adapted(nn.Module):
    """A frozen linear layer, and the product of two small matrices that is added to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, _RANK, bias=False)
        self.lora_b = nn.Linear(_RANK, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + 2 * self.lora_b(self.lora_a(x))


@cache
def _pretrained() -> dict[str, Tensor]:
    """Return the weights of the GPT, trained for 300 steps on the text as it is."""
    before = torch.get_rng_state()
    weights = Run(FAMILIES["GPT"]().workload, 100, until=300).model.state_dict()
    torch.set_rng_state(before)  # the caller draws its adapters from its own seed
    return weights


def _adapted() -> nn.Module:
    model = FAMILIES["GPT"]().workload.model()
    if not next(model.parameters()).is_meta:
        model.load_state_dict(_pretrained())
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is nn.Linear and name != "head":  # the head's matrix is that of the embedding
                setattr(module, name, _Adapted(layer))
    return model


def lora() -> Family:
    """Adapters of rank 16 in a frozen GPT of 0.1 M parameters, trained by NAdam.

    The GPT was trained on the text; the adapters learn it with upper and lower case exchanged.
    """
    nadam = partial(torch.optim.NAdam, betas=BETAS)
    made = on_text("LoRA", _adapted, 300, 5e-3, optimizer=nadam, decay=0.0, end=NEAR_ZERO)
    plain = made.workload

    @cache
    def held_out() -> list[Tensor]:
        return [_exchanged(text) for text in plain.held_out()]

    return replace(made, workload=replace(plain, batch=lambda rng: _exchanged(plain.batch(rng)), held_out=held_out))


def _exchanged(text: Tensor) -> Tensor:
    """Return bytes with the cases of letters exchanged."""
    letters = text | 32
    return torch.where((letters >= 97) & (letters <= 122), text ^ 32, text)


# ---------------------------------------------------------------------------------------------------------- optimizers

Made = Callable[..., torch.optim.Optimizer]
PACKAGES = ("pytorch_optimizer", "schedulefree")
"""Where these optimizers come from; `pip install pytorch_optimizer schedulefree`."""


def _made(package: str, name: str, groups: Iterable[Any], **settings: Any) -> Any:
    return getattr(import_module(package), name)(list(groups), **settings)


def of_package(name: str) -> Made:
    """Return a constructor of an optimizer of `pytorch_optimizer`."""
    return partial(_made, "pytorch_optimizer", name)


def muon(groups: Iterable[dict[str, Any]], lr: float) -> Any:
    """Make a Muon of matrices, which takes Adam's steps for other parameters."""
    for group in (groups := list(groups)):
        group["use_muon"] = group["params"][0].ndim >= 2
    return _made("pytorch_optimizer", "Muon", groups, lr=lr)


def schedule_free(groups: Iterable[dict[str, Any]], lr: float) -> Any:
    """Make a schedule-free AdamW, whose second average of the weights is z."""
    return _made("schedulefree", "AdamWScheduleFree", groups, lr=lr)


# ------------------------------------------------------------------------------------------------------------ models


class _Mixed(nn.Module):
    """A block that mixes patches, then channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.across = nn.Sequential(nn.Linear(patches, 64), nn.GELU(), nn.Linear(64, patches))
        self.within = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Any:
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norms[1](x))


class _Mixer(nn.Module):
    """A mixer of 16 patches of 2 x 2 pixels."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.blocks = nn.Sequential(_Mixed(16, width), _Mixed(16, width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Any:
        patches = F.unfold(images, 2, stride=2).transpose(1, 2)
        return self.head(self.norm(self.blocks(self.patches(patches))).mean(dim=1))


class _TextConvolution(nn.Module):
    """Two gated causal convolutions over bytes."""

    def __init__(self, width: int = 64, reach: int = 5) -> None:
        super().__init__()
        self.reach = reach
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, reach) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            before = F.pad(norm(x).transpose(1, 2), (self.reach - 1, 0))
            x = x + F.glu(layer(before), dim=1).transpose(1, 2)
        logits: Tensor = self.head(x)
        return logits.float()


# ---------------------------------------------------------------------------------------------------------- families


def _family(name: str, optimizer: Made, rate: float, more: dict[str, Any]) -> Callable[[], Family]:
    settings = {"end": NEAR_ZERO, "decay": 0.0, "optimizer": optimizer} | more
    if name.startswith("mixer"):
        return lambda: on_digits(name, _Mixer, 400, rate, **settings)
    return lambda: on_text(name, _TextConvolution, 400, rate, **settings)


_SETTINGS: dict[str, tuple[Made, float, dict[str, Any]]] = {
    "mixer, SGD": (partial(torch.optim.SGD, momentum=0.9), 0.1, {}),
    "mixer, Muon": (muon, 1e-2, {}),
    "mixer, schedule-free": (schedule_free, 1e-2, {"end": 1.0}),
    "mixer, SOAP": (of_package("SOAP"), 3e-3, {}),
    "text, Lion": (of_package("Lion"), 1e-3, {}),
    "text, ADOPT": (of_package("ADOPT"), 5e-3, {}),
    "text, AdEMAMix": (of_package("AdEMAMix"), 3e-3, {}),
    "text, bf16 masters": (torch.optim.AdamW, 5e-3, {"masters": True}),
}
"""Optimizer, learning rate, and further settings of the workload, each with an optimizer that no other family has."""
HELD_BACK: dict[str, Callable[[], Family]] = {
    "VAE": vae,
    "experts": partial(on_digits, "experts", _Experts, 500, 2e-3, end=NEAR_ZERO),
    "recommender": partial(on_clicks, "recommender", 1e-3, optimizer=torch.optim.RMSprop, decay=0.0, end=NEAR_ZERO),
    "diffusion, EMA": diffusion,
    "LoRA": lora,
    **{name: _family(name, *settings) for name, settings in _SETTINGS.items()},
}
"""They chose nothing: the levels were measured on them afterwards. Their schedules end near zero."""
ALL = FAMILIES | SENSITIVE | HELD_BACK
"""All families, first those that chose settings."""
