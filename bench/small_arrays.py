"""Rows "many small arrays" of `bench codec`: the cost of an array in states of many.

Five states, each the `state_dict` of a model and of its optimizer after a few steps with drawn gradients. A gradient is
a fixed direction and noise, scaled by row and column: moments differ between the rows of an array as in a training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

import shrinkpoint as sp
from shrinkpoint.codec.named_presets import NAMED

from .data import Pair, arrays, layers_kinds
from .harness import Case, Job, Options, Peer, Row, Rows, at_most, one_thread_clock, run_cases, threads
from .whole_states import BASE, COMPRESS, DECOMPRESS, DELTA, Work, torch_calls

NAME = "many small arrays"
EACH = "ms/array"
TORCH = "torch.save"
DEFAULT, EXACT = "default", "lossless"
SLOW = {"compress base": 0.15, "compress delta": 0.15, "decompress delta": 0.06, "lossless base": 0.12}
"""Rows of times, and the most milliseconds an array of 400 layers of 64 x 64 may take."""
OVER_ENTROPY = at_most(40)
"""Bytes an array may take above the entropy of its symbols."""
_STEPS = 8
_SHORT = 256
"""Exact arrays below so many elements count with their raw bytes: the entropy of so few says nothing."""
Shapes = dict[str, tuple[int, ...]]
Tree = dict[str, Any]


def squares(*, quick: bool) -> Shapes:
    """192 matrices of 256 x 256; 4 with `quick`."""
    return {f"layers.{i}.weight": (256, 256) for i in range(4 if quick else 192)}


def layers(*, quick: bool) -> Shapes:
    """400 layers of 64 x 64; 40 with `quick`."""
    return {f"layers.{i}.weight": (64, 64) for i in range(40 if quick else 400)}


def resnet(*, quick: bool) -> Shapes:
    """The 161 weight arrays of ResNet-50; with `quick` an eighth as wide."""
    part = 8 if quick else 1
    shapes: Shapes = {}

    def convolution(name: str, out: int, into: int, size: int, norm: str) -> None:
        shapes[f"{name}.weight"] = (out // part, into if into == 3 else into // part, size, size)
        shapes.update({f"{norm}.{kind}": (out // part,) for kind in ("weight", "bias")})

    convolution("conv1", 64, 3, 7, "bn1")
    into = 64
    for stage, blocks in enumerate((3, 4, 6, 3), 1):
        width = 32 << stage
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            for i, (out, inner, size) in enumerate(((width, into, 1), (width, width, 3), (4 * width, width, 1)), 1):
                convolution(f"{name}.conv{i}", out, inner, size, f"{name}.bn{i}")
            if block == 0:
                convolution(f"{name}.downsample.0", 4 * width, into, 1, f"{name}.downsample.1")
            into = 4 * width
    return shapes | {"fc.weight": (1000 // part, 2048 // part), "fc.bias": (1000 // part,)}


def lora(*, quick: bool) -> Shapes:
    """448 adapters of rank 16: seven projections of 32 layers of width 1024, two matrices each."""
    count, width = (2, 64) if quick else (32, 1024)
    inner, rank = width * 11 // 4, 16
    sides = {"q_proj": (width, width), "k_proj": (width, width), "v_proj": (width, width), "o_proj": (width, width)}
    sides |= {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
    return {
        f"layers.{i}.{name}.lora_{side}.weight": (rank, into) if side == "A" else (out, rank)
        for i in range(count)
        for name, (into, out) in sides.items()
        for side in "AB"
    }


def experts(*, quick: bool) -> Shapes:
    """Four layers of 64 experts of three matrices of 32 x 128, and a router each."""
    shapes: Shapes = {}
    for i in range(1 if quick else 4):
        shapes[f"layers.{i}.router.weight"] = (64, 128)
        for name in (f"layers.{i}.experts.{expert}" for expert in range(64)):
            inner = {"gate": (32, 128), "up": (32, 128), "down": (128, 32)}
            shapes |= {f"{name}.{part}.weight": shape for part, shape in inner.items()}
    return shapes


@dataclass(frozen=True)
class State:
    """A state: its name in rows, and the function that makes two successive states."""

    name: str
    make: Callable[[bool], Pair]
    """Called with whether the run is quick."""
    targets: bool = False


def trained(shapes: Shapes, *, buffers: Shapes | None = None, decay: float = 0.01) -> Pair:
    """Train a model with AdamW (Adam if `decay` is 0) on random gradients."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    weights = {
        name: torch.nn.Parameter(drawn(shape, 0.02) if len(shape) > 1 else 1.0 + drawn(shape, 0.02))
        for name, shape in shapes.items()
    }
    scales = {name: _scales(p.shape, generator) for name, p in weights.items()}
    directions = {name: drawn(tuple(p.shape), 0.3) for name, p in weights.items()}
    optimizer = (torch.optim.AdamW if decay else torch.optim.Adam)(weights.values(), lr=3e-4, weight_decay=decay)
    states: list[Tree] = []
    for step in range(1, 2 * _STEPS + 1):
        for name, p in weights.items():
            p.grad = (drawn(tuple(p.shape), 1.0) + directions[name]) * scales[name]
        optimizer.step()
        if step % _STEPS == 0:
            model = {name: p.detach().clone() for name, p in weights.items()}
            for name, shape in (buffers or {}).items():
                model[name] = torch.tensor(100 + step) if not shape else drawn(shape, 0.1).abs()
            states.append({"model": model, "optimizer": copy.deepcopy(optimizer.state_dict())})
    return Pair(states[0], states[1], f"{len(shapes)} arrays, drawn gradients, steps {_STEPS} and {2 * _STEPS}")


def _scales(shape: tuple[int, ...], generator: Any) -> Any:
    """Scales of a gradient: log-normal, a factor a row and one a column."""
    import torch

    sizes = [(shape[0], *[1] * (len(shape) - 1)), (1, *shape[1:2], *[1] * (len(shape) - 2))]
    parts = [torch.exp(0.5 * torch.randn(size, generator=generator)) for size in sizes[: min(len(shape), 2)]]
    return 1e-3 * (parts[0] * parts[1] if len(parts) == 2 else parts[0])


def _resnet(quick: bool) -> Pair:
    shapes = resnet(quick=quick)
    norms = {name.removesuffix(".bias"): shape for name, shape in shapes.items() if f".{name}".endswith(".bias")}
    norms.pop("fc")
    buffers: Shapes = {}
    for name, shape in norms.items():
        buffers |= {f"{name}.running_mean": shape, f"{name}.running_var": shape, f"{name}.num_batches_tracked": ()}
    return trained(shapes, buffers=buffers, decay=0.0)


def _scalars(quick: bool) -> Pair:
    import torch

    count = 500 if quick else 10_000
    first = torch.randn(count, generator=torch.Generator().manual_seed(0))
    before, after = ({f"scalar.{i}": x for i, x in enumerate((first * factor).unbind())} for factor in (1.0, 1.01))
    return Pair({"model": before}, {"model": after}, "drawn")


STATES = (
    State("400 layers 64 x 64, AdamW", lambda quick: trained(layers(quick=quick)), targets=True),
    State("ResNet-50 shapes, Adam", _resnet),
    State("LoRA rank 16, AdamW", lambda quick: trained(lora(quick=quick))),
    State("mixture of 64 experts, AdamW", lambda quick: trained(experts(quick=quick))),
    State("10,000 scalars", _scalars),
)


def _row(state: State, what: str) -> str:
    return f"{NAME}, {state.name}: {what}"


def _count(tree: Any) -> int:
    """Return the number of arrays of a state."""
    return sum(1 for _ in arrays(tree))


def cases(state: State, works: Mapping[str, Work], wanted: Callable[[str], bool]) -> Iterator[Case]:
    """Yield the four rows of times, of processor milliseconds an array."""
    for what, limit in SLOW.items():
        name, (way, _, kind) = _row(state, what), what.rpartition(" ")
        work, way = (works[EXACT], COMPRESS) if way == EXACT else (works[DEFAULT], way)
        size, target = _count(work.pair.before) if wanted(name) else 0, at_most(limit) if state.targets else None
        yield Case(name, size, EACH, partial(_job, work, way, kind), target=target, peers=(TORCH,))


def _job(work: Work, way: str, kind: str) -> Job:
    calls = partial(torch_calls, work.state(kind), decode=way == DECOMPRESS)
    peer = Peer(TORCH, calls, note="no compression, to and from memory")
    return work.job(way, kind, [peer], float(_count(work.pair.before)))


def sizes(state: State, works: Mapping[str, Work], options: Options) -> list[Row]:
    """Return rows of bytes: of three checkpoints, and above the entropy of the symbols."""
    rows = Rows()
    if options.wanted(name := _row(state, "bytes above the entropy")):
        model = {"model": works[DEFAULT].pair.before["model"]}
        weights, count = sp.compress(model, kinds=layers_kinds(model["model"])), _count(model)
        floor = entropy_bytes(weights)
        note = (
            f"base of the {count:,} arrays of the model, {weights.nbytes:,} bytes; entropy {floor:,.0f} bytes: of "
            f"the values an array comes back with, of an exact one by byte planes, below {_SHORT} elements raw"
        )
        value = (weights.nbytes - floor) / count
        rows.add(name, value, "bytes/array", note=note, size=count, target=OVER_ENTROPY)
    for of, config, kind in ((BASE, DEFAULT, BASE), (DELTA, DEFAULT, DELTA), (f"{EXACT} {BASE}", EXACT, BASE)):
        if options.wanted(name := _row(state, f"bytes of the {of}")):
            stored, count = works[config].stored(kind), _count(works[config].pair.before)
            raw, size, note = stored.raw_nbytes, stored.nbytes, f"{count:,} arrays"
            rows.add(name, size, "bytes", ("raw", raw), note, ratio=raw / size, size=count)
    return rows


def entropy_bytes(stored: sp.Checkpoint) -> float:
    """Return the least bytes of an order-0 coder for the values of each array.

    Args:
        stored: a base of quantized weights and exact arrays; scaled moments have too many values.
    """
    back, total = dict(arrays(sp.decompress(stored))), 0.0
    for row in stored.summary():
        x = back[row.path]
        if row.measure != "exact":
            total += _entropy(x)
        elif x.size < _SHORT:
            total += x.nbytes
        else:
            planes = np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(-1, x.itemsize)
            total += sum(_entropy(planes[:, i]) for i in range(x.itemsize))
    return total


def _entropy(x: Any) -> float:
    """Bytes of entropy of the values of an array."""
    counts = np.unique(x, return_counts=True)[1]
    return float(-(counts * np.log2(counts / x.size)).sum()) / 8


def alone(options: Options) -> bool:
    """Return whether `--only` names these rows alone, so that other states are not made."""
    names = (NAME, *(state.name for state in STATES))
    return options.only is not None and all(any(word in name for name in names) for word in options.words())


def rows(options: Options) -> list[Row]:
    """Return all rows of all states, on one thread."""
    found: list[Row] = []
    with threads(1):
        for state in STATES:
            pair = cache(partial(state.make, options.quick))
            works = {config: Work(pair, NAMED[config]()) for config in (DEFAULT, EXACT)}
            found += run_cases(cases(state, works, options.wanted), options, one_thread_clock())
            found += options.done(sizes(state, works, options))
    return found
