"""`info` and `ls` on sharded checkpoints, single ranks, and deltas whose base is only kept for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import shrinkpoint as sp
from shrinkpoint.report.collect import collect
from shrinkpoint.trainers.dcp import Reader

from .test_cli import bad, good

GOLDEN = Path(__file__).parents[1] / "golden" / "folders" / "0.2.0"
DCP = GOLDEN / "dcp"
"""Checkpoints of two ranks (`step-1`, and its delta `step-2`), and of a rank that saved alone."""


def told(*words: Any) -> Any:
    return json.loads(good("info", *words, "--json"))


def test_each_rank_of_a_folder() -> None:
    ranks = told(DCP / "step-2")["ranks"]
    assert [(part["rank"], part["delta"], part["arrays"]) for part in ranks] == [(0, True, 2), (1, True, 2)]
    assert [[tuple(row["shape"]) for row in part["rows"]] for part in ranks] == [[(16, 40), (3,)], [(15, 40), (2,)]]
    lines = good("info", DCP / "step-2", "--sort", "bytes").splitlines()
    (base,) = (DCP / "step-1" / "data").glob("000000-*")
    assert lines[0].startswith(f"{DCP / 'step-2'}, rank 0: delta of {base.stem.removeprefix('000000-')}...")
    assert [line.split()[:2] for line in lines[5:]] == [
        ["rank", "path"],
        *([r, p] for p in ("model/w", "model/b") for r in "01"),
    ]


def test_one_rank() -> None:
    (part,) = told(DCP / "step-2", "--rank", 1, "--paths", "*/w")["ranks"]
    assert (part["rank"], [row["shape"] for row in part["rows"]]) == (1, [[15, 40]])
    bad(2, "--rank 7: its ranks are 0, 1", "info", DCP / "step-2", "--rank", 7)
    (alone,) = told(DCP / "alone")["ranks"]
    assert (alone["rank"], alone["delta"]) == (0, False)
    file = next((DCP / "step-1" / "data").glob("000001-*"))
    assert told(file)["rows"] == told(DCP / "step-1", "--rank", 1)["ranks"][0]["rows"]
    bad(2, "it is not sharded", "info", file, "--rank", 0)
    bad(2, "is a folder of one checkpoint, not a store", "info", DCP / "alone", "--step", 1)


def test_a_sharded_step_of_a_store() -> None:
    store = GOLDEN / "sharded"
    found = told(store)
    listed = json.loads(good("ls", store, "--json"))["steps"]
    assert found["step"] == listed[-1]["step"]
    assert [part["rank"] for part in found["ranks"]] == [0, 1]
    assert [part["delta"] for part in found["ranks"]] == [listed[-1]["delta"]] * 2
    assert "model/w" in {row["path"] for row in found["ranks"][1]["rows"]}
    first = listed[0]["step"]
    assert {part["delta"] for part in told(store, "--step", first)["ranks"]} == {False}
    assert {row["base"] for row in listed} == {first}


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_diff_joins_the_shards_of_a_step() -> None:
    store = sp.Store(GOLDEN / "sharded")
    first, last = store.steps()[0], store.steps()[-1]
    found = json.loads(good("diff", store.url, first, last, "--json"))
    states = [{"model": {"w": torch.zeros(31, 40)}} for _ in range(2)]
    for step, state in zip((first, last), states, strict=True):
        dcp.load(state, storage_reader=Reader(store, step), no_dist=True)
    old, new = (state["model"]["w"] for state in states)
    (row,) = [row for row in found["arrays"] if row["path"] == "model/w"]
    assert row["elements"] == old.numel()
    assert row["what"] == "changed"
    assert row["changed_share"] == pytest.approx((old != new).double().mean().item())
    assert row["relative_l2"] == pytest.approx(((new - old).double().norm() / old.double().norm()).item())
    assert found["new_nbytes"] == store.describe(last).stored_nbytes
    same = json.loads(good("diff", store.url, last, last, "--json"))
    assert {row["what"] for row in same["arrays"]} == {"same"}


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_report_joins_the_shards_of_a_step(tmp_path: Path) -> None:
    store = sp.Store(GOLDEN / "sharded")
    run = collect(store, name="ranks")
    assert [row.manifest for row in run.steps] == [store.describe(step) for step in store.steps()]
    assert [sum(row.parts.values()) for row in run.steps] == [row.manifest.stored_nbytes for row in run.steps]
    weights = {"model": {"w": torch.zeros(31, 40)}}
    dcp.load(weights, storage_reader=Reader(store, store.steps()[-1]), no_dist=True)
    (shown,) = [t for t in run.tensors if t.record.path == "model/w"]
    assert shown.record.spec.shape == (31, 40)
    w = weights["model"]["w"]
    assert (shown.histogram.low, shown.histogram.high) == (w.min().item(), w.max().item())
    assert sum(shown.histogram.counts) == w.numel()
    good("report", store.url, "--output", tmp_path / "report.html")
    assert "model/w" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("folder", "advice"),
    [
        (DCP, "choose a folder in it: alone, step-1, step-2"),
        (DCP / "step-1" / "data", f"it is a part of {DCP / 'step-1'}"),
    ],
)
def test_a_folder_next_to_a_checkpoint(folder: Path, advice: str) -> None:
    bad(1, advice, "info", folder)


def test_the_base_of_a_kept_delta(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "a", sp.Config(chain=sp.ChainPolicy(only_smaller=False)))
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype("f4")
    for step in (1, 2, 3):
        store.save(step, {"weight": weight * np.float32(1 + step * 1e-4)}, kinds={"weight": "linear"})
    kinds = [line.split("  ")[1:3] for line in good("ls", tmp_path / "a").splitlines()[1:4]]
    assert [" ".join(words).strip() for words in kinds] == ["1 base", "2 delta of 1", "3 delta of 1"]
    store.drop(1, 2)
    assert "delta of 1 (its file)" in good("ls", tmp_path / "a")
