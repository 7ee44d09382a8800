"""Tables of kernels, store, saver, fuzzers, demo, real files, and the targets of each bench."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from .cells import NONE, Json, aimed, crossed, figure, markdown, met, number
from .results import documents, rows_of

_FLIPPED = "flipped bits"
_SAVER = (
    ("stall, processor time of the calling thread", "stall of save, processor time"),
    ("stall, on the wall", "stall of save"),
    ("until the save is durable", "time until durable"),
    ("worker's memory beyond the snapshot and an idle worker's", "memory of the worker"),
)


def demo() -> str:
    """Table of the bytes that `make demo` stored."""
    found = documents("demo.json").get("demo.json")
    if found is None:
        return f"*{NONE}*"
    totals = {"weights": (0, 0), "optimizer": (0, 0), "whole": (0, 0)}
    for ckpt in found["checkpoints"]:
        for part, sizes in [*ckpt["parts"].items(), ("whole", (ckpt["raw"], ckpt["stored"]))]:
            if part in totals:
                raw, stored = totals[part]
                totals[part] = raw + sizes[0], stored + sizes[1]
    names = {"weights": "weights", "optimizer": "optimizer state", "whole": "whole training state"}
    lines = []
    for part, sizes in totals.items():
        ratios = (f"{found[what][part]:.1f} x" for what in ("ratio", "late_delta_ratio"))
        lines.append([names[part], *(f"{size / 1e6:.1f} MB" for size in sizes), *ratios])
    what = f"{len(found['checkpoints'])} checkpoints, {len(found['restores'])} kills"
    during = [restore["during"] for restore in found["restores"]].count("save")
    what += f" ({during} of them in the middle of a save)" if during else ""
    return markdown([what, "raw", "stored", "ratio", "late deltas"], lines)


def aims(bench: str) -> str:
    """Return a row for each target of a bench: the figure, its peer, whether it is met."""
    lines = []
    for row in rows_of(f"{bench}*.json"):
        if row["target"] is None or row["row"].startswith(_FLIPPED):
            continue
        beside_it = row["value"] is not None and row["ratio"] is not None
        against = f", {number(row['ratio'])} x {row['peer']}{_on_fewer(row)}" if beside_it else ""
        where = f"{number(row['size'])}, {row['device']}"
        lines.append([row["row"], where, figure(row) + against, row["target"], met(row)])
    return markdown(["", "size, device", "measured", "target", "met"], lines)


def _on_fewer(row: Json) -> str:
    """Return a remark for a peer that was too slow for all elements, else ""."""
    few = re.search(r"\bon (?:the first )?([\d,]+) elements", row["note"].split(";")[0])
    if few is None or int(few[1].replace(",", "")) >= row["size"]:
        return ""
    return f" at its rate on {few[1]}"


def kernel_sizes() -> str:
    """Rates of the kernels over the sizes, 10,000 to 10**9 elements, on one CPU thread."""
    found: dict[str, dict[int, str]] = {}
    for row in rows_of("kernels.json"):
        swept = row["size"] == 10 ** (len(str(row["size"])) - 1)
        if row["peer"] == "memcpy" and row["device"].startswith("cpu") and swept and row["value"] is not None:
            rate = row["value"] * (4 if row["unit"] == "Gsym/s" else 1)
            found.setdefault(row["row"], {}).setdefault(row["size"], number(rate))
    cells = [(name, n, text) for name, of in found.items() if len(of) > 2 for n, text in of.items()]
    sizes, corner = sorted({n for _, n, _ in cells}), "GB/s of float32 weights (a symbol stands for one)"
    return crossed([(name, number(n), text) for name, n, text in cells], map(number, sizes), NONE, corner)


def beside(pattern: str, units: Sequence[str]) -> str:
    """Table of rows with several peers: ours and each peer's value, by row and size.

    Args:
        pattern: of the files.
        units: rows with one of these.
    """
    found = [row for row in rows_of(pattern) if row["unit"] in units and row["peer"] and row["value"] is not None]
    several = Counter((row["row"], row["size"]) for row in found)
    found = [row for row in found if several[row["row"], row["size"]] > 1]
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for row in found:
        cells = lines.setdefault((row["row"], row["size"]), {"": f"{number(row['value'])} {row['unit']}"})
        cells[row["peer"]] = number(row["peer_value"])
    peers = list(dict.fromkeys(row["peer"] for row in found))
    table = [[what, f"{n / 1e6:.0f} M", *(of.get(p, "") for p in ("", *peers))] for (what, n), of in lines.items()]
    return markdown(["", "parameters", "shrinkpoint", *peers], table)


def flips() -> str:
    """Table of flipped bits that each library loads without an error."""
    rows = [row for row in rows_of("store.json") if row["row"].startswith(_FLIPPED)]
    columns = ["shrinkpoint", *(str(row["peer"]) for row in rows)]
    values = [rows[0]["value"], *(row["peer_value"] for row in rows)] if rows else []
    cells = [NONE if value is None else number(value) for value in values]
    size = number(rows[0]["size"]) if rows else NONE
    return markdown(["", *columns], [[f"of {size} flipped bits, loaded silently", *cells]])


def fuzzed() -> str:
    """Table of the fuzzers: time, inputs, branches and findings."""
    lines = []
    for row in rows_of("fuzz.json"):
        branches = f"{row['branches at first']:,} to {row['branches reached']:,}"
        kept, spent = f"{row['seeds']} to {row['inputs worth keeping']:,}", f"{number(row['seconds'] / 60, 2)} min"
        lines.append([row["fuzzer"], spent, number(row["inputs"]), branches, kept, str(len(row["found"]))])
    return markdown(["", "time", "inputs read", "branches reached", "inputs kept", "found"], lines)


def real() -> str:
    """Table of real checkpoints: ratios, error of the weights, best lossless peer."""
    rows = rows_of("real.json")
    lines: dict[str, dict[str, str]] = {}
    errors: dict[str, float] = {}
    peers: dict[str, tuple[float, str]] = {}
    for row in rows:
        where, _, what = row["row"].partition(": ")
        name, _, level = where.rpartition(", ")
        cells = lines.setdefault(name, {"raw": f"{row['size'] / 1e6:.1f} MB"})
        if what == "error of the weights":
            errors[where] = row["value"]
        elif what == "change of the outputs" and level == "default":
            cells["outputs"] = f"{row['value']:.0%}"
        elif what == "whole state" and row["value"] is not None:
            cells[level] = f"{number(row['value'])} x"
        elif row["peer_value"] is not None:
            peers[name] = max(peers.get(name, (0.0, "")), (row["peer_value"], row["peer"]))
    for name, cells in lines.items():
        weights = errors.get(f"{name}, default", 0.0)
        cells["weights"] = f"{weights:.1%}" if weights else "exact"
        best, peer = peers.get(name, (None, ""))
        cells["peer"] = f"{number(best)} x ({peer})" if best else NONE
    columns = {"raw": "", "lossless": "lossless", "peer": "best lossless peer", "exact_weights": "exact_weights"}
    columns |= {"default": "default", "weights": "its error of weights", "outputs": "of outputs", "compact": "compact"}
    header = ["checkpoint", *columns.values()]
    return markdown(header, [[name, *(cells.get(c, "") for c in columns)] for name, cells in lines.items()])


def saver() -> str:
    """Return the cost of a save for trainer and worker by size, next to one copy by NumPy."""
    rows = [row for row in rows_of("saver*.json") if row["peer"] in (None, "memcpy")]
    first = [row for row in rows if row["row"] == _SAVER[0][1]]
    titles = {row["size"]: row["note"].split(";")[0] for row in first}
    cells = []
    for title, name in _SAVER if titles else ():
        for row in (row for row in rows if row["row"] == name and row["size"] in titles):
            copy = "" if row["peer"] is None else f"; one copy {number(row['peer_value'], 2)} {row['unit']}"
            cells.append((title, titles[row["size"]], f"{number(row['value'], 2)} {row['unit']}{copy}"))
    return crossed(cells, titles.values(), NONE)


def saves() -> str:
    """Return extra memory, stall and seconds until durable (in copies of the state; below 0.001: 0), by mode."""
    three: dict[tuple[str, str], list[str]] = {}
    for row in rows_of("saves.json"):
        mode, _, size = row["row"].partition(": ")[0].rpartition(" of ")
        value = None if row["value"] is None else row["value"] / (row["peer_value"] or 1)
        three.setdefault((mode, size), []).append("0" if value and value < 0.001 else number(value))
    texts = ((*place, NONE if NONE in found else "; ".join(found)) for place, found in three.items())
    return crossed(texts, dict.fromkeys(size for _, size in three), NONE)


def saver_overhead() -> str:
    """Table of how much saves lengthen a training that uses all cores."""
    return aimed(row for row in rows_of("saver*.json") if row["row"].startswith("overhead"))
