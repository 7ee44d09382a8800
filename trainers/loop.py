"""The plain training loop: `save` stores a run, `resume` restores it."""

from __future__ import annotations

import copy
import difflib
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import nn

from ..codec.config import Config
from ..codec.errors import BadArgumentError, ShrinkpointWarning
from ..codec.evidence.module import bare
from ..store.frozen_sets import Frozen
from ..store.manifest import check_step, lacking
from ..store.saver.saver import Saver
from ..store.store import Store
from . import model_state as models
from . import training_state as states
from .loader import Loader
from .processes import explaining, on_all, on_rank_0, rank, world
from .rows import RowTracker
from .save_timing import store_behind, timed
from .sensitivity import SensitivityTracker
from .state import Generator, Stateful, restore
from .training_state import MORE, Optimizers, TrainingState, at, is_training_tree, label, put

LOG = logging.getLogger("shrinkpoint.trainers")
Result = TypeVar("Result", covariant=True)


class Saves(Protocol[Result]):
    """A `Saver` or a `Store`, by what its `save` returns."""

    def save(
        self,
        step: int,
        state: Any,
        *,
        grads: Any = None,
        kinds: Mapping[str, Any] | None = None,
        metric: float | None = None,
        cfg: Config | str | None = None,
    ) -> Result: ...


class RanksChangedWarning(ShrinkpointWarning):
    """The number of processes changed, so random numbers and data positions start again."""


class PartNotRestoredWarning(ShrinkpointWarning):
    """The checkpoint holds a part that `resume` was not given, or a container it cannot build."""


def save(
    saver: Saves[Result],
    step: int,
    model: nn.Module | TrainingState,
    optimizer: Optimizers | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    ema: Stateful | None = None,
    loader: Stateful | None = None,
    generators: Mapping[str, Generator] | None = None,
    more: Mapping[str, Stateful] | None = None,
    frozen: str | None = None,
    tracker: RowTracker | None = None,
    sensitivity: SensitivityTracker | None = None,
    grads: Mapping[str, Any] | None = None,
    metric: float | None = None,
    cfg: Config | str | None = None,
) -> Result | None:
    """Save the whole state of a training run, for `resume`.

    With several processes (DDP, FSDP2, tensor parallelism) all of them must call it; rank 0 saves, after the state was
    gathered in its memory. For states larger than that, use `torch.distributed.checkpoint` with this package's
    storage.

    Args:
        saver: a Saver, so that the call returns as soon as the state is copied; or a Store, so that it returns when the
            checkpoint is durable.
        step: training steps done, 0 or more; also an integer of NumPy's or torch's.
        model: the module, or a `TrainingState` with all parts of the run; then leave out the next eight.
        optimizer, scheduler, scaler, ema, loader, generators, more, frozen: see `TrainingState`.
        tracker: tracker of the bare model's embedding rows. Its marked rows are passed to the save, and it gets the
            result. Only rank 0's tracker counts.
        sensitivity: tracker whose gradient averages are passed to the save; `step` must be in the unit of its `every`.
        grads: parameter name -> gradient average, as `SensitivityTracker.grads()` returns it, instead of `sensitivity`.
        metric: see `Store.save`.
        cfg: see `Store.save`. Only rank 0's configuration counts.

    Returns:
        The result of `saver.save`; None on ranks other than 0.

    Raises:
        BadArgumentError: an argument of the wrong type.
        UnsupportedLeafError: a state holds a value that cannot be stored without pickle; the message has its path.
        RuntimeError: of torch: another process is gone, or does not answer within the timeout of the process group.
        ShrinkpointError: another process could not give its part of the state; the message says why.
        Exception: see `Saver.save`; an error of rank 0 is raised on all processes, and all may call it again.

    Example:
        >>> import shrinkpoint as sp
        >>> model = nn.Linear(2, 1)
        >>> store = sp.Store("memory://docs-loop")
        >>> save(store, 3, model).step
        3
        >>> resume(store, model)
        3

    Source: Check-N-Run, section 4.1; Inshrinkerator, section 2 (the parts of a checkpoint).
    """
    state = _state_of(model, optimizer, scheduler, scaler, ema, loader, generators, more, frozen)

    def averages() -> Mapping[str, Any] | None:
        store_behind(saver)
        number = check_step(step)
        _check_trackers(state.model, tracker, sensitivity, grads)
        if sensitivity is None:
            return grads
        sensitivity.at(number)
        return sensitivity.grads(shards_only=rank() != 0)

    with explaining(f"step {step} was not saved"):
        found, _ = on_all(averages, lambda _: None)
        found = models.whole(found)
        tree: Any = state.tree(step)
        if state.frozen == models.ONCE:
            models.store_once(store_behind(saver), state.model, on_rank_0(lambda: Frozen.of_tree(tree), "nothing"))

    def write() -> Any:
        marked = None if tracker is None else tracker.kinds(state.optimizers or None)
        kinds = state.kinds(tree) | (marked or {})
        averaged = None if found is None else {"model": dict(found)}
        number = tree["step"]
        saved: Any = timed(
            saver, number, lambda: saver.save(number, tree, grads=averaged, kinds=kinds, metric=metric, cfg=cfg)
        )
        if tracker is not None:
            tracker.follow(saved, kinds=marked)
        return saved

    # An error of rank 0 is raised on all: a process that tries again must not do so alone.
    result: Result | None = on_rank_0(write, f"the result of saving step {step} could not be sent", lambda _: None)
    return result


def resume(
    saver: Saver | Store,
    model: nn.Module | TrainingState,
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
    keep: Sequence[str] = (),
) -> int:
    """Load a checkpoint into freshly built parts; return the steps done.

    With an empty store, nothing is changed and 0 is returned: a run begins. With `presets.lossless()` the resumed run
    computes exactly the same numbers as an uninterrupted one. The call waits for saves of this process to the same
    store that are in flight.

    Args:
        saver, model, optimizer, scheduler, scaler, ema, loader, generators, more: as for `save`. Parts of the
            checkpoint that are not given here are not restored; a PartNotRestoredWarning names them.
        tracker: as for `save`: every row counts as touched from now on, until the next save.
        sensitivity: as for `save`: it counts from the resumed step, and forgets its records.
        step: that step (or tag) or an error; None: the newest intact one.
        strict: True: a model or optimizer whose parameters were renamed, resized or regrouped, or another optimizer
            class, is an error that lists the differences, and nothing is changed. False: the parts that fit are loaded,
            other parameters keep their values and have no optimizer state, an optimizer of another class is not
            changed; a StateMismatchWarning lists them.
        rng: also set the global random number generators.
        keep: names of optimizer settings whose new values are kept, such as `("lr", "weight_decay")`. With "lr" and a
            `scheduler` the schedule continues at its position with the new base rate. Default: all are restored.

    Memory: existing tensors of the model and of an optimizer that has made a step are decoded into, one group of arrays
    at a time; a new optimizer takes the arrays that are read.

    Raises:
        BadArgumentError: the checkpoint lacks a part that was given, or was thinned and an optimizer was given, or does
            not fit; `keep` names no setting.
        Exception: see `Store.load`. Where a file is intact and cannot be read a moment later, model and optimizer may
            hold parts of the checkpoint. When the `load_state_dict` of a scheduler, scaler, loader or part of `more`
            raises, model and optimizer are restored already.

    Example:
        >>> import shrinkpoint as sp
        >>> resume(sp.Store("memory://docs-empty"), nn.Linear(2, 1))
        0
    """
    into = _state_of(model, optimizer, scheduler, scaler, ema, loader, generators, more)
    optimizers, auxiliary = into.optimizers, into.auxiliary
    modules = into.modules
    into.check()
    _check_trackers(into.model, tracker, sensitivity, None)
    states.check_keep(keep, optimizers)
    models.refuse_unplaced(into.model)

    def differences(tree: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Return the differences to refuse, and those that the models may accept."""
        kept_out = Frozen.of_tree(tree)
        kept = {} if kept_out is None else dict.fromkeys(kept_out.names)
        lines, doubts = models.mismatches(into.model, kept | tree["model"])
        for place, module in modules:
            for found, more in zip((lines, doubts), models.mismatches(module, at(tree, place)), strict=True):
                found += [f"{label(place)}: {line}" for line in more]
        if optimizers:
            lines += states.optimizer_mismatches(into.model, optimizers, tree["optimizer"], tree["optimizers"])
        return lines, doubts

    def check_position(tree: Mapping[str, Any]) -> None:
        """Refuse a position in other batches before anything is changed."""
        if isinstance(into.loader, Loader) and len(tree["ranks"]) == world():
            into.loader.check(tree["ranks"][0]["position"])

    def existing(tree: Any) -> dict[str, Any]:
        """Return the live tensors to decode into: none if the checkpoint might be refused."""
        if store_behind(saver).lacks or not is_training_tree(tree) or Frozen.of_tree(tree) is not None:
            return {}
        if into.missing(tree) or any(differences(tree)):
            return {}
        check_position(tree)
        found = models.plain_tensors(into.model, ("model",)) | states.plain_entries(into.model, optimizers)
        for place, module in modules:
            found |= models.plain_tensors(module, place)
        return models.nested(found)

    def load() -> dict[str, Any] | None:
        """Read on rank 0, and check that no part is missing."""
        store = store_behind(saver)
        if step is None and not store.steps():
            store.wait_for_saves()
        if step is None and not store.steps():
            _report_empty(store)
            return None
        state: dict[str, Any] = store.load(step, out=existing)
        _check_parts(state, _where(store, state), into)
        _check_whole(store, _where(store, state), into)
        return state

    def light(state: Any) -> dict[str, Any]:
        """Return the state without the parts that modules and optimizers distribute themselves."""
        sent = {key: value for key, value in state.items() if key not in ("model", "optimizer")}
        sent |= {MORE: dict(state[MORE])} if MORE in state else {}
        for place, _ in modules:
            put(sent, place, {})
        return sent

    state = on_rank_0(load, "nothing was resumed", light)
    if state is None:
        return 0
    kept_out = Frozen.of_tree(state)
    kept = () if kept_out is None else kept_out.names
    here = models.parameters_of(into.model)
    digest = models.frozen_digest(into.model, [name for name in kept if name in here]) if kept else ""

    def compare() -> tuple[list[str], str]:
        """Compare on rank 0, before anything is changed anywhere."""
        where = _where(store_behind(saver), state)
        check_position(state)
        if kept_out is not None and digest != kept_out.digest:
            state["model"] = state["model"] | models.load_frozen(store_behind(saver), kept_out)
        lines, doubts = differences(state)
        if lines and strict:
            models.refuse(lines + doubts, where, ". strict=False loads what does.")
        if left := into.unused(state):
            message = f"{where}: not restored, because resume was not given it: {', '.join(left)}"
            warnings.warn(message, PartNotRestoredWarning, stacklevel=4)
        return doubts, where

    doubts, where = on_rank_0(compare, "nothing was resumed")
    parts = [(module, at(state, place)) for place, module in modules]
    parts.insert(0, (into.model, state.get("model", {})))
    models.set_models(parts, doubts, where, strict=strict, keep=kept)
    if not strict and rank() == 0:
        models.warn([line for lines in differences(state) for line in lines], where, stacklevel=3)
    rates = states.LearningRates.of(optimizers, into.scheduler) if "lr" in keep else None
    if optimizers:
        resized = models.resized(into.model, state.get("model", {}))
        saved = state.get("optimizer", {})
        states.set_optimizers(into.model, optimizers, saved, state["optimizers"], without=resized, keep=keep)
    for place, part in auxiliary.items():
        held = at(state, place)
        # A disabled scaler has an empty state, which an enabled one refuses.
        if not isinstance(part, nn.Module) and (place != ("scaler",) or held):
            # A copy: a scheduler keeps the objects that it is given.
            _load(label(place), part, copy.deepcopy(held), state["ranks"][0])
    if rates is not None:
        rates.restore()
    if tracker is not None:
        tracker.forget()
    if sensitivity is not None:
        sensitivity.restart(int(state["step"]))
    _restore_rank(state["ranks"], into.loader, into.generators, rng)
    return int(state["step"])


def _state_of(model: Any, *parts: Any) -> TrainingState:
    """Return the state that `save` or `resume` was given, whole or part by part."""
    if not isinstance(model, TrainingState):
        return TrainingState(model, *parts)
    if any(part is not None for part in parts):
        raise BadArgumentError("model is a TrainingState, which holds all parts; give no other part in addition")
    return model


def _restore_rank(
    ranks: Sequence[Any], loader: Stateful | None, generators: Mapping[str, Generator] | None, rng: bool
) -> None:
    """Restore random numbers and data position of this process."""
    if ranks_changed(len(ranks), "random number generators and data positions"):
        return
    mine = ranks[rank()]
    if loader is not None:
        _load("loader", loader, mine["position"], mine)
    restore(mine, generators=generators, rng=rng)


def _load(name: str, part: Stateful, saved: Any, mine: Mapping[str, Any]) -> None:
    """Load a part's state by its own method, in containers of the classes that were saved."""
    saved, lost = states.in_containers(name, part, saved, mine)
    if lost:
        message = f"restored as a plain dict, list or tuple, since the new object has another class: {', '.join(lost)}"
        warnings.warn(message, PartNotRestoredWarning, stacklevel=4)
    part.load_state_dict(saved)


def ranks_changed(before: int, what: str) -> bool:
    """Return whether another number of processes has saved, and warn of what starts again."""
    if before != world():
        message = f"saved by {before} processes, resumed by {world()}: {what} start from the beginning"
        warnings.warn(message, RanksChangedWarning, stacklevel=4)
    return before != world()


def _check_parts(state: Any, where: str, into: TrainingState) -> None:
    """Refuse a checkpoint that lacks a requested part."""
    if not is_training_tree(state):
        held = ", ".join(map(str, state)) if isinstance(state, dict) else type(state).__qualname__
        raise BadArgumentError(f"{where}: not a checkpoint of trainers.save; it holds {held}")
    if missing := into.missing(state):
        raise BadArgumentError(f"{where}: the checkpoint has no {', '.join(missing)}; nothing was changed")


def _check_whole(store: Store, where: str, into: TrainingState) -> None:
    """Refuse a thinned step for an optimizer, which would begin with fresh moments."""
    if not (store.lacks and into.optimizers):
        return
    whole = [step for step, manifest in store.manifests()[0].items() if not manifest.lacks]
    raise BadArgumentError(
        f"{where} was thinned: {lacking(store.lacks)} of the optimizer; nothing was changed. Whole steps: "
        f"{', '.join(map(str, whole[-5:])) or 'none'}; without optimizer= the weights are loaded"
    )


def _where(store: Store, state: Any) -> str:
    """Return what messages about a checkpoint begin with."""
    return f"{store.url}: step {state['step']}" if isinstance(state, dict) and "step" in state else store.url


def _report_empty(store: Store) -> None:
    """Log that a run begins, with a similar folder that has checkpoints."""
    message, similar = f"{store.url}: no checkpoint; the run begins at step 0", None
    if "://" not in store.url:
        home, name = os.path.split(os.path.abspath(store.url))
        names = os.listdir(home) if os.path.isdir(home) else []
        close = difflib.get_close_matches(name, [n for n in names if n != name], n=3)
        similar = next((n for n in close if _has_checkpoints(os.path.join(home, n))), None)
    if similar is None:
        LOG.info(message)
    else:
        LOG.warning("%s (the folder %s next to it has checkpoints)", message, similar)


def _has_checkpoints(folder: str) -> bool:
    try:
        return os.path.isdir(folder) and bool(Store(folder).steps())
    except Exception:  # an unreadable folder cannot be used; it must not stop a run that does not use it
        return False


def _check_trackers(model: Any, tracker: Any, sensitivity: Any, grads: Any) -> None:
    """Refuse objects of other types, and a tracker of another module."""
    if tracker is not None:
        if not isinstance(tracker, RowTracker):
            raise BadArgumentError(f"tracker must be a RowTracker, not {type(tracker).__qualname__}")
        if isinstance(model, nn.Module) and tracker.module is not bare(model):
            raise BadArgumentError(
                f"tracker: it follows a {type(tracker.module).__qualname__} that is not the bare model; make it with "
                "RowTracker(model), before the model is wrapped"
            )
    if sensitivity is None:
        return
    if not isinstance(sensitivity, SensitivityTracker):
        raise BadArgumentError(f"sensitivity must be a SensitivityTracker, not {type(sensitivity).__qualname__}")
    if grads is not None:
        raise BadArgumentError("sensitivity and grads: both are gradient averages; give one of them")
