"""First lines of docstrings are short, and understandable without the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
LONGEST = 90
RIDDLES = re.compile(
    r"(What|Whatever|Where|Whether|How|As|The same|Do the same|Do as|All of it|It|They|Those|Their|Nothing|Of|Who)\b"
)
"""Beginnings of lines that refer to something else, or that are part of a sentence."""


def product_modules() -> list[Path]:
    folders = (HOME / folder for folder in ("kernels", "codec", "search", "store", "trainers", "src/shrinkpoint"))
    found = (path for folder in folders for path in folder.rglob("*.py"))
    return sorted(path for path in found if not any(part.is_symlink() for part in path.parents))


def first_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each docstring's first line, and the line number of its definition."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                yield getattr(node, "lineno", 1), docstring.partition("\n")[0]


def problem(line: str) -> str:
    """Return the fault of a first line, or ""."""
    if len(line) > LONGEST:
        return f"{len(line)} characters, more than {LONGEST}"
    if not line.endswith("."):
        return "no period at the end"
    beginning = RIDDLES.match(line)
    return f"begins with {beginning[0]!r}: write an imperative sentence or a noun phrase" if beginning else ""


def test_first_lines_of_docstrings_are_understandable_alone() -> None:
    modules = product_modules()
    lines = [(path, number, line) for path in modules for number, line in first_lines(path.read_text(encoding="utf-8"))]
    assert len(modules) > 250
    assert len(lines) > 3000
    assert [
        f"{path.relative_to(HOME)}:{number}: {problem(line)}: {line}" for path, number, line in lines if problem(line)
    ] == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("Return the levels of an array.", ""),
        ("Itemsize of a dtype in bytes.", ""),
        ("Offset of a piece in the body.", ""),
        (f"Return {'x' * 82}.", ""),
        (f"Return {'x' * 83}.", "91 characters, more than 90"),
        ("Return the levels of", "no period at the end"),
        ("", "no period at the end"),
        ("What the encoder wrote.", "begins with 'What'"),
        ("Whether the two are equal.", "begins with 'Whether'"),
        ("The same for optimizers.", "begins with 'The same'"),
        ("All of it.", "begins with 'All of it'"),
        ("Of the values.", "begins with 'Of'"),
    ],
)
def test_a_riddle_is_found(line: str, wrong: str) -> None:
    assert problem(line).partition(":")[0] == wrong


def test_docstrings_of_all_definitions_are_read() -> None:
    text = '"""A."""\nclass B:\n    """B.\n\n    More.\n    """\n    async def c(self): "C."\n    def d(self): pass\n'
    assert list(first_lines(text)) == [(1, "A."), (2, "B."), (7, "C.")]
