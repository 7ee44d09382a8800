"""Signals that schedulers send to all processes of a job, and that a worker ignores."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

_NAMES = (
    "SIGINT SIGTERM SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGALRM SIGVTALRM SIGPROF SIGXCPU SIGXFSZ SIGPIPE SIGIO SIGPWR "
    "SIGTSTP SIGTTIN SIGTTOU SIGURG SIGWINCH"
)
IGNORED = [getattr(signal, name) for name in _NAMES.split() if hasattr(signal, name)]
"""All signals that can be ignored, but for faults of the process itself, SIGCHLD and SIGCONT."""


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Block the signals in a process that is started, until it calls `ignore`."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Ignore the signals in this process, also those that `held_back` has blocked."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
