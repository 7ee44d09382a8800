"""Publishing of models that train to models that serve: exact patches over any file system."""

from __future__ import annotations

import contextlib

BACKEND = "shrinkpoint"
"""Name by which vLLM and verl know the engines of this package."""


def register_with_vllm() -> None:
    """Make the engines known to vLLM by name, without importing them.

    vLLM calls it in every process, as an entry point. A second call does nothing.
    """
    from vllm.distributed.weight_transfer import factory

    for name, engine in (
        ("WeightTransferEngineFactory", "PublishedWeightsEngine"),
        ("WeightTransferTrainerFactory", "PublisherEngine"),  # newer versions have it
    ):
        known = getattr(factory, name, None)
        if known is not None:
            with contextlib.suppress(ValueError):  # it is registered
                known.register_engine(BACKEND, f"{__name__}.vllm_engine", engine)
