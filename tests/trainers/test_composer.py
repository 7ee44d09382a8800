"""Composer: the callback under the events of its documentation, and under Composer itself where it can be installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import shrinkpoint as sp

from . import composer_events, composer_run

EXACT = sp.presets.lossless()
INSTALLED = find_spec("composer") is not None


@pytest.fixture
def callback(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The callback's class, over the documented base class where Composer is not installed."""
    if not INSTALLED:
        for name, module in composer_events.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "shrinkpoint.trainers.composer", raising=False)
    from shrinkpoint.trainers import composer

    yield composer.CompressedCheckpoints
    if not INSTALLED:
        # Its base class is gone with this test.
        sys.modules.pop("shrinkpoint.trainers.composer", None)
        vars(sys.modules["shrinkpoint.trainers"]).pop("composer", None)


def by_batch(folder: Path) -> dict[int, str]:
    """The loss of each batch; one that was computed twice must have come out the same."""
    found: dict[int, str] = {}
    for line in (folder / "losses.txt").read_text().splitlines():
        assert found.setdefault(int(line.split()[0]), line) == line
    return found


@pytest.mark.parametrize("every", [1, 4, 6, None])
def test_a_stopped_run_resumed_equals_one_that_was_not(callback: Any, tmp_path: Path, every: int | None) -> None:
    """Saved in the middle of an epoch, at its end, or both; then stopped, and gone on with."""
    for batches in (8, 15):
        composer_events.fit(callback(sp.Store(tmp_path / "s", EXACT), every), tmp_path / "stopped", batches)
    composer_events.fit(callback(sp.Store(tmp_path / "w", EXACT), every), tmp_path / "whole", 15)
    whole, stopped = by_batch(tmp_path / "whole"), by_batch(tmp_path / "stopped")
    assert whole == stopped
    assert sp.Store(tmp_path / "s").steps()[-1] == {1: 15, 4: 12, 6: 12, None: 12}[every]


def test_in_the_background_and_with_gradients(callback: Any, tmp_path: Path) -> None:
    cfg = sp.presets.inshrinkerator(prune=0.1, prune_metric="sensitivity")
    cfg = sp.Config([r for r in cfg.rules if r.match != "weight"])
    with sp.Saver(sp.Store(tmp_path / "s", cfg), mode="thread") as saver:
        made = callback(saver, 4, sensitivity=4)
        composer_events.fit(made, tmp_path / "run", 9)
        assert made._tracker is None
    assert sp.Store(tmp_path / "s").steps() == [4, 8]


def test_a_model_that_has_changed_is_refused(callback: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    store = sp.Store(tmp_path / "s", EXACT)
    composer_events.fit(callback(store, 4), tmp_path / "run", 5)
    monkeypatch.setattr(composer_events, "network", lambda: torch.nn.Sequential(torch.nn.Linear(8, 1)))
    with pytest.raises(sp.BadArgumentError, match=r"0\.weight: shape \(64, 8\) in the checkpoint, \(1, 8\)"):
        composer_events.fit(callback(store, 4), tmp_path / "run", 9)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [((3,), "must be a Saver or a Store, not int"), ((None, 0), "Saver"), ((..., 0), "every is 0")],
)
def test_bad_arguments(callback: Any, tmp_path: Path, arguments: Any, match: str) -> None:
    given = [sp.Store(tmp_path) if a is ... else a for a in arguments]
    with pytest.raises(sp.BadArgumentError, match=match):
        callback(*given)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [4, None])
def test_composer_itself(tmp_path: Path, every: int | None) -> None:
    if not INSTALLED:
        pytest.skip("Composer is not installed: its last release pins torch < 2.7.1, this package needs 2.11")
    for batches in (8, 15):
        composer_run.main(tmp_path / "stopped", batches, every)
    composer_run.main(tmp_path / "whole", 15, every)
    assert by_batch(tmp_path / "whole") == by_batch(tmp_path / "stopped")
