"""Messages between a Saver and its worker: JSON with file descriptors, over a Unix socket."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

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
        head = _exactly(sock, _HEAD.size, descriptors)
        length, count = _HEAD.unpack(head)
        if length > _MOST or count > _MOST_DESCRIPTORS:
            raise ProtocolError(f"a message of {length} bytes with {count} descriptors")
        data = _exactly(sock, length, descriptors)
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


def _exactly(sock: socket.socket, size: int, descriptors: list[int]) -> bytes:
    parts: list[bytes] = []
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    while size:
        data, found, _, _ = socket.recv_fds(sock, min(size, 1 << 16), _MOST_DESCRIPTORS, flags)
        descriptors += found
        if not data:
            raise EOFError("the other end is closed")
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def high(fd: int) -> int:
    """Return a descriptor above 2; a lower one could become a standard stream."""
    if fd > 2:
        return fd
    import fcntl

    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved
