"""Permissions of new files, for libraries that create theirs with mode 0600."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat

from .files import TEMPORARY


def follow_umask(path: str) -> None:
    """Give a file the permissions of a new file in its folder.

    They follow from the umask and the folder's default ACL.

    safetensors writes a private temporary file (mode 0600) and renames it; readers in other accounts would be locked
    out.

    Raises:
        OSError: the folder cannot be written to, or the file is not owned by this user.
    """
    folder = os.path.dirname(path) or "."
    probe = os.path.join(folder, f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        fd = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
        finally:
            os.close(fd)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(probe)
    os.chmod(path, mode)
