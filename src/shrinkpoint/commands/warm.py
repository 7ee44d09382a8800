"""`warm`: compile the kernels of saves and loads before a training needs them."""

from __future__ import annotations

import itertools
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import __version__
from .inputs import AsJson, config
from .outputs import result, steps_done

if TYPE_CHECKING:
    from ..codec.config import Config

DTYPES = ("float32", "bfloat16", "float16")
"""dtypes of the weights and moments that are saved."""
PARTS = ("kernels", "codec", "searching", "store")
"""Packages that decide which kernels are needed."""


def warm(
    preset: Annotated[
        list[str] | None,
        typer.Option(
            help="Preset to compile for; repeatable; by default: default (also with a rate, an error limit, and a "
            "search), lossless."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile the kernels of saves, loads and searches, and keep them on this machine's disk.

    Otherwise the first save and the first load compile them, in up to 40 s. Run this on the machine of the training as
    the same user, or when its container image is built. A second run only says that they are compiled.
    """
    from ..kernels.backend import cache

    purpose = f"{__version__} {preset and sorted(set(preset))} {_sources()}"
    begin, before = time.perf_counter(), len(cache.stored)
    kernels = cache.kernels_of(purpose)
    if not kernels:
        _compile(preset, as_json)
        cache.mark_warmed(purpose)
        kernels = len(cache.loaded | cache.stored)
    compiled, seconds = len(cache.stored) - before, time.perf_counter() - begin
    done = f"{compiled} of {kernels} kernels compiled in {seconds:.0f} s"
    text = done if compiled else f"all {kernels} kernels are compiled"
    result(as_json, text, functions=compiled, kernels=kernels, seconds=seconds)


def _sources() -> list[tuple[float, int]]:
    """Return times and sizes of the source files that decide which kernels are needed."""
    package = Path(__file__).parents[1]
    files = itertools.chain(*(sorted((package / name).rglob("*.py")) for name in PARTS))
    return [(found.st_mtime, found.st_size) for found in map(os.stat, files)]


def _compile(preset: list[str] | None, as_json: bool) -> None:
    """Save, load and search as a training would, and show how many kernels are compiled."""
    from numba.core import event

    from ..kernels.backend import cache, dispatch
    from ..kernels.backend.jit import LOG

    class Counter(event.Listener):
        """Shows the number of kernels that are compiled or loaded."""

        last = 0

        def on_start(self, event: Any) -> None:
            """Do nothing at the begin of a compilation."""

        def on_end(self, event: Any) -> None:
            """Show the number, if the compiled function was a kernel."""
            done = len(cache.loaded | cache.stored)
            if done != self.last:
                self.last = done
                show(None, done, max(done, cache.KERNELS))

    dispatch.compile_at_once()
    cfgs = [config(name, None) for name in preset or ("default", "lossless")]
    if not preset:
        cfgs += [config("default", None, rate=0.002), config("default", None, max_rel_error=0.01)]
    LOG.disabled = True  # the notice that kernels are compiled, and that this command compiles them
    try:
        with steps_done("kernels", quiet=as_json) as show, event.install_listener("numba:compile", Counter()):
            for cfg, dtype in itertools.product(cfgs, DTYPES):
                save_and_load(cfg, dtype)
            if not preset:
                search_once()
    finally:
        LOG.disabled = False


def save_and_load(cfg: Config, dtype: str) -> None:
    """Save and load the checkpoints of a short training in memory."""
    import fsspec
    import torch

    from ..store.saver.worker import sample_states
    from ..store.store import Store

    url, own = f"memory://warm-{uuid.uuid4()}", getattr(torch, dtype)
    state = sample_states(lambda x: torch.from_numpy(x).to(own))
    store = Store(url, cfg)
    try:
        for step in range(4):
            store.save(step, next(state))
        Store(url).load()
        Store(url).load(0)
    finally:
        fsspec.filesystem("memory").rm(url.removeprefix("memory:/"), recursive=True)


def search_once() -> None:
    """Search a configuration for the second checkpoint of a short training."""
    import torch

    from ..searching.run import search
    from ..store.saver.worker import sample_states

    states = sample_states(torch.from_numpy)
    first = next(states)
    kinds = {f"model/{name}": "linear" for name in first["model"] if "norm" not in name}
    search(first, lambda state: float(state["model"]["linear.weight"].square().mean()), 0.5, kinds=kinds)
