"""Three of the families that never chose a setting: they judge the levels."""

from __future__ import annotations

from functools import cache, partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..workloads import Workload
from .families import NEAR_ZERO, Family, digit_images, first, on_clicks, on_digits


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


def experts() -> Family:
    """A mixture of eight experts in stacked arrays, 0.07 M parameters."""
    return on_digits("experts", _Experts, 500, 2e-3, end=NEAR_ZERO)


def recommender() -> Family:
    """The click predictor with tables of 1,500 x 24, 0.16 M parameters, trained by RMSprop."""
    return on_clicks("recommender", 1e-3, optimizer=torch.optim.RMSprop, decay=0.0, end=NEAR_ZERO)
