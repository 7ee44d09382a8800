"""Every launch happens with the device of its data made current."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from shrinkpoint import kernels
from shrinkpoint.kernels.backend import arrays, gpu
from shrinkpoint.kernels.quantizer import Thresholds

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULES = [
    importlib.import_module(m.name)
    for m in pkgutil.walk_packages(kernels.__path__, "shrinkpoint.kernels.")
    if m.name.rpartition(".")[2] == "gpu"
]


class Current:
    """Stand-in for `torch.cuda.device` that records the current device."""

    def __init__(self) -> None:
        self.stack: list[Any] = ["cuda:0"]

    @contextmanager
    def __call__(self, device: Any) -> Iterator[None]:
        self.stack.append(str(device))
        yield
        self.stack.pop()


def test_the_device_of_the_data_becomes_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current = Current()
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    data: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda:1"))
    with gpu.on(data):
        assert current.stack == ["cuda:0", "cuda:1"]
    assert current.stack == ["cuda:0"]


def test_page_locked_memory_is_the_host_s_whatever_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def pinned(*shape: Any, pin_memory: bool, **how: Any) -> torch.Tensor:
        return empty(*shape, **how)

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    values = torch.arange(10)
    with torch.device("meta"):
        assert arrays._page_locked(values).tolist() == list(range(10))


def launches(module: Any) -> Iterator[tuple[ast.Call, list[ast.With]]]:
    """Return the launches `NAME[grid](...)` of a module with the `with` statements around them."""

    def walk(node: ast.AST, around: list[ast.With]) -> Iterator[tuple[ast.Call, list[ast.With]]]:
        inner = [*around, node] if isinstance(node, ast.With) else around
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Subscript):
                yield child, inner
            yield from walk(child, inner)

    yield from walk(ast.parse(Path(str(module.__file__)).read_text()), [])


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__.rsplit(".", 1)[-1])
def test_no_launch_stands_outside_of_the_guard(module: Any) -> None:
    for call, around in launches(module):
        guards = [ast.unparse(item.context_expr) for w in around for item in w.items]
        assert any(g.startswith("on(") for g in guards), f"line {call.lineno}: {ast.unparse(call.func)}"


def test_launches_of_a_call_run_on_the_device_of_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """All launches of a call run under the guard of its data's device."""
    if not gpu.INTERPRETED:
        pytest.skip("launches are observed in the interpreter")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    current, seen = Current(), []
    run = interpreter.GridExecutor.__call__

    def observe(self: Any, *arguments: Any, **constants: Any) -> Any:
        seen.append(current.stack[-1])
        return run(self, *arguments, **constants)

    def on(t: torch.Tensor) -> Any:
        assert t.numel()
        return current("cuda:1")

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", observe)
    for module in MODULES:
        if hasattr(module, "on"):
            monkeypatch.setattr(module, "on", on)
    x = torch.linspace(-2, 2, 1500)
    with np.errstate(all="ignore"):
        levels = importlib.import_module("shrinkpoint.kernels.quantizer.gpu").assign(
            x, Thresholds(), np.array([-1.0, 1.0])
        )
        importlib.import_module("shrinkpoint.kernels.histogram.gpu").log_histogram(x, 4)
        importlib.import_module("shrinkpoint.kernels.levels.gpu").split_by_level(levels, levels, 4)
    assert len(seen) >= 4
    assert set(seen) == {"cuda:1"}
    assert current.stack == ["cuda:0"]
