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
from pathlib import Path
from typing import Any

import numpy as np

from .data import Pair, drawn_state
from .harness import Options, Row, at_most

TARGETS = {"compress": at_most(0.3), "delta": at_most(0.3), "out": at_most(0.1)}
UNIT = "x raw state"


def rows(real: Pair, parameters: int, options: Options) -> list[Row]:
    """Extra memory of compress and decompress with the default configuration on all cores."""
    found = []
    names = {"compress": "extra memory, compress base"}
    if not options.quick:
        names |= {"delta": "extra memory, compress delta", "decompress": "extra memory, decompress base"}
        names |= {"out": "extra memory, decompress base into existing tensors"}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "pools.npz"
        np.savez(source, **{f"{role}_{i}": pool for role, pools in real.pools.items() for i, pool in enumerate(pools)})  # type: ignore[arg-type]
        for what, name in names.items():
            if not options.wanted(name):
                continue
            options.say(name)
            target = TARGETS.get(what)
            text = target.text(UNIT) if target else None
            try:
                extra, raw, how = _child(source, parameters, what)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                note = f"not measured: {str(error).strip().splitlines()[-1]}"
                found.append(Row(name, "cpu, all cores", parameters, None, UNIT, None, None, None, text, None, note))
                continue
            value = extra / raw
            note = f"{extra / 1e6:.0f} MB in addition to {raw / 1e6:.0f} MB; {how}; drawn from: {real.origin}"
            met = target.met(value, None) if target else None
            found.append(Row(name, "cpu, all cores", parameters, value, UNIT, None, None, None, text, met, note))
    return found


def _child(source: Path, parameters: int, what: str) -> tuple[int, int, str]:
    code = "from shrinkpoint.bench.memory import child; child()"
    command = [sys.executable, "-P", "-c", code, str(source), str(parameters), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise ValueError(done.stderr or f"status {done.returncode}")
    answer = json.loads(done.stdout)
    return answer["extra"], answer["raw"], answer["how"]


def child() -> None:
    """Measure in this process; arguments: the pools, the number of parameters, the operation."""
    import shrinkpoint as sp

    source, parameters, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    with np.load(source) as stored:
        arrays = {name: stored[name] for name in stored.files}
    pair = pair_of(arrays)
    small = drawn_state(pair, 200_000)
    warm = sp.compress(small.before)
    sp.compress(small.after, warm)
    sp.decompress(sp.Checkpoint.from_bytes(warm.to_bytes()))
    state = drawn_state(pair, parameters)
    raw = state.nbytes
    if what == "compress":
        extra, how = peak(lambda: sp.compress(state.before))
        how += ", the result included"
    elif what == "delta":
        parent = sp.compress(state.before)
        extra, how = peak(lambda: sp.compress(state.after, parent))
        how += ", the result included"
    else:
        blob = sp.compress(state.before).to_bytes()
        out = state.after if what == "out" else None
        extra, how = peak(lambda: sp.decompress(sp.Checkpoint.from_bytes(blob), out=out))
        if out is None:
            extra, how = extra - raw, f"{how}, without the state returned"
    print(json.dumps({"extra": extra, "raw": raw, "how": how}))


def pair_of(arrays: dict[str, Any]) -> Pair:
    """A pair whose pools are the given ones."""
    states: list[dict[str, Any]] = [{"model": {}, "optimizer": {}}, {"model": {}, "optimizer": {}}]
    for name, values in arrays.items():
        role, number = name.rsplit("_", 1)
        part = states[int(number)]["model" if role == "weight" else "optimizer"]
        part[role] = values.reshape(1, -1)
    return Pair(states[0], states[1], "pools")


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
