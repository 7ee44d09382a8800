"""The picture of costs, and remarks next to the tables on the limits of a figure."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from shrinkpoint.bench.evidence import speeds
from shrinkpoint.bench.harness import Row


def row(name: str, device: str, value: float | None, **more: Any) -> dict[str, Any]:
    empty = {"peer": None, "peer_value": None, "ratio": None, "target": None, "met": None, "note": ""}
    made = {"row": name, "device": device, "size": 25_000_000, "value": value, "unit": "MB/s", **empty, **more}
    return dataclasses.asdict(Row(**made))


ONE, TWO = "cpu, 1 thread", "cpu, 2 threads"
SPEEDS = [
    row("compress base, default, GPT", ONE, 500.0, peer="memcpy", peer_value=9000.0),
    row("compress base, default, GPT", ONE, 500.0, peer="torch.save", peer_value=1200.0),
    row("compress base, default, GPT", TWO, 800.0, peer="torch.save", peer_value=1300.0),
    row("compress base, default, ViT", ONE, 1.0, peer="torch.save", peer_value=2.0),
    row("compress base, lossless, GPT", ONE, 3.0, peer="torch.save", peer_value=4.0),
    row("decompress base, default, GPT", ONE, None, peer="torch.save", peer_value=1300.0),
]
STALLS = [
    row("Saver of 1.0 GB: extra memory", "cpu", 1.2),
    row("Saver of 1.0 GB: stall", "cpu", 0.25, peer="memcpy", peer_value=0.125),
    row("torch.save of 1.0 GB: stall", "cpu", 1.5, peer="memcpy", peer_value=0.25),
    row("Orbax of 1.0 GB: stall", "cpu", None, note="not measured: orbax is not installed"),
]


def test_speeds_are_those_of_the_large_state() -> None:
    assert speeds.speeds_by_way(SPEEDS) == {
        "compress base": {"shrinkpoint, 1 thread": 500.0, "shrinkpoint, 2 threads": 800.0, "torch.save": 1200.0},
        "decompress base": {"torch.save": 1300.0},
    }
    assert list(speeds.speeds_by_way(SPEEDS)["compress base"]) == [
        "shrinkpoint, 1 thread",
        "shrinkpoint, 2 threads",
        "torch.save",
    ]


def test_stalls_are_those_that_were_measured() -> None:
    assert speeds.stalls(STALLS) == {"1.0 GB": {"Saver": 250.0, "one copy of memory": 125.0, "torch.save": 1500.0}}


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    speeds.picture(SPEEDS, STALLS, tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")


# -------------------------------------------------------------------------------------------------- next to the tables


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that writes a result for the evidence pages."""

    def write(name: str, rows: list[dict[str, Any]], commit: str = "abcdef0123+") -> None:
        document = {"machine": {}, "versions": {}, "commit": commit, "rows": rows}
        (tmp_path / name).write_text(json.dumps(document), encoding="utf-8")

    monkeypatch.setattr("shrinkpoint.bench.evidence.results.RESULTS", tmp_path)
    return write


def test_speeds_have_their_copy_of_memory_and_their_commit(results: Any) -> None:
    results("codec.json", SPEEDS[:3])
    header, _, line = speeds.speed().splitlines()
    assert header.startswith("| MB/s of raw state, 25 M parameters, commit `abcdef0+` | 1 thread |")
    assert line == "| compress base | 500 | 800 | not measured | not measured | not measured | 1,200 | 9,000 |  |"
    new = [{**row, "peer": "memcpy, fresh", "peer_value": 2e3} for row in SPEEDS[:1]]
    results("codec.json", [*SPEEDS[:3], *new])
    assert speeds.speed().splitlines()[2].endswith("| 9,000 | 2,000 |")
