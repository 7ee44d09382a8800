"""The bench `optimizers`: what becomes of each entry of each optimizer, by running it.

Every optimizer of the installed packages trains a small network for some steps. Its state is compressed with the
default, with `kinds=` and without, and restored into a second, equal training with the same weights; the row is the
relative difference of the update that this one makes next. Packages that are not installed have no rows:
`pip install pytorch_optimizer schedulefree prodigyopt torchao bitsandbytes optax jax`.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import nn

import shrinkpoint as sp

from ..harness import Options, Row

TITLE = "optimizers: the next update from restored entries, against that from the entries themselves"
STEPS = 40
PACKAGES = ("torch", "pytorch_optimizer", "schedulefree", "prodigyopt", "torchao", "bitsandbytes", "optax")
_VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "torch.optim.Adam": ({"amsgrad": True},),
    "torch.optim.SGD": ({"momentum": 0.9},),
    "torch.optim.RMSprop": ({"momentum": 0.9}, {"centered": True}),
    "pytorch_optimizer.LaProp": ({"centered": True, "steps_before_using_centered": 2},),
    "optax.rmsprop": ({"centered": True},),
    "optax.sgd": ({"momentum": 0.9},),
}
"""Settings that keep further entries."""
_RATES = {"Prodigy": 1.0, "prodigy": 1.0, "DAdapt": 1.0, "dadapt": 1.0}
"""Learning rates by the beginning of the name; others have 1e-3."""
_GRAPH = ("AdaHessian", "SophiaH")
"""Optimizers that take the gradient's gradient."""
_PROJECTING = ("galore", "apollo", "fira", "conda", "sara")
_PROJECTED = {"rank": 8, "update_proj_gap": 50, "scale": 1.0, "projection_type": "std"}
"""Optimizers of projected gradients, and the settings of a group that is projected."""
Entry = dict[str, Any]
Tree = dict[str, Any]


def _inputs(step: int) -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(step)) * torch.linspace(0.01, 3, 64)


class TorchTraining:
    """A network that a torch optimizer trains.

    Args:
        make: returns the optimizer of a network.
    """

    def __init__(self, make: Callable[[nn.Module], Any]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
        self.optimizer = make(self.model)
        getattr(self.optimizer, "train", lambda: None)()

    def step(self, number: int) -> None:
        """Take one step."""
        torch.manual_seed(number)
        name = type(self.optimizer).__name__

        def loss() -> Any:
            self.optimizer.zero_grad()
            x = _inputs(number)
            found = (self.model(x) - x).square().mean()
            if not hasattr(self.optimizer, "fused_backward"):
                found.backward(create_graph=name in _GRAPH)
            return found

        if hasattr(self.optimizer, "fused_backward"):
            self.optimizer.fused_backward(loss(), lr=1e-3)
        elif "Closure" in name or name in ("LBFGS", "BSAM"):
            self.optimizer.step(loss)
        else:
            loss()
            self.optimizer.step()

    @property
    def weights(self) -> np.ndarray[Any, Any]:
        """All weights."""
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).numpy().copy()

    @property
    def state(self) -> Tree:
        """The state that is compressed."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    @property
    def kinds(self) -> Any:
        """What `sp.kinds` says of it."""
        return sp.kinds(self.model, self.optimizer)

    def put(self, restored: Tree) -> None:
        """Put restored entries into the optimizer; the weights stay."""
        values = dict(leaves(restored["optimizer"]))
        for path, x in leaves(self.optimizer.state_dict()):
            if type(x) in (torch.Tensor, nn.Parameter) and torch.is_tensor(values[path]):
                x.data.copy_(values[path])

    @staticmethod
    def name(path: str) -> str:
        """Return the name of the entry at a path, or "" outside of the optimizer."""
        parts = path.split("/")
        if parts[0] != "optimizer":
            return ""
        inner = [part for part in parts[2:] if part != "__bnb_optimizer_quant_state__"]
        found = inner[1] if parts[1] == "state" and len(inner) > 1 else inner[-1]
        return found.partition("::")[0]


@lru_cache(8)
def _compiled(make: Callable[[], Any], passed: tuple[str, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a transformation's start and compiled step, the same for all trainings of it."""
    import jax
    import optax

    transformation = make()

    def loss(params: Any, x: Any) -> Any:
        hidden = jax.numpy.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
        return jax.numpy.square(hidden @ params["second"]["kernel"] + params["second"]["bias"] - x).mean()

    def step(params: Any, state: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, x)
        known = {"value": value, "grad": gradient, "value_fn": lambda p: loss(p, x), "obj_fn": lambda p: loss(p, x)}
        more = {name: known[name] for name in passed}
        updates, state = transformation.update(gradient, state, params, **more)
        return optax.apply_updates(params, updates), state

    return transformation.init, jax.jit(step)


class JaxTraining:
    """The same network in JAX, trained by an Optax transformation.

    Args:
        make: returns the transformation.
        passed: what its update is given in addition to the gradient, by name: of "value", "grad", "value_fn", "obj_fn".
    """

    def __init__(self, make: Callable[[], Any], passed: tuple[str, ...]) -> None:
        import jax

        keys = jax.random.split(jax.random.PRNGKey(0), 2)
        shapes = (("first", keys[0], 64, 96), ("second", keys[1], 96, 64))
        self.params = {
            name: {"kernel": jax.random.normal(key, (a, b)) / math.sqrt(a), "bias": jax.numpy.zeros(b)}
            for name, key, a, b in shapes
        }
        start, self._step = _compiled(make, passed)
        self.opt_state = start(self.params)
        self.kinds = None

    def step(self, number: int) -> None:
        """Take one step."""
        import jax

        x = jax.numpy.asarray(_inputs(number).numpy())
        self.params, self.opt_state = self._step(self.params, self.opt_state, x)

    @property
    def weights(self) -> np.ndarray[Any, Any]:
        """All weights."""
        import jax

        return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(self.params)])

    @property
    def state(self) -> Tree:
        """The state that is compressed."""
        from shrinkpoint.trainers.jax import nested

        return nested({"params": self.params, "opt_state": self.opt_state})

    def put(self, restored: Tree) -> None:
        """Put restored entries into the optimizer; the weights stay."""
        from shrinkpoint.trainers.jax import fitted

        state = {"params": self.params, "opt_state": self.opt_state}
        self.opt_state = fitted(restored, state)["opt_state"]

    @staticmethod
    def name(path: str) -> str:
        """Return the name of the entry at a path, or "" outside of the optimizer."""
        if not path.startswith("opt_state/"):
            return ""
        above = re.sub(r"/(first|second)/(kernel|bias)(/\d+)*$", "", path).split("/")[1:]
        return next((part for part in reversed(above) if not part.isdigit()), above[-1])


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each leaf."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, dict | list | tuple):
            yield from leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def examined(make: Callable[[], Any]) -> dict[str, Any]:
    """Return what becomes of the entries of an optimizer, and of its next update.

    Args:
        make: returns a training, always the same one.

    Returns:
        `entries`: name -> `lossy` (whether an array of this name changed), `error` (the largest relative L2 error),
        `gain` (of first moments: smallest and largest <m~, m> / <m, m>), `why`. `weights`: the reason without `kinds=`.
        `update`: relative difference of the next update.
    """
    training = _trained(make)
    state = training.state
    entries: dict[str, Entry] = {}
    weights, update, wanted = "", 0.0, _next_update(make, None)
    for kinds in (None, training.kinds) if training.kinds else (None,):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ckpt = sp.compress(state, kinds=kinds)
            restored = sp.decompress(ckpt)
        _add(entries, training.name, ckpt, dict(leaves(state)), dict(leaves(restored)))
        if kinds is None:
            weights = next(r.why for r in ckpt.summary() if r.path in ("model/0.weight", "params/first/kernel"))
        difference = float(np.linalg.norm(_next_update(make, restored) - wanted))
        update = max(update, difference / max(float(np.linalg.norm(wanted)), 1e-30))
    return {"entries": entries, "weights": weights, "update": update}


def _trained(make: Callable[[], Any]) -> Any:
    training = make()
    for number in range(STEPS):
        training.step(number)
    return training


def _next_update(make: Callable[[], Any], restored: Tree | None) -> np.ndarray[Any, Any]:
    """Return the change of the weights by one more step, from restored entries if given."""
    training = _trained(make)
    if restored is not None:
        training.put(restored)
    before = training.weights
    training.step(STEPS)
    return np.asarray(training.weights - before, np.float64)


def _add(
    entries: dict[str, Entry],
    name_of: Callable[[str], str],
    ckpt: Any,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> None:
    for row in ckpt.summary():
        name = name_of(row.path)
        value = before.get(row.path, ckpt)
        if not name or not (value is ckpt or hasattr(value, "shape")):
            continue
        name += " (quantized)" if value is ckpt else ""  # a part of a tensor subclass
        lossy = row.measure != "exact"
        entry = entries.setdefault(name, {"lossy": lossy, "error": 0.0, "gain": None, "why": row.why})
        if not lossy:
            continue
        if not entry["lossy"]:
            entry |= {"lossy": True, "why": row.why}
        x, y = (np.asarray(_host(tree[row.path]), np.float64) for tree in (before, after))
        square = max(float((x * x).sum()), 1e-300)
        entry["error"] = max(entry["error"], math.sqrt(float(((y - x) ** 2).sum()) / square))
        if "first moment" in row.why and square > 1e-300:
            gain = float((x * y).sum()) / square
            low, high = entry["gain"] or (gain, gain)
            entry["gain"] = (min(low, gain), max(high, gain))


def _host(x: Any) -> Any:
    return x.float() if torch.is_tensor(x) else x


# ----------------------------------------------------------------------------------------------------- of the packages


def subjects(package: str) -> Iterator[tuple[str, list[Callable[[], Any]]]]:
    """Yield each optimizer of an installed package, and the ways to construct its training."""
    if package == "optax":
        yield from _of_optax()
        return
    modules = {"torch": "torch.optim", "torchao": "torchao.optim", "bitsandbytes": "bitsandbytes.optim"}
    module = import_module(modules.get(package, package))
    classes = {
        name: x
        for name, x in vars(module).items()
        if inspect.isclass(x) and issubclass(x, torch.optim.Optimizer) and x is not torch.optim.Optimizer
    }
    if package == "pytorch_optimizer":
        classes = {
            cls.__name__: cls
            for cls in map(module.load_optimizer, module.get_supported_optimizers())
            if cls.__module__.startswith(package)
        }
    for name, cls in sorted(classes.items()):
        for path, more in _variants(f"{module.__name__}.{name}"):
            yield path, [partial(TorchTraining, make) for make in _ways(cls, {"lr": _rate(name), **more})]


def _rate(name: str) -> float:
    return next((rate for start, rate in _RATES.items() if name.startswith(start)), 1e-3)


def _variants(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the settings of each variant of an optimizer."""
    yield path, {}
    for more in _VARIANTS.get(path, ()):
        yield f"{path}({', '.join(f'{key}={value}' for key, value in more.items())})", more


def _ways(cls: Any, settings: Mapping[str, Any]) -> Iterable[Callable[[nn.Module], Any]]:
    """Return the ways in which optimizers are constructed; one of them fits."""

    def matrices(model: nn.Module, wanted: bool = True) -> list[Any]:
        return [p for p in model.parameters() if (p.ndim >= 2) == wanted]

    def groups(model: nn.Module) -> list[Any]:
        return [{"params": matrices(model), **_PROJECTED}, {"params": matrices(model, False)}]

    def muon(model: nn.Module) -> list[Any]:
        return [{"params": matrices(model), "use_muon": True}, {"params": matrices(model, False), "use_muon": False}]

    parameters: list[Callable[[nn.Module], Any]] = [lambda m: list(m.parameters()), matrices, muon, lambda m: m]
    if cls.__name__.lower() in _PROJECTING:
        parameters.insert(0, groups)
    more: tuple[dict[str, Any], ...] = ({}, {"momentum": 0.9}, {"num_data": 32}, {"num_iterations": 100})

    def made(model: nn.Module, given: Callable[[nn.Module], Any], named: Mapping[str, Any]) -> Any:
        return cls(given(model), **named)

    return [
        partial(made, given=given, named={**start, **added})
        for given in parameters
        for added in more
        for start in (settings, {})
    ]


def _of_optax() -> Iterator[tuple[str, list[Callable[[], Any]]]]:
    import optax
    import optax.contrib

    for module in (optax, optax.contrib):
        for name in sorted(vars(module)):
            make = getattr(module, name)
            if not inspect.isfunction(make) or name.startswith(("scale_by", "add_", "inject_", "_")):
                continue
            takes = inspect.signature(make).parameters
            if not takes or not ("learning_rate" in takes or name in ("dog", "dowg", "cocob", "polyak_sgd")):
                continue
            given = {"learning_rate": _rate(name)} if "learning_rate" in takes else {}
            passed = ((), ("value",), ("value", "grad", "value_fn"), ("obj_fn",))
            for path, more in _variants(f"{module.__name__}.{name}"):
                yield path, [partial(JaxTraining, partial(make, **given, **more), names) for names in passed]


def attempted(ways: Iterable[Callable[[], Any]]) -> dict[str, Any] | str:
    """Return what `examined` finds by the first way that works, or why none does."""
    why = ""
    for way in ways:
        try:
            _trained(way)
        except Exception as error:  # any package may refuse arguments, this machine or a loss in its own way
            why = why or f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            continue
        try:
            return examined(way)
        except sp.UnsupportedLeafError as error:
            return f"refused: {error}"
    return f"not run: {why}"


def run(options: Options) -> list[Row]:
    """Examine the optimizers of all installed packages."""
    records = options.kept["optimizers"] = {}
    options.kept["packages"] = {name: version(name) for name in PACKAGES if find_spec(name)}
    for package in options.kept["packages"]:
        if options.quick and package != "torch":
            continue
        for name, ways in subjects(package):
            if not options.begins(name):
                continue
            records[name] = found = attempted(ways)
            options.done([_row(name, found)])
    return options.measured


def _row(name: str, found: dict[str, Any] | str) -> Row:
    unit = "relative difference"
    if isinstance(found, str):
        return Row(name, "cpu", 0, None, unit, note=found)
    changed = [f"{entry} {x['error']:.2f}" for entry, x in found["entries"].items() if x["lossy"]]
    exact = [entry for entry, x in found["entries"].items() if not x["lossy"]]
    note = f"changed: {', '.join(changed) or 'none'}; exact: {', '.join(exact) or 'none'}; weights: {found['weights']}"
    return Row(name, "cpu", 12448, found["update"], unit, note=note)
