"""`warm`: compile the kernels of saves and loads before a training needs them."""

from __future__ import annotations

import itertools
import time
import uuid
from typing import TYPE_CHECKING, Annotated

import typer

from .options import AsJson
from .output import emit, line

if TYPE_CHECKING:
    from ..codec.config import Config

DTYPES = ("float32", "bfloat16", "float16")
"""dtypes of the weights and moments that are saved."""


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
    the same user, or when its container image is built.
    """
    from numba.core import event

    from ..kernels.backend import first_calls
    from ..kernels.backend.compile_notice import LOG
    from .configs import config

    first_calls.compile_at_once()

    cfgs = [config(name, None) for name in preset or ("default", "lossless")]
    if not preset:
        cfgs += [config("default", None, rate=0.002), config("default", None, max_rel_error=0.01)]
    begin = time.perf_counter()
    LOG.disabled = True  # the notice that kernels are compiled, and that this command compiles them
    try:
        with event.install_listener("numba:compile", event.RecordingListener()) as listener:  # type: ignore[no-untyped-call]
            for cfg, dtype in itertools.product(cfgs, DTYPES):
                save_and_load(cfg, dtype)
            if not preset:
                search_once()
    finally:
        LOG.disabled = False
    compiled, seconds = sum(one.is_end for _, one in listener.buffer), time.perf_counter() - begin
    if as_json:
        emit({"functions": compiled, "seconds": seconds})
    else:
        line(f"{compiled} functions compiled in {seconds:.0f} s; those compiled before were kept")


def save_and_load(cfg: Config, dtype: str) -> None:
    """Save and load the checkpoints of a short training in memory."""
    import fsspec
    import torch

    from ..store.saver.warm_up import sample_states
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
    from ..store.saver.warm_up import sample_states

    states = sample_states(torch.from_numpy)
    first = next(states)
    kinds = {f"model/{name}": "linear" for name in first["model"] if "norm" not in name}
    search(first, lambda state: float(state["model"]["linear.weight"].square().mean()), 0.5, kinds=kinds)
