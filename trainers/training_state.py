"""`TrainingState`: the parts of a training run, and their tree in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from ..codec.errors import ShrinkpointError
from ..codec.evidence.kind import Kind
from ..codec.evidence.module import bare, kinds
from ..codec.state.leaves import is_array
from ..codec.state.tree import flatten
from ..kernels.errors import BadArgumentError
from ..store.manifest import check_step
from .frozen_parameters import check_frozen, record
from .model_state import model_state, parameters_of, refuse_flat, sharded, whole
from .optimizer_state import optimizer_state, optimizers_of
from .processes import from_all, on_all, rank
from .state import Generator, Stateful, capture, plain

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Place: TypeAlias = tuple[str, ...]
"""Keys of a part of a run in its tree: `("ema",)`, `("more", "teacher")`."""
MORE = "more"
"""Key of the parts that users name."""


def label(place: Place) -> str:
    """Return the argument that a place belongs to.

    Example:
        >>> label(("ema",)), label(("more", "teacher"))
        ('ema', "more['teacher']")
    """
    return place[0] if len(place) == 1 else f"{place[0]}[{place[1]!r}]"


def put(state: dict[str, Any], place: Place, value: Any) -> None:
    """Store a value at its place, below levels that exist."""
    for name in place[:-1]:
        state = state[name]
    state[place[-1]] = value


def at(state: Mapping[str, Any], place: Place) -> Any:
    """Return the value at a place."""
    for name in place:
        state = state[name]
    return state


def has(state: Mapping[str, Any], place: Place) -> bool:
    """Return whether there is a value at a place."""
    for name in place:
        if not isinstance(state, Mapping) or name not in state:
            return False
        state = state[name]
    return True


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The parts of a training run that `save` stores and `resume` restores.

    The global random number generators of torch (and its devices), Python and NumPy always belong to it.

    Args:
        model: the module, wrapped (DDP, `torch.compile`) or not.
        optimizer: one optimizer or several.
        scheduler: learning-rate scheduler; like the next three, any object with `state_dict` and `load_state_dict`.
        scaler: gradient scaler of mixed precision.
        ema: averaged model, such as `torch.optim.swa_utils.AveragedModel`.
        loader: position in the data: a `Loader`.
        generators: name -> generator that training draws from, in addition to the global ones.
        more: name -> any other object with a state.
        frozen: where the model's frozen parameters (those that do not require a gradient) are kept. None (default): in
            each checkpoint. "once": once in the run's store. Any other text: not stored; the text names their source, a
            folder or a hub model with its revision. Their hash is in each checkpoint and is compared on resume.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> state = TrainingState(model, torch.optim.SGD(model.parameters()))
        >>> sorted(state.tree(3))
        ['model', 'optimizer', 'optimizers', 'ranks', 'step']

    Source: Check-N-Run, section 3.4; Inshrinkerator, section 2 (the parts of a checkpoint).
    """

    model: nn.Module
    optimizer: Optimizers | None = None
    scheduler: Stateful | None = None
    scaler: Stateful | None = None
    ema: Stateful | None = None
    loader: Stateful | None = None
    generators: Mapping[str, Generator] | None = None
    more: Mapping[str, Stateful] | None = None
    frozen: str | None = None

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Return the optimizers as a tuple; BadArgumentError if another object is among them."""
        return optimizers_of(self.optimizer)

    @property
    def auxiliary(self) -> dict[Place, Stateful]:
        """Return scheduler, scaler, ema and more by place; refuse `more` that is not a mapping."""
        more = {} if self.more is None else self.more
        if not isinstance(more, Mapping):
            raise BadArgumentError(f"more must map names to objects with a state, not be a {type(more).__qualname__}")
        given = {("scheduler",): self.scheduler, ("scaler",): self.scaler, ("ema",): self.ema}
        found: dict[Place, Stateful] = {place: part for place, part in given.items() if part is not None}
        return found | {(MORE, name): part for name, part in more.items()}

    @property
    def modules(self) -> list[tuple[Place, nn.Module]]:
        """Return the auxiliary parts that are modules, which all processes save and load together."""
        return [(place, part) for place, part in self.auxiliary.items() if isinstance(part, nn.Module)]

    def check(self) -> None:
        """Raise BadArgumentError if a part has the wrong type."""
        if not isinstance(self.model, nn.Module):
            raise BadArgumentError(f"model must be a torch.nn.Module, not {type(self.model).__qualname__}")
        check_frozen(self.frozen)
        parts = {label(place): part for place, part in self.auxiliary.items()}
        for module in (self.model, *(module for _, module in self.modules)):
            refuse_flat(module)
        parts |= {} if self.loader is None else {"loader": self.loader}
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise BadArgumentError(f"{name} is a {type(part).__qualname__}, without state_dict and load_state_dict")

    def tree(self, step: int) -> dict[str, Any] | None:
        """Return the tree that `save` stores: plain containers and the live arrays.

        With several processes all of them must call it: the whole state is gathered on rank 0, the others get None.

        Args:
            step: training steps done, 0 or more.

        Raises:
            BadArgumentError: a part has the wrong type; the step is out of range; an optimizer has a parameter that
                is not the model's, or that another optimizer has too.
            ShrinkpointError: another process could not give its part of the state; the message says why.
        """

        def local() -> tuple[int, Sequence[torch.optim.Optimizer], dict[str, Any], Any]:
            """Return the part of the state that this process has without communication."""
            optimizers = self.optimizers
            self.check()
            own: dict[str, Any] = {} if self.more is None else {MORE: {}}
            for place, part in self.auxiliary.items():
                put(own, place, None if isinstance(part, nn.Module) else plain(part.state_dict()))
            position = None if self.loader is None else self.loader.state_dict()
            mine = capture(generators=self.generators, position=position)
            # An unsupported value is refused here, with its path, because it may not even be sent.
            flatten({"ranks": mine, **own}, is_array)
            return check_step(step), optimizers, own, mine

        # Before the first collective: a process that cannot join one would leave the others waiting.
        (number, optimizers, own, mine), paths = on_all(local, lambda found: list(sharded(found[2], "")))
        if any(other != paths[0] for other in paths):
            raise ShrinkpointError(
                "nothing was saved: the ranks have different sharded tensors in scheduler, scaler, ema or more"
            )
        kept_out = record(self.model, self.frozen)
        weights = model_state(self.model, without=() if kept_out is None else set(kept_out.names))
        state: dict[str, Any] = {"step": number, "model": weights}
        if kept_out is not None:
            state["frozen"] = kept_out.to_tree()
        if optimizers:
            state["optimizers"] = [type(one).__qualname__ for one in optimizers]
            state["optimizer"] = optimizer_state(self.model, optimizers)
        state |= whole(own)
        for place, module in self.modules:
            put(state, place, model_state(module))
        state["ranks"] = from_all(mine)
        return state if rank() == 0 else None

    def kinds(self, tree: Mapping[str, Any]) -> dict[str, Kind]:
        """Return the kinds of the parameters and of optimizer entries; `state` for all other arrays.

        Args:
            tree: as `tree` returned it.
        """
        found = kinds(bare(self.model), list(self.optimizers) or None)
        others = {key: value for key, value in tree.items() if key not in ("model", "optimizer")}
        known = found.keys() | parameters_of(self.model).keys()
        others["model"] = {k: v for k, v in tree["model"].items() if k not in known}
        others["optimizer"] = {"more": tree.get("optimizer", {}).get("more", {})}
        _, arrays = flatten(others, is_array)
        return found | {node.path: Kind("other", "state") for node in arrays}

    def missing(self, tree: Mapping[str, Any]) -> list[str]:
        """Return the names of the parts of this state that a stored tree does not hold."""
        places: list[Place] = [("model",), *[("optimizer",)] * bool(self.optimizers), *self.auxiliary]
        names = ["/".join(map(str, place)) for place in places if not has(tree, place)]
        names += [f"generators/{n}" for n in self.generators or {} if not has(tree["ranks"][0], ("generators", n))]
        if self.loader is not None and any(mine.get("position") is None for mine in tree["ranks"]):
            names.append("loader")
        return names

    def unused(self, tree: Mapping[str, Any]) -> list[str]:
        """Return the names of stored parts that `resume` skips because this state lacks them."""
        mine = {"model", *(place[0] for place in self.auxiliary), *["optimizer"] * bool(self.optimizers)}
        names = [name for name in ("optimizer", "scheduler", "scaler", "ema") if name in tree and name not in mine]
        names += [f"more[{name!r}]" for name in tree.get("more", {}) if (MORE, name) not in self.auxiliary]
        held = tree["ranks"][0]
        if self.loader is None and held.get("position") is not None:
            names.append("loader")
        return names + [f"generators[{n!r}]" for n in held.get("generators", {}) if n not in (self.generators or {})]


def is_training_tree(tree: Any) -> bool:
    """Return whether a stored tree was made by `TrainingState.tree`."""
    if not isinstance(tree, dict) or type(tree.get("step")) is not int or not isinstance(tree.get("model"), dict):
        return False
    ranks = tree.get("ranks")
    return isinstance(ranks, list) and bool(ranks) and all(isinstance(one, dict) and "rng" in one for one in ranks)
