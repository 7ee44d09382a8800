"""A small training in each framework: without checkpoints, with its own, with ours.

Every training uses the same network and the same batches in the same order. `train(job)` returns its time, the time of
each save, and the final weights. A job whose folder holds checkpoints resumes from the newest.
"""

from __future__ import annotations

import contextlib
import logging
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import shrinkpoint as sp

FEATURES, BATCH = 64, 64
RATE = 1e-3


@dataclass(frozen=True)
class Job:
    """Settings of one training.

    Args:
        folder: where checkpoints go and come from.
        how: "none" (no checkpoints), "own" (the framework's default) or "ours".
        cfg: how ours compress.
        steps: to train to.
        every: steps between saves; divides `steps`.
        width: of the network.
        timed: whether its times are used; otherwise no helper process is started.
    """

    folder: Path
    how: str
    cfg: sp.Config
    steps: int
    every: int
    width: int
    timed: bool = False


@dataclass
class Outcome:
    """Result of one training: its times, the number of saves, the final weights.

    Args:
        seconds: in the loop, until all is saved.
        stalls: seconds of each save's call.
        waited: seconds of them that were spent waiting for the save before, where that is known.
        closing: seconds after the last step until all is saved, where that is known.
        before: saves made before the loop.
        weights: the final ones, in the model's order.
    """

    seconds: float = 0.0
    stalls: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    before: int = 0
    weights: list[torch.Tensor] = field(default_factory=list)
    closing: float = 0.0

    @property
    def saves(self) -> int:
        """Number of checkpoints written."""
        return self.before + len(self.stalls)

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        """Context that times the training loop."""
        begin = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begin

    def train(
        self, job: Job, step: int, descend: Callable[[int], object], save: Callable[[int], object],
        finish: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """Train a job on from a step, with saves; `finish` waits until all is saved."""
        with self.loop():
            while step < job.steps:
                descend(step)
                step += 1
                if step % job.every == 0 and job.how != "none":
                    with self.stall():
                        save(step)
            begin = time.perf_counter()
            finish()
            self.closing = time.perf_counter() - begin

    @contextlib.contextmanager
    def stall(self) -> Iterator[None]:
        """Context that times one save."""
        begin = time.perf_counter()
        yield
        self.stalls.append(time.perf_counter() - begin)

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call so that it is timed as a save."""

        def wrapper(*arguments: Any, **named: Any) -> Any:
            with self.stall():
                return call(*arguments, **named)

        return wrapper


class Net(nn.Module):
    """Three layers with dropout before them; returns the loss if labels are given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        found = self.layers(self.drop(x))
        return {"logits": found} if labels is None else {"loss": (found - labels).square().mean(), "logits": found}


def net(width: int) -> Net:
    """Return the initial network, which is the same in every training."""
    torch.manual_seed(0)
    return Net(width)


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [count, FEATURES] and labels [count, 1]."""
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return x, torch.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]


def epoch_of(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of an epoch: of the steps from one save to the next."""
    return samples(job.every * BATCH, 1)


def uneven(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """Return three quarters of an epoch's samples, so that saves fall within epochs."""
    return samples(job.every * 3 // 4 * BATCH, 1)


def batch_of(data: tuple[torch.Tensor, torch.Tensor], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step."""
    x, y = data
    begin = step * BATCH % x.shape[0]
    return x[begin : begin + BATCH], y[begin : begin + BATCH]


def saved_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, a file with several links once."""
    stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum({(s.st_dev, s.st_ino): s.st_size for s in stats}.values())


def held_out_loss(weights: list[torch.Tensor], width: int) -> float:
    """Loss on samples that no training saw."""
    model = net(width).eval()
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
        x, y = samples(2048, 2)
        return float(model(x, y)["loss"])


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().cpu().clone() for p in model.parameters()]


def _descend(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    optimizer.zero_grad()
    model(*batch)["loss"].backward()
    optimizer.step()


def _endless(loader: Any) -> Iterator[Any]:
    """Iterate over a loader without end, epoch after epoch."""
    while True:
        yield from loader


def plain(job: Job) -> Outcome:
    """Train with a plain loop: `torch.save` against a `Saver`."""
    from shrinkpoint import trainers

    model = net(job.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*uneven(job)), BATCH, shuffle=True)
    loader, done, step = trainers.Loader(data), Outcome(), 0
    futures: list[Any] = []
    job.folder.mkdir(parents=True, exist_ok=True)
    ours = job.how == "ours"
    with contextlib.ExitStack() as stack:
        if ours:
            mode = "process" if job.timed else "thread"
            saver = stack.enter_context(sp.Saver(sp.Store(job.folder, job.cfg), mode=mode))
            step = trainers.resume(saver, model, optimizer, loader=loader)
            if not step:
                # The worker has started when this returns; it starts once a run.
                trainers.save(saver, 0, model, optimizer, loader=loader)
                saver.wait()
                done.before = 1
        elif job.how == "own":
            newest = max(job.folder.glob("*.pt"), default=None)
            if newest is not None:
                state = torch.load(newest, weights_only=True)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                loader.load_state_dict(state["loader"])
                torch.set_rng_state(state["rng"])
                step = state["step"]
        batches = _endless(loader)

        def save(step: int) -> None:
            if ours:
                futures.append(trainers.save(saver, step, model, optimizer, loader=loader))
            else:
                state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"loader": loader.state_dict(), "rng": torch.get_rng_state()}
                torch.save(state, job.folder / f"{step:06d}.pt")

        finish = saver.wait if ours else lambda: None
        done.train(job, step, lambda _: _descend(model, optimizer, next(batches)), save, finish)
    done.waited = [future.result().waited for future in futures]
    done.weights = _weights(model)
    return done


def dcp(job: Job) -> Outcome:
    """torch.distributed.checkpoint in one process: its `FileSystemWriter` against our `Writer`."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    from shrinkpoint.trainers.dcp import Reader, Writer

    model = net(job.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    data, done, step = epoch_of(job), Outcome(), 0
    newest = max(job.folder.glob("step-*"), default=None)
    if newest is not None:
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optim": moments, "step": 0, "rng": torch.get_rng_state()}
        reader = Reader(newest) if job.how == "ours" else FileSystemReader(newest)
        load(state, storage_reader=reader, no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        torch.set_rng_state(state["rng"])
        step = state["step"]
    writer = Writer(cfg=job.cfg, parent=newest if job.how == "ours" else None)

    def checkpoint(step: int) -> None:
        weights, moments = get_state_dict(model, optimizer)
        where = job.folder / f"step-{step:06d}"
        storage = writer if job.how == "ours" else FileSystemWriter(where)
        state = {"model": weights, "optim": moments, "step": step, "rng": torch.get_rng_state()}
        save(state, storage_writer=storage, checkpoint_id=where, no_dist=True)

    done.train(job, step, lambda step: _descend(model, optimizer, batch_of(data, step)), checkpoint)
    done.weights = _weights(model)
    return done


def lightning(job: Job) -> Outcome:
    """Lightning: its `ModelCheckpoint`, without and with the plugin."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from shrinkpoint.trainers.lightning import CompressedCheckpoints, CompressedIO

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Model(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net(job.width)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(*batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    done, ours = Outcome(), job.how == "ours"
    callbacks: list[Any] = [CompressedCheckpoints()] if ours else []
    if job.how != "none":
        callbacks.append(ModelCheckpoint(job.folder, save_top_k=-1, every_n_epochs=1))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=job.steps // job.every,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=job.how != "none",
        plugins=[CompressedIO(job.cfg)] if ours else None,
        callbacks=callbacks,
    )
    trainer.save_checkpoint = done.timed(trainer.save_checkpoint)
    newest = max(job.folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, default=None)
    model = Model()
    with done.loop():
        trainer.fit(model, DataLoader(TensorDataset(*epoch_of(job)), batch_size=BATCH), ckpt_path=newest)
    done.weights = _weights(model)
    return done


def transformers(job: Job) -> Outcome:
    """Transformers: its `Trainer`, without and with the mixin."""
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint
    from transformers.utils import logging as their_logging

    from shrinkpoint.trainers.transformers import CompressedCheckpoints

    their_logging.set_verbosity_error()
    done = Outcome()

    class Timed(Trainer):  # type: ignore[misc]
        def _save_checkpoint(self, *arguments: Any, **named: Any) -> None:
            with done.stall():
                super()._save_checkpoint(*arguments, **named)

    class Ours(CompressedCheckpoints, Timed):
        compression = job.cfg

    class Rows(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.x, self.y = uneven(job)

        def __len__(self) -> int:
            return int(self.x.shape[0])

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            return {"x": self.x[i], "labels": self.y[i]}

    arguments = TrainingArguments(
        str(job.folder),
        max_steps=job.steps,
        save_strategy="no" if job.how == "none" else "steps",
        save_steps=job.every,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    job.folder.mkdir(parents=True, exist_ok=True)
    newest = get_last_checkpoint(str(job.folder))
    trainer = (Ours if job.how == "ours" else Timed)(net(job.width), arguments, train_dataset=Rows())
    with done.loop():
        trainer.train(resume_from_checkpoint=newest)
    done.weights = _weights(trainer.model)
    return done


def accelerate(job: Job) -> Outcome:
    """Accelerate: `save_state`, without and with the hooks."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from shrinkpoint.trainers.accelerate import compress_states

    logging.getLogger("accelerate").setLevel(logging.ERROR)
    done, step = Outcome(), 0
    project = ProjectConfiguration(str(job.folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    if job.how == "ours":
        compress_states(accelerator, sp.Store(job.folder / "store", job.cfg))
    model = net(job.width)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=RATE))
    names = sorted((job.folder / "checkpoints").glob("checkpoint_*"), key=lambda path: int(path.name.split("_")[1]))
    if names:
        accelerator.load_state(str(names[-1]))
        project.iteration = len(names)
        step = len(names) * job.every
    data = epoch_of(job)

    def descend(step: int) -> None:
        optimizer.zero_grad()
        accelerator.backward(model(*batch_of(data, step))["loss"])
        optimizer.step()

    done.train(job, step, descend, lambda _: accelerator.save_state())
    done.weights = _weights(model)
    return done


def orbax(job: Job) -> Outcome:
    """JAX: Orbax's `StandardSave` against our handler, both asynchronous."""
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    from shrinkpoint.trainers.orbax import CompressedHandler, CompressedRestore, CompressedSave

    ready: Any = jax.block_until_ready

    def loss(params: Any, x: Any, y: Any) -> Any:
        (a, first), (b, second), (c, last) = ((params[f"{k}.weight"].T, params[f"{k}.bias"]) for k in (0, 2, 4))
        hidden = jax.nn.gelu(jax.nn.gelu(x @ a + first, approximate=False) @ b + second, approximate=False)
        return jnp.square(hidden @ c + last - y).mean()

    @jax.jit
    def descend(state: Any, x: Any, y: Any) -> Any:
        """A step of AdamW, its state as Optax keeps it."""
        params, (adam,) = state["params"], state["opt_state"]
        grads, count = jax.grad(loss)(params, x, y), adam["count"] + 1
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, adam["mu"], grads)
        nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, adam["nu"], grads)
        far, near = 1 - 0.9**count, 1 - 0.999**count
        params = jax.tree.map(
            lambda p, m, v: p * (1 - 0.01 * RATE) - RATE * (m / far) / (jnp.sqrt(v / near) + 1e-8), params, mu, nu
        )
        return {"params": params, "opt_state": [{"count": count, "mu": mu, "nu": nu}]}

    params = {name: jnp.asarray(w.numpy()) for name, w in net(job.width).layers.state_dict().items()}
    zeros = jax.tree.map(jnp.zeros_like, params)
    state: Any = {"params": params, "opt_state": [{"count": jnp.zeros(()), "mu": zeros, "nu": zeros}]}
    data, done, step = epoch_of(job), Outcome(), 0
    with contextlib.ExitStack() as stack:
        handler, save, restore = None, ocp.args.StandardSave, ocp.args.StandardRestore
        if job.how == "ours":
            store = sp.Store(job.folder / "shrinkpoint", job.cfg)
            saver = stack.enter_context(sp.Saver(store, mode="process")) if job.timed else store
            handler, save, restore = CompressedHandler(saver), CompressedSave, CompressedRestore
        manager = stack.enter_context(ocp.CheckpointManager(job.folder.absolute(), item_handlers=handler))
        if manager.latest_step() is not None:
            step = manager.latest_step()
            state = manager.restore(step, args=restore(state))
        elif job.how != "none":
            # The first save starts its helpers, once a run.
            manager.save(0, args=save(state))
            manager.wait_until_finished()
            done.before = 1
        ready(descend(state, *(part.numpy() for part in batch_of(data, 0))))

        def advance(step: int) -> None:
            nonlocal state
            state = descend(state, *(part.numpy() for part in batch_of(data, step)))
            if (step + 1) % job.every == 0:
                ready(state)

        done.train(job, step, advance, lambda step: manager.save(step, args=save(state)), manager.wait_until_finished)
    # JAX has sorted the names.
    done.weights = [torch.from_numpy(np.array(state["params"][name])) for name in params]
    return done


@dataclass(frozen=True)
class Framework:
    """A framework, and the code that a user writes for its checkpoints.

    Args:
        train: runs a job.
        peer: its own checkpoints, as shown.
        ours: the lines a user adds or changes to save and resume with this package.
        own: the same without it.
        drawn: the parts of a resumed run that depend on random numbers and on the position in the data.
    """

    train: Callable[[Job], Outcome]
    peer: str
    ours: str
    own: str
    drawn: str = "no dropout, no shuffling"


TRAININGS: dict[str, Callable[[Job], Outcome]] = {
    "plain loop": plain,
    "DCP": dcp,
    "Lightning": lightning,
    "Transformers": transformers,
    "Accelerate": accelerate,
    "Orbax": orbax,
}
_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FRAMEWORKS = {name: Framework(train, **_TEXTS[name]) for name, train in TRAININGS.items()}


def run(name: str, job: Job) -> Outcome:
    """Train on one thread, without the warnings of torch and frameworks about accelerators.

    Threads that wait for each other make the times of so small a network those of the machine's other work.

    Raises:
        ImportError: the framework is not installed.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return FRAMEWORKS[name].train(job)
    finally:
        torch.set_num_threads(threads)
