"""Run a script in processes forked from one that has already imported its modules.

`python forking.py SCRIPT` is the one that forks. It has computed nothing, so no threads are there for a fork to lose.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE = 600.0
"""Seconds until a run must have got there. Where others have the cores, importing a framework alone takes a minute."""
MOST = 3000
"""Characters of what went wrong that are shown."""


class Run:
    """A forked process, with a process group of its own for its children."""

    def __init__(self, script: Script, pid: int, said: Path) -> None:
        self._script, self._pid, self._said = script, pid, said
        self._code: int | None = None

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        if self._code is None:
            self._code = self._script.ask({"poll": self._pid})
        return self._code

    @property
    def said(self) -> str:
        """Text on its standard output."""
        return _text(self._said)

    @property
    def trouble(self) -> str:
        """Last part of its standard error."""
        return _text(_errors(self._said))[-MOST:]

    def wait(self) -> int:
        """Wait for the end; return the exit code."""
        end = time.monotonic() + PATIENCE
        while (code := self.code) is None:
            assert time.monotonic() < end, f"it did not end: {self.trouble}"
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        """Kill the process and all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self.wait()


class Script:
    """A script that can be run any number of times, as `python SCRIPT ARGUMENT ...` would.

    Args:
        path: of the script. Its imports are made once, without its `if __name__ == "__main__":`; all of it is run again
            in each process.
    """

    def __init__(self, path: Path) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = itertools.count()
        alone = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "MASTER_PORT")}
        with self._log().open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True, env=alone,
            )  # fmt: skip

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()

    def start(self, *arguments: object, **environment: object) -> Run:
        """Run the script with arguments and additional environment variables."""
        said = self._log()
        asked = {"arguments": [*map(str, arguments)], "environment": {k: str(v) for k, v in environment.items()}}
        return Run(self, self.ask({**asked, "said": str(said)}), said)

    def together(self, world: int, *arguments: object, fails: bool = False) -> None:
        """Run one process for each rank, as torchrun does; all must succeed, or all must fail."""
        with self.ranks(world, *arguments) as runs:
            for run in runs:
                assert (run.wait() != 0) == fails, run.trouble

    @contextlib.contextmanager
    def ranks(self, world: int, *arguments: object) -> Iterator[list[Run]]:
        """Start one process for each rank, as torchrun does; kill those that are left."""
        from torch.distributed import TCPStore

        # Where they meet, at a port that nobody else can take meanwhile.
        meet = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": meet.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        runs = [
            self.start(*arguments, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, **place)
            for rank in range(world)
        ]
        try:
            yield runs
        finally:
            for run in runs:
                run.kill()

    def ask(self, question: Any) -> Any:
        """Send a question to the forking process, and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, _text(Path(self._folder.name) / "0")[-MOST:]
        return json.loads(answer)

    def _log(self) -> Path:
        return Path(self._folder.name) / str(next(self._numbers))


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _errors(said: Path) -> Path:
    return said.with_suffix(".errors")


def import_late() -> None:
    """Import the modules that the first save and the first optimizer load."""
    for late in ("shrinkpoint.codec.compress", "shrinkpoint.store.saver.saver", "numba", "torch._dynamo"):
        importlib.import_module(late)


def serve(answers: Any) -> bool:
    """Fork children and report their ends until input closes; in a child, return True."""
    children: set[int] = set()
    for line in sys.stdin:
        question = json.loads(line)
        if "poll" in question:
            done, status = os.waitpid(question["poll"], os.WNOHANG)
            children.discard(done)
            answer = os.waitstatus_to_exitcode(status) if done else None
        elif answer := os.fork():
            children.add(answer)
            # Here, too: it must be a group before it can be ended.
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(answer, answer)
        else:
            answers.close()
            become(question)
            return True
        print(json.dumps(answer), file=answers, flush=True)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return False


def become(question: Any) -> None:
    """Set up a forked child: process group, output files, environment, arguments."""
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    said, new = Path(question["said"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, (path, how) in enumerate(((os.devnull, os.O_RDONLY), (said, new), (_errors(said), new))):
        os.dup2(os.open(path, how), number)
    os.environ.update(question["environment"])
    # As each process has them that is not forked.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.argv[1:] = question["arguments"]


if __name__ == "__main__":
    path = sys.argv[1]
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    with os.fdopen(os.dup(1), "w") as mine:
        os.dup2(2, 1)
        runpy.run_path(path, run_name="imported")
        import_late()
        if not serve(mine):
            os._exit(0)
    runpy.run_path(path, run_name="__main__")
