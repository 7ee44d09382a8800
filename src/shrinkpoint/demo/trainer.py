"""The trainer process, which can be killed at any time and resumes from its checkpoints.

Started as `python -m shrinkpoint.demo.trainer JOB`, where JOB is a JSON object (`Job`). It reports events on standard
output, one JSON object per line:

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
import json
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..trainers.state import capture, restore
from .config import SIZES, Job, Size, checkpoint_steps, presets
from .task import GPT, Batches, Corpus, held_out_loss, loss

Send = Callable[..., None]
PROBE_FROM = 0.8
"""Share of the steps after which every checkpoint is loaded again and compared with the exact model."""


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


def _probe(training: Training, job: Job, windows: torch.Tensor, send: Send) -> None:
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
