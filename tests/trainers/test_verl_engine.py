"""The engine for verl, against the installed `CheckpointEngine` and a stand-in."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import shrinkpoint as sp

from .test_publishing import same, step

MODULE = "shrinkpoint.trainers.publishing.verl_engine"


class Registry:
    """Stand-in for verl's registry."""

    engines: dict[str, Any] = {}  # noqa: RUF012

    @staticmethod
    def register(backend: str) -> Any:
        def known(engine: Any) -> Any:
            Registry.engines[backend] = engine
            return engine

        return known

    @classmethod
    def get(cls, backend: str) -> Any:
        return cls.engines[backend]


@pytest.fixture(params=["verl", "a stand-in"])
def engine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    base = "verl.checkpoint_engine.base"
    if request.param == "verl":
        registry: Any = pytest.importorskip(base, exc_type=ImportError).CheckpointEngineRegistry
        monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    else:
        for name in ("verl", "verl.checkpoint_engine", base):
            made = ModuleType(name)
            made.__path__ = []
            monkeypatch.setitem(sys.modules, name, made)
        registry = Registry
        vars(sys.modules[base]).update(CheckpointEngine=object, CheckpointEngineRegistry=registry)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    importlib.import_module(MODULE)  # what `custom_backend_module` imports
    yield registry.get("shrinkpoint")
    sys.modules.pop(MODULE, None)


async def received(worker: Any, steps: int | None) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() async for name, tensor in worker.receive_weights(global_steps=steps)}


@pytest.mark.parametrize("numbered", [True, False])
def test_weights_arrive(engine: Any, tmp_path: Path, numbered: bool) -> None:
    now = {"a": torch.randn(300).bfloat16(), "b": torch.randn(300).bfloat16()}
    trainer = engine(bucket_size=1 << 20, is_master=True, url=str(tmp_path))
    workers = [engine(bucket_size=1 << 20, url=str(tmp_path), changed_only=changed) for changed in (False, True)]
    assert engine.build_topology(1, 2, [trainer.prepare(), *(w.prepare() for w in workers)]) == ({}, {})
    trainer.init_process_group()

    async def sync(steps: int | None) -> list[dict[str, torch.Tensor]]:
        """The workers wait for what the trainer sends."""
        waiting = [asyncio.create_task(received(worker, steps)) for worker in workers]
        await asyncio.sleep(0)
        await trainer.send_weights(iter(now.items()), global_steps=steps)
        return list(await asyncio.gather(*waiting))

    for number in (1, 2, 3):
        found = asyncio.run(sync(10 * number if numbered else None))
        assert same(found[0], now)
        assert same(found[1], now if number == 1 else {"b": now["b"]})
        now = {"a": now["a"], **step({"b": now["b"]}, 0.05, number)}
    trainer.finalize()

    async def stopped() -> None:
        await trainer.send_weights(iter(now.items()), global_steps=90)
        async for _ in workers[1].receive_weights(global_steps=90):
            break

    asyncio.run(stopped())
    asyncio.run(trainer.send_weights(iter(now.items()), global_steps=91))
    assert same(asyncio.run(received(workers[1], 91)), now)  # everything after a load that was stopped


def test_a_version_that_does_not_come(engine: Any, tmp_path: Path) -> None:
    worker = engine(url=str(tmp_path), timeout=0.0)
    with pytest.raises(sp.ShrinkpointError, match="nothing has been published"):
        asyncio.run(received(worker, 1))
    sp.Publisher(tmp_path).publish(1, {"a": torch.ones(3)})
    with pytest.raises(sp.ShrinkpointError, match="the newest version is 1 after 0 s"):
        asyncio.run(received(worker, 2))
