"""`python -m bench`: files are checked first, measured rows are kept, arguments are used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shrinkpoint.bench import __main__ as command
from shrinkpoint.bench import machine, store
from shrinkpoint.bench.__main__ import main
from shrinkpoint.bench.harness import Case, Job, Options, Peer, Row, run_cases, wall_clock

HOME = Path(__file__).parents[1]


def row(name: str) -> Row:
    return Row(name, "cpu", 1, 1.0, "x", None, None, None, None, None, "")


def never(_: Options) -> list[Row]:
    raise AssertionError("measured all the same")


@pytest.mark.parametrize("flag", ["--json", "--plot"])
@pytest.mark.parametrize("kind", ["no folder", "a folder"])
def test_files_are_checked_before_anything_is_measured(
    flag: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "run", never)
    path = tmp_path / "no" / "dir" / "x.png" if kind == "no folder" else tmp_path
    assert main(["store", flag, str(path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert flag in said
    assert ("no such folder" if kind == "no folder" else "is a folder") in said


def test_a_picture_of_no_kind_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(store, "run", never)
    assert main(["store", "--plot", str(tmp_path / "rows.xyz")]) == 2
    assert "png" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk full"), ZeroDivisionError("nothing")])
def test_what_was_measured_is_not_lost(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: Options) -> list[Row]:
        options.seeds.add(3)
        options.done([row("the first")])
        raise error

    monkeypatch.setattr(store, "run", run)
    out = tmp_path / "rows.json"
    asked = ["store", "--quick", "--json", str(out)]
    if isinstance(error, ZeroDivisionError):
        with pytest.raises(ZeroDivisionError):
            main(asked)
    else:
        assert main(asked) == (130 if isinstance(error, KeyboardInterrupt) else 2)
    document = json.loads(out.read_text())
    assert [r["row"] for r in document["rows"]] == ["the first"]
    assert document["run"]["seeds"] == [3]
    assert document["stopped"] == (
        "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
    )
    assert "the first" in capsys.readouterr().out


def test_cases_are_kept_as_they_come() -> None:
    def make() -> Job:
        return Job(lambda: sum(range(1000)), lambda: "a check", 1e6, [])

    def broken() -> Job:
        raise KeyboardInterrupt

    options = Options()
    with pytest.raises(KeyboardInterrupt):
        run_cases([Case("a", 1, "GB/s", make), Case("b", 1, "GB/s", broken)], options, wall_clock)
    assert [r.row for r in options.measured] == ["a"]


def test_a_document_says_how_it_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A document names its command, without the folder of the output."""
    out = tmp_path / "rows.json"
    monkeypatch.setattr(store, "run", lambda options: [row("a")] if options.wanted("save base") else [])
    assert main(["store", "--quick", "--only", "save base", "--json", str(out)]) == 0
    run = json.loads(out.read_text())["run"]
    assert run == {
        "command": "python -m bench store --quick --only 'save base'",
        "only": "save base",
        "quick": True,
        "seeds": None,
    }
    assert str(tmp_path) not in out.read_text()


def test_the_commit_is_the_one_it_began_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commits = iter(["before", "after"])
    monkeypatch.setattr(machine, "commit", lambda: next(commits))
    monkeypatch.setattr(store, "run", lambda _: [row("a")])
    out = tmp_path / "rows.json"
    assert main(["store", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["commit"] == "before"
    assert command.result([])["commit"] == "after"


def test_a_peer_that_is_not_installed_says_how_to_get_it() -> None:
    def missing() -> Any:
        raise ImportError("No module named 'moonclip'", name="moonclip")

    def make() -> Job:
        return Job(lambda: sum(range(1000)), lambda: "a check", 1e6, [Peer("moonclip", missing)])

    (found,) = run_cases([Case("a", 1, "GB/s", make)], Options(), wall_clock)
    assert found.note.startswith("not measured: moonclip is not installed (make bench installs it)")
    targets = (HOME / "Makefile").read_text(encoding="utf-8")
    assert "\nbench:" in targets
    assert "\nbench-models:" in targets


@pytest.mark.parametrize(("name", "minutes"), [("store", "3"), *(("training", m) for m in ("nan", "inf", "0", "-1"))])
def test_minutes_that_mean_nothing_are_refused(name: str, minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--minutes", minutes]) == 2
    assert "--minutes" in capsys.readouterr().err
