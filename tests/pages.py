"""Run the code of a Markdown page, block by block, in one namespace and one scratch folder.

    ```python    runs; with `>>>` prompts it is a doctest
    ```console   runs; after `$ ` prompts come commands, below them what they must say. `...` stands for anything.
                 Without prompts every line is a command. A command must end with 0, or with what a comment
                 behind it says: `# exit code 1`
    ```output    is what the Python block above it must have printed
    other fences are not code

In a comment straight above a fence (the last one also further up):

    <!-- not run: why -->          the block is left out
    <!-- needs MODULE: why -->     the block is left out where the module is not installed
    <!-- numbers within 30 % -->   numbers may be off by so much, for what depends on the machine
    <!-- runs before               Python that the page does not show
    ... -->

`shrinkpoint` runs in this process, for speed, or in a process for each command; other commands in a shell. This module
needs nothing but the package, so that a wheel can be tried with it: `python tests/pages.py README.md`.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUN = ("python", "console")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_PIECE = re.compile(
    r"^<!--(?P<comment>.*?)-->[ \t]*$|^```(?P<language>[a-z]*)[ \t]*\n(?P<code>.*?)^```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
# Not within a name.
_NUMBER = r"(?<![\w/.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?"
_EXIT = re.compile(r"#\s*exit code (\d+)\s*$")


class PageError(AssertionError):
    """A page whose code does not give the result that the page shows."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Args:
        language: after the fence.
        code: between the fences.
        line: of the fence, from 1.
        left_out: why it is not run, or "".
        before: Python to run first.
        within: how far numbers may be off, as a share of themselves; 0: the text must be the same.
    """

    language: str
    code: str
    line: int
    left_out: str = ""
    before: str = ""
    within: float = 0.0


@dataclass(slots=True)
class Report:
    """Result of a page: number of blocks that ran, and blocks left out with the reason."""

    ran: int = 0
    left_out: list[str] = field(default_factory=list)


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page, with the options of the comments directly above them.

    Raises:
        PageError: a comment without a reason, or one above something that does not run.
    """
    found = []
    left_out = before = ""
    end, within = 0, 0.0
    for piece in _PIECE.finditer(text):
        line = text.count("\n", 0, piece.start()) + 1
        if text[end : piece.start()].strip():
            left_out, within = "", 0.0
        end = piece.end()
        if piece["comment"] is not None:
            word, _, rest = piece["comment"].strip().partition("\n")
            if word == "runs before":
                before += rest + "\n"
            elif word.startswith("numbers within "):
                within = float(word.split()[2]) / 100
            elif word.startswith(("not run", "needs ")):
                left_out = _reason(" ".join(piece["comment"].split()), line) or left_out
            continue
        found.append(Block(piece["language"], piece["code"], line, left_out, before, within))
        left_out, before, within = "", "", 0.0
    if before:
        raise PageError("Python that runs before a block, and no block follows")
    return found


def _reason(comment: str, line: int) -> str:
    """Return why a block is left out; "" if the module that it needs is installed."""
    match = re.fullmatch(r"(not run|needs ([a-z_0-9.]+)):\s*(\S.*)", comment)
    if match is None:
        raise PageError(f"line {line}: {comment!r} gives no reason")
    if match[2] and importlib.util.find_spec(match[2]) is not None:
        return ""
    return comment


def run_page(path: Path, *, fresh: bool = False) -> Report:
    """Run a page.

    Args:
        path: of the page.
        fresh: run each `shrinkpoint` command in a process of its own, with two threads.

    Raises:
        PageError: a command ended or said otherwise than the page shows; other exceptions are those of its code.
    """
    report = Report()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        printed = ""
        for block in blocks(path.read_text(encoding="utf-8")):
            where = f"{path.name}:{block.line}"
            if block.language in RUN and block.left_out:
                report.left_out.append(f"{where}: {block.left_out}")
                continue
            if block.before:
                exec(compile(block.before, f"{where} (before)", "exec"), namespace)
            if block.language == "output":
                _compare(where, block.code, printed, block.within)
            elif block.language == "python" and re.search(r"^>>> ", block.code, re.MULTILINE):
                _doctest(block, where, namespace)
                report.ran += 1
            elif block.language == "python":
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    exec(compile("\n" * block.line + block.code, str(path), "exec"), namespace)
                printed = out.getvalue()
                report.ran += 1
            elif block.language == "console":
                _console(block, where, fresh)
                report.ran += 1
    return report


def _compare(where: str, expected: str, got: str, within: float) -> None:
    same = _is_near(expected, got, within) if within else doctest.OutputChecker().check_output(expected, got, FLAGS)
    if not same:
        raise PageError(f"{where}: the page shows\n{expected}\nand it is\n{got}")


def _is_near(expected: str, got: str, within: float) -> bool:
    """Compare two texts up to white space, `...`, and small differences of numbers."""
    parts = re.split(rf"(\.\.\.|{_NUMBER}|\s+)", expected.strip())
    numbers = []
    pattern = ""
    for number, part in enumerate(parts):
        if number % 2 == 0:
            pattern += re.escape(part)
        elif part == "..." or part.isspace():
            pattern += ".*?" if part == "..." else r"\s+"
        else:
            pattern += f"({_NUMBER})"
            numbers.append(_number(part))
    match = re.fullmatch(pattern, got.strip(), re.DOTALL)
    if match is None:
        return False
    return all(abs(_number(a) - b) <= within * abs(b) for a, b in zip(match.groups(), numbers, strict=True))


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _doctest(block: Block, where: str, namespace: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block.code, namespace, where, where, block.line)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    out = io.StringIO()
    runner.run(test, out=out.write, clear_globs=False)
    namespace.update(test.globs)
    if runner.failures:
        raise PageError(f"{where}: {out.getvalue()}")


def _console(block: Block, where: str, fresh: bool) -> None:
    for command, expected in _commands(block.code):
        wanted = _EXIT.search(command)
        code, said = _shell(command, _process if fresh else _face)
        if code != (int(wanted[1]) if wanted else 0):
            raise PageError(f"{where}: {command}\nended with {code}:\n{said}")
        if expected is not None:
            _compare(f"{where}: {command}", expected, said, block.within)


def _commands(code: str) -> Iterator[tuple[str, str | None]]:
    """Yield each command and its expected output; None if the page does not show the output."""
    if not re.search(r"^\$ ", code, re.MULTILINE):
        for line in code.replace("\\\n", "").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line, None
        return
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        command, _, said = part.replace("\\\n", "").partition("\n")
        yield command, said


def _shell(line: str, face: Callable[[list[str]], tuple[int, str]]) -> tuple[int, str]:
    """Run commands joined by `&&`; return the last exit code and all output.

    `face` runs the words after `shrinkpoint`.
    """
    said = ""
    code = 0
    for command in line.split(" && "):
        words = shlex.split(command, comments=True)
        if words[:1] == ["shrinkpoint"]:
            code, now = face(words[1:])
        else:
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
            code, now = done.returncode, done.stdout + done.stderr
        said += now
        if code:
            break
    return code, said


def _face(words: list[str]) -> tuple[int, str]:
    """Run the package's command line in this process."""
    from typer.testing import CliRunner

    from shrinkpoint.__main__ import app

    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def _process(words: list[str]) -> tuple[int, str]:
    """Run the package's command line in a new process, which has not imported torch."""
    done = subprocess.run(
        [sys.executable, "-m", "shrinkpoint", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "SHRINKPOINT_THREADS": "2"},
    )
    return done.returncode, re.sub(r"^Compiling kernels, once per machine.*\n", "", done.stdout, flags=re.MULTILINE)


def main(paths: list[str]) -> int:
    """Run pages; return 0 if each has at least one block."""
    worst = 0
    for name in paths:
        os.environ.setdefault("COLUMNS", "120")
        report = run_page(Path(name).resolve())
        print(f"{name}: {report.ran} blocks ran")
        for reason in report.left_out:
            print(f"  left out: {reason}")
        worst |= not report.ran
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
