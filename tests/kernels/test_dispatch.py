"""Every back end has the functions, parameters and defaults of its subject's protocols."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"
PROTOCOLS = {"BackEnd": ("reference", "cpu", "gpu"), "HostBackEnd": ("reference", "cpu")}


def functions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> list[tuple[str, str | None]]:
    """Return name and default of each parameter but `self` and `out`."""
    own = function.args
    names = [a.arg for a in (*own.posonlyargs, *own.args)]
    defaults: list[ast.expr | None] = [*[None] * (len(names) - len(own.defaults)), *own.defaults]
    found = [*zip(names, defaults, strict=True), *zip([a.arg for a in own.kwonlyargs], own.kw_defaults, strict=True)]
    return [(name, None if d is None else ast.unparse(d)) for name, d in found if name not in ("self", "out")]


def cases() -> list[tuple[str, str, str]]:
    found = []
    for page in sorted(KERNELS.glob("*/__init__.py")):
        for node in ast.parse(page.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in PROTOCOLS:
                found += [(page.parent.name, node.name, name) for name in PROTOCOLS[node.name]]
    return found


CASES = cases()


def test_most_subjects_are_found() -> None:
    assert len({subject for subject, _, _ in CASES}) >= 15


@pytest.mark.parametrize(("subject", "protocol", "back_end"), CASES)
def test_parameters_and_defaults_are_those_of_the_protocol(subject: str, protocol: str, back_end: str) -> None:
    page = ast.parse((KERNELS / subject / "__init__.py").read_text(encoding="utf-8"))
    (wanted,) = [node for node in page.body if isinstance(node, ast.ClassDef) and node.name == protocol]
    module = functions(ast.parse((KERNELS / subject / f"{back_end}.py").read_text(encoding="utf-8")).body)
    for name, function in functions(wanted.body).items():
        assert name in module, f"{subject}.{back_end} lacks {name}"
        assert parameters(module[name]) == parameters(function), f"{subject}.{back_end}.{name}"
