"""Folders of the store's tests: in memory, except for tests of the disk."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

IN_MEMORY = Path("/dev/shm")
ROOM = 1 << 30
ON_DISK = {"test_chaos", "test_crash", "test_local", "test_lock"}


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of the test's own, on a file system in memory if one has room.

    Waiting for the disk to sync took over half of the time; writes, syncs and renames stay the same.
    """
    module = request.module.__name__.rpartition(".")[2]
    here = module not in ON_DISK and os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free >= ROOM
    if not here:
        yield tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:30])
        return
    with tempfile.TemporaryDirectory(prefix="shrinkpoint-test-", dir=IN_MEMORY) as folder:
        yield Path(folder)
