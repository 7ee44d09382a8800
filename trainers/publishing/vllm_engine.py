"""Both sides of vLLM's weight transfer: trainers publish, and workers follow.

vLLM loads weights by the names of the checkpoint, and keeps them fused and split between its ranks. So each worker has
a copy of the published tensors on the host, and gives what changed in it to vLLM's loader: as patches, or, where vLLM
takes none, as the whole checkpoint.

`register_with_vllm` makes both known by the name `shrinkpoint`; vLLM calls it in every process, as the entry point of
this package in the group `vllm.general_plugins`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer import base

from ...codec.errors import ShrinkpointError
from . import BACKEND, register_with_vllm
from .publisher import publisher_of_all
from .subscriber import Change, HostCopy

_PATCHED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that vLLM takes patches for; it marks unchanged elements by NaN."""


@dataclass
class PublishedInitInfo(base.WeightTransferInitInfo):  # type: ignore[misc, unused-ignore]
    """Argument of `init_weight_transfer_engine`.

    Args:
        url: the publisher's URL.
        key: as `Subscriber` has it, in hexadecimal digits.
    """

    url: str
    key: str | None = None


@dataclass
class PublishedUpdateInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc, unused-ignore]
    """Argument of `update_weights`: `{"version": ...}`, the same for all workers."""

    version: int


class PublishedWeightsEngine(base.WeightTransferEngine):  # type: ignore[misc, unused-ignore, type-arg]
    """Bring a vLLM worker's model to a published version.

    The first update, and one after an update that failed, loads the whole checkpoint.
    """

    init_info_cls = PublishedInitInfo
    update_info_cls = PublishedUpdateInfo
    supports_draft_weight_update = False

    _init_info: PublishedInitInfo | None = None
    _copy: HostCopy | None = None
    _model_is_copy = False

    def init_transfer_engine(self, init_info: PublishedInitInfo) -> None:
        """Remember the URL; it must have a version when the first update begins."""
        self._init_info, self._copy, self._model_is_copy = init_info, None, False

    def start_weight_update(self) -> None:
        """Do nothing: an update is one call of `receive_weights`."""

    def finish_weight_update(self) -> None:
        """Do nothing, see `start_weight_update`."""

    def receive_weights(self, update_info: PublishedUpdateInfo) -> None:
        """Bring the model to a version; an error leaves the next update to load everything.

        Raises:
            RuntimeError: before `init_transfer_engine`.
            ShrinkpointError: the version cannot be reached; the model is as it was.
        """
        info = self._init_info
        if info is None:
            raise RuntimeError("init_weight_transfer_engine comes before update_weights")
        if self._copy is None:
            self._copy = HostCopy(info.url, key=None if info.key is None else bytes.fromhex(info.key))
        held, self._model_is_copy = self._model_is_copy, False
        try:
            changes = self._copy.changes(update_info.version)
        except ShrinkpointError:
            self._model_is_copy = held and self._copy.version is not None  # neither was written
            raise
        if not held or changes is None or not self._patched(changes):
            self._load_all(self._copy.tensors)
        self._model_is_copy = True

    def _patched(self, changes: list[Change]) -> bool:
        """Give changes to vLLM's patch loader; return False if it cannot take them."""
        if not changes:
            return True
        if getattr(self.model_config, "quantization", None) is not None:
            return False
        if any(values.dtype not in _PATCHED or bool(values.isnan().any()) for _, _, _, values in changes):
            return False
        try:
            from vllm.model_executor.model_loader.checkpoint_weight_patch import (
                CheckpointWeightPatch,
                load_checkpoint_weight_patches,
            )
        except ImportError:  # before vLLM 0.33
            return False
        assert self._copy is not None
        shapes = {name: tuple(tensor.shape) for name, tensor in self._copy.tensors.items()}
        patches = [
            CheckpointWeightPatch(
                name=name,
                shape=shapes[name],
                dtype=values.dtype,
                values=values.to(self.device),
                indices=torch.from_numpy(positions).to(self.device),
            )
            for name, positions, _, values in changes
        ]
        try:
            load_checkpoint_weight_patches(self.model, patches)
        except NotImplementedError:  # a loader that does more than copy; everything is loaded next
            return False
        return True

    def _load_all(self, tensors: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        self.model.load_weights(tensors.items())
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Free the copy."""
        self._init_info, self._copy, self._model_is_copy = None, None, False


if hasattr(base, "TrainerInitInfo"):  # older versions have no trainer's side, or another one

    @dataclass
    class PublisherInitInfo(base.TrainerInitInfo):  # type: ignore[misc, unused-ignore]
        """Argument of `trainer_init`: `PublisherInitInfo(url, rank=rank)`.

        Args:
            url: of the `Publisher`, which the workers must reach as well.
            options: further arguments of the `Publisher`.
            public: as `Subscriber` has `key`, in hexadecimal digits, for the workers.
        """

        backend: ClassVar[str] = BACKEND

        url: str
        options: dict[str, Any] | None = None
        public: str | None = None

    class PublisherEngine(base.TrainerWeightTransferEngine):  # type: ignore[misc, unused-ignore, type-arg]
        """Publish the weights of a `WeightSource`, then have vLLM's workers take that version.

        Nothing is gathered where the source has `iter_local`. The workers serve while the version is written.
        """

        init_info_cls = PublisherInitInfo

        @classmethod
        def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> PublisherEngine:
            """Open the URL on all ranks; the sender passes it to the workers."""
            made = cls(client=client, source=source, is_sender=init_info.is_sender)
            made._publisher = publisher_of_all(init_info.url, init_info.options)
            made._index = init_info.rank
            made._version = made._publisher.newest or 0
            if made.is_sender:
                client.init_weight_transfer_engine({"url": init_info.url, "key": init_info.public})
            return made

        def send_weights(self) -> None:
            """Publish the next version on all ranks, and have the workers take it."""
            self._version += 1
            state: dict[str, torch.Tensor] = {}
            shards: dict[str, Any] = {}
            for name, tensor, shard in _shards(self.source, self._index):
                state[name] = tensor
                if shard is not None:
                    shards[name] = shard
            self._publisher.publish(self._version, state, shards=shards)
            if self.is_sender:
                self.client.start_weight_update()
                self.client.update_weights({"version": self._version})
                self.client.finish_weight_update()

    def _shards(source: Any, rank: int) -> Iterator[tuple[str, torch.Tensor, Any]]:
        """Yield names, tensors of this rank, and their slices; None for plain ones."""
        local = getattr(source, "implements_iter_local", bool)()
        metadata = {meta.name: meta for meta in source.metadata} if local else {}
        whole = getattr(source, "iter_full", lambda: iter(source))  # in older versions the source itself
        for name, tensor in source.iter_local() if local else whole():
            meta = metadata.get(name)
            if meta is None or meta.placements is None:
                yield name, tensor, None
            elif (box := _box_of(meta, rank)) is not None:
                yield name, tensor, (name, meta.shape, box)

    def _box_of(meta: Any, rank: int) -> tuple[slice, ...] | None:
        """Return the slices of a rank by vLLM's `ParamMeta`; None if an earlier rank has the same."""
        number, box = meta.owners.index(rank), [(0, n) for n in meta.shape]
        coordinates = []
        for size in reversed(meta.mesh_shape):
            number, at = divmod(number, size)
            coordinates.append(at)
        for placement, size, at in zip(meta.placements, meta.mesh_shape, reversed(coordinates), strict=True):
            if not hasattr(placement, "dim"):  # a copy
                if at:
                    return None
                continue
            start, n = box[placement.dim]
            chunk = -(-n // size)
            first = min(at * chunk, n)
            box[placement.dim] = start + first, min(chunk, n - first)
        return tuple(slice(start, start + n) for start, n in box) if all(n for _, n in box) else None


register_with_vllm()
