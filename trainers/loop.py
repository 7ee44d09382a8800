"""The plain training loop: one call saves everything a resumed run needs, one call puts it back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import torch
from torch import nn

from ..codec.config import Config
from ..codec.errors import ShrinkpointError, ShrinkpointWarning
from ..codec.state.leaves import is_array
from ..codec.state.tree import flatten
from ..kernels.errors import BadArgumentError
from ..store.manifest import check_step
from ..store.saver import Saver, SaveResult
from ..store.store import Saved, Store
from . import parts
from .beside import Beside, Place, at, has, label, put
from .processes import explaining, from_all, on_all, on_rank_0, rank, world
from .rows import RowTracker
from .sensitivity import SensitivityTracker
from .state import Generator, Stateful, capture, restore

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class RanksChangedWarning(ShrinkpointWarning):
    """A run goes on with another number of processes: each one's random numbers and data position start anew."""


def training_state(
    step: int,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    ema: Stateful | None = None,
    loader: Stateful | None = None,
    generators: Mapping[str, Generator] | None = None,
    more: Mapping[str, Stateful] | None = None,
) -> dict[str, Any] | None:
    """The tree that `save` stores: plain dicts, lists, scalars and the live arrays, no copies.

    Under several processes all of them must call it: the whole state comes together on rank 0, the others get None.

    Args: as `save`.

    Raises:
        BadArgumentError: an argument of the wrong kind; a step out of range; an optimizer with a parameter that is not
            the model's, or that another one has too.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> sorted(training_state(3, model, torch.optim.SGD(model.parameters())))
        ['model', 'optimizer', 'optimizers', 'ranks', 'step']
    """

    def alone() -> tuple[int, Sequence[torch.optim.Optimizer], Beside, dict[str, Any], Any]:
        """All that this process says without the others; of modules only that they are some."""
        optimizers, beside = parts.optimizers_of(optimizer), Beside.of(scheduler, scaler, ema, more)
        _check(model, beside, loader)
        own = beside.said()
        mine = capture(generators=generators, position=None if loader is None else loader.state_dict())
        # What cannot be stored is refused here, with its path, for it may not even be sent.
        flatten({"ranks": mine, **own}, is_array)
        return check_step(step), optimizers, beside, own, mine

    # Before anything that all do together: who could not come to that would leave the others waiting.
    (number, optimizers, beside, own, mine), told = on_all(alone, lambda found: list(parts.sharded(found[3], "")))
    if any(paths != told[0] for paths in told):
        raise ShrinkpointError("nothing was saved: ranks have different sharded tensors beside model and optimizer")
    state: dict[str, Any] = {"step": number, "model": parts.model_state(model)}
    if optimizers:
        state["optimizers"] = [type(one).__qualname__ for one in optimizers]
        state["optimizer"] = parts.optimizer_state(model, optimizers)
    state |= parts.whole(own) if world() > 1 else own
    for place, module in beside.modules:
        put(state, place, parts.model_state(module))
    state["ranks"] = from_all(mine)
    return state if rank() == 0 else None


def save(
    saver: Saver | Store,
    step: int,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    ema: Stateful | None = None,
    loader: Stateful | None = None,
    generators: Mapping[str, Generator] | None = None,
    more: Mapping[str, Stateful] | None = None,
    tracker: RowTracker | None = None,
    sensitivity: SensitivityTracker | None = None,
    grads: Mapping[str, Any] | None = None,
    metric: float | None = None,
    cfg: Config | None = None,
) -> Future[SaveResult] | Saved | None:
    """Save the whole state of a training run: what `resume` puts back.

    Also saved: the global random number generators of torch (and its devices), Python and NumPy. Under several
    processes (DDP, FSDP2, tensor parallelism) all must call it; rank 0 saves, after the state was put together in its
    memory. For states larger than that, use `torch.distributed.checkpoint` with this package's storage.

    Args:
        saver: a Saver: returns as soon as training may go on; or a Store: returns when it is durable.
        step: training steps done, 0 or more; also an integer of NumPy's or torch's.
        model: the module, wrapped or not.
        optimizer: one optimizer or several.
        scheduler: learning-rate scheduler, or anything with `state_dict` and `load_state_dict`; so are the next three.
        scaler: gradient scaler of mixed precision.
        ema: averaged model, such as `torch.optim.swa_utils.AveragedModel`.
        loader: position in the data: a `Loader`.
        generators: name -> generator that training draws from beside the global ones.
        more: name -> anything else with a state.
        tracker: of the bare model's embedding rows: what it has marked goes with the save, and what comes of the save
            is reported to it. Only rank 0's counts.
        sensitivity: whose gradient averages go with the save; it is told the step, in whose unit its `every` must be.
        grads: parameter name -> gradient average, as `SensitivityTracker.grads()` gives it, instead of `sensitivity`.
        metric: see `Store.save`.
        cfg: see `Store.save`. Only rank 0's counts.

    Returns:
        What `saver.save` does; None on ranks other than 0.

    Raises:
        BadArgumentError: an argument of the wrong kind.
        UnsupportedLeafError: a state holds what cannot be stored without pickle; the path is named.
        RuntimeError: of torch: another process is gone, or does not answer within the timeout of the process group.
        ShrinkpointError: another process could not say its part of the state; the message says why.
        Exception: see `Saver.save`; what rank 0 meets is raised on all processes, and all may call it again.

    Example:
        >>> import shrinkpoint as sp
        >>> model = nn.Linear(2, 1)
        >>> store = sp.Store("memory://docs-loop")
        >>> save(store, 3, model).step
        3
        >>> resume(store, model)
        3

    Source: Check-N-Run, section 3.4; Inshrinkerator, section 2 (the parts of a checkpoint).
    """

    def averages() -> Mapping[str, Any] | None:
        _store_of(saver)
        number = check_step(step)
        _check_tracker(tracker, model)
        _check_sensitivity(sensitivity, grads)
        if sensitivity is None:
            return grads
        sensitivity.at(number)
        return sensitivity.grads(shards_only=rank() != 0)

    with explaining(f"step {step} was not saved"):
        found, _ = on_all(averages, lambda _: None)
        grads = parts.gathered(found)
        state: Any = training_state(
            step,
            model,
            optimizer,
            scheduler=scheduler,
            scaler=scaler,
            ema=ema,
            loader=loader,
            generators=generators,
            more=more,
        )

    def write() -> Future[SaveResult] | Saved:
        optimizers = parts.optimizers_of(optimizer)
        kinds = parts.kinds_of(model, optimizers)
        marked = None if tracker is None else tracker.kinds(optimizers or None)
        beside = None if grads is None else {"model": dict(grads)}
        result = saver.save(state["step"], state, grads=beside, kinds=kinds | (marked or {}), metric=metric, cfg=cfg)
        if tracker is not None:
            tracker.follow(result, kinds=marked)
        return result

    # What rank 0 meets is raised on all: one that tries again must not do so alone.
    result: Future[SaveResult] | Saved | None = on_rank_0(
        write, lambda _: None, f"what became of step {step} could not be told"
    )
    return result


def resume(
    saver: Saver | Store,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    ema: Stateful | None = None,
    loader: Stateful | None = None,
    generators: Mapping[str, Generator] | None = None,
    more: Mapping[str, Stateful] | None = None,
    tracker: RowTracker | None = None,
    sensitivity: SensitivityTracker | None = None,
    step: int | str | None = None,
    strict: bool = True,
    rng: bool = True,
) -> int:
    """Put the newest intact checkpoint, or that of a step, back into freshly built parts; returns the steps done.

    An empty store is the beginning of a run: nothing is changed and 0 returned. With `presets.lossless()` the resumed
    run computes the very numbers of one that was never interrupted. Parts not given here are left in the checkpoint.

    Args:
        saver, model, optimizer, scheduler, scaler, ema, loader, generators, more: as for `save`.
        tracker: as for `save`: every row counts as touched from here on, until the next save.
        sensitivity: as for `save`: it counts from the step that is resumed, and forgets what it has recorded.
        step: that step (or tag) or an error; None: the newest that is intact.
        strict: True: a model or optimizer whose parameters were renamed, resized or regrouped, or another optimizer
            class, is an error that lists them, and nothing is changed. False: what fits is loaded, a parameter that
            does not keeps its value and has no optimizer state, an optimizer of another class is left as it is; a
            StateMismatchWarning lists them.
        rng: also set the global random number generators.

    Raises:
        BadArgumentError: the checkpoint lacks a part that is asked for, or does not fit.
        Exception: see `Store.load`.

    Example:
        >>> import shrinkpoint as sp
        >>> resume(sp.Store("memory://docs-empty"), nn.Linear(2, 1))
        0
    """
    optimizers, beside = parts.optimizers_of(optimizer), Beside.of(scheduler, scaler, ema, more)
    _check(model, beside, loader)
    _check_tracker(tracker, model)
    _check_sensitivity(sensitivity, None)
    parts.refuse_unplaced(model)

    def load() -> dict[str, Any] | None:
        """Read and check on rank 0, before anything is changed anywhere."""
        store = _store_of(saver)
        if step is None and not store.steps():
            return None
        state = store.load(step)
        named = f": step {state['step']}" if isinstance(state, dict) and "step" in state else ""
        where = f"{store.url}{named}"
        _check_parts(state, where, bool(optimizers), beside, generators or {}, loader)
        lines = parts.mismatches(model, state["model"])
        if optimizers:
            classes = state["optimizers"]
            lines += parts.optimizer_mismatches(model, optimizers, state["optimizer"], classes)
        for place, module in beside.modules:
            lines += [f"{label(place)}: {line}" for line in parts.mismatches(module, at(state, place))]
        parts.refuse_or_warn(lines, strict, where, stacklevel=5)
        found: dict[str, Any] = state
        return found

    def light(state: dict[str, Any]) -> dict[str, Any]:
        """Without what modules and optimizers are sent by themselves."""
        return {k: v for k, v in beside.without_modules(state).items() if k not in ("model", "optimizer")}

    state = on_rank_0(load, light, "nothing was resumed")
    if state is None:
        return 0
    resized = parts.resized(model, state.get("model", {}))
    parts.set_model(model, state.get("model", {}))
    if optimizers:
        fitting = [one for one in optimizers if type(one).__qualname__ in state["optimizers"]]
        parts.set_optimizers(model, fitting, state.get("optimizer", {}), resized)
    for place, part in beside.parts.items():
        held = at(state, place)
        if isinstance(part, nn.Module):
            parts.set_model(part, held)
        elif place != ("scaler",) or held:  # that of a disabled scaler is empty, which no other one takes
            # A copy: a scheduler keeps the very objects it is given.
            part.load_state_dict(copy.deepcopy(held))
    if tracker is not None:
        tracker.forget()
    if sensitivity is not None:
        sensitivity.restart(int(state["step"]))
    _restore_rank(state["ranks"], loader, generators, rng)
    return int(state["step"])


def _restore_rank(
    ranks: Sequence[Any], loader: Stateful | None, generators: Mapping[str, Generator] | None, rng: bool
) -> None:
    """Random numbers and data position of this process."""
    if len(ranks) != world():
        message = (
            f"saved by {len(ranks)} processes, resumed by {world()}: "
            "random number generators and data positions start anew"
        )
        warnings.warn(message, RanksChangedWarning, stacklevel=3)
        return
    mine = ranks[rank()]
    if loader is not None:
        loader.load_state_dict(mine["position"])
    restore(mine, generators=generators, rng=rng)


def _check_parts(
    state: Any, where: str, optimizers: bool, beside: Beside, generators: Mapping[str, Any], loader: Any
) -> None:
    """Refuse a checkpoint without what is asked for."""
    if not _is_ours(state):
        held = ", ".join(map(str, state)) if isinstance(state, dict) else type(state).__qualname__
        raise BadArgumentError(f"{where}: no checkpoint of trainers.save; it holds {held}")
    wanted: list[Place] = [("model",), *[("optimizer",)] * optimizers, *beside.parts]
    missing = ["/".join(map(str, place)) for place in wanted if not has(state, place)]
    missing += [f"generators/{name}" for name in generators if not has(state["ranks"][0], ("generators", name))]
    if loader is not None and any(mine.get("position") is None for mine in state["ranks"]):
        missing.append("loader")
    if missing:
        raise BadArgumentError(f"{where}: the checkpoint has no {', '.join(missing)}; nothing was changed")


def _is_ours(state: Any) -> bool:
    """Whether a state is one that `training_state` made."""
    if not isinstance(state, dict) or type(state.get("step")) is not int or not isinstance(state.get("model"), dict):
        return False
    ranks = state.get("ranks")
    return isinstance(ranks, list) and bool(ranks) and all(isinstance(one, dict) and "rng" in one for one in ranks)


def _store_of(saver: Any) -> Store:
    if isinstance(saver, Saver):
        return saver.store
    if isinstance(saver, Store):
        return saver
    raise BadArgumentError(f"saver must be a Saver or a Store, not {type(saver).__qualname__}")


def _check(model: Any, beside: Beside, loader: Any) -> None:
    if not isinstance(model, nn.Module):
        raise BadArgumentError(f"model must be a torch.nn.Module, not {type(model).__qualname__}")
    for module in (model, *(module for _, module in beside.modules)):
        parts.refuse_flat(module)
    stateful = beside.named() | ({} if loader is None else {"loader": loader})
    for name, part in stateful.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise BadArgumentError(f"{name} is a {type(part).__qualname__}, without state_dict and load_state_dict")


def _check_tracker(tracker: Any, model: nn.Module) -> None:
    """Refuse what is no tracker, and one of another module: its names would not be those of the state."""
    if tracker is None:
        return
    if not isinstance(tracker, RowTracker):
        raise BadArgumentError(f"tracker must be a RowTracker, not {type(tracker).__qualname__}")
    if isinstance(model, nn.Module) and tracker.module is not parts.bare(model):
        raise BadArgumentError(
            f"tracker: it is of a {type(tracker.module).__qualname__} that is not the bare model; make it with "
            "RowTracker(model), before the model is wrapped"
        )


def _check_sensitivity(sensitivity: Any, grads: Any) -> None:
    if sensitivity is None:
        return
    if not isinstance(sensitivity, SensitivityTracker):
        raise BadArgumentError(f"sensitivity must be a SensitivityTracker, not {type(sensitivity).__qualname__}")
    if grads is not None:
        raise BadArgumentError("sensitivity and grads: both are gradient averages; give one of them")
