"""Compilation of kernels before the first save."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ...codec.compress import compress
from ...codec.evidence.kind import Kind

if TYPE_CHECKING:
    from ...codec.config import Config

NpArray = np.ndarray[Any, Any]
_SHAPE = (256, 512)
"""Shape of a matrix that is large enough for every coding method, and for compiled code (`kernels.backend.dispatch`)."""


def sample_states(convert: Callable[[NpArray], Any]) -> Iterator[dict[str, Any]]:
    """Yield successive states of a model that is trained with AdamW.

    Args:
        convert: what makes an array of the wanted library and dtype of a NumPy array (float32).
    """
    random = np.random.default_rng(0)
    shapes = {
        "embedding.weight": (4096, 64),
        "linear.weight": _SHAPE,
        "convolution.weight": (128, 64, 3, 3),
        "norm.weight": _SHAPE[1:],
        **{f"layers.{number}.weight": (48, 48) for number in range(12)},  # small ones are coded together
    }

    def drawn(shape: tuple[int, ...], scale: float) -> NpArray:
        return scale * random.standard_normal(shape, dtype=np.float32)

    weights = {name: drawn(shape, 1.0) for name, shape in shapes.items()}
    # Some rows are larger than others, as in trainings, because entropy coding has contexts for that.
    moments = {name: drawn(shape, 1e-3) for name, shape in shapes.items()}
    exact = [drawn(_SHAPE, 1.0), drawn(_SHAPE, 1.0)]
    for moment in moments.values():
        moment[: len(moment) // 4] *= 8
    for step in itertools.count():
        for name, moment in moments.items():
            weights[name] = weights[name] + moment
            moments[name] = np.float32(0.9) * moment + drawn(moment.shape, 1e-4)
        for number, share in enumerate((1e-2, 1e-5)):  # few and very few changes
            change = np.float32(1e-3) * (random.random(_SHAPE) < share)
            exact[number] = exact[number] + change
        optimizer = {
            number: {"step": 1.0, "exp_avg": convert(m), "exp_avg_sq": convert(np.float32(1e-3) * m * m)}
            for number, m in enumerate(moments.values())
        }
        yield {
            "model": {name: convert(x) for name, x in weights.items()},
            "exact": [convert(x) for x in exact],
            "lists": [[*range(1 << 14), step], [float(x) for x in exact[0].reshape(-1)[: 1 << 14]]],
            "random": random.integers(0, 256, 5056, dtype=np.uint8),
            "optimizer": {"state": optimizer, "param_groups": [{"params": list(optimizer)}]},
        }


def warm_up(cfg: Config, convert: Callable[[NpArray], Any], stop: Callable[[], bool]) -> None:
    """Load the kernels of saves, and compile those that are not in the cache.

    Loading takes a second of processor time, and compiling about eleven.

    Args:
        cfg: of the saves.
        convert: as in `sample_states`.
        stop: whether a save waits; asked between steps of some seconds.
    """
    states = sample_states(convert)
    first, second = next(states), next(states)
    for parts in (("model",), ("model", "optimizer")):
        # A model without optimizer uses other kernels, because the importance of its weights is unknown.
        kinds = {f"model/{name}": Kind("linear") for name in first["model"]} if parts == ("model",) else None
        base = None
        for state in (first, second):
            if stop():
                return
            base = compress({name: state[name] for name in parts}, base, cfg, kinds=kinds)
