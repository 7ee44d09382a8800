"""Background saves with pointer files, and compaction between them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.parallel import map_chunks
from shrinkpoint.store.compaction import Compaction
from shrinkpoint.trainers.pointers import WholeSaves, check_compact, drop, load_at, read_pointer, wait_for_files

LONG = sp.presets.lossless(chain=sp.ChainPolicy(None))
PATIENCE = 300.0


def state(number: int) -> dict[str, Any]:
    """Return a state; half of it equals the state before."""
    w = torch.randn(8192, generator=torch.Generator().manual_seed(0))
    for one in range(1, number + 1):
        w[one % 2 :: 2] = torch.randn(4096, generator=torch.Generator().manual_seed(one))
    return {"weight": w}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_stopped_worker_is_waited_for_within_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait for a stopped worker ends with an error after the limit."""
    monkeypatch.setattr("shrinkpoint.store.saver.saver.STOPPED", 1.0)
    with sp.Saver(sp.Store(tmp_path / "store")) as saver:
        background, file = WholeSaves(saver), tmp_path / "1.ckpt"
        os.kill(saver.pid, signal.SIGSTOP)
        try:
            background.save(file, state(1))
            for waiting in (background.wait, lambda: read_pointer(file), wait_for_files, background.wait):
                with pytest.raises(ChildProcessError, match=rf"process {saver.pid}\) has been stopped for 1 s"):
                    waiting()
        finally:
            os.kill(saver.pid, signal.SIGCONT)
        background.wait()
        assert torch.equal(load_at(file)["weight"], state(1)["weight"])


def test_a_rotation_does_not_wait_for_a_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Semaphore(0)

    def run(_: Any) -> list[int]:
        began.release()
        while True:
            map_chunks(time.sleep, [0.001])

    monkeypatch.setattr(Compaction, "run", run)
    store = sp.Store(tmp_path / "store", LONG)
    with sp.Saver(store, mode="thread", compact=1.0) as saver:
        background = WholeSaves(saver)
        for number in range(4):
            background.save(tmp_path / f"{number}.ckpt", state(number))
            background.wait()
            if number:
                assert began.acquire(timeout=PATIENCE)
                before = read_pointer(tmp_path / f"{number - 1}.ckpt")
                assert before is not None
                # That compaction never ends is what stands for a long time: who waited for it would raise TimeoutError.
                background.then(lambda store, gone=before.step: drop(store, [gone]))
        assert len(store.steps()) == 1
    assert torch.equal(load_at(tmp_path / "3.ckpt")["weight"], state(3)["weight"])


@pytest.mark.parametrize("rotate", [False, True])
def test_pointers_hold_while_chains_are_compacted(tmp_path: Path, rotate: bool) -> None:
    store = sp.Store(tmp_path / "store", LONG)
    background = WholeSaves(store, background=True, compact=2.0)
    files = [tmp_path / f"{number}.ckpt" for number in range(9)]
    identities = {}
    for number, file in enumerate(files):
        background.save(file, state(number))
        background.wait()
        pointer = read_pointer(file)
        assert pointer is not None
        identities[file] = pointer.identity
        if rotate and number > 1:
            background.then(
                lambda store, file=files[number - 2], step=pointer.step - 2: (file.unlink(), drop(store, [step]))
            )
    # Nine times half a base; the worker gets to it when nothing else is to be done.
    deadline = time.monotonic() + PATIENCE
    while store.describe(store.steps()[-1]).restore_cost > 2.5 and not rotate:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    background.close()
    kept = files[-2:] if rotate else files
    assert len(store.steps()) == len(kept)
    for file in kept:
        pointer = read_pointer(file)
        assert pointer is not None
        assert pointer.identity == identities[file] == store.describe(pointer.step).identity
        assert torch.equal(load_at(file)["weight"], state(files.index(file))["weight"])


def test_a_saver_that_removes_by_itself_is_refused(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "store")
    with (
        sp.Saver(store, keep=sp.Retention(last=2)) as saver,
        pytest.raises(sp.BadArgumentError, match="leave keep= out"),
    ):
        WholeSaves(saver)
    assert check_compact(None, background=False) is None
    assert check_compact(2.5, background=True) == 2.5
    with pytest.raises(sp.BadArgumentError, match="say background=True"):
        check_compact(2.5, background=False)
    with pytest.raises(sp.BadArgumentError, match="compact"):
        check_compact(0.5, background=True)
