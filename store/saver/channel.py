"""The connection of a Saver to its worker process: its start, its signals, and the messages.

Messages are JSON with file descriptors, over a Unix socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

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


def start_worker(fd: int, log: int, threads: int) -> subprocess.Popen[bytes]:
    """Start `python -m shrinkpoint.store.saver.worker`; nothing of `__main__` runs again in it.

    Args:
        fd: descriptor of its socket.
        log: descriptor of the file for its standard output and error.
        threads: how many it computes with.
    """
    command = [sys.executable, "-P", "-m", "shrinkpoint.store.saver.worker", str(fd), str(os.getpid())]
    libraries = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = {**os.environ, **libraries, "PYTHONPATH": os.pathsep.join(module_folders())}
    # All data are in host memory: a context on the GPU would only take memory from the trainer.
    environment |= {"SHRINKPOINT_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", "SHRINKPOINT_DEVICE_CODING": "0"}
    # A session of its own, so that signals to the group, session or terminal of the trainer do not reach it.
    with held_back():
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(fd,),
            env=environment,
            start_new_session=True,
        )


def module_folders() -> list[str]:
    """Return the folders where this process finds modules."""
    here = ""
    with contextlib.suppress(OSError):  # the current folder was removed
        here = os.getcwd()
    return [entry or here for entry in sys.path if isinstance(entry, str) and (entry or here)]


_HEAD = struct.Struct("<II")
_MOST = 1 << 30
_MOST_DESCRIPTORS = 64


class ProtocolError(Exception):
    """The bytes received are not a message."""


def send(sock: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message; the receiver gets duplicates of the descriptors."""
    data = json.dumps(message).encode()
    data = _HEAD.pack(len(data), len(descriptors)) + data
    # In one call, which the system takes whole if it is short: an interrupted message is sent or not sent.
    sent = socket.send_fds(sock, [data], list(descriptors)) if descriptors else sock.send(data)
    if sent < len(data):
        sock.sendall(memoryview(data)[sent:])


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the next message and its descriptors, which the caller closes.

    Raises:
        EOFError: the other end is closed.
        ProtocolError: the bytes received are not a message.
    """
    descriptors: list[int] = []
    try:
        head = _receive_bytes(sock, _HEAD.size, descriptors)
        length, count = _HEAD.unpack(head)
        if length > _MOST or count > _MOST_DESCRIPTORS:
            raise ProtocolError(f"a message of {length} bytes with {count} descriptors")
        data = _receive_bytes(sock, length, descriptors)
        if len(descriptors) != count:
            raise ProtocolError(f"{len(descriptors)} descriptors received, not {count}")
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as e:
            raise ProtocolError(str(e)) from None
        if not isinstance(message, dict):
            raise ProtocolError("not an object")
    except BaseException:
        close_all(descriptors)
        raise
    return message, descriptors


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors; errors are ignored."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)


def _receive_bytes(sock: socket.socket, size: int, descriptors: list[int]) -> bytes:
    parts: list[bytes] = []
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    while size:
        data, received, _, _ = socket.recv_fds(sock, min(size, 1 << 16), _MOST_DESCRIPTORS, flags)
        descriptors += received
        if not data:
            raise EOFError("the other end is closed")
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def above_standard_streams(fd: int) -> int:
    """Return a descriptor above 2; a lower one could become a standard stream."""
    if fd > 2:
        return fd
    import fcntl

    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved
