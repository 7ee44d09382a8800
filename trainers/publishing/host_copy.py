"""A host copy of the published tensors, for engines that convert their weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from ...codec.errors import CorruptDataError, MissingParentError, NewerFormatError
from ...codec.state.leaves import LeafSpec, NpArray, check_memory
from ...store.urls import opened
from .layout import Version, public_key, version_name, versions_in
from .subscriber import Subscriber
from .tensors import Patch, of_one


def published_tensors(url: str | os.PathLike[str], key: Any = None) -> dict[str, torch.Tensor]:
    """Return zeros with the names, dtypes and shapes of the newest version that can be read.

    Args:
        url: the URL of the `Publisher`.
        key: as `Subscriber` has it.

    Raises:
        MissingParentError: no version is there.
        CorruptDataError, NewerFormatError: none of them can be read.
    """
    files = opened(url)
    keys, problem = public_key(key), None
    for number in versions_in(files.list("versions"))[::-1]:
        try:
            version = Version.from_bytes(files.read(version_name(number)), number, keys)
        except (OSError, CorruptDataError, NewerFormatError) as e:
            problem = e
            continue
        specs = {shard.name: LeafSpec("torch", shard.dtype, shard.shape) for shard in version.shards}
        check_memory(sum(spec.nbytes for spec in specs.values()), f"version {number}")
        return {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
    if problem is not None:
        kind = NewerFormatError if isinstance(problem, NewerFormatError) else CorruptDataError
        raise kind(f"{files.path('versions')}: no version can be read: {problem}")
    raise MissingParentError(f"{files.path('versions')}: nothing has been published")


class Change(NamedTuple):
    """The changes of one update in one tensor.

    Args:
        name: of the tensor.
        positions: int64, flat, ascending.
        before: the values that were there.
        values: the new ones.
    """

    name: str
    positions: NpArray
    before: torch.Tensor
    values: torch.Tensor


class HostCopy(Subscriber):
    """Host copy of the published tensors, with the changes of each update.

    Args:
        url: the URL of the `Publisher`; it must have a version.
        key: as `Subscriber` has it.
    """

    def __init__(self, url: str | os.PathLike[str], *, key: Any = None) -> None:
        self.tensors = published_tensors(url, key)
        super().__init__(url, self.tensors, key=key)

    def changes(self, version: int | None = None) -> list[Change] | None:
        """Bring the copy to a version, and return all that differs from the version before.

        Returns:
            One entry for each tensor that changed; None where everything may be different: at first, from a base, and
            after an update that failed.
        """
        with self._update():
            before = self.version
            found = self._stage(version, verify=True)
            if found is None:
                return [] if self.version == before else None
            reached, patches, report = found
            followed = before is not None and self.version == before and not report.from_base
            changes = [self._joined(list(own)) for _, own in groupby(patches, attrgetter("name"))] if followed else None
            self._commit(reached, patches, report, None)
            return changes

    def _joined(self, patches: Sequence[Patch]) -> Change:
        name = patches[0].name
        tensor = self.tensors[name]
        parts = list(of_one(tensor, patches))
        positions = np.concatenate([positions for positions, _ in parts])
        values = torch.cat([values.view(torch.uint8) for _, values in parts]).view(tensor.dtype)
        return Change(name, positions, tensor.view(-1)[torch.from_numpy(positions)], values)
