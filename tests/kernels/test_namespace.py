"""`shrinkpoint.kernels`: every function by its own name, nothing imported before it is used."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import json
import pickle
import pydoc
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import shrinkpoint
from shrinkpoint import kernels

HOME = Path(__file__).parents[2]


def fresh(code: str) -> object:
    """What `code`, run in a new interpreter, prints as JSON."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=HOME / "tests")
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", kernels.__all__)
def test_each_name_is_that_of_its_module(name: str) -> None:
    value = getattr(kernels, name)
    subject = kernels._MODULE_OF[name]
    module = import_module(f"shrinkpoint.kernels.{subject}")
    assert value is (module if name == subject else getattr(module, name))
    assert name in dir(kernels)


def test_the_lists_agree_with_each_other_and_the_documentation() -> None:
    tree = ast.parse(Path(kernels.__file__).read_text(encoding="utf-8"))
    typed = {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level for a in n.names}
    assert sorted(typed) == sorted(kernels.__all__) == sorted(kernels._MODULE_OF)
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (HOME / "docs" / "kernels.md").read_text(encoding="utf-8"), re.M)
    documented = {name: subject for subject, names in rows for name in re.findall(r"`(\w+)`", names)}
    errors = {"BadArgumentError", "CorruptDataError", "ShrinkpointError"}
    assert documented == {n: s for n, s in kernels._MODULE_OF.items() if n not in errors}


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


@pytest.mark.parametrize("subject", ["assign", "distortion", "extrapolate"])
def test_a_module_of_its_functions_name_is_both_in_any_order_of_imports(subject: str) -> None:
    forms = {
        "name": f"from shrinkpoint.kernels import {subject} as it",
        "function": f"from shrinkpoint.kernels.{subject} import {subject} as it",
        "module": f"import shrinkpoint.kernels.{subject} as it",
        "attribute": f"import shrinkpoint.kernels as k; it = k.{subject}",
    }
    code = "import json, sys; said = []; " + "; ".join(f"{f}; said.append(callable(it))" for f in forms.values())
    assert fresh(f"{code}; print(json.dumps(said))") == [True] * 4
    reverse = "import json, sys; said = []; " + "; ".join(
        f"{f}; said.append(callable(it))" for f in reversed(forms.values())
    )
    assert fresh(f"{reverse}; print(json.dumps(said))") == [True] * 4
    module = getattr(kernels, subject)
    assert isinstance(module, ModuleType)
    assert inspect.signature(module) == inspect.signature(getattr(module, subject))
    assert pickle.loads(pickle.dumps(getattr(module, subject))) is getattr(module, subject)


@pytest.mark.parametrize("module", [kernels.assign, kernels.distortion, kernels.extrapolate, shrinkpoint.search])
def test_a_callable_module_can_be_handed_to_another_process(module: Any) -> None:
    given = functools.partial(module, 1)
    for again in (pickle.loads(pickle.dumps(given)), copy.deepcopy(given)):
        assert again.func is module
    name = module.__name__.rpartition(".")[2]
    assert module.__doc__ == getattr(module, name).__doc__
    assert "Args:" in pydoc.render_doc(module)


def test_the_callable_modules_compute() -> None:
    x = np.array([0.0, 0.9], np.float32)
    assert kernels.assign(x, kernels.Thresholds(), np.array([0.0, 1.0])).tolist() == [2, 3]
    assert kernels.distortion(x, x).squared_error == 0.0
    assert kernels.extrapolate(x, x, 1.0).tolist() == x.tolist()
