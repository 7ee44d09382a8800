"""A function of the user that measures a restored state, for `try --eval`."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from ..kernels.errors import BadArgumentError


def load_function(option: str, name: str) -> Callable[[Any, str], float]:
    """Import a function by its name, also from a module of the current folder.

    What the module and the function print goes to standard error.

    Args:
        option: of the command, for messages.
        name: "module:function".

    Returns:
        A function of a state and a description of it, which calls the user's function with the state.

    Raises:
        BadArgumentError: it does not exist, or its module cannot be imported. The returned function raises it if the
            user's function raises or does not return a number.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise BadArgumentError(f"{option} is {name!r}; it must be module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with _guarded(f"{option} {name}: the module {module_name} cannot be imported"):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        what = "has no function" if function is None else f"has {type(function).__name__}, not a function,"
        raise BadArgumentError(f"{option} {name}: {module.__name__} ({module.__file__}) {what} {function_name!r}")

    def evaluate(state: Any, what: str) -> float:
        with _guarded(f"{option} {name} failed on the state restored from {what}"):
            found = function(state)
        try:
            return float(found.detach() if hasattr(found, "detach") else found)
        except (TypeError, ValueError, RuntimeError):
            raise BadArgumentError(f"{option} {name} returned {type(found).__name__}; it must be a number") from None

    return evaluate


@contextlib.contextmanager
def _guarded(message: str) -> Iterator[None]:
    """Raise an error of the user's code as BadArgumentError that names its type and place."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = str(error).partition("\n")[0][:200]
        where = f" ({place.filename}, line {place.lineno})" if os.path.isfile(place.filename) else ""
        raise BadArgumentError(f"{message}: {type(error).__name__}{': ' * bool(said)}{said}{where}") from error
