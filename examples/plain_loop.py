"""A plain PyTorch loop with compressed checkpoints: stop and restart it at any time.

python examples/plain_loop.py run/
"""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import shrinkpoint as sp
from shrinkpoint import trainers


def main(folder: str, epochs: int = 3) -> float:
    """Train a small network; returns the last loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    x = torch.randn(2048, 32)
    data = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=64, shuffle=True, num_workers=2)

    loader = trainers.Loader(data)
    saver = sp.Saver(sp.Store(folder))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    step = trainers.resume(saver, **parts)
    print(f"resumed at step {step}")
    loss = torch.zeros(())
    while loader.epoch < epochs:
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 20 == 0:
                trainers.save(saver, step, **parts)
    saver.close()
    print(f"step {step}: loss {float(loss.detach()):.4f}; stored {saver.store.steps()}")
    return float(loss.detach())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "run")
