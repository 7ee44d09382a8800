"""Functions of the benches in fresh processes, whose arguments and results are JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

_CODE = """
import json, sys
from {module} import {name}
print(json.dumps({name}(*json.loads(sys.argv[1]))))
"""


def call(function: str, *arguments: Any, **environment: str) -> Any:
    """Call a function in a fresh process, and return its result.

    Args:
        function: "module:name".
        arguments: as JSON has them.
        environment: variables in addition to those of this process.

    Raises:
        ValueError: the process failed; its last words are in the message.
    """
    return _result(_begun(function, arguments, environment), 3600)


def ranks(function: str, world: int, *arguments: Any, seconds: float) -> list[Any]:
    """Call a function in one process for each rank, and return their results.

    Args:
        function: "module:name"; it is given a new folder, `world`, the rank, and the arguments.
        world: number of processes.
        arguments: further ones, the same for all.
        seconds: time limit of each.

    Raises:
        ValueError: a process failed; its last words are in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = [_begun(function, (folder, world, rank, *arguments), {}) for rank in range(world)]
        try:
            return [_result(process, seconds) for process in running]
        finally:
            for process in running:
                process.kill()


def _begun(function: str, arguments: Any, environment: dict[str, str]) -> subprocess.Popen[str]:
    module, _, name = function.partition(":")
    command = [sys.executable, "-P", "-c", _CODE.format(module=module, name=name), json.dumps(arguments)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **environment}, **pipes)


def _result(process: subprocess.Popen[str], seconds: float) -> Any:
    try:
        out, error = process.communicate(timeout=seconds)
    finally:
        process.kill()  # of no effect where it has ended
    if process.returncode:
        raise ValueError(error[-2000:] or f"status {process.returncode}")
    return json.loads(out.splitlines()[-1])
