"""Helpers of the fuzzers: command line, coverage guidance, limits of time and memory.

They are started manually (`pip install atheris`); the suite has Hypothesis and time-boxed tests of the same readers
(tests/codec/test_corruption.py, tests/store/test_fuzz.py).
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Read = Callable[[bytes], object]
Mutate = Callable[[random.Random, bytes, Callable[[bytes, int], bytes]], bytes]
VALUES: list[Any] = [
    *(0, -1, 1, 2, 7, 255, 256, 2**31, 2**40, 2**53, 2**62, 2**64, 10**30, 1.5, 1e308, True, False, None),
    *("", "x", "..", "../x", "0" * 64, [], {}, [0], [-1], [2**40], [[]], {"a": 0}, {"l": 3}),
]
"""What a field of JSON is replaced by."""
GIGABYTES = 2
SECONDS_EACH = 20


ROOT = Path(__file__).resolve().parents[2]


def instrumented() -> Any:
    """Return atheris with a context in which imported library modules are instrumented.

    Compiled modules are left out: Numba does not compile instrumented code.
    """
    try:
        atheris = importlib.import_module("atheris")
    except ImportError:
        sys.exit("atheris is not installed: pip install atheris")
    compiled = [*(ROOT / "kernels").rglob("*.py"), ROOT / "store" / "streaming.py"]
    names = [".".join(("shrinkpoint", *p.relative_to(ROOT).with_suffix("").parts)) for p in compiled]
    return atheris.instrument_imports(include=["shrinkpoint"], exclude=names)


def fuzz(name: str, seeds: Iterable[bytes], read: Read, mutate: Mutate) -> None:
    """Give `read` altered inputs until the time is over or an error ends it.

    Never returns. A failing input is written to a file, which `--again FILE` reads once more.

    Args:
        name: of the fuzzer.
        seeds: first inputs.
        read: the tested function; it catches allowed errors itself.
        mutate: `mutate(rng, data, at_random)` alters data; `at_random(part, most)` is atheris' own way with bytes.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tests.fuzz.{name}")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, help="folder with what earlier runs found worth keeping, and for this")
    parser.add_argument("--again", type=Path, help="only read this file, under the same limits")
    asked = parser.parse_args()
    atheris = importlib.import_module("atheris")
    folder = asked.corpus or Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    folder.mkdir(parents=True, exist_ok=True)
    largest = 0
    for number, seed in enumerate(seeds):
        read(seed)  # imports and compiles, before memory is limited
        (folder / f"seed-{number:03}").write_bytes(seed)
        largest = max(largest, len(seed))
    _limit_memory()

    def custom(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        return mutate(rng, bytes(data), atheris.Mutate)[:most]

    flags = [f"-max_len={4 * largest}", f"-timeout={SECONDS_EACH}", "-print_final_stats=1", "-rss_limit_mb=0"]
    flags += [f"-max_total_time={asked.seconds}", f"-artifact_prefix={folder}/found-"]
    where = str(folder) if asked.again is None else str(asked.again)
    atheris.Setup([sys.argv[0], *flags, where], lambda data: read(bytes(data)), custom_mutator=custom)
    print(f"corpus and findings: {folder}", flush=True)
    atheris.Fuzz()


def _limit_memory() -> None:
    """Limit the memory of the process; a larger allocation ends the fuzzer."""
    if sys.platform == "linux":
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + (GIGABYTES << 30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def alter_json(rng: random.Random, root: Any) -> Any:
    """Return a JSON value with one place changed, moved, removed or doubled."""
    root = json.loads(json.dumps({"": root}))
    places: list[tuple[Any, Any]] = []
    stack = [root]
    while stack:
        node = stack.pop()
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                stack.append(node[key])
    node, key = places[min(int(rng.paretovariate(0.3)) % len(places), len(places) - 1)]
    if rng.random() < 0.7:
        node, key = rng.choice(places)
    how = rng.randrange(6)
    if how == 0 and type(node[key]) is int:
        node[key] += rng.choice([-1, 1, 8, -8, 1 << rng.randrange(40)])
    elif how == 1 and node is not root:
        del node[key]
    elif how == 2 and isinstance(node, list):
        node.insert(key, json.loads(json.dumps(node[key])))
    elif how == 3:
        other, place = rng.choice(places)
        node[key] = json.loads(json.dumps(other[place]))
    else:
        node[key] = rng.choice(VALUES)
    return root[""]
