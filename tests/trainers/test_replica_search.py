"""Processes that search together share a state, and handle lost processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shrinkpoint.trainers import processes
from shrinkpoint.trainers.processes import on_all, on_rank_0

from ..forking import Script


def test_all_get_the_tree_of_the_first(tmp_path: Path) -> None:
    with Script(Path(__file__).with_name("replica_search_ranks.py")) as script:
        script.together(2, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.done", "1.done"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError])
def test_what_was_met_here_is_raised_where_the_others_cannot_be_told(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection reset by peer")

    def work() -> None:
        raise error

    monkeypatch.setattr(processes, "world", lambda: 2)
    monkeypatch.setattr(processes, "rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", gone)
    monkeypatch.setattr(dist, "all_gather_object", gone)
    for together in (lambda: on_rank_0(work, "nothing was written"), lambda: on_all(work, lambda x: x)):
        with pytest.raises(error):
            together()
    with pytest.raises(RuntimeError, match="reset by peer"):
        on_rank_0(lambda: 1, "nothing was written")
