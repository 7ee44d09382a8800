"""One state for processes that search together."""

from __future__ import annotations

from pathlib import Path

from .killing import torchrun


def test_all_get_the_tree_of_the_first(tmp_path: Path) -> None:
    torchrun(2, Path(__file__).with_name("together_ranks.py"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.done", "1.done"]
