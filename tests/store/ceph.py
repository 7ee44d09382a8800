"""A local S3 server for the tests: Debian's Ceph with objects in memory (235 MB)."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
_CONFIG = """
[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{v2}/0,v1:127.0.0.1:{v1}/0]
public_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
osd_objectstore = memstore
mon_data_avail_crit = 0
mon_data = {root}/mon
osd_data = {root}/osd
run_dir = {root}
log_file = {root}/$name.log
ms_mon_client_mode = crc secure
ms_cluster_mode = crc
ms_client_mode = crc
[client.rgw]
ms_mon_client_mode = crc
rgw_frontends = beast endpoint=127.0.0.1:{http}
"""


@dataclass(frozen=True)
class Server:
    """Endpoint and credentials of a server."""

    endpoint: str
    key: str = "AKIATEST"
    secret: str = "SECRETTEST"


def missing() -> str | None:
    """Return why the server cannot run here, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(absent)} not installed (Debian: apt-get install radosgw ceph-mon ceph-osd)" if absent else None


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@contextlib.contextmanager
def running(root: Path) -> Iterator[Server]:
    """Run the server's processes; end them by their process ids."""
    with contextlib.ExitStack() as stack:
        for attempt in range(3):
            try:
                server = stack.enter_context(_running(root / str(attempt)))
                break
            except AssertionError:  # another process has taken one of the ports meanwhile
                if attempt == 2:
                    raise
        yield server


@contextlib.contextmanager
def _running(root: Path) -> Iterator[Server]:
    v2, v1, http = _free_ports(3)
    fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
    config = root / "ceph.conf"
    (root / "osd").mkdir(parents=True)
    config.write_text(_CONFIG.format(fsid=fsid, v2=v2, v1=v1, http=http, root=root))
    # Debian's `ceph` needs Debian's Python, not another one on the path.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env["PATH"] = "/usr/bin:/usr/sbin:/bin:/sbin"
    started: list[subprocess.Popen[bytes]] = []

    def call(*command: str) -> None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{command}: no answer in 120 s; the servers said:\n{_said(root)}") from None
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{_said(root)}"

    def serve(*command: str) -> None:
        log = (root / f"{command[0]}.out").open("wb")
        started.append(subprocess.Popen([*command, "-c", str(config), "-f"], stdout=log, stderr=log, env=env))
        log.close()

    try:
        monmap = str(root / "monmap")
        address = f"[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]"
        call("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monmap)
        call("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "-c", str(config))
        serve("ceph-mon", "-i", "a")
        call("/usr/bin/python3", "/usr/bin/ceph", "-c", str(config), "osd", "new", osd)
        call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd, "-c", str(config))
        serve("ceph-osd", "-i", "0")
        serve("radosgw", "-n", "client.rgw")
        user = ("user", "create", "--uid=t", "--display-name=t", "--access-key=AKIATEST", "--secret=SECRETTEST")
        call("radosgw-admin", "-c", str(config), "-n", "client.rgw", *user)
        endpoint = f"http://127.0.0.1:{http}"
        _wait(endpoint, started)
        yield Server(endpoint)
    finally:
        for process in reversed(started):
            process.kill()
            process.wait()


def _said(root: Path) -> str:
    """Return the last output of each server, for error messages."""
    return "\n".join(f"{p.name}: {p.read_text(errors='replace')[-2000:]}" for p in sorted(root.glob("*.out")))


def _wait(endpoint: str, started: list[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        assert all(p.poll() is None for p in started), "a server ended by itself"
        try:
            urllib.request.urlopen(endpoint, timeout=5).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
            continue
        return
    raise AssertionError("the gateway does not answer")
