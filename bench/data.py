"""Data that looks like training: weights, levels of two checkpoints, whole AdamW states.

Two sources, and every row says which one it was measured on:

- trained here: the demo's GPT on the standard library's sources, for a few seconds (quick) or about a minute.
- drawn: element i is `0.02 * s[row] * z`, with z standard normal, rows of 1024 elements and `ln s` normal with
  deviation 0.4 (kurtosis 5.7; the demo's GPT has 3 to 8); the next checkpoint is 1 % of the row's deviation away.

Larger states are drawn from real ones in blocks of 1024 neighbours at random places, the same places in both
checkpoints and in weights and moments, so that rows, tails and changes between the two are preserved. Each
element is multiplied by a factor within 0.1 % of one, the same in both checkpoints: no value is met a second time, and
a compressor that looks for repetitions finds none that training would not have made.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from shrinkpoint.kernels.errors import BadArgumentError

from .harness import threads

Floats = npt.NDArray[np.float32]
Levels = npt.NDArray[np.uint8]
Tree = dict[str, Any]

BLOCK = 1024
"""Neighbours that stay together when a state is drawn from a smaller one."""
DRIFT = 0.01
"""Distance of the next checkpoint in deviations of its row, where none was trained."""
CODES = 16
"""Codebook entries of the levels that the coders are measured on."""
_SCALES = 1 << 14


def weights(n: int, seed: int = 0) -> Floats:
    """n weights drawn from the distribution above.

    Example:
        >>> weights(2000).shape
        (2000,)
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n, dtype=np.float32)
    return _scale_rows(x, 0.02 * np.exp(0.4 * rng.standard_normal(_SCALES)))


def drifted(w: Floats) -> Floats:
    """Return the next checkpoint of w: each row moves by `DRIFT` of its own deviation."""
    step = np.random.default_rng(1).standard_normal(w.size, dtype=np.float32)
    rows = w[: w.size // BLOCK * BLOCK].reshape(-1, BLOCK)
    deviation = np.sqrt(np.square(rows).mean(axis=1)) if rows.size else np.full(1, 0.02)
    step = _scale_rows(step, DRIFT * deviation)
    step += w
    return step


def _scale_rows(x: Floats, scale: npt.NDArray[np.floating[Any]]) -> Floats:
    """Multiply rows of `BLOCK` elements by `scale` in place; the last row may be shorter."""
    whole = x.size // BLOCK
    rows = x[: whole * BLOCK].reshape(whole, BLOCK)
    factors = np.resize(scale.astype(np.float32), whole + 1)
    rows *= factors[:whole, None]
    x[whole * BLOCK :] *= factors[whole]
    return x


@dataclass(frozen=True)
class Pair:
    """A training state, a later one of the same run, and where they come from."""

    before: Tree
    after: Tree
    origin: str

    @cached_property
    def pools(self) -> dict[str, tuple[Floats, Floats]]:
        """All weights, first moments and second moments of matrices, flat, before and after."""
        earlier = dict(arrays(self.before))
        later = dict(arrays(self.after))
        parts: dict[str, list[str]] = {"weight": [], "exp_avg": [], "exp_avg_sq": []}
        for path, value in earlier.items():
            role = role_of(path)
            other = later.get(path)
            if role and value.ndim >= 2 and value.dtype == np.float32 and other is not None:
                parts[role].append(path)
        pools: dict[str, tuple[Floats, Floats]] = {}
        for role, paths in parts.items():
            if paths:
                pools[role] = (_flat(earlier, paths), _flat(later, paths))
        if "weight" not in pools:
            raise BadArgumentError(f"{self.origin}: holds no float32 matrix; a training state is needed")
        return pools

    @property
    def parameters(self) -> int:
        """Number of weights of the earlier state."""
        return sum(x.size for path, x in arrays(self.before) if role_of(path) == "weight")

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of the earlier state."""
        return sum(value.nbytes for _, value in arrays(self.before))


def _flat(found: dict[str, npt.NDArray[Any]], paths: list[str]) -> Floats:
    return np.concatenate([np.asarray(found[path], np.float32).reshape(-1) for path in paths])


def role_of(path: str) -> str:
    """Return "weight", "exp_avg" or "exp_avg_sq" for a path of a training state, else ""."""
    name = path.rsplit("/", 1)[-1]
    if name in ("exp_avg", "exp_avg_sq"):
        return name
    return "" if path.startswith(("optimizer", "rng", "scheduler")) else "weight"


def arrays(tree: Any, path: str = "") -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield every array of a state as (path, NumPy array); bfloat16 as its bit patterns."""
    from shrinkpoint.kernels.backend.arrays import is_torch, to_numpy

    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from arrays(value, f"{path}/{key}" if path else str(key))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from arrays(value, f"{path}/{number}" if path else str(number))
    elif isinstance(tree, np.ndarray) or is_torch(tree):
        yield path, to_numpy(tree)


def relative_l2(arrays: Iterable[tuple[str, Any, Any]]) -> dict[str, float]:
    """Return the relative L2 error of arrays by their kind, all of a kind together.

    Args:
        arrays: kind, exact values and others of each array.
    """
    sums: dict[str, list[float]] = {}
    for kind, exact, other in arrays:
        a, b = (np.asarray(x, np.float64) for x in (exact, other))
        found = sums.setdefault(kind, [0.0, 0.0])
        found[0] += float(np.square(a - b).sum())
        found[1] += float(np.square(a).sum())
    return {kind: math.sqrt(error / all_) if all_ else 0.0 for kind, (error, all_) in sums.items()}


def trained(*, quick: bool) -> Pair:
    """Train the demo's GPT, and return two states: about 2 s (quick) or a minute on one core."""
    from shrinkpoint.demo import SIZES
    from shrinkpoint.demo.trainer import Corpus, Training

    name, steps = ("tiny", 40) if quick else ("small", 150)
    with threads(1):  # several threads that wait for each other crawl on a machine shared with others
        training = Training(SIZES[name], steps=2 * steps, seed=0, text=Corpus().train)
        states = []
        for upto in (steps, steps + 10):
            while training.step < upto:
                training.advance()
            states.append(copy.deepcopy(training.state()))  # tied weights stay tied
    return Pair(states[0], states[1], f"demo GPT ({name}) trained here, steps {steps} and {steps + 10}")


def gpt_shapes(parameters: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a byte-level GPT: 12 layers, 4 below 20 million parameters."""
    layers = 12 if parameters >= 20_000_000 else 4
    width = max(64, round(math.sqrt(parameters / (12 * layers)) / 32) * 32)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (256, width)}
    for i in range(layers):
        block = {
            "norm1.weight": (width,),
            "attention.query_key_value.weight": (3 * width, width),
            "attention.project.weight": (width, width),
            "norm2.weight": (width,),
            "mlp.up.weight": (4 * width, width),
            "mlp.down.weight": (width, 4 * width),
        }
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    return shapes | {"norm.weight": (width,)}


def drawn_state(pair: Pair, parameters: int) -> Pair:
    """A larger pair of states of a GPT, drawn from the pools of `pair` in blocks of neighbours."""
    return drawn_shapes(pair, gpt_shapes(parameters))


def drawn_shapes(pair: Pair, shapes: dict[str, tuple[int, ...]]) -> Pair:
    """A pair of states with weights of these shapes, drawn as in `drawn_state`."""
    rng = np.random.default_rng(0)
    pools = pair.pools
    states: tuple[Tree, Tree] = ({"model": {}}, {"model": {}})
    for state in states:
        if "exp_avg" in pools:
            state["optimizer"] = {"state": {}}
    for number, (name, shape) in enumerate(shapes.items()):
        size = math.prod(shape)
        spot = rng.random(-(-size // BLOCK))
        for moment, state in enumerate(states):
            factor = np.random.default_rng([0, number]).random(size, dtype=np.float32)
            values = {role: pools[role][moment] for role in pools}
            drawn = torch.from_numpy(_blocks(values["weight"], spot, factor).reshape(shape))
            state["model"][name] = 1.0 + 0.01 * drawn if len(shape) == 1 else drawn
            if "optimizer" in state:
                state["optimizer"]["state"][number] = {"step": torch.tensor(float(100 + moment))} | {
                    role: torch.from_numpy(_blocks(values[role], spot, factor).reshape(shape))
                    for role in ("exp_avg", "exp_avg_sq")
                    if role in values
                }
    return Pair(states[0], states[1], f"drawn in blocks of {BLOCK} from: {pair.origin}")


def _blocks(pool: Floats, spot: npt.NDArray[np.float64], factor: Floats) -> Floats:
    """Draw blocks of `BLOCK` neighbours of `pool`, each value times 1 -+ 0.1 %.

    Args:
        pool: values to draw from.
        spot: [ceil(n / BLOCK)].
        factor: [n], in [0, 1).
    """
    length = min(BLOCK, pool.size)
    start = (spot * (pool.size - length + 1)).astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(pool, length)
    found: Floats = np.resize(windows[start], factor.size)
    found *= 1.0 + 0.002 * (factor - np.float32(0.5))
    return found


class Sample:
    """Weights of two successive checkpoints, and their levels by one frozen codebook.

    Args:
        most: largest number of elements that will be asked for.
        pair: where to draw from; None: the documented distribution.
        drawn: elements that are drawn from the distribution and repeated for more. Default: all.
    """

    def __init__(self, most: int, pair: Pair | None = None, *, drawn: int | None = None) -> None:
        self._most = most
        self._drawn = most if drawn is None else min(drawn, most)
        self._pair = pair
        self.origin = "drawn: normal rows of log-normal scale" if pair is None else f"drawn from {pair.origin}"

    @cached_property
    def _weights(self) -> tuple[Floats, Floats]:
        if self._pair is None:
            before = weights(self._drawn)
            after = drifted(before)
            if self._drawn < self._most:
                return np.resize(before, self._most), np.resize(after, self._most)
            return before, after
        before_pool, after_pool = self._pair.pools["weight"]
        rng = np.random.default_rng(0)
        spot, factor = rng.random(-(-self._most // BLOCK)), rng.random(self._most, dtype=np.float32)
        return _blocks(before_pool, spot, factor), _blocks(after_pool, spot, factor)

    @cached_property
    def codebook(self) -> Floats:
        """`CODES` entries: the optimum for the earlier weights, rounded to float32."""
        from shrinkpoint.kernels.histogram import log_histogram
        from shrinkpoint.kernels.kmeans import bucket_weights, weighted_kmeans

        histogram = log_histogram(self._weights[0][: 1 << 20], 6, signed=True)
        values = histogram.values()
        fitted = weighted_kmeans(values, bucket_weights(histogram.counts[:-1], values), CODES)
        return np.asarray(fitted, np.float32)

    @cached_property
    def thresholds(self) -> Any:
        """Protects the largest 0.05 % of the earlier weights; prunes nothing."""
        from shrinkpoint.kernels.quantizer import Thresholds

        return Thresholds(protect_magnitude=float(np.quantile(np.abs(self._weights[0][: 1 << 20]), 0.9995)))

    @cached_property
    def _levels(self) -> tuple[Levels, Levels]:
        from shrinkpoint.kernels.quantizer import assign

        before, after = self._weights
        return assign(before, self.thresholds, self.codebook), assign(after, self.thresholds, self.codebook)

    def before(self, n: int) -> Floats:
        """The earlier weights, float32 [n]."""
        return self._weights[0][:n]

    def after(self, n: int) -> Floats:
        """The later weights, float32 [n]."""
        return self._weights[1][:n]

    def levels_before(self, n: int) -> Levels:
        """Levels of the earlier weights, uint8 [n], below CODES + 2."""
        return self._levels[0][:n]

    def levels_after(self, n: int) -> Levels:
        """Levels of the later weights by the same codebook, uint8 [n]."""
        return self._levels[1][:n]


def layers_kinds(weights: Mapping[str, Any]) -> dict[str, str]:
    """Return kinds which say that the matrices among weights are those of trained layers."""
    return {name: "linear" for name, x in weights.items() if len(getattr(x, "shape", ())) >= 2}


# -------------------------------------------------------------------------------------------------- models trained here

# The GPT reads Python's sources as bytes (pre-norm, AdamW; on a GPU in bfloat16 by autocast); a hundred steps take
# seconds on a GPU, minutes on two cores. The other two learn the angle of gratings in noise.

CONTEXT, BATCH = 256, 16
SIDE, CLASSES = 16, 10
"""Pixels of an image's side, and angles of gratings."""


@dataclass(frozen=True)
class Size:
    """Width, number of layers, and steps until the first state.

    Args:
        width: a multiple of 64.
        layers: at least one.
        steps: of training.
    """

    width: int
    layers: int
    steps: int

    @property
    def says(self) -> str:
        return f"GPT of {self.layers} layers of width {self.width}"


LARGE = Size(768, 12, 120)
"""86 million parameters: a state of 1.03 GB."""
MEDIUM = Size(512, 8, 120)
"""26 million parameters: a state of 0.31 GB."""
SMALL = Size(64, 2, 5)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm.

    Args:
        width: a multiple of 64.
        causal: whether a token sees only those before it.
    """

    def __init__(self, width: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = width // 64, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Any:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Logits of the next byte."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, size.width), nn.Embedding(CONTEXT, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, 256)

    def forward(self, x: Tensor) -> Any:
        h = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class ViT(nn.Module):
    """Logits of the class of an image, from patches of 2 x 2 pixels."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(SIDE * SIDE // 4, width))
        self.blocks = nn.ModuleList(Block(width, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Any:
        h = self.patch(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h).mean(1))


class Residual(nn.Module):
    """Two convolutions of 3 x 3 with batch norm, added to their input."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or into != out:
            self.shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(h + self.shortcut(x))


def resnet(width: int, blocks: int) -> nn.Module:
    """Return a ResNet of four stages for small images; (64, 2) is ResNet-18."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    into = width
    for stage in range(4):
        for block in range(blocks):
            out = width << stage
            layers.append(Residual(into, out, 2 if stage and not block else 1))
            into = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, CLASSES))


def states(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], optimizer: torch.optim.Optimizer, at: Sequence[int]
) -> list[Tree]:
    """Train, and return the states of model and optimizer on the host.

    Args:
        model: on its device.
        loss_of: draws a batch and returns the loss of the model.
        optimizer: of the model's parameters.
        at: steps of the states, increasing.
    """
    found: list[Tree] = []
    for step in range(1, at[-1] + 1):
        optimizer.zero_grad()
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step in at:
            state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            found.append(torch.utils._pytree.tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, state))
    return found


def gpt_states(size: Size, device: str, at: Sequence[int]) -> list[Tree]:
    """Train a GPT with AdamW on Python's sources, and return its states at these steps."""
    from shrinkpoint.demo.trainer import Corpus

    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Corpus().train), dtype=torch.uint8).to(device)
    model = GPT(size).to(device)
    batch = BATCH if device == "cuda" else 2

    def loss_of(model: nn.Module) -> Tensor:
        starts = torch.randint(len(text) - CONTEXT - 1, (batch, 1), device=device)
        window = text[starts + torch.arange(CONTEXT + 1, device=device)].long()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(window[:, :-1]).float()
        return nn.functional.cross_entropy(logits.reshape(-1, 256), window[:, 1:].reshape(-1))

    return states(model, loss_of, torch.optim.AdamW(model.parameters(), lr=3e-4), at)


def trained_gpt(size: Size, device: str, *, apart: int = 10) -> Pair:
    """Train a GPT and return the states at `size.steps` and `apart` steps later, on the host.

    Args:
        size: of the model.
        device: "cuda" or "cpu".
        apart: steps between the two states.
    """
    before, after = gpt_states(size, device, (size.steps, size.steps + apart))
    return Pair(before, after, f"{size.says} trained here, steps {size.steps} and {size.steps + apart}")


def _gratings(count: int) -> tuple[Tensor, Tensor]:
    """Draw images [count, 3, SIDE, SIDE] of gratings in noise, and the classes of their angles."""
    classes = torch.randint(CLASSES, (count,))
    angle, phase = classes * (torch.pi / CLASSES), 2 * torch.pi * torch.rand(count, 3, 1, 1)
    line = torch.arange(SIDE) - SIDE / 2
    along = torch.cos(angle)[:, None, None] * line + torch.sin(angle)[:, None, None] * line[:, None]
    return torch.sin(along[:, None] * (1 + torch.rand(count, 1, 1, 1)) + phase) + torch.randn(
        count, 3, SIDE, SIDE
    ), classes


def seeing(kind: str, *, quick: bool) -> Pair:
    """Train on gratings and return the states ten steps apart.

    Args:
        kind: "ViT" (6 layers of width 384, AdamW) or "ResNet-18" (batch norm, Adam).
        quick: a small model, and few steps.
    """
    torch.manual_seed(0)
    if kind == "ViT":
        model: nn.Module = ViT(64, 1) if quick else ViT(384, 6)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    else:
        model = resnet(8, 1) if quick else resnet(64, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(model: nn.Module) -> Tensor:
        images, classes = _gratings(16)
        return nn.functional.cross_entropy(model(images), classes)

    first = 4 if quick else 60
    before, after = states(model, loss_of, optimizer, (first, first + 10))
    return Pair(before, after, f"{kind} trained on gratings here, steps {first} and {first + 10}")
