"""Long lists and tuples of Python numbers: types and bits, cost, deltas, and files with false counts."""

from __future__ import annotations

import json
import random
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.format import container
from shrinkpoint.codec.state.leaves import LONG

from .common import difference

NAN = struct.unpack(">d", bytes.fromhex("7ff4dead0000beef"))[0]
LISTS: dict[str, Any] = {
    "integers": list(range(0, 7 * LONG, 7)),
    "floats": [0.1 * n for n in range(LONG)],
    "bools": [True, False] * LONG,
    "tuple": tuple(range(LONG)),
    "limits": [-(2**63), 2**63 - 1] * LONG,
    "unsigned": [2**64 - 1, 0] * LONG,
    "beyond": [2**64, 1] * LONG,
    "both signs": [2**63, -1] * LONG,
    "odd": [NAN, -0.0, float("inf"), -float("inf"), 5e-324] * LONG,
    "mixed": [1, 1.0, True, None] * LONG,
    "one float": [*range(LONG), 1.0],
    "one integer": [*([0.5] * LONG), 1],
    "nested": [[1.0] * LONG, (2,) * LONG],
    "random": random.Random(0).getstate(),
    "short": list(range(LONG - 1)),
    "NumPy": [np.float64(1.0)] * LONG,
    "empty": [],
}


@pytest.mark.parametrize("name", LISTS)
def test_the_same_types_and_bits_come_back(name: str) -> None:
    state = {"w": torch.ones(3), "loader": {"kept": LISTS[name]}}
    base = sp.compress(state)
    delta = sp.compress(state, base)
    read = sp.Checkpoint.from_bytes(delta.to_bytes(), prev=sp.Checkpoint.from_bytes(base.to_bytes()))
    for back in (sp.decompress(base), sp.decompress(read)):
        assert difference(back["loader"]["kept"], LISTS[name]) == ""


def test_a_saver_keeps_types_and_bits(tmp_path: Path) -> None:
    store = sp.Store(str(tmp_path))
    with sp.Saver(store) as saver:
        saver.save(1, LISTS)
    assert difference(store.load(), LISTS) == ""


def test_a_list_is_chosen_by_its_path(tmp_path: Path) -> None:
    store = sp.Store(str(tmp_path))
    store.save(1, {"w": torch.ones(3), "order": LISTS["integers"]})
    for paths in (["ord*"], ["order"], ["order/*"], ["order/3"], ["order/3", "order/7"]):
        assert store.load(1, paths=paths) == {"order": LISTS["integers"]}
    with pytest.raises(sp.BadArgumentError, match="no path matches 'w/0'"):
        store.load(1, paths=["w/0"])


def test_no_rule_changes_a_list_and_no_optimizer_entry_is_one() -> None:
    state = {
        "model": {"weight": [0.1 * n for n in range(4096)], "fc.weight": torch.randn(64, 64)},
        "optimizer": {"state": {0: {"exp_avg": [0.3] * 4096}}, "param_groups": [{"params": list(range(500))}]},
    }
    for cfg in (sp.Config(), sp.Config([("*", sp.Quantize())])):
        back = sp.decompress(sp.compress(state, cfg=cfg, kinds={"model/fc.weight": "linear"}))
        assert back["optimizer"] == state["optimizer"]
        assert back["model"]["weight"] == state["model"]["weight"]


def test_an_optimizer_of_many_parameters_keeps_its_evidence() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(LONG)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    why = {row.path: row.why for row in sp.compress(state).summary()}
    assert why["model/3.weight"] == "structure: an optimizer entry belongs to it"


def test_long_lists_take_little_time_and_unchanged_ones_few_bytes() -> None:
    numbers = torch.randperm(200_000, generator=torch.Generator().manual_seed(0)).tolist()
    dicts = [{"step": n, "loss": 1 / (n + 1)} for n in range(20_000)]
    cfg = sp.presets.lossless()
    sp.decompress(sp.compress({"order": numbers}, cfg=cfg))  # compiles
    for state, most in (({"order": numbers}, 450_000), ({"history": dicts}, 300_000)):
        seconds = []
        for _ in range(3):  # other processes on the machine slow some of them down
            begin = time.process_time()
            base = sp.compress(state, cfg=cfg)
            assert sp.decompress(sp.Checkpoint.from_bytes(base.to_bytes())) == state
            seconds.append(time.process_time() - begin)
        assert min(seconds) < 1.0
        assert base.nbytes < most
    order = sp.compress({"order": numbers}, cfg=cfg)
    assert sp.compress({"order": numbers}, order, cfg).nbytes < 300


def test_out_does_not_need_lists() -> None:
    state = {"w": torch.arange(5), "order": list(range(LONG))}
    out = {"w": torch.zeros(5, dtype=torch.int64)}
    back = sp.decompress(sp.compress(state), out=out)
    assert back["order"] == state["order"]
    assert back["w"] is out["w"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"s": [2, LONG // 2]}, "a list of 'int64' with the shape"),
        ({"s": []}, "a list of 'int64' with the shape"),
        ({"d": "float32"}, "a list of 'float32'"),
        ({"s": [1 << 44]}, "bytes, this machine or container has"),
    ],
)
def test_a_false_list_is_refused_before_memory_is_allocated(change: dict[str, Any], message: str) -> None:
    ckpt = sp.compress({"order": [7] * LONG})
    header = json.loads(json.dumps(ckpt.header))
    header["arrays"] = [{**header["arrays"][0], **change}]
    header["raw"] = 8 * int(np.prod(header["arrays"][0]["s"])) if "s" in change else 4 * LONG
    pieces = [bytes(piece) for piece in ckpt.pieces_of(ckpt.records[0])]
    with pytest.raises(sp.CorruptDataError, match=message):
        sp.decompress(sp.Checkpoint.from_bytes(container.write(header, pieces)[0]))
