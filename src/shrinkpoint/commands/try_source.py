"""Read the checkpoint for `try`: a file, a folder of DCP, or the files of a model's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..codec.errors import UnsupportedLeafError

OPTIMIZER = "optimizer.pt"
"""File of the optimizer's state in a folder that Transformers' Trainer saves."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that was read.

    Args:
        path: as given.
        kind: "file" (also a DCP folder), "model" (a folder of safetensors files), or "trainer" (the same with the
            optimizer's state).
        state: its arrays and plain values.
        refused: why other values are left out, one reason a value.
    """

    path: Path
    kind: str
    state: Any
    refused: list[str]


def read_source(path: Path) -> Source:
    """Read a checkpoint, executing nothing in it.

    Raises:
        BadArgumentError, CorruptDataError, OSError, UnsupportedLeafError: it cannot be read; see `load_state`.
    """
    from .dcp import is_dcp
    from .interchange import load_state

    kind = "file"
    if path.is_dir() and not is_dcp(path) and any(path.glob("*.safetensors")):
        from ..trainers.model_folder import ModelFolder

        kind = "model"
        state: Any = ModelFolder(path).all()
        if (path / OPTIMIZER).is_file():
            kind, state = "trainer", {"model": state, "optimizer": load_state(path / OPTIMIZER)}
    else:
        state = load_state(path)
    found, refused = _storable(state)
    return Source(path, kind, found, refused)


def _storable(state: Any) -> tuple[Any, list[str]]:
    """Return the part of a state that can be stored without pickle, and why the rest cannot."""
    from ..codec.state import tree
    from ..codec.state.leaves import is_array

    try:
        tree.flatten(state, is_array)
    except UnsupportedLeafError:
        pass
    else:
        return state, []
    root: list[Any] = []
    refused = []
    stack: list[tuple[Any, Any, tuple[Any, ...]]] = [([state], root, ())]
    while stack:
        source, target, keys = stack.pop()
        for key, value in source.items() if isinstance(source, dict) else enumerate(source):
            if isinstance(value, (dict, list)):
                kept: Any = type(value)()
                stack.append((value, kept, (*keys, key)))
            else:
                try:
                    tree.flatten([value], is_array)
                except UnsupportedLeafError as error:
                    refused.append(
                        "/".join(map(str, (*keys[1:], key))) + str(error).removeprefix("0").partition(";")[0]
                    )
                    continue
                kept = value
            if isinstance(target, dict):
                target[key] = kept
            else:
                target.append(kept)
    return root[0], refused
