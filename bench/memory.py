"""Peak of extra memory while a state is compressed or restored, each in a fresh process.

The child makes the state, runs the codec once on a small one (so that code is loaded), gives freed memory back to the
system (`malloc_trim`), resets the peak of its resident set (`/proc/self/clear_refs`, Linux), does the one thing, and
reports the peak minus the resident memory before. The result is part of that: for `compress` the file and the
reference; for `decompress` the returned state, which is taken off again, unless it is decoded into existing tensors
(`out=`). Where the peak cannot be reset, the growth of `ru_maxrss` is reported, which may be too small.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .data import Pair, drawn_state
from .harness import Options, Row, at_most, held

TARGETS = {"compress": at_most(0.3), "delta": at_most(0.3), "out": at_most(0.1)}
UNIT = "x raw state"


def rows(real: Callable[[], Pair], parameters: int, options: Options) -> list[Row]:
    """Return extra memory of compress and decompress at the default on all cores.

    Args:
        real: returns the states to draw from.
        parameters: of the drawn state.
        options: of the run.
    """
    found = []
    names = {"compress": "extra memory, compress base"}
    if not options.quick:
        names |= {"delta": "extra memory, compress delta", "decompress": "extra memory, decompress base"}
        names |= {"out": "extra memory, decompress base into existing tensors"}
    names = {what: name for what, name in names.items() if options.wanted(name)}
    if not names:
        return []
    with tempfile.TemporaryDirectory() as folder:
        source = write_pools(real(), folder)
        for what, name in names.items():
            options.say(name)
            try:
                answer = in_process("memory", "child", source, parameters, what)
                extra, raw, value = answer["extra"], answer["raw"], answer["extra"] / answer["raw"]
                note = f"{extra / 1e6:.0f} MB in addition to {raw / 1e6:.0f} MB; {answer['how']}"
                note += f"; drawn from: {real().origin}"
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                value, note = None, f"not measured: {str(error).strip().splitlines()[-1]}"
            found.append(held(Row(name, "cpu, all cores", parameters, value, UNIT, note=note), TARGETS.get(what)))
    return found


def in_process(module: str, function: str, *arguments: Any) -> dict[str, Any]:
    """Run a function of the benches in a fresh process, and return its JSON output.

    Raises:
        ValueError: the process failed.
    """
    code = f"from shrinkpoint.bench.{module} import {function}; {function}()"
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise ValueError(done.stderr[-2000:] or f"status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_pools(pair: Pair, folder: str) -> Path:
    """Write the pools of a pair to a file."""
    source = Path(folder) / "pools.npz"
    pools: dict[str, Any] = {f"{role}_{i}": pool for role, two in pair.pools.items() for i, pool in enumerate(two)}
    np.savez(source, **pools)
    return source


def read_pools(source: Path) -> Pair:
    """Read a pair with these pools."""
    states: list[dict[str, Any]] = [{"model": {}, "optimizer": {}}, {"model": {}, "optimizer": {}}]
    with np.load(source) as stored:
        for name in stored.files:
            role, number = name.rsplit("_", 1)
            states[int(number)]["model" if role == "weight" else "optimizer"][role] = stored[name].reshape(1, -1)
    return Pair(states[0], states[1], "pools")


def warm(pair: Pair, config: Any = None) -> None:
    """Run the codec once on a small state, so that code is loaded."""
    import shrinkpoint as sp

    cfg, small = config or sp.Config(), drawn_state(pair, 200_000)
    base = sp.compress(small.before, cfg=cfg)
    sp.compress(small.after, base, cfg)
    sp.decompress(sp.Checkpoint.from_bytes(base.to_bytes()))


def child() -> None:
    """Measure in this process; arguments: the pools, the number of parameters, the operation."""
    import shrinkpoint as sp

    source, parameters, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    pair = read_pools(source)
    warm(pair)
    state = drawn_state(pair, parameters)
    if what in ("compress", "delta"):
        parent = sp.compress(state.before) if what == "delta" else None
        extra, how = peak(lambda: sp.compress(state.before if parent is None else state.after, parent))
        how += ", the result included"
    else:
        blob = sp.compress(state.before).to_bytes()
        out = state.after if what == "out" else None
        extra, how = peak(lambda: sp.decompress(sp.Checkpoint.from_bytes(blob), out=out))
        if out is None:
            extra, how = extra - state.nbytes, f"{how}, without the state returned"
    print(json.dumps({"extra": extra, "raw": state.nbytes, "how": how}))


def peak(call: Any) -> tuple[int, str]:
    """Bytes by which the resident set grew at most during the call, and how that was found out."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc: kept free memory would hide new allocations
    reset = Path("/proc/self/clear_refs")
    try:
        reset.write_text("5", encoding="ascii")
        before = _status("VmRSS")
        result = call()
        after = _status("VmHWM")
        how = "peak of the resident set (VmHWM)"
    except OSError:
        before = _maxrss()
        result = call()
        after = _maxrss()
        how = "growth of ru_maxrss"
    del result
    return max(0, after - before), how


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def _maxrss() -> int:
    try:
        import resource
    except ImportError:
        raise ValueError("this system does not tell a process's peak of memory") from None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
