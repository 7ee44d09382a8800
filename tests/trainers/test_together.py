"""One state for processes that search together."""

from __future__ import annotations

from pathlib import Path

from ..forking import Script


def test_all_get_the_tree_of_the_first(tmp_path: Path) -> None:
    with Script(Path(__file__).with_name("together_ranks.py")) as script:
        script.together(2, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.done", "1.done"]
