"""A checkpoint engine for verl: trainers publish, and rollout workers follow.

    actor_rollout_ref.rollout.checkpoint_engine:
        backend: shrinkpoint
        custom_backend_module: shrinkpoint.trainers.publishing.verl_engine
        engine_kwargs: {shrinkpoint: {url: s3://bucket/policy}}

verl gives each trainer rank whole tensors one after the other, so that no rank can write its own shards: each takes
every N-th tensor, and holds that part of the model on the host.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from ...codec.errors import ShrinkpointError
from ..processes import rank, world
from . import BACKEND
from .publisher import Publisher, publisher_of_all
from .subscriber import HostCopy


@CheckpointEngineRegistry.register(BACKEND)
class PublishedCheckpointEngine(CheckpointEngine):  # type: ignore[misc, unused-ignore]
    """Publish the weights of verl's trainer, and yield them in its rollout workers.

    Args:
        bucket_size: not used.
        url: a path or fsspec URL that all workers reach.
        is_master: not used.
        changed_only: yield only tensors that changed since the last call, for loaders that take a part of a model.
        timeout: seconds to wait for a version.
        options: further arguments of the `Publisher`.
        public: as `Subscriber` has `key`, in hexadecimal digits.
    """

    def __init__(
        self,
        bucket_size: int = 0,
        *,
        url: str,
        is_master: bool = False,
        changed_only: bool = False,
        timeout: float = 600.0,
        options: Mapping[str, Any] | None = None,
        public: str | None = None,
    ) -> None:
        self._public = None if public is None else bytes.fromhex(public)
        self._url, self._options, self._changed_only, self._timeout = url, dict(options or {}), changed_only, timeout
        self._publisher: Publisher | None = None
        self._copy: HostCopy | None = None
        self._is_loaded = False

    def prepare(self) -> dict[str, Any]:
        """Return nothing: processes meet at the URL."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return nothing, see `prepare`."""
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        """Do nothing, see `prepare`."""

    def finalize(self) -> None:
        """Do nothing: the copies are needed for the next delta."""

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Publish the version `global_steps`; None: the next one. All ranks call this."""
        if self._publisher is None:
            self._publisher = publisher_of_all(self._url, self._options)
        # All ranks run the generator, which gathers each tensor; its memory may be used again for the next.
        mine = {name: tensor.to("cpu", copy=True) for i, (name, tensor) in enumerate(weights) if i % world() == rank()}
        version = (self._publisher.newest or 0) + 1 if global_steps is None else global_steps
        self._publisher.publish(version, mine)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the weights of the version `global_steps`; None: the next one after the last call.

        Raises:
            ShrinkpointError: the version did not appear in time, or cannot be read.
        """
        begin, copy = time.monotonic(), self._copy
        held = -1 if copy is None or copy.version is None else copy.version
        while True:
            if copy is None:
                try:
                    copy = HostCopy(self._url, key=self._public)
                except ShrinkpointError:
                    if time.monotonic() - begin > self._timeout:
                        raise
            newest = -1 if copy is None or copy.newest is None else copy.newest
            if copy is not None and newest >= (held + 1 if global_steps is None else global_steps):
                break
            if time.monotonic() - begin > self._timeout:
                raise ShrinkpointError(f"{self._url}: the newest version is {newest} after {self._timeout:g} s")
            await asyncio.sleep(0.02)
        self._copy, follows, self._is_loaded = copy, self._is_loaded and self._changed_only, False
        changes = copy.changes(global_steps)
        names = [change.name for change in changes] if changes is not None and follows else list(copy.tensors)
        for name in names:
            yield name, copy.tensors[name]
        self._is_loaded = True  # else the next call yields everything
