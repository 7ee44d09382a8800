"""Put rows that were measured again into a result: `python -m bench.studies.merge RESULT`.

    python -m bench.studies.merge bench/results/ratio-gpt.json NEW.json ...     # rows and outcomes of other runs
    python -m bench.studies.merge bench/results/systems.json NEW.json ...       # whole experiments of `bench systems`

In a result of `bench ratio`, for one model, the rows of a newly measured system replace the old ones. All rows name the
commit they were measured at, and rows of systems that `bench ratio` does not have are removed. Rows that compare
systems (the targets, our weights next to the published ones') are computed again from all rows. In any other result an
experiment (the part of a row's name before the colon) is replaced as a whole, and its rows name their commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shrinkpoint.codec.errors import BadArgumentError

from ..evidence.results import MARK, ON
from ..harness import Row
from . import ratio, workloads
from .outcomes import TABLE, System, summary_rows

Json = dict[str, Any]


def key(row: str, model: str) -> str | None:
    """Group of a row: a system, "alone" or "against PEER"; None for a row made of others.

    Example:
        >>> key("MLP, rate 0.001, 12 bins: loss change later", "MLP"), key("MLP, alone, 8 bins: weights", "MLP")
        ('rate 0.001, 12 bins', 'alone')
        >>> key("MLP: weights alone, no parent, loss <= 1 %", "MLP"), key("MLP: whole state, loss <= 0.1 %", "MLP")
        ('alone', None)
    """
    where, _, what = row.partition(": ")
    if where == model:
        return "alone" if what.startswith("weights alone") else None
    if not where.startswith(f"{model}, "):
        raise BadArgumentError(f"{row!r} is not a row of {model}")
    system = where.removeprefix(f"{model}, ")
    return "alone" if system.startswith("alone, ") else system


def model_of(document: Json) -> str:
    """Return the only model of a result.

    Raises:
        BadArgumentError: it has rows of several, or none.
    """
    found = _models(document)
    if len(found) != 1 or not found <= workloads.WORKLOADS.keys():
        raise BadArgumentError(f"a result of one model of {', '.join(workloads.WORKLOADS)} is needed, this has {found}")
    return str(found.pop())


def merged(old: Json, new: Sequence[Json]) -> Json:
    """Merge a result with newer ones, where newer rows replace older ones.

    Args:
        old, new: documents of one model, as `bench --json` writes them, with the outcomes of their systems. Rows of
            systems that `bench ratio` has no more are left out; outcomes too.

    Raises:
        BadArgumentError: models or sizes differ, a row is of something unknown, or outcomes are missing.
    """
    model = model_of(old)
    rows: dict[str, list[Json]] = {}
    outcomes: Json = {}
    for document in (old, *new):
        if model_of(document) != model:
            raise BadArgumentError(f"a result of {model_of(document)} goes into none of {model}")
        fresh: dict[str, list[Json]] = {}
        for row in document["rows"]:
            of = key(row["row"], model)
            if of is not None:
                fresh.setdefault(of, []).append(_marked(row, document["commit"]))
        rows |= fresh
        outcomes |= document.get("outcomes", {})
    against = [of for of in rows if of.startswith("against ")]
    kept = [of for of in (*ratio.SYSTEMS, "alone", *against) if of in rows]
    found = [Row(**row) for of in kept for row in rows[of]]
    sizes = {row.size for row in found}
    if len(sizes) != 1:
        raise BadArgumentError(f"results of one model of {model} have sizes {sizes}")
    made = {of: outcomes.get(f"{model}, {of}", []) for of in kept if of in ratio.SYSTEMS}
    if lost := [of for of, one in made.items() if not one]:
        raise BadArgumentError(f"outcomes are missing of {', '.join(lost)}")
    systems = {of: System.of_json(one) for of, one in made.items()}
    found += summary_rows(model, sizes.pop(), systems)
    newest = (old, *new)[-1]
    return {
        **{name: newest[name] for name in ("machine", "versions", "commit")},
        "rows": [dataclasses.asdict(row) for row in found],
        "outcomes": {f"{model}, {of}": one for of, one in made.items()},
    }


def replaced(old: Json, new: Sequence[Json]) -> Json:
    """Return a result whose experiments are replaced by those of newer results.

    Machine, versions and commit stay the old one's, which most rows are of; new rows name their own commit, and their
    processor where it is another.

    Args:
        old, new: documents as `bench --json` writes them.

    Raises:
        BadArgumentError: a newer one is of other versions, which the result could not say.
    """
    rows = _experiments(old["rows"])
    for document in new:
        # A package that one machine lacks took no part in the rows of both.
        both = (old["versions"].keys() & document["versions"].keys()) - {"shrinkpoint"}
        different = sorted(name for name in both if old["versions"][name] != document["versions"][name])
        if different:
            raise BadArgumentError(f"a result of other versions ({', '.join(different)}) does not go into this one")
        cpu = document["machine"].get("cpu")
        where = "" if cpu == old["machine"].get("cpu") else f"{ON}{cpu}"
        marked = [_marked(row, document["commit"]) for row in document["rows"]]
        rows |= _experiments([row | {"note": f"{row['note']}{where}"} for row in marked])
    return {**old, "rows": [row for found in rows.values() for row in found]}


def _experiments(rows: Iterable[Json]) -> dict[str, list[Json]]:
    found: dict[str, list[Json]] = {}
    for row in rows:
        found.setdefault(row["row"].partition(": ")[0], []).append(row)
    return found


def _models(document: Json) -> set[str]:
    """First words of the row names, which are the workloads in a result of `bench ratio`."""
    return {row["row"].partition(": ")[0].partition(", ")[0] for row in document["rows"]}


def _is_ratio(document: Json) -> bool:
    """Return whether a document is a result of `bench ratio`."""
    labels = {label for label, _, _ in TABLE}
    return any(row["row"].rpartition(": ")[2] in labels for row in document["rows"])


def _marked(row: Json, commit: str | None) -> Json:
    """Return a row whose note names the commit it was measured at."""
    if MARK in row["note"]:
        return row
    at = "no commit" if commit is None else commit[:7] + ("+" if commit.endswith("+") else "")
    return row | {"note": f"{row['note']}{MARK}{at}"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge results, and write the merged one in place of the old one."""
    parser = argparse.ArgumentParser(
        prog="bench.studies.merge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("into", type=Path, metavar="RESULT", help="the JSON of one model, written again")
    parser.add_argument("new", type=Path, nargs="*", metavar="NEW", help="of later runs, the newest last")
    asked = parser.parse_args(arguments)
    files = (asked.into, *asked.new)
    try:
        old, *new = (json.loads(path.read_text(encoding="utf-8")) for path in files)
        document = merged(old, new) if _is_ratio(old) else replaced(old, new)
    except (BadArgumentError, OSError) as error:
        print(f"bench.studies.merge: {error}", file=sys.stderr)
        return 2
    command = shlex.join(["python", "-m", "bench.studies.merge", *(path.name for path in files)])
    document["run"] = {"command": command}
    asked.into.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
