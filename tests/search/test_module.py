"""`shrinkpoint.search` is a package and a function: the same thing, whichever is imported first."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import shrinkpoint as sp
from shrinkpoint.search.run import search

CALL = "assert sp.search({'a': 1}, None, 0.1).method == 'error target'; "
SAME = "import sys; assert sp.search is sys.modules['shrinkpoint.search']; "
ORDERS = {
    "the face first": f"import shrinkpoint as sp; {CALL}import shrinkpoint.search.cube; {CALL}{SAME}",
    "a module first": f"import shrinkpoint.search.cube; import shrinkpoint as sp; {CALL}{SAME}",
    "from the package": f"from shrinkpoint.search import Cube; import shrinkpoint as sp; {CALL}{SAME}",
    "from the face": "from shrinkpoint import search, SearchResult; assert search({'a': 1}, None, 0.1).met; "
    "import shrinkpoint.search as package; assert package is search; assert package.SearchResult is SearchResult",
    "light": "import shrinkpoint, sys; assert not [m for m in sys.modules if m.startswith('shrinkpoint.search')]; "
    "assert 'search' in shrinkpoint.__all__; assert 'torch' not in sys.modules; "
    "shrinkpoint.search; assert 'torch' not in sys.modules",
}


@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_imports(order: str) -> None:
    done = subprocess.run([sys.executable, "-c", ORDERS[order]], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_it_is_documented_as_what_it_calls() -> None:
    assert inspect.signature(sp.search) == inspect.signature(search)
    assert list(inspect.signature(sp.search).parameters)[:9] == [
        "state", "evaluate", "threshold", "prev", "last", "grads", "kinds", "group", "cube",
    ]  # fmt: skip
    assert callable(sp.search)
    assert sp.search.__doc__ == search.__doc__  # what help() shows
