"""`shrinkpoint.kernels`: every function by its own name, imported on first use."""

from __future__ import annotations

import ast
import copy
import functools
import json
import pickle
import pydoc
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest

import shrinkpoint
from shrinkpoint import kernels

HOME = Path(__file__).parents[2]


def fresh(code: str) -> object:
    """Run `code` in a new interpreter; return the JSON that it prints."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=HOME / "tests")
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", kernels.__all__)
def test_each_name_is_that_of_its_module(name: str) -> None:
    value = getattr(kernels, name)
    if name != "FORMATS":
        assert getattr(import_module(value.__module__), name) is value
    assert name in dir(kernels)


def test_the_lists_agree_with_each_other_and_the_documentation() -> None:
    tree = ast.parse(Path(kernels.__file__).read_text(encoding="utf-8"))
    subject_of = {
        a.name: (n.module or "").rpartition(".")[2]
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and n.level
        for a in n.names
    }
    assert sorted(subject_of) == kernels.__all__
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (HOME / "docs" / "kernels.md").read_text(encoding="utf-8"), re.M)
    documented = {name: subject for subject, names in rows for name in re.findall(r"`(\w+)`", names)}
    errors = {"BadArgumentError", "CorruptDataError", "ShrinkpointError"}
    assert documented == {n: s for n, s in subject_of.items() if n not in errors}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="log_histogramm"):
        kernels.log_histogramm  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name"):
        exec("from shrinkpoint.kernels import log_histogramm")


def test_nothing_is_compiled_or_loaded_before_it_is_used() -> None:
    heavy = "[m for m in ('numba', 'triton', 'torch', 'jax') if m in sys.modules]"
    assert fresh(f"import json, sys, shrinkpoint; print(json.dumps({heavy}))") == []
    code = f"import json, sys; from shrinkpoint.kernels import assign, log_histogram, rans; print(json.dumps({heavy}))"
    assert fresh(code) == []


@pytest.mark.parametrize("name", ["assign", "distortion", "extrapolate"])
def test_no_module_has_the_name_of_a_function(name: str) -> None:
    assert isinstance(getattr(kernels, name), FunctionType)
    assert pickle.loads(pickle.dumps(getattr(kernels, name))) is getattr(kernels, name)
    with pytest.raises(ModuleNotFoundError):
        import_module(f"shrinkpoint.kernels.{name}")


def test_search_can_be_called_and_handed_to_another_process() -> None:
    given = functools.partial(shrinkpoint.search, 1)
    for again in (pickle.loads(pickle.dumps(given)), copy.deepcopy(given)):
        assert again.func is shrinkpoint.search
    assert "Args:" in pydoc.render_doc(shrinkpoint.search)


def test_functions_compute() -> None:
    x = np.array([0.0, 0.9], np.float32)
    assert kernels.assign(x, kernels.Thresholds(), np.array([0.0, 1.0])).tolist() == [2, 3]
    assert kernels.distortion(x, x).squared_error == 0.0
    assert kernels.extrapolate(x, x, 1.0).tolist() == x.tolist()
