"""Links in a folder that somebody else may have made: which of them may be followed."""

from __future__ import annotations

import os
from pathlib import Path

from ..kernels.errors import BadArgumentError

_CACHED = ("models--", "datasets--", "spaces--")
"""Prefixes of the folders in a cache of the Hub."""


def check_link(path: Path, folder: Path, *, writes: bool = False) -> None:
    """Refuse a link that leads out of a folder, whose file could be anybody's.

    The cache of the Hugging Face Hub consists of links: from `snapshots/REVISION/...` to files in `blobs` next to
    `snapshots`. These are followed, but not written through, because other revisions share the files.

    Args:
        path: an entry of the folder, or of a folder in it.
        folder: the folder that the user has named; it may be a link itself.
        writes: whether the file will be written.

    Raises:
        BadArgumentError: the entry, or a folder above it, is a link that leads elsewhere.
    """
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if real.is_relative_to(root):
        return
    snapshots = (p.parent for p in (root, *root.parents) if p.parent.name == "snapshots")
    caches = [p.parent / "blobs" for p in snapshots if p.parent.name.startswith(_CACHED)]
    if writes or real.parent not in caches:
        raise BadArgumentError(f"{path} links to {real}, which is outside of {folder}: put a copy in its place")
