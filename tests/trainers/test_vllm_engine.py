"""The engine for vLLM, against stand-ins with the interface of vLLM 0.33."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import shrinkpoint as sp
from shrinkpoint.codec.errors import CorruptDataError
from shrinkpoint.trainers.publishing import register_with_vllm
from shrinkpoint.trainers.publishing.layout import Version, version_name
from shrinkpoint.trainers.publishing.ranks import Counted

WEIGHTS = "vllm.distributed.weight_transfer"
LOADER = "vllm.model_executor.model_loader"


class Patch(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor | None = None


class Base:
    """Stand-in for vLLM's base class, which keeps the model and parses updates."""

    init_info_cls: Any
    update_info_cls: Any

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        self.model, self.device, self.model_config = model, device, vllm_config.model_config

    def update_weights(self, info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**info))  # type: ignore[attr-defined]


class Registry:
    """Stand-in for vLLM's factories, which import an engine when it is used."""

    def __init__(self) -> None:
        self.engines: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, engine: str) -> None:
        if name in self.engines:
            raise ValueError(f"{name} is already registered")
        self.engines[name] = module, engine

    def engine(self, name: str) -> Any:
        module, engine = self.engines[name]
        return getattr(importlib.import_module(module), engine)


class TrainerBase:
    """Stand-in for vLLM's trainer side."""

    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender


@dataclass
class TrainerInfo:
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class Rank(nn.Module):
    """A rank that holds its rows of q, k and v in one parameter, as vLLM does."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.fails = rank, False
        self.qkv = nn.Parameter(torch.zeros(24, 16, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, w in weights:
            i = "qkv".index(name)
            own = self.qkv.data[8 * i : 8 * i + 8]
            new = w[8 * self.rank : 8 * self.rank + 8]
            own.copy_(torch.where(new.isnan(), own, new) if self.patching else new)
            if self.fails:
                raise RuntimeError("out of memory")

    patching = False


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    log: list[str] = []

    def load_patches(model: Rank, patches: list[Patch]) -> None:
        log.append("patches")
        model.patching = True
        try:
            for patch in patches:
                assert patch.indices is not None
                whole = torch.full((patch.shape[0] * patch.shape[1],), float("nan"), dtype=patch.dtype)
                whole[patch.indices] = patch.values
                model.load_weights([(patch.name, whole.view(patch.shape))])
        finally:
            model.patching = False

    workers, trainers = Registry(), Registry()
    modules = {
        f"{WEIGHTS}.base": {
            "WeightTransferEngine": Base,
            "TrainerWeightTransferEngine": TrainerBase,
            "TrainerInitInfo": TrainerInfo,
            **dict.fromkeys(("WeightTransferInitInfo", "WeightTransferUpdateInfo"), object),
        },
        f"{WEIGHTS}.factory": {"WeightTransferEngineFactory": workers, "WeightTransferTrainerFactory": trainers},
        f"{LOADER}.checkpoint_weight_patch": {
            "CheckpointWeightPatch": Patch,
            "load_checkpoint_weight_patches": load_patches,
        },
        f"{LOADER}.reload": {
            "initialize_layerwise_reload": lambda _: log.append("begin"),
            "finalize_layerwise_reload": lambda *_: log.append("end"),
        },
    }
    for name in ("vllm", "vllm.distributed", WEIGHTS, "vllm.model_executor", LOADER, *modules):
        made = ModuleType(name)
        made.__path__ = []
        for key, value in modules.get(name, {}).items():
            setattr(made, key, value)
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.delitem(sys.modules, "shrinkpoint.trainers.publishing.vllm_engine", raising=False)
    register_with_vllm()
    register_with_vllm()  # vLLM may load plugins again
    assert "shrinkpoint.trainers.publishing.vllm_engine" not in sys.modules
    yield SimpleNamespace(log=log, engine=workers.engine("shrinkpoint"), trainer=trainers.engine("shrinkpoint"))
    sys.modules.pop("shrinkpoint.trainers.publishing.vllm_engine", None)


def engine_of(vllm: SimpleNamespace, url: Path, rank: int, quantization: str | None = None) -> Any:
    config = SimpleNamespace(model_config=SimpleNamespace(quantization=quantization))
    engine = vllm.engine(None, config, torch.device("cpu"), Rank(rank))
    engine.init_transfer_engine(engine.init_info_cls(url=str(url)))
    return engine


def holds(engine: Any, state: dict[str, torch.Tensor]) -> bool:
    rank = engine.model.rank
    expected = torch.cat([state[name][8 * rank : 8 * rank + 8] for name in "qkv"])
    return torch.equal(engine.model.qkv.data.view(torch.int16), expected.view(torch.int16))


def moved(state: dict[str, torch.Tensor], value: float = 1.0) -> dict[str, torch.Tensor]:
    made = {name: w.clone() for name, w in state.items()}
    for w in made.values():
        w.view(-1)[::50] = value
    return made


@pytest.fixture
def start() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(16, 16, generator=g).bfloat16() for name in "qkv"}


def test_ranks_reach_the_version_that_is_given(
    vllm: SimpleNamespace, tmp_path: Path, start: dict[str, torch.Tensor]
) -> None:
    publisher, states = sp.Publisher(tmp_path), {1: start}
    publisher.publish(1, start)
    engines = [engine_of(vllm, tmp_path, rank) for rank in range(2)]
    for version, value in ((2, 1.0), (3, -0.0), (4, float("nan")), (5, 2.0)):
        states[version] = moved(states[version - 1], value)
        publisher.publish(version, states[version])
    expected = {1: ["begin", "end"], 2: ["patches"], 3: ["patches"], 4: ["begin", "end"], 5: ["patches"]}
    for version, calls in expected.items():
        for engine in engines:
            vllm.log.clear()
            engine.start_weight_update()
            engine.update_weights({"version": version})
            engine.finish_weight_update()
            assert holds(engine, states[version])
            assert vllm.log == calls  # patches cannot say NaN
    with pytest.raises(CorruptDataError):
        engines[0].update_weights({"version": 6})
    assert holds(engines[0], states[5])
    states[6] = moved(states[5], 3.0)
    publisher.publish(6, states[6])
    vllm.log.clear()
    engines[0].update_weights({"version": 6})
    assert vllm.log == ["patches"]
    assert holds(engines[0], states[6])


def test_quantized_models_load_everything(
    vllm: SimpleNamespace, tmp_path: Path, start: dict[str, torch.Tensor]
) -> None:
    publisher = sp.Publisher(tmp_path)
    publisher.publish(1, start)
    engine = engine_of(vllm, tmp_path, 0, quantization="fp8")
    engine.update_weights({"version": 1})
    publisher.publish(2, moved(start))
    engine.update_weights({"version": 2})
    assert vllm.log == ["begin", "end"] * 2


@pytest.mark.parametrize("when", ["patches", "whole", "damaged copy"])
def test_after_a_failure_everything_is_loaded(
    vllm: SimpleNamespace, tmp_path: Path, start: dict[str, torch.Tensor], when: str
) -> None:
    publisher = sp.Publisher(tmp_path)
    publisher.publish(1, start)
    engine = engine_of(vllm, tmp_path, 1)
    if when != "whole":
        engine.update_weights({"version": 1})
    now = moved(start)
    publisher.publish(2, now)
    if when == "damaged copy":
        engine._copy.tensors["v"].data[:] = now["v"]  # the change to v is not found against this
    else:
        engine.model.fails = True
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.update_weights({"version": 2})
        engine.model.fails = False
    vllm.log.clear()
    engine.update_weights({"version": 2})
    assert vllm.log == ["begin", "end"]
    assert holds(engine, now)
    engine.shutdown()
    with pytest.raises(RuntimeError, match="comes before"):
        engine.update_weights({"version": 2})


@dataclass
class Meta:
    """Stand-in for `ParamMeta`."""

    name: str
    shape: tuple[int, ...]
    owners: tuple[int, ...] = (0, 1)
    mesh_shape: tuple[int, ...] = (2,)
    placements: tuple[Any, ...] | None = None


class Source:
    """Stand-in for a `WeightSource` of two ranks: q is split, k is a copy, v is whole."""

    def __init__(self, rank: int, state: dict[str, torch.Tensor]) -> None:
        self.rank, self.state = rank, state
        split, copy = SimpleNamespace(dim=0), SimpleNamespace()
        self.metadata = [Meta("q", (16, 16), placements=(split,)), Meta("k", (16, 16), placements=(copy,))]
        self.metadata.append(Meta("v", (16, 16), owners=(0,), mesh_shape=(1,)))

    def implements_iter_local(self) -> bool:
        return True

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "q", self.state["q"][8 * self.rank : 8 * self.rank + 8]
        yield "k", self.state["k"]
        if self.rank == 0:
            yield "v", self.state["v"]


class Client:
    """Stand-in for the control calls of two workers."""

    def __init__(self, engines: list[Any], log: list[str]) -> None:
        self.engines, self.log = engines, log

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.init_transfer_engine(engine.init_info_cls(**info))

    def start_weight_update(self) -> None:
        self.log.append("start")

    def update_weights(self, info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.update_weights(info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.log.append("finish")


def test_trainer_ranks_send_their_shards(vllm: SimpleNamespace, tmp_path: Path, start: dict[str, torch.Tensor]) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(quantization=None))
    engines = [vllm.engine(None, config, torch.device("cpu"), Rank(rank)) for rank in range(2)]
    now, client, trainers = start, Client(engines, vllm.log), []
    for rank in range(2):
        info = vllm.trainer.init_info_cls(str(tmp_path), {"ranks": Counted(rank, 2, "run")}, rank=rank)
        trainers.append(vllm.trainer.trainer_init(info, client=client, source=Source(rank, now)))
    for version in (1, 2):
        for trainer in trainers:
            trainer.source.state = now
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda trainer: trainer.send_weights(), trainers))
        assert all(holds(engine, now) for engine in engines)
        files = Version.from_bytes((tmp_path / version_name(version)).read_bytes(), version).files
        assert [[shard.label for shard in file.shards] for file in files] == [
            ["q[0:8, 0:16]", "k", "v"],
            ["q[8:16, 0:16]"],
        ]
        now = moved(now, float(version))
    assert vllm.log == ["start", "begin", "end", "begin", "end", "finish", "start", "patches", "patches", "finish"]


def test_the_entry_point_is_declared() -> None:
    toml = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    ((name, value),) = toml["project"]["entry-points"]["vllm.general_plugins"].items()
    assert EntryPoint(name, value, "vllm.general_plugins").load() is register_with_vllm


def test_the_slices_of_a_mesh(vllm: SimpleNamespace) -> None:
    """Both axes of a mesh may split one dimension, the outer one first, as `torch.chunk` does."""
    module = sys.modules["shrinkpoint.trainers.publishing.vllm_engine"]
    whole = torch.arange(7 * 10).reshape(7, 10)
    for dims in ((0, 1), (1, 0), (1, 1), (0, None), (None, 1)):
        placements = tuple(SimpleNamespace() if dim is None else SimpleNamespace(dim=dim) for dim in dims)
        meta, found = Meta("w", (7, 10), (4, 0, 3, 1, 2, 5), (2, 3), placements), []
        for number, rank in enumerate(meta.owners):
            part, copies = whole, False
            for dim, size, at in zip(dims, (2, 3), divmod(number, 3), strict=True):
                parts = None if dim is None else part.chunk(size, dim)
                part = part if parts is None else parts[at] if at < len(parts) else part[:0]
                copies |= dim is None and at > 0
            box = module._box_of(meta, rank)
            assert (box is None) == (copies or not part.numel())
            if box is not None:
                assert torch.equal(whole[box], part)
                found.append(part.numel())
        assert sum(found) == whole.numel()
