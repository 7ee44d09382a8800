"""Starting the worker process of a `Saver`: its command, its environment and its signals."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from . import signals


def start_worker(fd: int, log: int, threads: int) -> subprocess.Popen[bytes]:
    """Start `python -m shrinkpoint.store.worker`; nothing of `__main__` runs again in it.

    Args:
        fd: descriptor of its socket.
        log: descriptor of the file for its standard output and error.
        threads: how many it computes with.
    """
    command = [sys.executable, "-P", "-m", "shrinkpoint.store.worker", str(fd), str(os.getpid())]
    # A session of its own, so that signals to the group, session or terminal of the trainer do not reach it.
    with signals.held_back():
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(fd,),
            env=child_environment(threads),
            start_new_session=True,
        )


def child_environment(threads: int) -> dict[str, str]:
    """Return the environment of a worker: the same modules, few threads, no GPU."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(module_folders()),
        "SHRINKPOINT_THREADS": str(threads),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # All data are in host memory: a context on the GPU would only take memory from the trainer.
        "CUDA_VISIBLE_DEVICES": "",
    }


def module_folders() -> list[str]:
    """Return the folders where this process finds modules."""
    found = [entry for entry in sys.path if isinstance(entry, str)]
    if "" in found:
        here = ""
        with contextlib.suppress(OSError):  # the current folder was removed
            here = os.getcwd()
        found = [entry or here for entry in found if entry or here]
    return found
