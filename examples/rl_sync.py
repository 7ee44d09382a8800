"""Reinforcement learning with a served copy: one process trains, one generates.

A small language model is rewarded for sequences that count upward. The trainer keeps float32 weights and publishes them
as bfloat16 after every few steps of policy gradient; the server takes each version over in place and generates the next
samples.

    python examples/rl_sync.py FOLDER
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import torch
import zstandard
from torch import nn

import shrinkpoint as sp

SYMBOLS, LENGTH, SAMPLES = 16, 12, 64


class Model(nn.Module):
    """A recurrent language model over a few symbols."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(SYMBOLS, width), nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """Logits of the symbol that follows each symbol."""
        logits: torch.Tensor = self.head(self.rnn(self.embed(symbols))[0])
        return logits


def serve(url: str, width: int, asked: Any, answers: Any) -> None:
    """Wait for a version, load it, and answer with samples, logits and the update's cost."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Model(width).bfloat16()
    subscriber = sp.Subscriber(url, model)
    while asked.get() is not None:
        subscriber.update()
        with torch.no_grad():
            symbols = torch.randint(SYMBOLS, (SAMPLES, 1))
            for _ in range(LENGTH):
                chances = torch.softmax(model(symbols)[:, -1].float(), -1)
                symbols = torch.cat([symbols, torch.multinomial(chances, 1)], 1)
            answers.put((symbols.numpy(), model(symbols).float().numpy(), subscriber.last))


def half(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights as they are served, in bfloat16."""
    return {name: tensor.detach().bfloat16() for name, tensor in model.state_dict().items()}


def xor_bytes(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> int:
    """Bytes of the exclusive or of two versions, compressed by zstd at level 1."""
    parts = [(before[k].view(torch.int16) ^ after[k].view(torch.int16)).numpy().tobytes() for k in after]
    return len(zstandard.ZstdCompressor(level=1).compress(b"".join(parts)))


def main(folder: str, versions: int = 8, width: int = 128, steps: int = 2, lr: float = 1e-5) -> dict[str, Any]:
    """Train, publish and serve; return the costs, as medians over the later versions."""
    torch.manual_seed(0)
    context = multiprocessing.get_context("spawn")
    asked, answers = context.Queue(), context.Queue()
    server = context.Process(target=serve, args=(folder, width, asked, answers))
    server.start()
    model, publisher = Model(width), sp.Publisher(folder)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    last, rows, equal = half(model), [], True
    try:
        for version in range(versions):
            now = half(model)
            done = publisher.publish(version, now)
            asked.put(version)
            found, logits, report = answers.get(timeout=300)
            symbols = torch.from_numpy(found)
            served = Model(width).bfloat16()
            served.load_state_dict(now)
            with torch.no_grad():
                equal &= torch.equal(served(symbols).float(), torch.from_numpy(logits))
            reward = (symbols[:, 1:] == (symbols[:, :-1] + 1) % SYMBOLS).float().mean(1)
            if version:
                changed = sum(int((now[k].view(torch.int16) != last[k].view(torch.int16)).sum()) for k in now)
                rows.append((done, report, changed, xor_bytes(last, now)))
                print(f"version {version}: reward {float(reward.mean()):.3f}, {done.nbytes} of {done.raw_bytes} bytes")
            last = now
            advantage = reward - reward.mean()
            for _ in range(steps):
                chances = torch.log_softmax(model(symbols[:, :-1]), -1)
                chosen = chances.gather(-1, symbols[:, 1:, None]).squeeze(-1).sum(1)
                optimizer.zero_grad()
                (-(advantage * chosen).mean()).backward()
                optimizer.step()
    finally:
        asked.put(None)
        server.join(60)
    middle = sorted(rows, key=lambda row: row[0].nbytes)[len(rows) // 2]
    parameters = middle[0].raw_bytes // 2
    return {
        "parameters": parameters,
        "bytes": middle[0].nbytes,
        "zstd-1 of XOR": middle[3],
        "changed": middle[2] / parameters,
        "publish ms": 1e3 * middle[0].seconds,
        "stage ms": 1e3 * (middle[1].fetch_seconds + middle[1].stage_seconds),
        "pause ms": 1e3 * middle[1].pause_seconds,
        "equal": equal,
    }


if __name__ == "__main__":
    print(main(sys.argv[1]))
