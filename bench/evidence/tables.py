"""Tables that show rows of the benches as they are, and the targets of each bench."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..studies.real import CONTINUED
from ..studies.training import PREFIX
from .levels import change
from .results import (
    NONE,
    Json,
    aimed,
    by_place,
    crossed,
    documents,
    figure,
    markdown,
    met,
    number,
    rows_of,
    shown,
    spread,
)

_FLIPPED = "flipped bits"


def demo() -> str:
    """Table of the bytes that `make demo` stored."""
    found = documents("demo.json")["demo.json"]
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


def saves() -> str:
    """Return extra memory, stall and seconds until durable of each way to save (a table)."""
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


# ------------------------------------------------------------------------------------------------------------- trainers

_RESUMES = ("resume, lossless", "loss after a lossy resume")


def frameworks() -> str:
    """Table of frameworks: saves by ours and by their own, and the result of a resume."""
    both = ("stall of a save", "overhead of the run", "bytes of a save", "lines", "save", "metadata")
    lines = []
    for name, found in by_place(rows_of("trainers.json")).items():
        peer = next(r["peer"] for r in found.values() if r["peer"])
        pairs = (found.get(what) for what in both)
        cells = [f"{number(p['value'])} / {number(p['peer_value'])} {p['unit']}" if p else "" for p in pairs]
        resumes = [shown(found[w], f" {found[w]['unit']}") if w in found else "" for w in _RESUMES]
        lines.append([f"{name} / {peer}", *cells, *resumes])
    return markdown(["", *both, *_RESUMES], lines)


def trainers() -> str:
    """Bytes of a save in each framework next to its own, and the loss after a lossy resume."""
    lines, title = [], ""
    for name, found in by_place(rows_of("trainers.json")).items():
        stored, loss = found.get("bytes of a save"), found.get(_RESUMES[1])
        if stored is None or loss is None:
            continue
        how = re.match(r"(\d+) steps of .*, a save every (\d+)", found["overhead of the run"]["note"])
        title = f"{stored['size']:,} parameters" + (f", {how[1]} steps, a save every {how[2]}" if how else "")
        ratio, loss_change = f"{stored['ratio']:.1f} x", change(loss["value"])
        lines.append([name, _bytes(stored["value"]), stored["peer"], _bytes(stored["peer_value"]), ratio, loss_change])
    return markdown([title, "bytes of a save", "its own", "bytes", "times smaller", "loss after a resume"], lines)


def _bytes(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def ranks() -> str:
    """Table of saves by several processes: ours and torch's."""
    named = ((re.fullmatch(r"DCP, (\d+) ranks: (.*)", row["row"]), row) for row in rows_of("trainers.json"))
    rows = {(m[1], m[2]): row for m, row in named if m and row["value"] is not None and m[2] != "save"}
    worlds, columns = (list(dict.fromkeys(key[i] for key in rows)) for i in (0, 1))
    lines = []
    for world in worlds:
        pairs = (rows.get((world, what), {"value": None, "peer_value": None}) for what in columns)
        lines.append([world, *(_bytes(pair[side]) for pair in pairs for side in ("value", "peer_value"))])
    return markdown(["ranks", *(text for what in columns for text in (what, "torch"))], lines)


# ----------------------------------------------------------------------------------------------------------- optimizers

_HEADER = ("", "entries that may change: relative L2 error", "exact entries", "weights by", "next update")


def optimizers() -> str:
    """Table of all optimizers that were run; those with the same entries share a line."""
    document = documents("optimizers.json")["optimizers.json"]
    lines: list[list[str]] = []
    groups: dict[tuple[str, tuple[str, ...], tuple[str, ...], bool], dict[str, Json]] = {}
    for name, found in document["optimizers"].items():
        if not isinstance(found, str):
            changed, exact = names_of(found)
            key = (name.split(".")[0], changed, exact, found["weights"].startswith("structure"))
            groups.setdefault(key, {})[name] = found
    for (package, changed, exact, structure), records in groups.items():
        errors = ", ".join(f"{n} {_range(r['entries'][n]['error'] for r in records.values())}" for n in changed)
        updates = _range(record["update"] for record in records.values())
        title = f"{package} {document['packages'][package]}: {_joined(records)}"
        lines.append([title, errors, ", ".join(exact), "structure" if structure else "`kinds=`", updates])
    return markdown(_HEADER, lines)


def optimizers_not_run() -> str:
    """List of the optimizers that were not run or whose state is refused, by reason."""
    reasons: dict[str, list[str]] = {}
    for document in documents("optimizers.json").values():
        for name, found in document["optimizers"].items():
            if isinstance(found, str):
                reasons.setdefault(_plain(found), []).append(name)
    return markdown(["optimizer", "reason"], [[_joined(names), why] for why, names in reasons.items()])


def names_of(record: Json) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of entries that may change and of those that stay exact.

    Example:
        >>> names_of({"entries": {"step": {"lossy": False}, "exp_avg": {"lossy": True}}})
        (('exp_avg',), ('step',))
    """
    entries = sorted(record["entries"].items())
    return tuple(n for n, e in entries if e["lossy"]), tuple(n for n, e in entries if not e["lossy"])


def _joined(names: Iterable[str]) -> str:
    return ", ".join(name.partition(".")[2].removeprefix("optim.") for name in names)


def _plain(text: str) -> str:
    return text.partition("; allowed are")[0].replace("|", "/").replace("<", "").replace(">", "")


def _range(values: Iterable[float]) -> str:
    texts = [f"{value:.2f}" for value in sorted(values)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


# ---------------------------------------------------------------------------------------------------------------- scale

_SHARD = "175 M shard, "


def shard() -> str:
    """Seconds, extra memory and ratio of one rank's shard, by level."""
    lines = []
    for place, rows in by_place(rows_of("scale.json"), _SHARD).items():
        cells = [figure(rows[label]) if label in rows else "" for label in ("seconds", "extra memory", "ratio")]
        note = rows["ratio"]["note"] if "ratio" in rows else ""
        every = note.split(";")[0].rpartition(": ")[2].partition(" for ")[0]
        lines.append([*place.rsplit(", ", 1), *cells, every])
    return markdown(["", "", "seconds", "extra memory", "ratio", "1,000 ranks"], lines)


def scale() -> str:
    """Table of the other rows: the long chain, and the search by eight ranks."""
    lines = []
    for row in rows_of("scale.json"):
        if not row["row"].startswith(_SHARD):
            peer = "" if row["peer"] is None else f"{number(row['peer_value'])} ({row['peer']})"
            lines.append([row["row"], figure(row) if row["value"] is not None else NONE, peer])
    return markdown(["", "measured", "next to it"], lines)


PAPER_MODELS = {"ResNet-152": 60.2e6, "BERT Base": 110e6, "ViT L32": 306.5e6, "GPT-2 Medium": 335e6}
"""Parameters of Inshrinkerator's models, its table 3."""
_STATE, _INTERVAL = 12, 1800.0
"""Bytes a parameter of float32 weights with AdamW's moments; seconds between checkpoints, Check-N-Run's interval."""


def _rate(name: str, device: str) -> float | None:
    """Return bytes a second of the codec on a large state."""
    rows = (row for row in rows_of("codec.json") if (row["row"], row["device"]) == (name, device))
    return next((1e6 * row["value"] for row in rows if row["size"] > 2e7 and row["value"] is not None), None)


def computed() -> str:
    """Seconds of a save and a search round of the paper's models, as shares of 30 minutes.

    These were not run: seconds are bytes over the measured rates of one thread, without evaluations.
    """
    rates = (_rate(f"{what} delta, default, GPT", "cpu, 1 thread") for what in ("compress", "decompress"))
    compress, decompress = rates
    lines = []
    for name, parameters in PAPER_MODELS.items():
        if compress is None or decompress is None:
            lines.append([name, NONE, NONE, NONE, NONE])
            continue
        save = _STATE * parameters / compress
        trial = save + _STATE * parameters / decompress
        shares = [100 * seconds / _INTERVAL for seconds in (save + trial, trial)]
        lines.append([name, *(f"{number(s)} s" for s in (save, trial)), *(f"{number(share)} %" for share in shares)])
    return markdown(["computed", "a save", "a trial", "both, of 30 min", "save in the background"], lines)


# ------------------------------------------------------------------------------------------------------------ trainings


def _split(place: str) -> tuple[str, str]:
    """Split a name into training, which ends with "steps", and system.

    Example:
        >>> _split("MLP, 3,600 steps, Config(), fixed")
        ('MLP, 3,600 steps', 'Config(), fixed')
    """
    training, _, system = place.partition(" steps, ")
    return f"{training} steps", system


Column = tuple[str, Callable[[Json | None], str]]
"""Label of a row, and what its cell shows."""


def _times(row: Json | None) -> str:
    return shown(row, " x")


def _percent(row: Json | None) -> str:
    return shown(row, " %")


def _of_trainings(pattern: str, prefix: str, columns: Sequence[Column]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the cells of each training whose rows begin with a prefix."""
    for name, found in by_place(rows_of(pattern), prefix).items():
        yield name, [cell(found.get(label)) for label, cell in columns]


def table_5_all() -> str:
    """Table of final accuracy, final loss and ratio of weights, by training and system."""
    columns: list[Column] = [("accuracy lost at the end", spread), ("degradation of the loss at the end", spread)]
    columns.append(("weights, all checkpoints", _times))
    found = _of_trainings("training-table-5-*.json", PREFIX, columns)
    header = ["", "", "accuracy lost, %", "loss, %", "weights"]
    return markdown(header, ([*_split(place), *cells] for place, cells in found))


def continued() -> str:
    """Loss and accuracy of the real training that went on, by level."""
    columns: list[Column] = [("loss at the end", spread), ("accuracy lost at the end", spread)]
    columns.append(("whole state, all checkpoints", _times))
    found = _of_trainings("real-continued.json", CONTINUED, columns)
    header = ["", "loss at the end, %", "accuracy lost, points", "whole state"]
    return markdown(header, ([name, *cells] for name, cells in found))


def transfer() -> str:
    """Return the table of transfer: ratios, losses and accuracies."""
    columns: list[Column] = [("ratio", _times), ("loss change straight after restore", _percent)]
    columns += [(f"{what} after fine-tuning", spread) for what in ("loss change", "accuracy lost")]
    found = _of_trainings("training-transfer-*.json", "transfer ", columns)
    header = ["", "ratio", "loss straight after restore", "loss after fine-tuning, %", "accuracy lost, points"]
    return markdown(header, ([name, *cells] for name, cells in found))
