"""The compilers of kernels give the code that Numba's own compiler gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.compiler import Flags

from shrinkpoint.kernels.backend import jit
from shrinkpoint.kernels.backend.jit import EntryCompiler, KeptFlags, RememberedCalls


def folded(x: Any, table: Any, out: Any) -> Any:
    """Use operators, conversions, slices, loops and rows, as kernels do."""
    total = np.int64(0)
    for start in range(0, x.size, 16):
        part = x[start : start + 16]
        for i in range(part.size):
            value = np.int32(part[i]) * np.int32(3) - np.int32(i)
            out[start + i] = np.uint8(min(max(value, np.int32(0)), np.int32(255)))
            total += abs(value) >> 1
        table[start % table.shape[0], 0] += np.float64(total) / 2.0
    return total


ARGUMENTS = np.arange(64, dtype=np.int16), np.zeros((4, 2)), np.zeros(64, np.uint8)


def code(pipeline: type[EntryCompiler]) -> tuple[Any, str]:
    """Return what the function returns when it is compiled from scratch, and its instructions without names."""
    x, table, out = (a.copy() for a in ARGUMENTS)
    made: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy", pipeline_class=pipeline)(folded)
    found = made(x, table, out), table.tolist(), out.tolist()
    (text,) = made.inspect_llvm().values()  # type: ignore[attr-defined]
    instructions = "\n".join(line for line in text.splitlines() if line.startswith("  "))
    return found, re.sub(r'[@%]"[^"]*"|@[\w.$]+', "@", instructions)


class Plain(EntryCompiler):
    """The same compiler with Numba's own typing context and flags."""


def test_remembered_signatures_do_not_change_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_signatures", {})
    first = code(EntryCompiler)
    assert len(jit._signatures) > 10
    again = code(EntryCompiler)
    monkeypatch.setattr(jit, "RememberedCalls", lambda context, nrt: context)
    monkeypatch.setattr(jit, "KeptFlags", lambda flags: flags)
    assert first == again == code(Plain)


def test_a_call_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        calls = 0

        def resolve_function_type(self, func: Any, args: Any, kws: Any) -> str:
            self.calls += 1
            return f"signature {self.calls}"

    monkeypatch.setattr(jit, "_signatures", {})
    context = Context()
    with_memory, without = RememberedCalls(context, True), RememberedCalls(context, False)
    own, array = numba.types.Function, numba.int32[::1]
    assert own in jit._OWN
    found = [with_memory.resolve_function_type("getitem", (array, numba.int64), {}) for _ in range(3)]
    assert found == ["signature 1"] * 3
    assert without.resolve_function_type("getitem", (array, numba.int64), {}) == "signature 2"
    assert with_memory.resolve_function_type("getitem", (array, numba.int32), {}) == "signature 3"
    # A compiled function as an argument, or keywords: each time again.
    other = numba.types.unicode_type
    for number in (4, 5):
        assert with_memory.resolve_function_type("getitem", (other, numba.int64), {}) == f"signature {number}"


def test_kept_flags_follow_a_change() -> None:
    plain = Flags()
    kept = KeptFlags(plain)
    assert kept == plain
    assert kept == KeptFlags(kept)
    kept.nrt = True
    assert kept.values()["nrt"] is True
    assert kept != plain
    assert kept.copy() == kept
    assert hash(kept.copy()) == hash(kept)
    assert kept.get_mangle_string() == KeptFlags(kept).get_mangle_string()
