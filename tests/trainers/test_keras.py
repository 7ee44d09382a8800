"""Keras 3 as it is on the registry, on the torch back end: killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shrinkpoint as sp

os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip("keras", reason="keras is not installed")

from shrinkpoint.trainers.keras import CompressedBackup

from .keras_run import build, main

pytestmark = pytest.mark.filterwarnings("ignore")
RUN = Path(__file__).with_name("keras_run.py")


def by_epoch(folder: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    for line in (folder / "losses.txt").read_text().splitlines():
        assert found.setdefault(int(line.split()[0]), line) == line
    return found


@pytest.mark.slow
def test_a_killed_run_resumed_equals_one_that_was_not(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, str(RUN), str(tmp_path / "killed"), "5000"], start_new_session=True)
    limit = time.monotonic() + 120
    while not (tmp_path / "killed" / "losses.txt").exists() or len(by_epoch(tmp_path / "killed")) < 4:
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    epochs = len(by_epoch(tmp_path / "killed")) + 4
    main(tmp_path / "killed", epochs)
    main(tmp_path / "whole", epochs)
    assert by_epoch(tmp_path / "killed") == by_epoch(tmp_path / "whole")


def test_another_model_is_refused_with_a_list(tmp_path: Path) -> None:
    store = main(tmp_path, 1)
    model = build(32)
    before = [w.copy() for w in model.get_weights()]
    with pytest.raises(sp.BadArgumentError, match=r"first/kernel: shape \(8, 64\) in the checkpoint, \(8, 32\)"):
        CompressedBackup(store).resume(model)
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(sp.BadArgumentError, match="must be a Saver or a Store, not int"):
        CompressedBackup(3)  # type: ignore[arg-type]
    with pytest.raises(sp.BadArgumentError, match="every is 0"):
        CompressedBackup(sp.Store(tmp_path), every=0)
