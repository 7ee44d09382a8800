"""Write or check the golden files: `python -m tests.golden.make [--check]`, from the root.

Without an option it writes the files and refuses to overwrite existing ones. `--check` encodes every case again and
compares the bytes with the files: a refactoring must leave every byte as it is. The files of a release are never
replaced: an encoder that writes other bytes gets a further folder, and its case stays readable in the old one.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

import shrinkpoint as sp
from shrinkpoint.codec.rebase import rebase
from shrinkpoint.codec.state.leaves import is_array, is_stored_as_array, memory_order, read_leaf
from shrinkpoint.codec.state.tree import flatten

from .subclass import Coded, coded

FOLDER = Path(__file__).parent / "v2"
INDEX = FOLDER / "index.json"


def fingerprint(tree: Any) -> str:
    """Return a hash of all visible parts of a state: types, keys, dtypes, shapes, bits."""
    h = blake3()
    stack = [tree]
    while stack:
        x = stack.pop()
        name = "Tensor" if isinstance(x, torch.Tensor) and not isinstance(x, Coded) else type(x).__name__
        h.update(f"<{name}>".encode())
        if isinstance(x, Coded):
            stack.append([x.codes, x.scale, repr(x.context)])
        elif isinstance(x, torch.Tensor):
            h.update(f"{x.dtype} {tuple(x.shape)}".encode())
            h.update(bits(x))
        elif isinstance(x, (np.ndarray, np.generic)):
            h.update(f"{x.dtype.str} {x.dtype.name} {x.shape}".encode() + x.tobytes())
        elif isinstance(x, dict):
            h.update(repr(list(x)).encode())
            stack.extend(reversed(list(x.values())))
        elif isinstance(x, (list, tuple)):
            h.update(str(len(x)).encode())
            stack.extend(reversed(x))
        else:
            h.update((x.hex() if isinstance(x, float) else repr(x)).encode())
    return str(h.hexdigest())


def uniform(n: int, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return n numbers in [0, 1) by a congruential generator that no library version changes."""
    out = np.empty(n)
    x = seed * 2654435761 % (2**31 - 1) + 1
    for i in range(n):
        x = x * 48271 % (2**31 - 1)
        out[i] = x / (2**31 - 1)
    return out


def bell(n: int, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return roughly normal numbers: sums of twelve uniform ones."""
    return np.asarray(uniform(12 * n, seed).reshape(n, 12).sum(axis=1) - 6.0)


def training(t: int) -> dict[str, Any]:
    """Return a training state at moment t."""
    w = bell(2000, 1) + 0.01 * t * bell(2000, 2 + t)
    odd = w.copy()
    odd[:5] = [np.nan, np.inf, -np.inf, 1e300, -0.0]
    m = bell(1500, 9 + t) * 1e-3
    zero = np.zeros(1200, np.float32)
    return {
        "model": {
            "fc.weight": torch.from_numpy(w.astype(np.float32).reshape(40, 50)),
            "wte.weight": torch.from_numpy(w.reshape(50, 40)).bfloat16(),
            "half": torch.from_numpy(w).half(),
            "odd": odd,
            "zero": zero,
            "norm.weight": torch.ones(8) + t,
        },
        "optimizer": {
            "state": {
                0: {
                    "step": torch.tensor(float(t)),
                    "exp_avg": torch.from_numpy(m.astype(np.float32)),
                    "exp_avg_sq": torch.from_numpy(m * m).bfloat16(),
                },
                1: {
                    "exp_avg": torch.from_numpy(m.astype(np.float32).reshape(30, 50)),
                    "exp_avg_sq": torch.from_numpy((m * m).astype(np.float32).reshape(30, 50)),
                },
            },
            "param_groups": [{"lr": 0.1 / (1 + t), "betas": (0.9, 0.95), "params": [0, 1]}],
        },
    }


def tables(t: int) -> dict[str, Any]:
    """Return embedding tables with changed rows, one with NaN, and their moments."""
    w = bell(60 * 24, 21).reshape(60, 24)
    m = 1e-3 * bell(60 * 24, 22).reshape(60, 24)
    for step in range(1, t + 1):
        rows = slice(step * 7, step * 7 + 6)
        w[rows] += 0.1 * bell(6 * 24, 30 + step).reshape(6, 24)
        m[rows] *= 1.5
        w[40 + step, 3] = np.nan
    model = {"emb.weight": torch.from_numpy(w.astype(np.float32)), "wte.weight": torch.from_numpy(w).bfloat16()}
    moments = {"exp_avg": m.astype(np.float32), "exp_avg_sq": m * m, "sum": torch.from_numpy(m).float()}
    return {"model": model, "optimizer": {"state": {"emb.weight": moments}}}


def mixed(t: int) -> dict[str, Any]:
    """Return half-precision weights, their masters, and an average that is first a clone."""
    w = torch.from_numpy((bell(2500, 41) + 0.01 * t * bell(2500, 42)).astype(np.float32).reshape(50, 50))
    v = (bell(2500, 43) ** 2).astype(np.float32).reshape(50, 50)
    entry = {"exp_avg": 1e-3 * w, "exp_avg_sq": torch.from_numpy(v)}
    ema = w.clone() if t == 0 else 0.9 * w
    return {"model": {"fc.weight": w.bfloat16()}, "master": w, "ema": ema, "optimizer": {"state": {0: entry}}}


def directed(t: int) -> dict[str, Any]:
    """Return a first moment of three outer products and noise."""
    left, right = bell(300, 111 + t).reshape(100, 3), bell(240, 121 + t).reshape(3, 80)
    m = np.rint(left @ right * 64) / 64 + bell(8000, 131 + t).reshape(100, 80) / 4
    v = np.ones((100, 80), np.float32)
    entry = {"exp_avg": torch.from_numpy(m.astype(np.float32)), "exp_avg_sq": torch.from_numpy(v)}
    return {"model": {"fc.weight": torch.ones(100, 80)}, "optimizer": {"state": {0: entry}}}


def uneven(t: int) -> dict[str, Any]:
    """Return weights and moments in which some rows and columns change far more."""
    rows, columns = (np.ldexp(1.0, (6 * uniform(n, n)).astype(int)) for n in (90, 60))
    active = np.minimum(rows[:, None] * columns / 2**7, 1)
    moving = (rows >= 8)[:, None] & (columns >= 8)
    w = bell(5400, 71).reshape(90, 60)
    for step in range(1, t + 1):
        w += moving * bell(5400, 71 + step).reshape(90, 60)
    m = np.where(uniform(5400, 81 + t).reshape(90, 60) < active, bell(5400, 91 + t).reshape(90, 60), 0.01)
    v = np.ldexp(1.0, (2 * active * bell(5400, 101 + t).reshape(90, 60)).astype(int))
    entry = {"exp_avg": torch.from_numpy(m.astype(np.float32)), "exp_avg_sq": torch.from_numpy(v.astype(np.float32))}
    return {"model": {"fc.weight": torch.from_numpy(w.astype(np.float32))}, "optimizer": {"state": {0: entry}}}


def everything(t: int) -> dict[Any, Any]:
    """Return a state with every kind of node and leaf."""
    tied = torch.arange(6, dtype=torch.int16).reshape(2, 3) + t
    raw = (uniform(4800, 5) * 256).astype(np.uint8)
    return {
        "scalars": [None, True, 0, -1, 2**53 + 1, -(2**200), 0.1, -0.0, float("inf"), float("nan"), 1e300, 5e-324],
        "text": ["", "π\x00\x1f", "\ud800", b"", bytes(range(256))],
        1: "int key",
        "1": "text key",
        None: {1.5: 1, b"k": 2, (1, ("a", None)): 3, True: 4, 2**70: 5},
        "containers": [{}, [], (), OrderedDict(b=1, a=2), Counter("abca"), ((),)],
        "tied": [tied, {"again": tied}],
        "shapes": [torch.tensor(7), torch.empty(0, 3), np.zeros((2, 0)), np.float32(1.5), np.datetime64("2026-11-21")],
        "dtypes": {
            **{str(d): torch.from_numpy(raw[:1600].copy()).view(d) + 0 * t for d in (torch.int8, torch.int64)},
            **{str(d): torch.from_numpy(raw[:1600].copy()).view(d) for d in (torch.float8_e4m3fn, torch.uint16)},
            "bool": raw > 100 + t,
            "complex": (bell(300, 3) + 1j * bell(300, 4 + t)).astype(np.complex64),
            "big endian": (bell(300, 3) + t).astype(">f4"),
            "words": np.array(["ab", "cde"]),
            "random": raw,
            "few": (raw // 100).astype(np.uint8),
            "one": np.full(3000, t, np.int32),
            "ramp": np.arange(3000, dtype=np.int64) * 7 + t,
        },
    }


def floats(t: int) -> dict[str, Any]:
    """Return matrices with scales of rows and columns, and steps independent of the magnitude."""
    rows, columns = (np.ldexp(1.0, (8 * uniform(n, n)).astype(int)) for n in (60, 50))
    w = bell(3000, 1).reshape(60, 50) * rows[:, None] * columns + t * 0.01 * bell(3000, 5 + t).reshape(60, 50)
    return {
        "single": torch.from_numpy(w.astype(np.float32)),
        "brain": torch.from_numpy(w[::-1].copy()).bfloat16(),
        "half": torch.from_numpy(w / 1024).half(),
        "double": w,
        "complex": (w + 1j * w[::-1]).astype(np.complex64),
        "decayed": torch.from_numpy((w * w * 0.95**t).astype(np.float32)),
        "flat": (np.repeat(rows, 60)[:3000] * bell(3000, 3) + t * 1e-4).astype(np.float16),
    }


def peaked(t: int) -> dict[str, Any]:
    """Return matrices that need multiples of two bytes, then of four, then a step of their own."""
    w = bell(3000, 1).reshape(60, 50)
    w[0, 0] = 30.0 + t
    return {"single": torch.from_numpy((w + t * 0.001).astype(np.float32)), "double": w * (0.5 if t == 2 else 1.0)}


def flipped(t: int) -> dict[str, Any]:
    """Return integers whose single bits change: flags, nibbles, bit sets, signs."""
    n, words = 3000, (uniform(3000, 51) * 2**32).astype(np.uint32)
    at = uniform(n, 52 + t) < 0.2 * t
    w = (np.abs(bell(n, 53)) + 1).astype(np.float32)
    return {
        "flags": (words & 255).astype(np.uint8) ^ (at * 16).astype(np.uint8),
        "nibbles": torch.from_numpy((words >> 8 & 0xF0 | np.where(at, words >> 3, words) & 0x0F).astype(np.uint8)),
        "sets": words ^ (at.astype(np.uint32) << (words >> 27)),
        "signs": torch.from_numpy(np.where(at, -w, w)),
    }


def sparse(t: int) -> dict[str, Any]:
    """Return arrays in which few patterns change, small numbers more often, and a constant one."""
    n = 270_000
    w = np.rint(8 * np.resize(bell(900, 61), n)) / 8 * np.ldexp(1.0, -(np.arange(n) % 5))
    chosen, small = uniform(n, 63 + t), np.where(np.arange(n) % 5 > 2, 0.012, 0.002)
    steps = (chosen < small) * (1 + (chosen < small / 9) * (90 * chosen / small).astype(int)) * min(t, 1)

    def moved(x: torch.Tensor) -> torch.Tensor:
        patterns = x.view(getattr(torch, f"int{8 * x.element_size()}"))
        return (patterns + torch.from_numpy(steps[: patterns.numel()]).to(patterns.dtype)).view(x.dtype)

    plain = torch.from_numpy(w)
    return {
        "single": moved(plain[:70_000].float()),
        "brain": moved(plain[:140_000].bfloat16()),
        "half": moved(plain[:140_000].half()),
        "double": moved(plain[:35_000]),
        "complex": torch.view_as_complex(moved(plain[:70_000].float()).reshape(-1, 2)),
        "eighth": moved(plain.to(torch.float8_e4m3fn)),
        "nibbles": (8 * plain).to(torch.int8).view(torch.uint8) ^ torch.from_numpy(16 * (steps != 0).astype(np.uint8)),
        "counts": moved((8 * plain[:70_000]).to(torch.int32)).numpy(),
        "same": plain[:140_000].bfloat16(),
    }


def many(t: int) -> dict[str, Any]:
    """Return enough patterns that exponents, and then steps, are coded in 64 states."""
    n = 160_000
    exponents = (12 * uniform(n, 141) ** 2).astype(np.int16)
    steps = (10 * uniform(n, 142) ** 2).astype(np.int16) >> (exponents > 6)
    return {"brain": torch.from_numpy((exponents + 100 << 7) + t * (steps - 3)).view(torch.bfloat16)}


def small(t: int) -> dict[str, Any]:
    """Return many small layers for groups: members come, go, change shape or stand out."""
    model, entries = {}, {}
    for i in range(12):
        shape = (48, 32) if i == 5 and t else (32, 48)
        w = (0.1 * bell(1536, 150 + i) + 0.002 * t * bell(1536, 170 + i + 20 * t)).astype(np.float32)
        if i == 1:  # few values, each with an entry of its own
            w = np.rint(8 * w) / np.float32(8)
        if i == 2:  # protected values, and some that bfloat16 does not hold
            w[:4] = [np.nan, np.inf, 1e-44, 30.0]
        if i == 3:  # another codebook in every checkpoint
            w *= np.float32(3.0**t)
        left, right = bell(64, 230 + i + t).reshape(32, 2), bell(96, 250 + i + t).reshape(2, 48)
        m = np.rint(left @ right * 16) / 16 + bell(1536, 270 + i + t).reshape(32, 48) / 8
        v = (1e-4 + bell(1536, 290 + i) ** 2).reshape(32, 48) * (1 + 0.1 * t)
        if (i == 10 and not t) or (i == 11 and t == 1):
            continue
        layer = f"layers.{i}"
        model[f"{layer}.weight"] = torch.from_numpy(w).reshape(shape)
        model[f"{layer}.bias"] = torch.from_numpy(bell(48, 310 + i + t).astype(np.float32))
        for name, of, first, second in (("weight", shape, m, v), ("bias", (48,), m[0], v[0])):
            entries[f"{layer}.{name}"] = {
                "step": torch.tensor(float(10 + t)),
                "exp_avg": torch.from_numpy((0.01 * first).astype(np.float32)).reshape(of),
                "exp_avg_sq": torch.from_numpy((1e-4 * second).astype(np.float32)).reshape(of),
            }
    return {"model": model, "optimizer": {"state": entries}}


def numbers(t: int) -> dict[str, Any]:
    """Return lists and tuples of Python numbers, long enough to be stored as arrays, and others."""
    mantissas = [struct.unpack(">d", bytes.fromhex(text))[0] for text in ("7ff4dead0000beef", "fff8000000000001")]
    order = [int(n) for n in 10_000 * uniform(300, 401)]
    return {
        "order": order,
        "losses": [float(x) for x in bell(200 + t, 402)],
        "odd": [*mantissas, -0.0, float("inf"), -float("inf"), 5e-324] * 20,
        "flags": [n % 3 == 0 for n in order],
        "state": (3, tuple(2**31 + n + t for n in order), None),
        "large": [2**64 - 1 - n for n in order],
        "larger": [2**64 + n for n in order[:70]],
        "both signs": [-1, 2**63] * 40,
        "mixed": [1, 1.0, True] * 30,
        "short": order[:63],
        "pairs": [[float(n), order[:64]] for n in range(2)],
        "one": [7] * 1000,
    }


def momentum(t: int) -> dict[str, Any]:
    """Return matrices, one of them of bfloat16, and the momentum that SGD keeps for them."""
    model, entries = {}, {}
    for i, (name, rows, columns, dtype) in enumerate((("fc", 90, 70, torch.float32), ("head", 40, 60, torch.bfloat16))):
        scale = (0.01 + uniform(rows, 501 + i))[:, None] * (0.01 + uniform(columns, 511 + i))
        model[f"{name}.weight"] = torch.from_numpy(0.1 * bell(rows * columns, 521 + i).reshape(rows, columns)).to(dtype)
        moment = scale * bell(rows * columns, 531 + 10 * t + i).reshape(rows, columns)
        moment[3] = 0
        entries[i] = {"momentum_buffer": torch.from_numpy(moment).to(dtype)}
    return {"model": model, "optimizer": {"state": entries}}


def permuted(t: int) -> dict[str, Any]:
    """Return a convolution in channels_last with its moments, and matrices by columns."""
    shape = (24, 8, 3, 3)
    size = int(np.prod(shape))

    def kernel(x: Any) -> torch.Tensor:
        return torch.from_numpy(x.astype(np.float32)).reshape(shape).to(memory_format=torch.channels_last)

    w = bell(size, 41) + 0.01 * bell(size, 42 + t)
    columns = torch.from_numpy(bell(6000, 43).astype(np.float32)).reshape(75, 80).T
    return {
        "model": {"conv.weight": kernel(w)},
        "optimizer": {0: {"exp_avg": kernel(0.1 * w), "exp_avg_sq": kernel(w * w)}},
        "projection": columns if t == 0 else columns.contiguous(),
        "volume": np.arange(60, dtype=np.int32).reshape(3, 4, 5).transpose(2, 0, 1) + t,
    }


KINDS: dict[Any, dict[str, Any]] = {
    training: {"fc.weight": "linear", "wte.weight": "embedding", "half": "linear", "odd": "linear", "zero": "linear"},
    tables: {"emb.weight": "embedding", "wte.weight": "embedding"},
    mixed: {"fc.weight": "linear", "master": "linear", "ema": sp.Kind("linear", parameter="ema")},
    directed: {"fc.weight": "linear"},
    uneven: {"fc.weight": "linear"},
    momentum: {
        f"state/{i}/momentum_buffer": sp.Kind("linear", "first moment", name, "SGD")
        for i, name in enumerate(("fc.weight", "head.weight"))
    },
    peaked: {"single": "linear", "double": "linear"},
}
"""What the arrays of a maker are, where neither its optimizer nor its names say so."""


def cases() -> dict[str, tuple[Any, sp.Config, int]]:
    """Return for each name the state at moment t, the configuration and the length of the chain."""
    quantize = sp.Quantize(bins=12, prune=0.2, protect=0.02, policy="refit", coder="published")
    return {
        "default": (training, sp.Config(), 3),
        "target": (training, sp.Config(max_rel_error=0.02), 2),
        "residual": (peaked, sp.Config([("weight", sp.Quantize(residual=True))], max_rel_error=2.55e-4), 3),
        "inshrinkerator": (training, sp.presets.inshrinkerator(), 3),
        "pruned": (training, sp.Config([("weight", quantize)]), 2),
        "moments": (training, sp.Config([("*", sp.LogBuckets(2.0**-12))]), 2),
        "lossless": (training, sp.presets.lossless(), 3),
        "lc": (training, sp.presets.lc_checkpoint(3), 3),
        "lc-packed": (training, sp.presets.lc_checkpoint(None, huffman=False, second_moments="exponent"), 2),
        "lc-smallest": (training, sp.Config([("*", sp.ExponentDelta(8))]), 2),
        "bitsnap": (training, sp.presets.bitsnap(), 2),
        "changed": (training, sp.Config([("weight", sp.Changed()), ("*", sp.Clusters(7))]), 2),
        "check-n-run": (tables, sp.presets.check_n_run(3), 3),
        "rows": (
            tables,
            sp.Config(
                [("embedding", sp.Rows()), ("first moment", sp.Rows(2, "kmeans")), ("*", sp.Rows(8, "symmetric"))]
            ),
            3,
        ),
        "mixed": (mixed, sp.Config(rate=0.003), 3),
        "directed": (directed, sp.Config(), 2),
        "uneven": (uneven, sp.Config([("weight", sp.Quantize(bins=4))]), 3),
        "everything": (everything, sp.presets.lossless(), 3),
        "floats": (floats, sp.presets.lossless(), 2),
        "flipped": (flipped, sp.presets.lossless(), 3),
        "sparse": (sparse, sp.presets.lossless(), 3),
        "many": (many, sp.presets.lossless(), 2),
        "small": (small, sp.Config(), 3),
        "small-rate": (small, sp.Config([("second moment", sp.LogBuckets())], rate=0.001), 2),
        "numbers": (numbers, sp.Config([("*", sp.Quantize())]), 2),
        "momentum": (momentum, sp.Config(), 2),
        "permuted": (permuted, sp.Config(), 2),
        "subclass": (lambda t: {"state": {0: {"exp_avg": coded(t), "step": t}}}, sp.Config(), 2),
    }


AGAIN = {"lc-base": ("lc", 2, None), "lc-super": ("lc", 2, 0)}
"""Checkpoints that stand for one of a chain: name -> (case, its moment, moment of the new parent or None)."""
FILES = [f"{name}-{t}.spt" for name, (_, _, length) in cases().items() for t in range(length)]
FILES += [f"{name}-{t}.spt" for name, (_, t, _) in AGAIN.items()]


def arrays_of(ckpt: sp.Checkpoint, state: Any) -> dict[str, list[Any]]:
    """Return library, dtype, shape, hash and order of each restored array, by its key as JSON."""
    _, nodes = flatten(state, is_stored_as_array)
    values = {node.key: node.value for node in reversed(nodes)}
    found = {}
    for record in ckpt.records:
        spec = record.spec
        digest = blake3(bits(values[record.key])).hexdigest()
        found[key_of(record.key)] = [spec.library, spec.dtype, list(spec.shape), digest]
        if order := memory_order(values[record.key]) if is_array(values[record.key]) else ():
            found[key_of(record.key)].append(list(order))
    return found


def key_of(key: str) -> str:
    """Return the typed keys of an array's path as a JSON list."""
    return "[" + ", ".join(key.split("\x1f")) + "]"


def bits(value: Any) -> bytes:
    """Return the bytes of an array in C order; text scalars with all of their characters."""
    if isinstance(value, torch.Tensor):
        return bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if value.numel() else b""
    if isinstance(value, list | tuple):
        value = read_leaf(value, "")[1]
    return bytes(value.tobytes())


def entry(ckpt: sp.Checkpoint, parent: str | None, state: Any) -> dict[str, Any]:
    """Return the index entry of a file."""
    restored = sp.decompress(ckpt)
    return {
        "parent": parent,
        "id": ckpt.identity,
        "state": fingerprint(restored),
        "exact": fingerprint(state) == fingerprint(restored),
        "streams": sorted({row.stream for row in ckpt.summary()}),
        "arrays": arrays_of(ckpt, restored),
    }


def encode() -> tuple[dict[str, Any], dict[str, bytes]]:
    """Encode every case; return index entries and bytes by file name."""
    index: dict[str, Any] = {}
    made: dict[str, sp.Checkpoint] = {}
    for name, (make, cfg, length) in cases().items():
        prev = None
        for t in range(length):
            ckpt = made[f"{name}-{t}.spt"] = sp.compress(make(t), prev, cfg, kinds=KINDS.get(make))
            parent = None if prev is None else f"{name}-{t - 1}.spt"
            index[f"{name}-{t}.spt"] = entry(ckpt, parent, make(t))
            prev = ckpt
    for name, (case, t, over) in AGAIN.items():
        parent = None if over is None else f"{case}-{over}.spt"
        ckpt = made[f"{name}-{t}.spt"] = rebase(made[f"{case}-{t}.spt"], None if parent is None else made[parent])
        index[f"{name}-{t}.spt"] = entry(ckpt, parent, cases()[case][0](t))
    return index, {file: ckpt.to_bytes() for file, ckpt in made.items()}


def check(folder: Path = FOLDER) -> list[str]:
    """Encode every case again and return one line for each file or index entry that differs."""
    index, blobs = encode()
    stored = json.loads((folder / INDEX.name).read_text())
    differences = []
    for file in sorted({*stored, *index, *(p.name for p in folder.glob("*.spt"))}):
        path = folder / file
        if file not in index:
            differences.append(f"{file}: no case writes this file")
        elif not path.exists():
            differences.append(f"{file}: the file is missing")
        elif path.read_bytes() != blobs[file]:
            old, new = path.read_bytes(), blobs[file]
            at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
            differences.append(f"{file}: {len(new)} bytes instead of {len(old)}, the first difference at byte {at}")
        elif file not in stored:
            differences.append(f"{file}: the index does not list this file")
        elif stored[file] != index[file]:
            names = sorted(k for k in {*stored[file], *index[file]} if stored[file].get(k) != index[file].get(k))
            differences.append(f"{file}: the index differs in {', '.join(names)}")
    return differences


def main(arguments: list[str]) -> None:
    if "--check" in arguments:
        differences = check()
        if differences:
            raise SystemExit("\n".join(differences))
        print(f"every golden file in {FOLDER} is encoded to the same bytes again")
        return
    if any(FOLDER.glob("*")):
        raise SystemExit(f"{FOLDER} is not empty; golden files are not overwritten")
    index, blobs = encode()
    FOLDER.mkdir(exist_ok=True)
    for file, blob in blobs.items():
        (FOLDER / file).write_bytes(blob)
    lines = ",\n".join(f"{json.dumps(file)}: {json.dumps(about)}" for file, about in index.items())
    INDEX.write_text(f"{{\n{lines}\n}}\n")
    print(f"{len(index)} files, {sum(p.stat().st_size for p in FOLDER.glob('*'))} bytes in {FOLDER}")


if __name__ == "__main__":
    main(sys.argv[1:])
