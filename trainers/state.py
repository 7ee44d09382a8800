"""The state of a training run as one plain tree, and back.

Model, optimizer (moments and `step`), learning-rate scheduler, the random number generators of torch, Python and NumPy,
and the position in the data. The tree has only dicts, lists, tuples, scalars and arrays, so it needs no pickle.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from ..kernels.errors import BadArgumentError

Generator: TypeAlias = torch.Generator | np.random.Generator | random.Random


class Stateful(Protocol):
    """Objects with `state_dict` and `load_state_dict`, such as modules and schedulers."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def capture(
    *,
    model: Stateful | None = None,
    optimizer: Stateful | None = None,
    scheduler: Stateful | None = None,
    generators: Mapping[str, Generator] | None = None,
    position: Any = None,
) -> dict[str, Any]:
    """Return the training state: model, optimizer, scheduler, random numbers, position.

    The tree identifies the state of the run: a new process that calls `restore` with it computes the same numbers as
    the process that called `capture`. Parts that are not given are left out.

    The arrays are the live ones, not copies: save (or copy) them before the next training step changes them.

    Args:
        model: module, or anything with `state_dict` and `load_state_dict`.
        optimizer: as `model`; the moments, `step` and the parameter groups.
        scheduler: as `model`; the learning rate and where it stands.
        generators: name -> `torch.Generator`, `numpy.random.Generator` or `random.Random` that training draws from,
            in addition to the global ones, which are always captured.
        position: where in the data the run stands (batches *consumed*), any tree of plain values and arrays.

    Raises:
        BadArgumentError: a generator is of an unknown kind.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> state = capture(model=model, position={"batch": 7})
        >>> sorted(state)
        ['model', 'position', 'rng']
        >>> restore(state, model=model)
        {'batch': 7}

    Source: Inshrinkerator section 2 and Check-N-Run section 4.1 name the parts of a checkpoint.
    """
    state: dict[str, Any] = {}
    for name, part in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
        if part is not None:
            state[name] = plain(part.state_dict())
    state["rng"] = capture_rng()
    if generators is not None:
        state["generators"] = {name: _generator_state(name, generator) for name, generator in generators.items()}
    state["position"] = plain(position)
    return state


def restore(
    state: Mapping[str, Any],
    *,
    model: Stateful | None = None,
    optimizer: Stateful | None = None,
    scheduler: Stateful | None = None,
    generators: Mapping[str, Generator] | None = None,
    rng: bool = True,
) -> Any:
    """Restore a captured state to freshly built objects; return the data position.

    The inverse of `capture`: for every part given here, `capture` afterwards gives the same tree.

    Args:
        state: what `capture` returned, or `Store.load` of it.
        model, optimizer, scheduler, generators: built as before the save; those left out are not touched.
        rng: also set the global random number generators of torch, Python and NumPy, default True.

    Returns:
        The `position` given to `capture`.

    Raises:
        BadArgumentError: the state lacks a requested part; nothing was changed.

    Example:
        >>> a, b = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> restore(capture(model=a), model=b)
        >>> torch.equal(a.weight, b.weight)
        True
    """
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    wanted = [name for name, part in parts.items() if part is not None]
    wanted += ["rng"] * rng + ["generators"] * (generators is not None)
    missing = [name for name in wanted if name not in state]
    for name, generator in (generators or {}).items():
        _generator_state(name, generator)  # refuses an unknown kind before anything is changed
        if name not in state.get("generators", {name: None}):
            missing.append(f"generators/{name}")
    if missing:
        held = ", ".join(map(str, state)) or "nothing"
        raise BadArgumentError(f"state: has no {', '.join(missing)}; it holds {held}")
    for name, part in parts.items():
        if part is not None:
            # A copy: optimizers and schedulers keep the very objects they are given, and training would change `state`.
            saved = state[name] if name == "model" else copy.deepcopy(state[name])
            saved = like(saved, part.state_dict()) if name == "scheduler" else saved
            load_optimizer(part, saved) if isinstance(part, torch.optim.Optimizer) else part.load_state_dict(saved)
    for name, generator in (generators or {}).items():
        _set_generator(name, generator, state["generators"][name])
    if rng:
        restore_rng(state["rng"])
    return state.get("position")


def capture_rng() -> dict[str, Any]:
    """Return the state of the global random number generators of torch, Python and NumPy.

    Example:
        >>> state = capture_rng()
        >>> first = random.random(), np.random.random(), torch.rand(1).item()
        >>> restore_rng(state)
        >>> first == (random.random(), np.random.random(), torch.rand(1).item())
        True
    """
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": _python_state(random.getstate()),
        "numpy": plain(np.random.get_state(legacy=False)),  # noqa: NPY002 - the global generator is saved
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set the global random number generators to the state of `capture_rng`.

    States of accelerators that this machine does not have are ignored, because a run may continue on another machine.
    """
    torch.set_rng_state(_byte_tensor(state["torch"]))
    random.setstate(_python_tuple(state["python"]))
    np.random.set_state(_numpy_state(state["numpy"]))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_byte_tensor(one), device)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(_byte_tensor(state["mps"]))


def plain(
    tree: Any, leaf: Callable[[Any], Any] = lambda value: value, kept: tuple[type[dict[Any, Any]], ...] = (Counter,)
) -> Any:
    """Convert a tree to dicts or classes `kept`, lists and tuples; its leaves by a function."""
    if isinstance(tree, Mapping):
        kind = type(tree) if type(tree) in kept else dict
        return kind({key: plain(value, leaf, kept) for key, value in tree.items()})  # type: ignore[call-arg]
    if isinstance(tree, list):
        return [plain(value, leaf, kept) for value in tree]
    if isinstance(tree, tuple):
        return tuple(plain(value, leaf, kept) for value in tree)
    return leaf(tree)


def stored(tree: Any, leaf: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return a tree in containers that a checkpoint can hold; `like` inverts it."""
    return plain(tree, leaf, (Counter, OrderedDict))


def converted(tree: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield path and class name of each container that `stored` replaces by an unequal one."""
    if not isinstance(tree, (Mapping, list, tuple)):
        return
    if type(tree) not in (dict, OrderedDict, Counter, list, tuple, torch.Size):
        yield "/".join(above), type(tree).__qualname__
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        if isinstance(value, (Mapping, list, tuple)):
            yield from converted(value, (*above, str(key)))


def like(saved: Any, live: Any) -> Any:
    """Return a saved tree in containers of the classes that a live one has at the same places.

    Example:
        >>> from collections import defaultdict
        >>> like({"n": {"a": 1}}, {"n": defaultdict(int)})["n"]["b"]
        0
    """
    if isinstance(saved, dict) and isinstance(live, Mapping):
        pairs = {key: like(value, live.get(key)) for key, value in saved.items()}
        made: Any = type(saved)()
        if type(saved) is dict and isinstance(live, MutableMapping):
            # A shallow copy of another mapping than a dict may share the items of the live one.
            made = copy.copy(live) if isinstance(live, dict) else copy.deepcopy(live)
        made.clear()
        made.update(pairs)
        return made
    if isinstance(saved, (list, tuple)) and isinstance(live, type(saved)):
        items = [like(value, mine) for value, mine in itertools.zip_longest(saved, live[: len(saved)])]
        return getattr(live, "_make", type(live))(items)
    return saved


def leaves(tree: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys and the value of each leaf of a tree of dicts, lists and tuples, in order."""
    if isinstance(tree, (Mapping, list, tuple)):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaves(value, (*above, str(key)))
    else:
        yield above, tree


def load_optimizer(optimizer: Any, state: Any) -> None:
    """Call `load_state_dict` of an optimizer, and keep the saved dtypes of its entries.

    torch converts all entries to their parameter's dtype, and with it float32 moments of bfloat16 weights.

    Args:
        optimizer: a `torch.optim.Optimizer`, or Accelerate's wrapper of one.
        state: what its `state_dict` returned.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    given = [state]
    # The last hook: its input was adapted by all others.
    handle = inner.register_load_state_dict_pre_hook(lambda _, adapted: given.append(adapted))
    try:
        optimizer.load_state_dict(state)
    finally:
        handle.remove()
    restore_dtypes(inner, given[-1])


def restore_dtypes(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Replace the entries of an optimizer that `load_state_dict` has converted from this state."""
    numbers = [number for group in state.get("param_groups", ()) for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries = state.get("state", {})
    for number, parameter in zip(numbers, parameters, strict=False):
        if number in entries and parameter in optimizer.state:
            optimizer.state[parameter] = _as_saved(entries[number], optimizer.state[parameter])


def _as_saved(saved: Any, loaded: Any) -> Any:
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return saved.to(loaded.device) if saved.dtype != loaded.dtype and saved.shape == loaded.shape else loaded
    if isinstance(saved, Mapping) and isinstance(loaded, dict):
        # Implementations of a step (`fused`, `capturable`) need its number in a form of their own.
        loaded.update({k: _as_saved(v, loaded[k]) for k, v in saved.items() if k in loaded and k != "step"})
        return loaded
    if isinstance(saved, (list, tuple)) and type(loaded) in (list, tuple) and len(saved) == len(loaded):
        return type(loaded)(map(_as_saved, saved, loaded))
    return saved if isinstance(saved, str) else loaded


def _python_state(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}


def _python_tuple(state: Mapping[str, Any]) -> tuple[Any, ...]:
    return state["version"], tuple(np.asarray(state["words"]).tolist()), state["gauss"]


def _byte_tensor(array: Any) -> torch.Tensor:
    return torch.as_tensor(array, dtype=torch.uint8, device="cpu").contiguous()


def _numpy_state(tree: Any) -> Any:
    """Return the state with NumPy arrays, from any type of array."""
    return plain(tree, lambda leaf: leaf if isinstance(leaf, str | int | float) else np.asarray(leaf))


def _generator_state(name: str, generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return plain(generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return _python_state(generator.getstate())
    raise BadArgumentError(
        f"generators: {name!r} is a {type(generator).__name__}; "
        "known are torch.Generator, numpy.random.Generator and random.Random"
    )


def _set_generator(name: str, generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(_byte_tensor(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _numpy_state(state)
    else:
        generator.setstate(_python_tuple(state))
