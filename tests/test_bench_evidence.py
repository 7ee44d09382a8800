"""Pages and pictures made from results: their origin, their rows, and that they are current."""

from __future__ import annotations

import doctest
import importlib.metadata
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shrinkpoint.bench.evidence import levels, pages, results, tables

HOME = Path(__file__).parents[1]


def pinned(package: str) -> str:
    text = (HOME / "constraints.txt").read_text(encoding="utf-8")
    found = re.search(rf"^{package}==(\S+)$", text, re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("name", sorted(pages.PICTURES))
def test_pictures_are_those_of_the_results(name: str, tmp_path: Path) -> None:
    """With the pinned Matplotlib a committed picture equals a new one byte for byte."""
    pytest.importorskip("matplotlib")
    here, wanted = (importlib.metadata.version("matplotlib"), pinned("matplotlib"))
    if here != wanted:
        pytest.skip(f"Matplotlib {here} draws other bytes than {wanted}, which the pictures are drawn with")
    pages.PICTURES[name](tmp_path / name)
    committed = pages.FOLDER / name
    assert committed.exists()
    same = (tmp_path / name).read_bytes() == committed.read_bytes()
    assert same, f"docs/pictures/{name} is not what bench/results has; run python -m bench.evidence"


def test_every_picture_is_drawn_from_results_and_shown() -> None:
    assert {path.name for path in pages.FOLDER.iterdir()} == set(pages.PICTURES)
    text = "".join(path.read_text(encoding="utf-8") for path in [HOME / "README.md", *(HOME / "docs").glob("*.md")])
    assert all(f"pictures/{name})" in text for name in pages.PICTURES)


# ------------------------------------------------------------------------------------------------------ where from


def test_rows_of_several_commits_are_counted_by_commit() -> None:
    document = {
        "machine": {"cpu": "A", "cores": 2, "gpu": None, "python": "3.11.7"},
        "versions": {"numpy": "2.0", "zipnn": "1"},
        "commit": "0123456789abcdef+",
        "run": {"command": "python -m bench store", "seeds": [0, 1], "only": None, "quick": False},
        "rows": [
            {"note": "x; measured at abc1234"},
            {"note": "y; measured at abc1234+"},
            {"note": "z"},
            {"note": "weight"},
        ],
    }
    assert results.manifest_line("a.json", document) == [
        "`a.json`",
        "`0123456+`: 2, `abc1234`: 1, `abc1234+`: 1",
        "`python -m bench store`, seeds 0, 1",
        "A, 2 cores, no GPU",
        "python 3.11.7, numpy 2.0",
    ]
    line = results.manifest_line("a.json", {**document, "stopped": "interrupted", "run": None})
    assert line[1].endswith("; did not come to its end (interrupted)")
    assert line[2] == results.UNKNOWN


def test_what_has_no_commit_says_so() -> None:
    assert results.manifest_line("aot.json", {"versions": {"triton": "3"}, "rows": [{}, {}]}) == [
        "`aot.json`",
        "not recorded: 2",
        "not recorded",
        "not recorded",
        "triton 3",
    ]


def test_every_result_is_in_the_manifest_with_all_its_rows() -> None:
    text = results.manifest()
    for name, document in results.documents("*.json").items():
        assert f"| `{name}` |" in text
        assert sum(results.commits(document).values()) == len(document.get("rows", []))
    assert "`3975d12+`: 250" in text


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=HOME, capture_output=True, text=True, check=False)


def test_every_commit_that_results_name_is_in_the_history() -> None:
    """Every commit that results name is in the history of this repository."""
    if shutil.which("git") is None or git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no git, or no whole history, here")
    named = {
        (name, commit.removesuffix("+"))
        for name, document in results.documents("*.json").items()
        for commit in results.commits(document)
        if commit != results.UNKNOWN
    }
    kept = levels.campaign().rows.values()
    named |= {("harm.jsonl", row["commit"].removesuffix("+")) for row in kept if row["commit"] is not None}
    assert len({commit for _, commit in named}) > 5
    lost = [(name, commit) for name, commit in named if git("merge-base", "--is-ancestor", commit, "HEAD").returncode]
    assert not lost


def test_no_result_names_a_folder_of_the_machine_it_was_made_on() -> None:
    for path in results.RESULTS.glob("*.json"):
        found = re.findall(r'"(?:/(?:tmp|home|root|work|Users)/[^"]*)"', path.read_text(encoding="utf-8"))
        assert not found, path.name


# ------------------------------------------------------------------------------------------------------------ tables


def result(tmp_path: Path, name: str, rows: list[dict[str, Any]]) -> None:
    document = {"machine": {}, "versions": {}, "commit": "abc", "rows": rows}
    (tmp_path / name).write_text(json.dumps(document), encoding="utf-8")


def row(name: str, **more: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("peer", "peer_value", "ratio", "target", "met"))
    return {"row": name, "device": "cpu", "size": 5_000_000, "value": 1.0, "unit": "MB/s", "note": "", **empty, **more}


def test_every_table_stands_in_a_page() -> None:
    found = [(results.HOME / page).read_text(encoding="utf-8") for page in pages.PAGES]
    assert {name for text in found for _, name, _ in pages._BLOCK.findall(text)} == set(pages.TABLES)


@pytest.mark.parametrize("module", [levels, results])
def test_examples(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


def test_ours_beside_every_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        row("save", peer="torch.save", peer_value=874.0, value=210.0),
        row("save", peer="moonclip", value=210.0),
        row("memory", unit="x raw state", peer="torch.save", peer_value=1.0, value=1.292),
        row("memory", unit="x raw state", peer="DCP", peer_value=1.16, value=1.292),
        row("alone", peer="torch.save", peer_value=3.0),
        row("stall", unit="ms", peer="memcpy", peer_value=3.0),
    ]
    result(tmp_path, "store.json", rows)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert tables.beside("store.json", ("MB/s", "x raw state")).splitlines() == [
        "|  | parameters | shrinkpoint | torch.save | moonclip | DCP |",
        "|---|---|---|---|---|---|",
        "| save | 5 M | 210 MB/s | 874 | not measured |  |",
        "| memory | 5 M | 1.29 x raw state | 1 |  | 1.16 |",
    ]
    assert tables.beside("absent.json", ("ms",)) == "*not measured*"


def test_a_target_that_the_figures_do_not_tell_is_open() -> None:
    lines = results.aimed([row("a", target="<= 1", met=None), row("b", target="<= 1", met=None, value=None)])
    first, second = lines.splitlines()[2:]
    assert first == "| a | 1 MB/s | <= 1 | cannot tell |  |"
    assert second == "| b | not measured | <= 1 | not measured |  |"
