"""Tensor subclasses made of plain tensors: exact, never lossy, never imported by a file."""

from __future__ import annotations

import enum
import sys
from typing import Any

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.state.tree import Wrapper

from ..golden.subclass import Coded, coded
from .common import difference


class Colour(enum.Enum):
    """An enum, which a context may hold and a file cannot."""

    RED = 1


def state(t: int) -> dict[str, Any]:
    """Return a state with low-bit moments, low-bit weights and plain weights."""
    w = torch.randn(64, 100, generator=torch.Generator().manual_seed(1)) * (1 + 1e-4 * t)
    return {
        "model": {"weight": w, "low": coded(t)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(t)), "exp_avg": coded(t + 1), "exp_avg_sq": coded(9)}}},
    }


@pytest.mark.parametrize("cfg", [sp.Config(), sp.Config([("*", sp.Quantize(bins=4))]), sp.presets.inshrinkerator()])
def test_inner_tensors_come_back_to_the_bit_whatever_the_rules(cfg: sp.Config) -> None:
    prev = read = None
    for t in range(3):
        prev = sp.compress(state(t), prev, cfg, kinds={"model/weight": "linear"})
        read = sp.Checkpoint.from_bytes(prev.to_bytes(), read)
        for ckpt in (prev, read):
            found = sp.decompress(ckpt)
            for ours, theirs in (
                (found["model"]["low"], coded(t)),
                (found["optimizer"]["state"][0]["exp_avg"], coded(t + 1)),
            ):
                assert type(ours) is Coded
                assert ours.context == theirs.context
                assert difference(ours, theirs) == ""
    assert prev is not None
    assert prev.is_delta
    rows = {row.path: row for row in prev.summary()}
    assert rows["optimizer/state/0/exp_avg_sq/tensors/codes"].stored_bytes < 20
    assert all(row.error == 0 for path, row in rows.items() if "/tensors/" in path)


def test_a_file_names_a_class_and_does_not_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = sp.compress(state(0), kinds={"model/weight": "linear"}).to_bytes()
    monkeypatch.delitem(sys.modules, Coded.__module__)
    with pytest.raises(sp.UnsupportedLeafError, match=r"model/low: .*Coded of .*subclass is not known here; import it"):
        sp.decompress(sp.Checkpoint.from_bytes(blob))
    assert Coded.__module__ not in sys.modules


@pytest.mark.parametrize(
    "name", ["os:system", "torch:Tensor", "builtins:dict", "no.such:Thing", "", ":", "sys:modules"]
)
def test_only_tensors_that_say_how_they_are_built(name: str) -> None:
    parts = {"class": name, "tensors": {}, "context": None, "size": [], "stride": []}
    ckpt = sp.compress({"x": Wrapper(parts)})
    with pytest.raises(sp.UnsupportedLeafError, match="not known here"):
        sp.decompress(sp.Checkpoint.from_bytes(ckpt.to_bytes()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("class", 3),
        ("tensors", [1]),
        ("tensors", {"codes": 1, "scale": 2}),
        ("size", 3),
        ("stride", [1.5]),
        ("context", {"dtype": "load"}),
        ("context", {"dtype": 1}),
        ("context", {"device": "nowhere"}),
        ("context", {"dict": 3}),
        ("context", {"dict": [[[1], 2]]}),
        ("context", {"size": ["a"]}),
        ("context", {"other": 1}),
        ("context", {}),
    ],
)
def test_parts_that_are_none(key: str, value: Any) -> None:
    x = coded(0)
    parts = Wrapper(
        {
            "class": f"{Coded.__module__}:Coded",
            "tensors": {"codes": x.codes, "scale": x.scale},
            "context": None,
            "size": [8, 600],
            "stride": [600, 1],
        }
    )
    assert type(sp.decompress(sp.compress({"x": parts}))["x"]) is Coded
    with pytest.raises((sp.CorruptDataError, sp.UnsupportedLeafError), match=r"^x: "):
        sp.decompress(sp.compress({"x": Wrapper({**parts, key: value})}))


def test_what_the_class_refuses_is_an_error_with_its_path() -> None:
    parts = {"class": f"{Coded.__module__}:Coded", "tensors": {}, "context": None, "size": [1], "stride": [1]}
    with pytest.raises(sp.UnsupportedLeafError, match=r"^a/0: Coded cannot be built from its parts: "):
        sp.decompress(sp.compress({"a": [Wrapper(parts)]}))


def test_a_context_that_needs_pickle_is_refused() -> None:
    x = coded(0)
    with pytest.raises(sp.UnsupportedLeafError, match=r"^m/0: the context of the tensor subclass Coded holds a Colour"):
        sp.compress({"m": [Coded(x.codes, x.scale, (1, [Colour.RED]))]})


def test_some_paths_of_a_subclass(tmp_path: Any) -> None:
    store = sp.Store(tmp_path)
    store.save(0, state(0), kinds={"model/weight": "linear"})
    assert torch.equal(store.load(0)["model"]["low"].codes, coded(0).codes)
    whole = store.load(0, paths=["optimizer/state/0/exp_avg/*"])
    assert type(whole["optimizer"]["state"][0]["exp_avg"]) is Coded
    part = store.load(0, paths=["*/scale"])
    assert type(part["model"]["low"]) is Wrapper
    assert torch.equal(part["model"]["low"]["tensors"]["scale"], coded(0).scale)
