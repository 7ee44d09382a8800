"""Peak of extra memory while a state is compressed or restored, each in a fresh process.

The child makes the state, runs the codec once on a small one (so that code is loaded), and measures the peak of its
resident set above the memory before (Linux). The result is part of that: for `compress` the file and the reference; for
`decompress` the returned state, which is taken off again, unless it is decoded into existing tensors (`out=`).
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shrinkpoint as sp
from shrinkpoint.commands.trials import peak

from . import processes
from .data import Pair, drawn_state
from .harness import Options, Row, Rows, at_most

TARGETS = {"compress": at_most(0.3), "delta": at_most(0.3), "out": at_most(0.1)}
HOW = "peak of the resident set (VmHWM)"


def rows(real: Callable[[], Pair], parameters: int, options: Options) -> list[Row]:
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
                answer = processes.call("shrinkpoint.bench.memory:child", str(source), parameters, what)
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


def warm(pair: Pair, config: Any = None) -> None:
    """Run the codec once on a small state, so that code is loaded."""
    cfg, small = config or sp.Config(), drawn_state(pair, 200_000)
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


def child(source: str, parameters: int, what: str) -> dict[str, Any]:
    """Measure an operation in this process, on a state drawn from pools."""
    pair = read_pools(source)
    warm(pair)
    state, how = drawn_state(pair, parameters), HOW
    if what in ("compress", "delta"):
        parent = sp.compress(state.before) if what == "delta" else None
        extra = extra_of(lambda: sp.compress(state.before if parent is None else state.after, parent))
        how += ", the result included"
    else:
        blob = sp.compress(state.before).to_bytes()
        out = state.after if what == "out" else None
        extra = extra_of(lambda: sp.decompress(sp.Checkpoint.from_bytes(blob), out=out))
        if out is None:
            extra, how = extra - state.nbytes, f"{how}, without the state returned"
    return {"extra": extra, "raw": state.nbytes, "how": how}
