"""`shrinkpoint.search` is a function, whichever module is imported first."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys

import pytest

import shrinkpoint as sp
from shrinkpoint.searching.run import search

CALL = "assert sp.search({'a': 1}, None, 0.1).method == 'error target'; "
FUNCTION = "import types; assert isinstance(sp.search, types.FunctionType); "
ORDERS = {
    "the face first": f"import shrinkpoint as sp; {CALL}import shrinkpoint.searching.cube; {CALL}{FUNCTION}",
    "a module first": f"import shrinkpoint.searching.cube; import shrinkpoint as sp; {CALL}{FUNCTION}",
    "from the package": f"from shrinkpoint.searching import Cube; import shrinkpoint as sp; {CALL}{FUNCTION}",
    "from the face": "from shrinkpoint import search, SearchResult; assert search({'a': 1}, None, 0.1).met; "
    "import shrinkpoint.searching as package; assert package.search is search; "
    "assert package.SearchResult is SearchResult",
    "light": "import shrinkpoint, sys; assert not [m for m in sys.modules if m.startswith('shrinkpoint.search')]; "
    "assert 'search' in shrinkpoint.__all__; assert 'torch' not in sys.modules",
}


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_imports(order: str) -> None:
    done = subprocess.run([sys.executable, "-c", ORDERS[order]], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_the_signature_is_the_documented_one() -> None:
    assert sp.search is search
    assert list(inspect.signature(sp.search).parameters) == [
        "state", "evaluate", "threshold", "prev", "last", "grads", "kinds", "group", "options",
    ]  # fmt: skip
    assert repr(sp.search).startswith("<function search at ")
    assert pickle.loads(pickle.dumps(sp.search)) is search


def test_other_options_are_refused() -> None:
    with pytest.raises(sp.BadArgumentError, match=r"options is \{'budget': 3\}; it must be SearchOptions or None"):
        sp.search({"a": 1}, None, 0.1, options={"budget": 3})  # type: ignore[arg-type]
