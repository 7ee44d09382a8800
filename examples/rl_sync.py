"""Reinforcement learning: two ranks train a sharded model, two servers generate.

A small language model is rewarded for sequences that count upward. The trainer ranks hold float32 weights, sharded by
FSDP; each publishes its shards as bfloat16 after every few steps of policy gradient, and nothing is gathered for it.
Each server prepares a version while it could serve, takes it over in place, and generates the next samples of one rank.

    python examples/rl_sync.py FOLDER
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import zstandard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shrinkpoint as sp

SYMBOLS, LENGTH, SAMPLES, RANKS = 16, 12, 32, 2


class Model(nn.Module):
    """A language model over a few symbols that sees the last two of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(SYMBOLS + 1, width), nn.Linear(width, SYMBOLS)
        self.layers = nn.Sequential(nn.Linear(2 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """Logits of the symbol that follows each symbol."""
        before = nn.functional.pad(symbols, (1, 0), value=SYMBOLS)[:, :-1]
        logits: torch.Tensor = self.head(self.layers(torch.cat([self.embed(before), self.embed(symbols)], -1)))
        return logits.clone()  # FSDP warns of outputs that are views


def serve(url: str, width: int, number: int, asked: Any, answers: Any) -> None:
    """Wait for a version, load it, and answer with samples, logits and the update's cost."""
    torch.set_num_threads(1)
    torch.manual_seed(1 + number)
    model = Model(width).bfloat16()
    subscriber = sp.Subscriber(url, model)
    while (version := asked.get()) is not None:
        subscriber.prepare(version=version)  # the model serves meanwhile
        subscriber.commit()
        with torch.no_grad():
            symbols = torch.randint(SYMBOLS, (SAMPLES, 1))
            for _ in range(LENGTH):
                chances = torch.softmax(model(symbols)[:, -1].float(), -1)
                symbols = torch.cat([symbols, torch.multinomial(chances, 1)], 1)
            answers.put((symbols.numpy(), model(symbols).float().numpy(), subscriber.last))


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole weights as they are served, only to check and to compare them."""
    return {name: tensor.full_tensor().detach().bfloat16() for name, tensor in model.state_dict().items()}


def xor_bytes(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> int:
    """Bytes of the exclusive or of two versions, compressed by zstd at level 1."""
    parts = [(before[k].view(torch.int16) ^ after[k].view(torch.int16)).numpy().tobytes() for k in after]
    return len(zstandard.ZstdCompressor(level=1).compress(b"".join(parts)))


def train(rank: int, meeting: str, url: str, how: dict[str, Any], asked: Any, answers: Any, results: Any) -> None:
    """One rank of the trainer; it asks its own server for samples."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = Model(how["width"])
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.Adam(model.parameters(), how["lr"])
    publisher = sp.Publisher(url, dtype=torch.bfloat16)
    last, rows, equal = gathered(model), [], True
    for version in range(how["versions"]):
        done = publisher.publish(version, model.state_dict())
        asked.put(version)
        found, logits, report = answers.get(timeout=300)
        symbols, now = torch.from_numpy(found), gathered(model)
        served = Model(how["width"]).bfloat16()
        served.load_state_dict(now)
        with torch.no_grad():
            equal &= torch.equal(served(symbols).float(), torch.from_numpy(logits))
        reward = (symbols[:, 1:] == (symbols[:, :-1] + 1) % SYMBOLS).float().mean(1)
        if version:
            changed = sum(int((now[k].view(torch.int16) != last[k].view(torch.int16)).sum()) for k in now)
            rows.append((done, report, changed, xor_bytes(last, now)))
            if rank == 0:
                raw = sum(tensor.nbytes for tensor in now.values())
                print(f"version {version}: reward {float(reward.mean()):.3f}, {done.nbytes} of {raw} bytes", flush=True)
        last = now
        advantage = reward - reward.mean()
        for _ in range(how["steps"]):
            chances = torch.log_softmax(model(symbols[:, :-1]), -1)
            chosen = chances.gather(-1, symbols[:, 1:, None]).squeeze(-1).sum(1)
            optimizer.zero_grad()
            (-(advantage * chosen).mean()).backward()
            optimizer.step()
    results.put((rank, sum(t.numel() for t in last.values()), rows, equal))
    dist.destroy_process_group()


def main(folder: str, versions: int = 8, width: int = 128, steps: int = 2, lr: float = 1e-5) -> dict[str, Any]:
    """Train, publish and serve; return the costs, as medians over the later versions."""
    context = multiprocessing.get_context("spawn")
    how, results = {"versions": versions, "width": width, "steps": steps, "lr": lr}, context.Queue()
    asked, answers = ([context.Queue() for _ in range(RANKS)] for _ in range(2))
    with tempfile.TemporaryDirectory() as meeting:
        processes = []
        for i in range(RANKS):
            processes.append(context.Process(target=serve, args=(folder, width, i, asked[i], answers[i])))
            given = (i, f"{meeting}/file", folder, how, asked[i], answers[i], results)
            processes.append(context.Process(target=train, args=given))
        for process in processes:
            process.start()
        found: list[Any] = []
        while len(found) < RANKS and not any(process.exitcode for process in processes):
            with contextlib.suppress(queue.Empty):
                found.append(results.get(timeout=1))
        for waiting in asked:
            waiting.put(None)
        for process in processes:
            process.join(60 if len(found) == RANKS else 1)
            process.terminate()
    if len(found) < RANKS:
        raise RuntimeError("a process failed; see above")
    _, parameters, rows, _ = min(found, key=lambda row: row[0])
    middle = sorted(rows, key=lambda row: row[0].nbytes)[len(rows) // 2]
    return {
        "parameters": parameters,
        "bytes": middle[0].nbytes,
        "zstd-1 of XOR": middle[3],
        "changed": middle[2] / parameters,
        "publish ms": 1e3 * middle[0].seconds,
        "prepare ms": 1e3 * middle[1].prepare_seconds,
        "pause ms": 1e3 * middle[1].pause_seconds,
        "equal": all(equal for _, _, _, equal in found),
    }


if __name__ == "__main__":
    print(main(sys.argv[1]))
