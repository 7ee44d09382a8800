"""In-memory redundancy: the last compressed checkpoints of a store, in memory that outlives the trainer.

An agent process holds them as anonymous files in memory; a reader gets the file's descriptor and so the very pages, not
a copy. It is found through a socket in the user's runtime directory, named by a hash of the store's URL and open to
that user alone. A store is as good without it: what it does not have, or what is not intact, is read from the disk.

Source: BitSnap section 3.2 (asynchronous agent, in-memory redundancy).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from ..codec.errors import BadArgumentError, ShrinkpointWarning
from ..kernels.arguments import integer
from .channel import ProtocolError, close_all, receive, send
from .files import is_of_this_process, one_name
from .snapshot import available_memory

VERSION = 1
IDLE = 6 * 3600.0
"""Seconds after which an agent that nobody asks for anything gives its memory back."""
_PATIENCE = 5.0
"""Seconds the other side has to answer before it counts as stuck."""
_LOOK = 5.0
"""Seconds between two looks whether the agent's socket is still its own."""
_CREDENTIALS = struct.Struct("3i")
_LONGEST = 100
"""Bytes in the path of a Unix socket, a little below every system's limit."""


class InMemoryWarning(ShrinkpointWarning):
    """A checkpoint is on the disk but not in memory."""


def runtime_folder() -> str:
    """The user's own folder for sockets: in XDG_RUNTIME_DIR, else a private one in the folder of temporary files.

    Raises:
        PermissionError: it is not this user's alone.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = os.path.join(base, "shrinkpoint") if base else f"{tempfile.gettempdir()}/shrinkpoint-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} must be a folder that only user {os.getuid()} can enter")
    return folder


def socket_path(url: str) -> str:
    """Where the agent of a store listens, whichever way its URL is spelled."""
    path = os.path.join(runtime_folder(), blake3(os.fsencode(one_name(url))).hexdigest()[:32])
    if len(os.fsencode(path)) > _LONGEST:
        raise OSError(f"{path} is too long for the name of a socket; set XDG_RUNTIME_DIR to a shorter folder")
    return path


def _peer(sock: socket.socket) -> tuple[int, int] | None:
    """Process and user id at the other end; None where the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


class _Unusable(Exception):
    """What listens at the socket is no agent to work with: nobody, stuck, or of another version."""


def check_keep(keep: Any, url: str) -> int:
    """Raise BadArgumentError unless `in_memory=` is a number of checkpoints of a store that can be kept here."""
    kept = integer("in_memory", keep, 0, 1000)
    if kept and not hasattr(socket, "AF_UNIX"):
        raise BadArgumentError(f"in_memory is {kept}; there are no Unix sockets here, so it must be 0")
    if kept and is_of_this_process(url):
        raise BadArgumentError(f"in_memory is {kept}; {url} ends with this process: nobody would ask for it again")
    return kept


class InMemory:
    """The trainer's side: puts checkpoints into the agent of a store and gets them back.

    Args:
        url: of the store, in any spelling.
        keep: how many of the newest checkpoints the agent holds, 1 or more, each with all that restoring it needs.

    Example:
        >>> import shrinkpoint as sp
        >>> from shrinkpoint.store.agent import InMemory
        >>> memory = InMemory("runs/a", keep=2)
        >>> memory.get("000000000010-0123456789abcdef.spt") is None
        True
    """

    def __init__(self, url: str, keep: int = 2) -> None:
        self.url, self.keep = one_name(url), keep

    def put(self, step: int, file: str, needs: Sequence[str], data: bytes) -> bool:
        """Hold a checkpoint, and let go of what the newest `keep` of them do not need.

        Args:
            step: its training step.
            file: name of its data file.
            needs: names of the data files of the chain below it.
            data: bytes of the file.

        Returns:
            Whether it is held; where it is not an InMemoryWarning says why.
        """
        try:
            available = available_memory()
            if available is not None and len(data) > available:
                raise MemoryError(f"{len(data)} bytes; this machine has {available} available")
            with _sealed(data) as fd:
                request = {"do": "put", "step": step, "file": file, "needs": list(needs), "keep": self.keep}
                answer, _ = self._ask({**request, "size": len(data)}, (fd,), start=True)
            if answer.get("ok"):
                return True
            why = str(answer.get("error"))
        except (OSError, MemoryError, subprocess.SubprocessError, _Unusable) as e:
            why = f"{type(e).__name__}: {e}"
        warnings.warn(f"step {step} is not kept in memory: {why}", InMemoryWarning, stacklevel=3)
        return False

    def get(self, file: str) -> bytes | None:
        """Bytes of a data file as they were put; None where there is no agent or it has no such file."""
        with contextlib.suppress(OSError, _Unusable):
            answer, descriptors = self._ask({"do": "get", "file": file})
            try:
                size = answer.get("size")
                if descriptors and type(size) is int and os.fstat(descriptors[0]).st_size == size:
                    return _all_of(descriptors[0], size)
            finally:
                close_all(descriptors)
        return None

    def steps(self) -> list[int]:
        """Steps held, ascending; empty without an agent."""
        return sorted({int(step) for step, *_ in self._list().get("entries", [])})

    def nbytes(self) -> int:
        """Bytes held; 0 without an agent."""
        return sum(self._list().get("files", {}).values())

    def drop(self, steps: Sequence[int]) -> None:
        """Let go of some steps: broken ones, or those that not all ranks have."""
        with contextlib.suppress(OSError, _Unusable):
            self._ask({"do": "drop", "steps": list(steps)})

    def end(self) -> None:
        """End the agent; its memory is free then."""
        with contextlib.suppress(OSError, _Unusable):
            self._ask({"do": "end"})

    def _list(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, _Unusable):
            return self._ask({"do": "list"})[0]
        return {}

    def _ask(
        self, request: dict[str, Any], descriptors: Sequence[int] = (), *, start: bool = False
    ) -> tuple[dict[str, Any], list[int]]:
        """The agent's answer; where none can be had, one is started first if asked for."""
        path = socket_path(self.url)
        try:
            return self._once(path, request, descriptors)
        except (_Unusable, FileNotFoundError):
            if not start:
                raise
        with _locked(f"{path}.lock"):
            try:
                return self._once(path, request, descriptors)
            except (_Unusable, FileNotFoundError):
                _start(path, self.url)
        return self._once(path, request, descriptors)

    def _once(self, path: str, request: dict[str, Any], descriptors: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_PATIENCE)
            try:
                sock.connect(path)
            except (ConnectionRefusedError, BlockingIOError, TimeoutError) as e:
                raise _Unusable(f"nobody answers at {path}: {e}") from None
            peer = _peer(sock)
            if peer is not None and peer[1] not in (os.getuid(), 0):
                raise PermissionError(f"{path} belongs to user {peer[1]}")
            try:
                send(sock, {**request, "version": VERSION}, descriptors)
                answer, found = receive(sock)
            except TimeoutError:
                # It listens but is stuck: its memory would be lost until it is ended.
                if peer is not None and peer[0] > 1 and peer[1] == os.getuid():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(peer[0], signal.SIGKILL)
                raise _Unusable(f"the agent at {path} is stuck") from None
            except (EOFError, ConnectionError, ProtocolError) as e:
                raise _Unusable(f"what listens at {path} is no agent: {e}") from None
        if answer.get("version") != VERSION or answer.get("url") != self.url:
            close_all(found)
            raise _Unusable(f"the agent at {path} is of version {answer.get('version')} for {answer.get('url')}")
        return answer, found


@contextlib.contextmanager
def _sealed(data: bytes) -> Iterator[int]:
    """Descriptor of an anonymous file with these bytes, which from now on nobody can change."""
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as f:
            f.write(data)
            f.flush()
            yield f.fileno()
        return
    import fcntl

    fd = os.memfd_create("shrinkpoint-checkpoint", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield fd
    finally:
        os.close(fd)


def _all_of(fd: int, size: int) -> bytes:
    parts = []
    at = 0
    while at < size and (part := os.pread(fd, min(size - at, 1 << 30), at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Only one process at a time looks for an agent in vain and starts one."""
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _start(path: str, url: str) -> None:
    """Start an agent in place of whatever was there; when this returns it listens."""
    from .process import child_environment

    command = [sys.executable, "-P", "-m", "shrinkpoint.store.agent", path, url, str(IDLE)]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=child_environment(1),
        start_new_session=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise OSError(f"the agent cannot be started: {done.stderr.decode(errors='replace').strip()[-500:]}")


# ---------------------------------------------------------------------------------------------- the agent's side


@dataclass(slots=True)
class Held:
    """What an agent has: data files as (descriptor, bytes), and which steps need which of them, the newest last."""

    url: str
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    entries: list[tuple[int, str, tuple[str, ...]]] = field(default_factory=list)

    def answer(self, request: dict[str, Any], descriptors: list[int]) -> tuple[dict[str, Any], list[int], bool]:
        """Do what is asked.

        Returns:
            The answer, its descriptors, and whether this was the last request. Descriptors that came are either kept
            here or left in `descriptors`.
        """
        head = {"version": VERSION, "url": self.url, "pid": os.getpid()}
        what = request.get("do")
        if what == "end":
            return {**head, "ok": True}, [], True
        if request.get("version") != VERSION:
            return {**head, "error": f"version {request.get('version')}"}, [], False
        if what == "put":
            return {**head, **self._put(request, descriptors)}, [], False
        if what == "get":
            fd, size = self.files.get(str(request.get("file")), (None, None))
            return {**head, "size": size}, [] if fd is None else [fd], False
        if what == "list":
            files = {name: size for name, (_, size) in self.files.items()}
            return {**head, "entries": self.entries, "files": files}, [], False
        if what == "drop":
            steps = request.get("steps")
            self.entries = [e for e in self.entries if not isinstance(steps, list) or e[0] not in steps]
            self._let_go()
            return {**head, "ok": True}, [], False
        return {**head, "error": "unknown request"}, [], False

    def _put(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        step, file, needs, keep, size = (request.get(k) for k in ("step", "file", "needs", "keep", "size"))
        plain = (
            type(step) is int
            and isinstance(file, str)
            and isinstance(needs, list)
            and all(isinstance(n, str) for n in needs)
            and type(keep) is int
            and keep >= 1
            and len(descriptors) == 1
            and os.fstat(descriptors[0]).st_size == size
        )
        if not plain:
            return {"error": "no such put"}
        assert isinstance(file, str)
        assert isinstance(size, int)
        assert isinstance(needs, list)
        if file in self.files:
            os.close(self.files.pop(file)[0])
        self.files[file] = (descriptors.pop(), size)
        self.entries = [e for e in self.entries if e[0] != step] + [(int(step or 0), file, tuple(needs))]
        self.entries = self.entries[-int(keep or 1) :]
        self._let_go()
        return {"ok": True}

    def _let_go(self) -> None:
        needed = {name for _, file, needs in self.entries for name in (file, *needs)}
        for name in [n for n in self.files if n not in needed]:
            os.close(self.files.pop(name)[0])


def _serve(server: socket.socket, path: str, held: Held, idle: float) -> None:
    """Answer one request after another until told to end, forgotten, or replaced."""
    own = _identity(path)
    last = time.monotonic()
    poll = select.poll()  # which takes any number of a file, as `select` does not
    poll.register(server, select.POLLIN)
    while time.monotonic() - last < idle:
        ready = poll.poll(1000 * min(_LOOK, idle))
        if _identity(path) != own:
            return
        if not ready:
            continue
        with contextlib.suppress(OSError, EOFError, ProtocolError):
            client, _ = server.accept()
            with client:
                client.settimeout(_PATIENCE)
                peer = _peer(client)
                if peer is not None and peer[1] not in (os.getuid(), 0):
                    continue
                request, descriptors = receive(client)
                try:
                    answer, given, over = held.answer(request, descriptors)
                finally:
                    close_all(descriptors)
                if over:
                    # Gone before it says so: who asked may start another one at once.
                    os.unlink(path)
                send(client, answer, given)
                if over:
                    return
                last = time.monotonic()
    if _identity(path) == own:
        os.unlink(path)


def _identity(path: str) -> tuple[int, int] | None:
    """Tells a socket from its successor of the same name; None where there is none. Inode numbers are used again."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def main() -> None:
    """The process: arguments are the socket's path, the store's URL and the idle time. Returns once it listens."""
    path, url, idle = sys.argv[1], sys.argv[2], float(sys.argv[3])
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.umask(0o177)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(path)
    ready, listening = os.pipe()
    if os.fork():
        os.close(listening)
        os._exit(0 if os.read(ready, 1) else 1)
    # Here and not before the fork: the system names the process that listens as the one at the other end.
    server.listen(64)
    os.write(listening, b"1")
    close_all((ready, listening))
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.chdir("/")
    _serve(server, path, Held(url), idle)
    os._exit(0)


if __name__ == "__main__":
    main()
