"""The processes that publish one version together, and how they agree on it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ...codec.errors import BadArgumentError, CorruptDataError, ShrinkpointError
from ...kernels.backend.arguments import integer, number
from ...store.files import Files
from .layout import FORMAT, Keys, sealed, unsealed

FOLDER = "parts"
_RUN = re.compile(r"[A-Za-z0-9_.]{1,64}")
_PART = re.compile(r"(\d{12})-(\d+)-of-(\d+)-([A-Za-z0-9_.]{1,64})\.json")


class PublishConflictError(ShrinkpointError):
    """Another publisher has written to the same URL."""


@dataclass(frozen=True, slots=True)
class Counted:
    """One of several processes without a process group, which wait for each other's parts.

    Args:
        index: of this process, from 0.
        count: of the processes.
        run: a name (letters, digits, `_` and `.`) that all of them share, and that is another one for each start of
            the trainer, so that a part that a killed run left behind is never taken.
        timeout: seconds to wait for the parts of the others.
    """

    index: int
    count: int
    run: str
    timeout: float = 600.0

    def __post_init__(self) -> None:
        integer("count", self.count, 1)
        integer("index", self.index, 0, self.count - 1)
        number("timeout", self.timeout, 0, 1e9)
        if not isinstance(self.run, str) or not _RUN.fullmatch(self.run):
            raise BadArgumentError(f"run is {self.run!r:.80}; it must be 1 to 64 letters, digits, '_' and '.'")


class Alone:
    """One process that publishes everything.

    `collective`: whether all ranks meet at every call of `share`; else only for their parts of a version. `commits`:
    whether this process creates the file of a version.
    """

    index, collective, commits = 0, True, True

    def share(self, version: int, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what every rank shares of a version, in their order: here its own alone."""
        return [mine]


class Grouped:
    """The ranks of a process group of `torch.distributed`."""

    collective = True

    def __init__(self, group: Any) -> None:
        self._group = group
        self.index = torch.distributed.get_rank(group)
        self.commits = self.index == 0

    def share(self, version: int, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Gather those of all ranks."""
        found: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(found, mine, self._group)
        return found


class InStore:
    """Processes that find the parts of the others in the store."""

    collective, commits = False, True

    def __init__(self, own: Counted, files: Files, keys: Keys) -> None:
        self._own, self._files, self._keys = own, files, keys
        self.index = own.index
        self._written: list[str] = []

    def share(self, version: int, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Write a part, and wait for those of the others.

        Raises:
            ShrinkpointError: parts are missing after the timeout, or their processes are at another version.
        """
        names = [f"{version:012}-{i}-of-{self._own.count}-{self._own.run}.json" for i in range(self._own.count)]
        self._write(names[self.index], mine)
        try:
            self._wait(version, names)
            return [self._read(name) for name in names]
        except (ShrinkpointError, OSError) as e:  # a process that comes later does not wait
            self._write(names[self.index], {"error": f"it gave up: {e}"[:2000]})
            raise

    def _wait(self, version: int, names: list[str]) -> None:
        own, begin, pause = self._own, time.monotonic(), 0.002
        while missing := sorted(set(names) - set(there := self._names())):
            parts = [part for name in there if (part := _PART.fullmatch(name)) and part[4] == own.run]
            # A process that is behind gets an error; one that is ahead waits for it.
            astray = [p for p in parts if int(p[1]) > version or int(p[3]) != own.count]
            if astray or time.monotonic() - begin > own.timeout:
                why = "; ".join(f"part {p[2]} of {p[3]} is at version {int(p[1])}" for p in astray[:5])
                raise ShrinkpointError(
                    f"{self._files.path(FOLDER)}: parts of version {version} are missing: {', '.join(missing[:5])}: "
                    f"{why or f'they did not arrive in {own.timeout:g} s'}; this process publishes nothing"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _write(self, name: str, part: dict[str, Any]) -> None:
        self._written.append(f"{FOLDER}/{name}")
        self._files.write(self._written[-1], sealed({"format": FORMAT, "part": part}, self._keys))

    def _read(self, name: str) -> dict[str, Any]:
        part = unsealed(self._files.read(f"{FOLDER}/{name}"), f"part {name}", self._keys).get("part")
        if not isinstance(part, dict):
            raise CorruptDataError(f"part {name}: it is another file")
        return part

    def _names(self) -> list[str]:
        return [name.rsplit("/", 1)[-1] for name in self._files.list(FOLDER)]

    def committed(self) -> None:
        """Remove own parts of earlier versions: all processes have gone on."""
        old, self._written = self._written[:-1], self._written[-1:]
        with contextlib.suppress(OSError):  # `Publisher` removes them with their versions
            self._files.remove(old)


Ranks: TypeAlias = Alone | Grouped | InStore
"""The processes of a trainer that publish together."""


def together(ranks: Ranks, version: int, work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Share the result of some work; raise on all ranks if it raises on one.

    Raises:
        Exception: the work's own.
        ShrinkpointError: another rank's work failed; the message names the rank and the reason.
    """
    error: Exception | None = None
    mine: dict[str, Any] = {}
    try:
        mine = work()
    except Exception as e:
        error, mine = e, {"error": f"{type(e).__name__}: {e}"[:2000]}
    everyone = ranks.share(version, mine)
    if error is not None:
        raise error
    problems = [f"rank {i}: {own['error']}" for i, own in enumerate(everyone) if "error" in own]
    if problems:
        raise ShrinkpointError(f"version {version} was not published: {'; '.join(problems[:5])}")
    return everyone


def one_value(everyone: Sequence[dict[str, Any]], key: str, what: str) -> Any:
    """Return what all ranks give for a key; BadArgumentError if they differ."""
    values = [own.get(key) for own in everyone]
    if any(value != values[0] for value in values):
        shown = ", ".join(f"rank {i}: {value!r:.60}" for i, value in enumerate(values[:8]))
        raise BadArgumentError(f"ranks disagree on {what}: {shown}; nothing was published")
    return values[0]
