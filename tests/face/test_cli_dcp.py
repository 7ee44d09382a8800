"""`shrinkpoint compress` on folders of the package's DCP writer, with shards and deltas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shrinkpoint as sp
from shrinkpoint.trainers.dcp import Reader, Writer

from .test_cli import bad, good, state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two saves: a base and a delta."""
    writer = Writer(cfg=sp.presets.lossless())
    for step in (1, 2):
        dcp.save(text_keys(step), storage_writer=writer, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    return tmp_path / "step-2"


def text_keys(step: int) -> dict[str, Any]:
    """Return a training state in which every key is text, as in DCP."""
    made = state(step)
    made["optimizer"]["state"] = {"fc.weight": made["optimizer"]["state"][0]}
    return made


def test_a_folder_of_our_own_writer_is_read_like_any_other(folder: Path, tmp_path: Path) -> None:
    good("compress", folder, tmp_path / "o.spt", "--preset", "lossless")
    good("restore", tmp_path / "o.spt", tmp_path / "o.pt")
    found = torch.load(tmp_path / "o.pt", weights_only=True)
    expected = text_keys(2)
    assert torch.equal(found["model"]["fc.weight"], expected["model"]["fc.weight"])
    assert torch.equal(
        found["optimizer"]["state"]["fc.weight"]["exp_avg"], expected["optimizer"]["state"]["fc.weight"]["exp_avg"]
    )
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert torch.equal(found["rng"][1], expected["rng"][1])
    assert (found["step"], found["name"]) == (2, "a run")


def test_what_is_wrong_with_it_is_told_plainly(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.spt"
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(metadata.replace(b'"world":1', b'"world":2'))
    bad(1, "the checksum does not match", "compress", folder, out)
    (folder / ".metadata").write_bytes(metadata[:40])
    bad(1, "no metadata of a shrinkpoint checkpoint|checksum", "compress", folder, out)
    (folder / ".metadata").write_bytes(metadata)
    base = folder / "data" / json.loads(metadata)["files"][0]["chain"][-1][0]
    kept = base.read_bytes()
    base.unlink()
    base.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    bad(1, f"rank 0: .*{base.name}|checksum", "compress", folder, out)
    base.unlink()
    bad(1, f"rank 0: its file .*{base.name} is gone", "compress", folder, out)
    assert not out.exists()


def test_shards_that_do_not_fill_their_tensors_are_refused(folder: Path, tmp_path: Path) -> None:
    """A folder with only one rank's shards is refused."""
    alone = tmp_path / "alone"
    writer = Writer(cfg=sp.presets.lossless())
    dcp.save({"weight": torch.zeros(4)}, storage_writer=writer, checkpoint_id=alone, no_dist=True)
    index = Reader(alone).read_metadata().storage_data
    (alone / ".metadata").write_bytes(replace(index, partial=True).to_bytes())
    bad(1, "do not cover their tensors", "compress", alone, tmp_path / "o.spt")
