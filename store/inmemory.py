"""Files of a store of which the newest are also in memory, with an agent: read there first, where they are intact."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Sequence

from blake3 import blake3

from .agent import InMemory, InMemoryWarning
from .files import Files, is_of_this_process
from .manifest import is_data


class NearFiles:
    """The same files, data files from memory where it has them with the hash that their name says.

    `hits` counts those that were.
    """

    def __init__(self, files: Files, memory: InMemory) -> None:
        self._files, self._memory = files, memory
        self.root, self.local, self.hits = files.root, files.local, 0
        self.path, self.exists, self.list = files.path, files.exists, files.list
        self.write, self.create, self.modified = files.write, files.create, files.modified

    def remove(self, names: Sequence[str]) -> None:
        """See Files."""
        self._files.remove(names)

    def _near(self, name: str) -> bytes | None:
        base = name.rpartition("/")[2]
        data = self._memory.get(base) if is_data(base) else None
        if data is None:
            return None
        if not base.endswith(f"-{blake3(data).hexdigest()[:16]}.spt"):
            message = f"{self.path(name)}: its copy in memory is damaged; read from storage"
            warnings.warn(message, InMemoryWarning, stacklevel=2)
            return None
        self.hits += 1
        return data

    def read(self, name: str) -> bytes:
        """See Files."""
        data = self._near(name)
        return self._files.read(name) if data is None else data

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """See Files: from storage, for only the whole can be checked."""
        return self._files.read_range(name, start, stop)

    def size(self, name: str) -> int:
        """See Files."""
        return self._files.size(name)


def still_held(files: Files, url: str) -> NearFiles | None:
    """The files of a store with those before them that an agent still holds; None where it holds none, or is none."""
    if not hasattr(socket, "AF_UNIX") or is_of_this_process(url):
        return None
    memory = InMemory(url)
    return NearFiles(files, memory) if memory.steps() else None
