"""The trainer: a small GPT over bytes, its text, and the process that is killed and resumes.

The text is the source code of Python's standard library, which every machine has.

The process can be killed at any time and resumes from its checkpoints. It is started as
`python -m shrinkpoint.demo.trainer JOB`, where JOB is a JSON object (`Job`), and reports events on standard output, one
JSON object per line:

    {"event": "start", "resumed": step or null, "warnings": [...], "parameters": n, "seconds": time to restore}
    {"event": "step", "step": n, "loss": nats per byte, "rate": learning rate}
    {"event": "saving", "step": n}
    {"event": "saved", "step": n, "delta": bool, "raw": bytes, "stored": bytes, "ms": time,
     "parts": {"weights" or "optimizer" or "rest": [raw bytes, stored bytes]}}
    {"event": "reading", "step": n, "loss": held-out loss on a few windows}
    {"event": "probe", "step": n, "exact": loss, "restored": loss, "ms": time to load}
    {"event": "final", "step": n, "loss": held-out loss on many windows}
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import random
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..trainers.state import capture, restore
from . import SIZES, DemoError, Job, Size, checkpoint_steps, presets

Send = Callable[..., None]
PROBE_FROM = 0.8
"""Share of the steps after which every checkpoint is loaded again and compared with the exact model."""
VOCABULARY = 256
# Tests are repetitive, code tables and help topics are not programs, and the rest is not part of the library.
_LEFT_OUT = {
    "test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__",
}  # fmt: skip
_HELD_OUT_OF = 20  # one file in this many is held out
_LEAST_BYTES = 500_000


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each with a layer norm and a residual.

    Queries and keys are normalized and rotated by their position in the window (rotary embedding). In a training this
    short, the model then learns far more than with learned positions.
    """

    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, bias=bias)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.project = nn.Linear(width, width, bias=bias)
        self.norm2 = nn.LayerNorm(width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, width = x.shape
        head = width // self.heads
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, head).permute(2, 0, 3, 1, 4)
        left, right = F.rms_norm(qkv[:2], (head,)).chunk(2, dim=-1)
        q, k = torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, qkv[2], is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(hidden)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Decoder-only transformer that predicts the next byte; the head is tied to the embedding.

    Args:
        layers, width, heads: depth, size of the residual stream, attention heads (width divisible by twice as many).
        context: longest window in bytes.
        dropout: of the embedded input, which makes torch's random number generator part of the training state.
        bias: whether linear layers and norms have one.

    Example:
        >>> model = GPT(layers=1, width=8, heads=2, context=4)
        >>> model(torch.zeros(1, 4, dtype=torch.long)).shape
        torch.Size([1, 4, 256])
    """

    cosine: Tensor
    sine: Tensor

    def __init__(
        self, layers: int, width: int, heads: int, context: int, dropout: float = 0.05, bias: bool = True
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, bias) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                # Layers that add to the residual stream start smaller, so that its variance does not grow with depth.
                residual = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.head.weight = self.embed.weight
        half = width // heads // 2
        angle = torch.arange(context)[:, None] * 100.0 ** (-torch.arange(half) / half)
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte: int64 [batch, time] -> float32 [batch, time, 256]."""
        length = tokens.shape[1]
        x = self.dropout(self.embed(tokens))
        for block in self.blocks:
            x = block(x, self.cosine[:length], self.sine[:length])
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(model: GPT, windows: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per byte, of each byte given those before it.

    Args:
        windows: int64 [batch, time + 1], values 0 ... 255.
    """
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: GPT, windows: Tensor, batch: int = 32) -> float:
    """Mean loss over windows, without dropout and without touching any random number generator."""
    training = model.training
    model.eval()
    total = 0.0
    for part in torch.split(windows, batch):
        total += float(loss(model, part)) * len(part)
    model.train(training)
    return total / len(windows)


class Corpus:
    """Bytes to train on and bytes held out, from the same library, split by file.

    Which files are held out depends only on their names, so two runs agree.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        root = Path(folder or sysconfig.get_path("stdlib"))
        parts: dict[bool, list[bytes]] = {False: [], True: []}
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            if not _LEFT_OUT.intersection(name.parts):
                parts[_held_out(name.as_posix())].append(path.read_bytes())
        self.train = _join(parts[False])
        self.held_out = _join(parts[True])
        if len(self.train) < _LEAST_BYTES:
            raise DemoError(
                f"the source code of the standard library is missing: {root} holds {len(self.train):,} bytes of it "
                "(a minimal or zipped Python? the demo needs a complete one)"
            )

    def held_out_windows(self, count: int, context: int) -> Tensor:
        """`count` evenly spaced windows of the held-out text, int64 [count, context + 1]."""
        starts = np.linspace(0, len(self.held_out) - context - 1, count).astype(np.int64)
        return _windows(self.held_out, starts, context)


class Batches:
    """Random windows in an order fixed by the seed, each visited once per epoch.

    The position can be saved and restored. The text is cut into windows, and an epoch is a permutation of them. Each
    batch is shifted by a few bytes drawn from NumPy's global generator, so that the state of that generator matters to
    a resumed run.

    Args:
        text: uint8 [length].
        context: number of bytes to predict in a window.
        batch: number of windows in a batch.
        seed: seed of the permutations.
    """

    def __init__(self, text: npt.NDArray[np.uint8], context: int, batch: int, seed: int) -> None:
        self._text, self._context, self._batch, self._seed = text, context, batch, seed
        self._count = len(text) // context - 2
        self.seek({"epoch": 0, "window": 0})

    def position(self) -> dict[str, int]:
        """The position of the next batch; windows before it have been used."""
        return {"epoch": self._epoch, "window": self._window}

    def seek(self, position: dict[str, int]) -> None:
        self._epoch, self._window = position["epoch"], position["window"]
        self._order = np.random.default_rng([self._seed, self._epoch]).permutation(self._count)

    def next(self) -> Tensor:
        """The next batch, int64 [batch, context + 1]."""
        if self._window + self._batch > self._count:
            self.seek({"epoch": self._epoch + 1, "window": 0})
        chosen = self._order[self._window : self._window + self._batch]
        self._window += self._batch
        shift = np.random.randint(self._context)  # noqa: NPY002 - the global generator is part of the demonstration
        return _windows(self._text, chosen * self._context + shift, self._context)


def _held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT_OF == 0


def _join(texts: list[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"\0".join(texts), dtype=np.uint8)


def _windows(text: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], context: int) -> Tensor:
    return torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))


class Training:
    """The objects of a training run, and one step of it.

    Example:
        >>> training = Training(SIZES["tiny"], steps=10, seed=0, text=np.zeros(4096, dtype=np.uint8))
        >>> state = training.state()
        >>> training.advance() < 6
        True
        >>> training.resume(state)
        >>> training.step
        0
    """

    def __init__(self, size: Size, *, steps: int, seed: int, text: Any) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the global generator is part of the demonstration
        self.step = 0
        self.model = GPT(size.layers, size.width, size.heads, size.context)
        self.batches = Batches(text, size.context, size.batch, seed)
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=size.learning_rate, betas=(0.9, 0.95), fused=True)
        warm_up = max(1, steps // 20)

        def schedule(step: int) -> float:
            if step < warm_up:
                return (step + 1) / warm_up
            return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (step - warm_up) / max(1, steps - warm_up)))

        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)

    def advance(self) -> float:
        """Make one training step and return its loss."""
        value = loss(self.model, self.batches.next())
        self.optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return float(value.detach())

    def state(self) -> dict[str, Any]:
        """The whole training state."""
        return capture(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            position={"step": self.step, "data": self.batches.position()},
        )

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from a captured state."""
        position = restore(state, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        self.step = position["step"]
        self.batches.seek(position["data"])


def train(job: Job, send: Send) -> None:
    """Run the job from the newest checkpoint in its store to the end."""
    size = SIZES[job.size]
    torch.set_num_threads(job.threads)
    store = _open_store(job)
    corpus = Corpus()
    training = Training(size, steps=job.steps, seed=job.seed, text=corpus.train)
    quick, probe, final = (
        corpus.held_out_windows(count, size.context)
        for count in (size.quick_windows, size.probe_windows, size.final_windows)
    )
    begin = time.perf_counter()
    resumed, caught = _resume(training, store)
    send(
        "start",
        resumed=resumed,
        warnings=caught,
        parameters=sum(p.numel() for p in training.model.parameters()),
        seconds=time.perf_counter() - begin,
    )
    save_at = set(checkpoint_steps(job.steps, job.every))
    while training.step < job.steps:
        rate = training.scheduler.get_last_lr()[0]
        value = training.advance()
        step = training.step
        send("step", step=step, loss=value, rate=rate)
        if step in save_at:
            if store is not None:
                _save(training, store, send)
                if step >= PROBE_FROM * job.steps:
                    _probe(training, job, probe, send)
            send("reading", step=step, loss=held_out_loss(training.model, quick))
    send("final", step=training.step, loss=held_out_loss(training.model, final))


def _open_store(job: Job) -> Any:
    if job.store is None:
        return None
    import shrinkpoint as sp

    return sp.Store(job.store, cfg=presets()[job.preset]())


def _resume(training: Training, store: Any) -> tuple[int | None, list[str]]:
    """Resume from the newest intact checkpoint, if any; return its step and the warnings."""
    if store is None or not store.steps():
        return None, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.resume(store.load())
    return training.step, [str(warning.message) for warning in caught]


def _save(training: Training, store: Any, send: Send) -> None:
    import shrinkpoint as sp

    kinds = sp.kinds(training.model, training.optimizer)
    send("saving", step=training.step)
    begin = time.perf_counter()
    saved = store.save(training.step, training.state(), kinds=kinds)
    ms = 1e3 * (time.perf_counter() - begin)
    parts = {"weights": [0, 0], "optimizer": [0, 0], "rest": [0, 0]}
    for row in saved.summary():
        part = parts[{"model": "weights", "optimizer": "optimizer"}.get(row.path.split("/")[0], "rest")]
        part[0] += row.raw_bytes
        part[1] += row.stored_bytes
    send(
        "saved", step=training.step, delta=saved.is_delta, raw=saved.raw_nbytes, stored=saved.nbytes, ms=ms, parts=parts
    )


def _probe(training: Training, job: Job, windows: Tensor, send: Send) -> None:
    """Compare the model restored from the store with the exact one on the same held-out windows."""
    begin = time.perf_counter()
    state = _open_store(job).load(training.step)  # a second Store, so that the saving one is not changed
    ms = 1e3 * (time.perf_counter() - begin)
    restored = copy.deepcopy(training.model)  # a new GPT would draw random numbers
    restored.load_state_dict(state["model"])
    send(
        "probe",
        step=training.step,
        exact=held_out_loss(training.model, windows),
        restored=held_out_loss(restored, windows),
        ms=ms,
    )


def main() -> None:
    """Run the job in the first argument (JSON), and report events on standard output."""
    # Only events may use the pipe; other output goes to standard error.
    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as pipe:
        os.dup2(2, 1)

        def send(event: str, **values: Any) -> None:
            pipe.write(json.dumps({"event": event, **values}) + "\n")

        train(Job(**json.loads(sys.argv[1])), send)


if __name__ == "__main__":
    main()
