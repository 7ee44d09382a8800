"""A weight-transfer engine with which vLLM's workers follow a `Publisher`.

vLLM loads weights by the names of the checkpoint, and keeps them fused and split between its ranks. So each worker has
a copy of the published tensors on the host, and gives what changed in it to vLLM's loader: as patches, or, where vLLM
takes none, as the whole checkpoint.

Importing this module imports vLLM, and registers the engine as `weight_transfer_config={"backend": "shrinkpoint"}`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from ...codec.errors import ShrinkpointError
from .host_copy import Change, HostCopy

BACKEND = "shrinkpoint"
_PATCHED = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that vLLM takes patches for; it marks unchanged elements by NaN."""


@dataclass
class PublishedInitInfo(WeightTransferInitInfo):  # type: ignore[misc, unused-ignore]
    """Argument of `init_weight_transfer_engine`: `{"url": ...}`, the publisher's URL."""

    url: str


@dataclass
class PublishedUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc, unused-ignore]
    """Argument of `update_weights`: `{"version": ...}`, the same for all workers."""

    version: int


class PublishedWeightsEngine(WeightTransferEngine):  # type: ignore[misc, unused-ignore, type-arg]
    """Bring a vLLM worker's model to a published version.

    The first update, and one after an update that failed, loads the whole checkpoint.
    """

    init_info_cls = PublishedInitInfo
    update_info_cls = PublishedUpdateInfo
    supports_draft_weight_update = False

    _copy: HostCopy | None = None
    _model_is_copy = False

    def init_transfer_engine(self, init_info: PublishedInitInfo) -> None:
        """Open the URL, which must have a version."""
        self._copy, self._model_is_copy = HostCopy(init_info.url), False

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
        if self._copy is None:
            raise RuntimeError("init_weight_transfer_engine comes before update_weights")
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
        self._copy, self._model_is_copy = None, False


WeightTransferEngineFactory.register_engine(BACKEND, PublishedWeightsEngine)
