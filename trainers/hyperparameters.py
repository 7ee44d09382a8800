"""Hyperparameters in a checkpoint: plain forms, and a report of unsupported ones."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping
from typing import Any

from ..codec.errors import UnsupportedLeafError
from ..codec.state.leaves import is_array
from ..codec.state.tree import flatten


def plain_form(value: Any) -> Any:
    """Return hyperparameters with enums, dataclasses and paths in plain form.

    An enum becomes its value, a dataclass a dict of its fields, a path a string.

    Example:
        >>> from pathlib import Path
        >>> plain_form({"data": Path("a/b"), "rates": (0.1, 0.2)})
        {'data': 'a/b', 'rates': (0.1, 0.2)}
    """
    if isinstance(value, enum.Enum):
        return plain_form(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_form(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {plain_form(key): plain_form(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        # Named tuples are refused with their path like any other class.
        return type(value)(map(plain_form, value)) if type(value) in (list, tuple) else value
    return value


def unstorable(parameters: Mapping[str, Any]) -> list[str]:
    """Return a line for each hyperparameter that cannot be stored without pickle.

    Example:
        >>> unstorable({"rate": 0.1, "names": {"a"}})[0].split(":")[0]
        'names'
    """
    lines = []
    for name, value in parameters.items():
        try:
            flatten({str(name): plain_form(value)}, is_array)
        except UnsupportedLeafError as e:
            lines.append(str(e))
    return lines
