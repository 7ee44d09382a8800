"""A training in its own process: `python exact_trainer.py STORE DTYPE STEPS [KILLED]`.

It goes on from the newest checkpoint of the store, if there is one, and saves every ten steps. STORE "-" is none. After
step KILLED it kills itself, as hard as it can. A line is a step, the bits of its loss, and "delta" or "base" where a
checkpoint was saved after it; the last has a hash of the state.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shrinkpoint as sp

EVERY = 10
WORDS = 64


class Model(nn.Module):
    """A transformer of one block with dropout, so that it depends on a random generator."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.embedding(tokens)))
        return out


class Training:
    """A training with model, optimizer, scheduler and generators."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = Model().to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 2e-3, total_steps=400)
        self.data = torch.Generator().manual_seed(1)
        self.step = 0

    def advance(self) -> float:
        """Train one step; return the loss."""
        first = torch.randint(WORDS, (8, 1), generator=self.data)
        tokens = (first + torch.arange(17) * torch.randint(1, 5, (8, 1), generator=self.data)) % WORDS
        logits = self.model(tokens[:, :-1]).float()
        loss = F.cross_entropy(logits.reshape(-1, WORDS), tokens[:, 1:].reshape(-1))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """Return the complete state."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": [torch.get_rng_state(), self.data.get_state()],
            "step": self.step,
        }

    def go_on_from(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"][0])
        self.data.set_state(state["random"][1])
        self.step = state["step"]

    def digest(self) -> str:
        """Return a hash of all weights and moments."""
        found = hashlib.sha256()
        entries = self.optimizer.state.values()
        for x in [*self.model.state_dict().values(), *(value for entry in entries for value in entry.values())]:
            found.update(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def main(url: str, dtype: str, steps: int, killed: int = 0) -> None:
    """Train up to step `steps`; die after step `killed`."""
    torch.set_num_threads(1)
    run = Training(getattr(torch, dtype))
    store = None if url == "-" else sp.Store(Path(url), sp.presets.lossless())
    if store is not None and store.steps():
        run.go_on_from(store.load())
    while run.step < steps:
        line = [str(run.step + 1), run.advance().hex()]
        if store is not None and run.step % EVERY == 0:
            line.append("delta" if store.save(run.step, run.state()).is_delta else "base")
        print(*line, flush=True)
        if run.step == killed:
            os.kill(os.getpid(), signal.SIGKILL)
    print("end", run.digest(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))  # type: ignore[arg-type]
