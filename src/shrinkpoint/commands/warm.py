"""`warm`: compile the kernels of saves and loads before a training needs them."""

from __future__ import annotations

import itertools
import time
import uuid
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AsJson
from .output import emit, line

if TYPE_CHECKING:
    from ..codec.config import Config

DTYPES = ("float32", "bfloat16")
"""dtypes of the weights and moments that are saved."""
_SHAPE = (256, 512)
"""Shape of a matrix that is large enough for every coding method."""


def warm(
    preset: Annotated[
        list[str] | None,
        typer.Option(help="Preset to compile for; repeatable; by default: default (also with a rate) and lossless."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile the kernels of saves and loads for this machine's CPU, and keep them on its disk.

    Otherwise the first save and the first load compile them, in up to 40 s. Run this on the machine of the training as
    the same user, or when its container image is built.
    """
    from numba.core import event

    from ..kernels import first_calls
    from .configs import config

    first_calls.compile_at_once()

    cfgs = [config(name, None) for name in preset or ("default", "lossless")]
    if not preset:
        cfgs.append(config("default", None, rate=0.002))
    begin = time.perf_counter()
    with event.install_listener("numba:compile", event.RecordingListener()) as listener:  # type: ignore[no-untyped-call]
        for cfg, dtype in itertools.product(cfgs, DTYPES):
            save_and_load(cfg, dtype)
    compiled, seconds = sum(one.is_end for _, one in listener.buffer), time.perf_counter() - begin
    if as_json:
        emit({"functions": compiled, "seconds": seconds})
    else:
        line(f"{compiled} functions compiled in {seconds:.0f} s; those compiled before were kept")


def save_and_load(cfg: Config, dtype: str) -> None:
    """Save and load the checkpoints of a short training in memory."""
    import fsspec
    import torch

    from ..store.store import Store

    url, state = f"memory://warm-{uuid.uuid4()}", _states(getattr(torch, dtype))
    store = Store(url, cfg)
    try:
        for step in range(4):
            store.save(step, next(state))
        Store(url).load()
        Store(url).load(0)
    finally:
        fsspec.filesystem("memory").rm(url.removeprefix("memory:/"), recursive=True)


def _states(dtype: Any) -> Any:
    """Successive states of a model with an embedding, a matrix, a norm and AdamW's moments."""
    import torch

    random = torch.Generator().manual_seed(0)
    names = {
        "embedding.weight": (4096, 64),
        "linear.weight": _SHAPE,
        "convolution.weight": (128, 64, 3, 3),
        "norm.weight": _SHAPE[1:],
    }
    weights = {name: torch.randn(shape, generator=random) for name, shape in names.items()}
    # Some rows are larger than others, as in trainings, because entropy coding has contexts for that.
    moments = {name: 1e-3 * torch.randn(shape, generator=random) for name, shape in names.items()}
    for moment in moments.values():
        moment[: len(moment) // 4] *= 8
    while True:
        for name, moment in moments.items():
            weights[name] = weights[name] + moment
            moments[name] = 0.9 * moment + 1e-4 * torch.randn(moment.shape, generator=random)
        optimizer = {
            number: {"step": torch.tensor(1.0), "exp_avg": m.to(dtype), "exp_avg_sq": (1e-3 * m * m).to(dtype)}
            for number, m in enumerate(moments.values())
        }
        yield {
            "model": {name: x.to(dtype) for name, x in weights.items()},
            "optimizer": {"state": optimizer, "param_groups": [{"params": list(optimizer)}]},
        }
