"""Functions in fresh processes; rows of first calls and extra memory for `bench codec`.

First calls: processor time of the first saves and the first load, with an empty kernel cache. Memory: the child makes
the state, runs the codec once on a small one (so that code is loaded), and measures the peak of its resident set above
the memory before (Linux). The result is part of that: for `compress` the file and the reference; for `decompress` the
returned state, which is taken off again, unless it is decoded into existing tensors (`out=`).
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shrinkpoint as sp
from shrinkpoint.codec.named_presets import NAMED
from shrinkpoint.commands.trials import peak

from .data import Pair, drawn_state
from .harness import Options, Row, Rows, at_most, threads

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


# ------------------------------------------------------------------------------------------------ rows of `bench codec`

NAMES = {"save": "first base and delta, empty kernel cache", "load": "first load, empty kernel cache"}
LIMITS = {"save": 6.0, "load": 2.5}
LAYERS, WIDTH = 8, 512


def first_calls(options: Options) -> list[Row]:
    """Both rows: medians of three processes (one with --quick) with kernel caches of their own."""
    found = Rows(size=LAYERS * (WIDTH * WIDTH + WIDTH))
    if not any(options.wanted(name) for name in NAMES.values()):
        return found
    options.say("first call")
    times: dict[str, list[float]] = {what: [] for what in NAMES}
    for _ in range(1 if options.quick else 3):
        with tempfile.TemporaryDirectory() as folder:
            for what, spent in times.items():
                cache = str(Path(folder) / f"cache-{what}")
                spent.append(call("shrinkpoint.bench.fresh:first_child", what, folder, NUMBA_CACHE_DIR=cache))
    for what, spent in times.items():
        note = f"processor time, {len(spent)} processes, {min(spent):.2f} to {max(spent):.2f} s; imports not counted"
        found.add(NAMES[what], statistics.median(spent), "s", note=note, target=at_most(LIMITS[what]))
    return found


def first_child(what: str, place: str) -> float:
    """Save or load for the first time in this process, and return the processor seconds.

    Raises:
        ValueError: the result is not that of the state.
    """
    import torch

    torch.set_num_threads(1)
    sp.set_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer, folder = torch.optim.AdamW(model.parameters()), Path(place)

    def state() -> dict[str, Any]:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(64, WIDTH)).square().mean().backward()
            optimizer.step()
        return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    if what == "save":
        first, second = state(), state()
        begin = time.process_time()
        base = sp.compress(first)
        delta = sp.compress(second, base)
        spent = time.process_time() - begin
        (folder / "base").write_bytes(base.to_bytes())
        (folder / "delta").write_bytes(delta.to_bytes())
        good = delta.is_delta
    else:
        files = (folder / "base").read_bytes(), (folder / "delta").read_bytes()
        begin = time.process_time()
        back = sp.decompress(sp.Checkpoint.from_bytes(files[1], prev=sp.Checkpoint.from_bytes(files[0])))
        spent = time.process_time() - begin
        good = sorted(back["model"]) == sorted(model.state_dict())
    if not good:
        raise ValueError(f"{NAMES[what]}: the result is not that of the state")
    return spent


# -------------------------------------------------------------------------------------------------------------- memory

TARGETS = {"compress": at_most(0.3), "delta": at_most(0.3), "out": at_most(0.1)}
HOW = "peak of the resident set (VmHWM)"


def memory(real: Callable[[], Pair], parameters: int, options: Options) -> list[Row]:
    """Return extra memory of compress and decompress at the default on all cores.

    Args:
        real: returns the states to draw from.
        parameters: of the drawn state.
        options: of the run.
    """
    names = {"compress": "extra memory, compress base"}
    if not options.quick:
        names |= {"delta": "extra memory, compress delta", "decompress": "extra memory, decompress base"}
        names |= {"out": "extra memory, decompress base into existing tensors"}
    names = {what: name for what, name in names.items() if options.wanted(name)}
    found = Rows(size=parameters, device="cpu, all cores")
    with tempfile.TemporaryDirectory() as folder:
        source = write_pools(real(), folder) if names else None
        for what, name in names.items():
            options.say(name)
            try:
                answer = call("shrinkpoint.bench.fresh:memory_child", str(source), parameters, what)
                extra, raw, value = answer["extra"], answer["raw"], answer["extra"] / answer["raw"]
                note = f"{extra / 1e6:.0f} MB in addition to {raw / 1e6:.0f} MB; {answer['how']}"
                note += f"; drawn from: {real().origin}"
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                value, note = None, f"not measured: {str(error).strip().splitlines()[-1]}"
            found.add(name, value, "x raw state", note=note, target=TARGETS.get(what))
    return found


def write_pools(pair: Pair, folder: str) -> Path:
    """Write the pools of a pair to a file."""
    source = Path(folder) / "pools.npz"
    pools: dict[str, Any] = {f"{role}_{i}": pool for role, two in pair.pools.items() for i, pool in enumerate(two)}
    np.savez(source, **pools)
    return source


def read_pools(source: str) -> Pair:
    """Read a pair with these pools."""
    states: list[dict[str, Any]] = [{"model": {}, "optimizer": {}}, {"model": {}, "optimizer": {}}]
    with np.load(source) as stored:
        for name in stored.files:
            role, number = name.rsplit("_", 1)
            states[int(number)]["model" if role == "weight" else "optimizer"][role] = stored[name].reshape(1, -1)
    return Pair(states[0], states[1], "pools")


def warm(pair: Pair, cfg: sp.Config) -> None:
    """Run the codec once on a small state, so that code is loaded."""
    small = drawn_state(pair, 200_000)
    base = sp.compress(small.before, cfg=cfg)
    sp.compress(small.after, base, cfg)
    sp.decompress(sp.Checkpoint.from_bytes(base.to_bytes()))


def extra_of(call: Callable[[], object]) -> int:
    """Return the peak of a call above the memory before.

    Raises:
        ValueError: this system does not tell it.
    """
    extra = peak(call)
    if extra is None:
        raise ValueError("this system does not tell a process's peak of memory")
    return extra


def memory_child(source: str, parameters: int, what: str, level: str = "default", cores: int = 0) -> dict[str, Any]:
    """Measure an operation in this process, on a state drawn from pools.

    Args:
        source: file of the pools.
        parameters: of the state.
        what: "compress" (a base), "delta", "decompress", or "out": into existing tensors.
        level: name of the configuration.
        cores: threads; 0: all.
    """
    pair, config, kept = read_pools(source), NAMED[level](), list[Any]()
    with threads(cores or os.cpu_count() or 1):
        warm(pair, config)
        state = drawn_state(pair, parameters)
        base = None if what == "compress" else sp.compress(state.before, cfg=config)
        blob, out = b"" if base is None else base.to_bytes(), state.after if what == "out" else None
        if what in ("compress", "delta"):
            after = state.before if base is None else state.after
            call: Callable[[], Any] = lambda: sp.compress(after, base, config)  # noqa: E731
        else:
            base = None
            call = lambda: sp.decompress(sp.Checkpoint.from_bytes(blob), out=out)  # noqa: E731
        begin = time.process_time()
        extra = extra_of(lambda: kept.append(call()))
        seconds = time.process_time() - begin
    answer = {"seconds": seconds, "extra": extra, "raw": state.nbytes, "how": HOW}
    if what in ("compress", "delta"):
        return answer | {"how": f"{HOW}, file and reference included", "stored": kept[0].nbytes}
    if what == "out":
        return answer
    return answer | {"extra": extra - state.nbytes, "how": f"{HOW}, without the state returned"}
