"""The entry point for vLLM: it registers both engines by name, without importing them."""

from __future__ import annotations

import contextlib

BACKEND = "shrinkpoint"
_MODULE = f"{__package__}.vllm_engine"


def register() -> None:
    """Make the engines known to vLLM; a second call does nothing."""
    from vllm.distributed.weight_transfer import factory

    for name, engine in (
        ("WeightTransferEngineFactory", "PublishedWeightsEngine"),
        ("WeightTransferTrainerFactory", "PublisherEngine"),  # newer versions have it
    ):
        known = getattr(factory, name, None)
        if known is not None:
            with contextlib.suppress(ValueError):  # it is registered
                known.register_engine(BACKEND, _MODULE, engine)
