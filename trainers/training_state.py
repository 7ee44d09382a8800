"""`TrainingState`: the parts of a training run, and their tree in a checkpoint.

Optimizers are in it by the canonical names of their parameters, under any parallelism.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from ..codec.errors import BadArgumentError, ShrinkpointError
from ..codec.evidence.kind import Kind
from ..codec.evidence.module import bare, kinds
from ..codec.state.leaves import is_array, is_sharded
from ..codec.state.tree import flatten
from ..store.manifest import check_step
from .model_state import check_frozen, frozen_record, is_plain, model_state, parameters_of, refuse_flat, whole
from .processes import broadcast_entries, from_all, on_all, rank
from .state import Generator, Stateful, capture, converted, leaves, like, load_optimizer, plain, stored

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Place: TypeAlias = tuple[str, ...]
"""Keys of a part of a run in its tree: `("ema",)`, `("more", "teacher")`."""
CLASSES = "classes"
"""Key of the classes of containers that the tree cannot hold, by part and path."""
MORE = "more"
"""Key of the parts that users name."""
_LOAD = torch.optim.Optimizer.load_state_dict
_DEVICE_SETTINGS = {"foreach", "fused", "capturable", "differentiable"}
"""Settings that depend on the device, which may be another one than before."""


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

    Source: Check-N-Run, section 4.1; Inshrinkerator, section 2 (the parts of a checkpoint).
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
            saved: dict[str, Any] = {}
            for place, part in self.auxiliary.items():
                saved[label(place)] = None if isinstance(part, nn.Module) else part.state_dict()
                put(own, place, stored(saved[label(place)]))
            saved["loader"] = None if self.loader is None else self.loader.state_dict()
            mine = capture(generators=self.generators) | {"position": stored(saved["loader"])}
            if classes := {name: found for name, tree in saved.items() if (found := dict(converted(tree)))}:
                mine[CLASSES] = classes
            # An unsupported value is refused here, with its path, because it may not even be sent.
            flatten({"ranks": mine, **own}, is_array)
            return check_step(step), optimizers, own, mine

        # Before the first collective: a process that cannot join one would leave the others waiting.
        (number, optimizers, own, mine), paths = on_all(
            local, lambda found: [keys for keys, value in leaves(found[2]) if is_sharded(value)]
        )
        if any(other != paths[0] for other in paths):
            raise ShrinkpointError(
                "nothing was saved: the ranks have different sharded tensors in scheduler, scaler, ema or more"
            )
        kept_out = frozen_record(self.model, self.frozen)
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


def in_containers(name: str, part: Stateful, saved: Any, mine: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return a part's saved state in containers of the classes that it had, and lines of others.

    Args:
        name: of the part, its label.
        part: as it is now; its own state has the classes.
        saved: state.
        mine: what the process saved for itself.
    """
    before = mine.get(CLASSES, {}).get(name, {})
    saved = like(saved, part.state_dict()) if before else saved
    now = dict(converted(saved)) if before else {}
    return saved, [f"{name}: {path} was a {kind}" for path, kind in before.items() if now.get(path) != kind]


def is_training_tree(tree: Any) -> bool:
    """Return whether a stored tree was made by `TrainingState.tree`."""
    if not isinstance(tree, dict) or type(tree.get("step")) is not int or not isinstance(tree.get("model"), dict):
        return False
    ranks = tree.get("ranks")
    return isinstance(ranks, list) and bool(ranks) and all(isinstance(one, dict) and "rng" in one for one in ranks)


def optimizers_of(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return one optimizer or several as a tuple.

    Raises:
        BadArgumentError: something else is among them.
    """
    if optimizer is None:
        return ()
    is_many = isinstance(optimizer, Iterable) and not isinstance(optimizer, (str, bytes, Mapping))
    found = tuple(optimizer) if is_many else (optimizer,)
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise BadArgumentError(f"optimizer must be a torch.optim.Optimizer, not {type(one).__qualname__}")
    return found


@dataclass(frozen=True, slots=True)
class _NamedOptimizer:
    """An optimizer with the names of its parameters.

    Args:
        optimizer: as given.
        groups: the names, group by group.
        first: the name of its first parameter, or its number if it has no name: a key for what belongs to no parameter.
    """

    optimizer: torch.optim.Optimizer
    groups: list[list[str]]
    first: str

    @property
    def flat(self) -> list[str]:
        return [name for group in self.groups for name in group]

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name."""
        return dict(zip(self.flat, (p for g in self.optimizer.param_groups for p in g["params"]), strict=True))


def _named(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[_NamedOptimizer]:
    """Return the names of the optimizers' parameters.

    Raises:
        BadArgumentError: an optimizer has a parameter that is not the model's.
    """
    table = {id(p): name for name, p in reversed(parameters_of(model).items())}  # of tied ones the first
    found = []
    for place, one in enumerate(optimizers):
        for number, group in enumerate(one.param_groups):
            for i, parameter in enumerate(group["params"]):
                if id(parameter) not in table:
                    raise BadArgumentError(
                        f"optimizer: parameter {i} of group {number}, of shape {tuple(parameter.shape)}, is not the "
                        "model's"
                    )
        groups = [[table[id(p)] for p in group["params"]] for group in one.param_groups]
        found.append(_NamedOptimizer(one, groups, next((name for group in groups for name in group), str(place))))
    return found


def optimizer_state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return moments and parameter groups of all optimizers, by parameter name.

    What belongs to no parameter stands in `more`: entries of `state` under other keys, and further parts.

    Raises:
        BadArgumentError: an optimizer has a parameter that is not the model's, or that another one has too.
    """
    state, groups, more = dict[str, Any](), list[Any](), dict[str, Any]()
    seen: set[str] = set()
    for one in _named(model, optimizers):
        if twice := seen.intersection(one.flat):
            raise BadArgumentError(f"optimizer: {min(twice)} is a parameter of two optimizers; give one of them")
        seen.update(one.flat)
        saved = one.optimizer.state_dict()
        entries, other = _split(saved["state"], one)
        state |= entries
        groups += [{**g, "params": n} for g, n in zip(saved["param_groups"], one.groups, strict=True)]
        extra = {k: v for k, v in saved.items() if k not in ("state", "param_groups")}
        if other:
            extra["state"] = other
        if extra:
            more[one.first] = extra
    return whole(plain({"state": state, "param_groups": groups, **({"more": more} if more else {})}))


def plain_entries(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[tuple[str, ...], torch.Tensor]:
    """Return the large entries that loading replaces by the saved ones, by place."""
    found: dict[tuple[str, ...], torch.Tensor] = {}
    for one in _named(model, optimizers):
        if type(one.optimizer).load_state_dict is not _LOAD or one.optimizer._optimizer_load_state_dict_pre_hooks:
            continue
        for name, parameter in one.parameters.items():
            entry = one.optimizer.state.get(parameter, {})
            found |= {("optimizer", "state", name, key): value for key, value in entry.items() if is_plain(value)}
    return found


def _split(state: Mapping[Any, Any], one: _NamedOptimizer) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Return the entries of numbered parameters by name, and those under other keys."""
    names = dict(enumerate(one.flat))
    entries = {names[k]: v for k, v in state.items() if k in names}
    return entries, {k: v for k, v in state.items() if k not in names}


def optimizer_mismatches(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], saved: Mapping[str, Any], classes: Sequence[str]
) -> list[str]:
    """Return a line for each difference between saved and present optimizers."""
    lines = []
    mine = [type(one).__qualname__ for one in optimizers]
    if list(classes) != mine:
        lines.append(f"optimizer: {', '.join(classes)} in the checkpoint, {', '.join(mine)} here")
    here = [names for one in _named(model, optimizers) for names in one.groups]
    before = [group["params"] for group in saved["param_groups"]]
    if len(here) != len(before):
        lines.append(f"optimizer: {len(before)} parameter groups in the checkpoint, {len(here)} here")
    for number, (a, b) in enumerate(zip(before, here, strict=False)):
        lines += [f"optimizer: group {number}: {n}: not in the checkpoint" for n in sorted(set(b) - set(a))]
        lines += [f"optimizer: group {number}: {n}: not in the optimizer" for n in sorted(set(a) - set(b))]
    return lines


def set_optimizers(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    saved: Mapping[str, Any],
    classes: Collection[str],
    *,
    without: Collection[str] = (),
    keep: Collection[str] = (),
) -> None:
    """Load a saved state into optimizers, by parameter names.

    Parameters that the saved state does not know, or knows in another shape, start from scratch. Under several
    processes rank 0 has the state and the others give an empty one.

    Args:
        model: whose parameters they are.
        optimizers: as they were when saved.
        saved: what `optimizer_state` gave.
        classes: of the saved optimizers; one of another class is not changed.
        without: names of the parameters of another shape.
        keep: settings of the groups whose present values are kept; "lr" is left to `LearningRates`.
    """
    kept = _DEVICE_SETTINGS | set(keep) - {"lr"}
    before = saved.get("param_groups", [])
    by_name = {name: group for group in before for name in group["params"]}
    known, at = set(classes), 0
    for one in _named(model, optimizers):
        places = before[at : at + len(one.groups)]
        at += len(one.groups)
        if type(one.optimizer).__qualname__ not in known:
            continue
        entries: Mapping[str, Any] = {}
        more: tuple[Any, ...] = ()
        if rank() == 0:
            entries = {n: saved["state"][n] for n in one.flat if n in saved["state"] and n not in without}
            settings = [
                # By place, if the same parameters stand there: a group without parameters has no name.
                places[i]
                if i < len(places) and set(places[i]["params"]) == set(names)
                else next((by_name[name] for name in names if name in by_name), {})
                for i, names in enumerate(one.groups)
            ]
            more = settings, saved.get("more", {}).get(one.first, {}), by_name.keys() & set(one.flat) - set(without)
        entries, more = broadcast_entries(entries, more, one.parameters)
        _load(one, entries, kept, *more)


def _load(
    one: _NamedOptimizer,
    entries: Mapping[str, Any],
    kept: Collection[str],
    settings: Sequence[Mapping[str, Any]],
    extra: Mapping[str, Any],
    known: Collection[str],
) -> None:
    """Load entries by name, settings of the groups, and what belongs to no parameter.

    Not by torch's `set_optimizer_state_dict`: it makes a step to see what the state is like, which some optimizers
    cannot, and which gives parameters a state that had none.
    """
    present = one.optimizer.state_dict()
    groups = [
        {**own, **{k: v for k, v in group.items() if k not in own or k not in kept}}
        | {k: own[k] for k in ("params", "param_names") if k in own}
        for own, group in zip(present["param_groups"], settings, strict=True)
    ]
    mine, other = _split(present["state"], one)
    other |= {k: _moved(v, other.get(k)) for k, v in extra.get("state", {}).items()}
    # Some optimizers need the entries that they made before their first step.
    state = {n: e for n, e in mine.items() if _is_unstepped(e, n in known)} | dict(entries)
    numbers = {name: i for i, name in enumerate(one.flat)}
    numbered = {numbers[name]: entry for name, entry in state.items()}
    load_optimizer(one.optimizer, {**extra, "state": other | numbered, "param_groups": groups})


def _moved(saved: Any, mine: Any) -> Any:
    return saved.to(mine.device) if isinstance(saved, torch.Tensor) and isinstance(mine, torch.Tensor) else saved


def _is_unstepped(entry: Any, known: bool) -> bool:
    """Return whether an entry is from before the first step.

    Args:
        entry: of the optimizer.
        known: whether the checkpoint knows its parameter; then an entry without a number of steps counts as stepped.
    """
    return isinstance(entry, Mapping) and float(entry.get("step", known)) == 0


def check_keep(keep: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse names that do not stand for a setting of any parameter group.

    Raises:
        BadArgumentError: with the nearest names.
    """
    if isinstance(keep, str) or not isinstance(keep, Sequence):
        raise BadArgumentError(f'keep must be a sequence of names such as ("lr", "weight_decay"), not {keep!r}')
    known = sorted({str(name) for one in optimizers for group in one.param_groups for name in group} - {"params"})
    for name in keep:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else f"; the settings are {', '.join(known) or 'none'}"
            raise BadArgumentError(f"keep: {name!r} is not a setting of the optimizer{hint}")


@dataclass(frozen=True, slots=True)
class LearningRates:
    """Learning rates of new optimizers and schedulers, to restore after loading.

    Args:
        groups: (optimizer, number of the group, its rate, its base rate or None if no scheduler has set one).
        schedulers: (scheduler, its base rates), nested ones included.
    """

    groups: Sequence[tuple[torch.optim.Optimizer, int, Any, Any]]
    schedulers: Sequence[tuple[Any, list[Any]]]

    @staticmethod
    def of(optimizers: Sequence[torch.optim.Optimizer], scheduler: Any) -> LearningRates:
        """Record the present rates."""
        rates = [
            (one, number, _number(group["lr"]), _number(group.get("initial_lr")))
            for one in optimizers
            for number, group in enumerate(one.param_groups)
        ]
        schedulers = [(one, list(one.base_lrs)) for one in _schedulers(scheduler) if hasattr(one, "base_lrs")]
        return LearningRates(rates, schedulers)

    def restore(self) -> None:
        """Restore the rates, under a scheduler in proportion to the base rate."""
        for optimizer, number, rate, base in self.groups:
            group = optimizer.param_groups[number]  # loading has replaced the groups
            before = _number(group.get("initial_lr"))
            if self.schedulers and base is not None and before:
                rate = _number(group["lr"]) * base / before
            if base is not None:
                group["initial_lr"] = base
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        for scheduler, base_rates in self.schedulers:
            scheduler.base_lrs = base_rates
            if hasattr(scheduler, "_last_lr"):
                scheduler._last_lr = [_number(group["lr"]) for group in scheduler.optimizer.param_groups]


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else value


def _schedulers(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and those within it."""
    if scheduler is not None:
        yield scheduler
        for inner in getattr(scheduler, "_schedulers", ()):
            yield from _schedulers(inner)
