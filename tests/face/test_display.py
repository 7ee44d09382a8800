"""How objects show themselves in a terminal and in a notebook."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

import shrinkpoint as sp

STATE = {f"layer{i}.weight": np.random.default_rng(i).normal(size=(64, 64)).astype("f4") for i in range(3)}
KINDS = dict.fromkeys(STATE, "linear")


class Tags(HTMLParser):
    """The tags and the text of a fragment; unclosed ones fail."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        assert not any("color" in (value or "") for _, value in attrs)  # the notebook's, light or dark

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def test_a_summary_prints_as_a_table_and_is_a_list() -> None:
    rows = sp.compress(STATE, kinds=KINDS).summary()
    assert isinstance(rows, list)
    lines = repr(rows).splitlines()
    assert lines[0].split() == ["path", "codec", "bits", "relative", "L2", "why"]
    assert len(lines) == 4
    assert max(map(len, lines)) <= 100
    assert re.match(r"layer0\.weight +quantize +\d\.\d\d +0\.0\d+ +kinds", lines[1])
    assert rows[0].path == "layer0.weight"
    assert [row["bits_per_element"] for row in rows] == [row.bits_per_element for row in rows]
    assert Tags(rows._repr_html_()).text.count("quantize") == 3


def test_the_error_is_comparable_between_arrays() -> None:
    """Exact arrays say so; a bound of each element is shown as one of the relative L2 error."""
    state = {**STATE, "bias": np.ones(3, "f4")}
    moments = {"layer1.weight": sp.LogBuckets(alpha=0.25)}
    rows = sp.compress(state, cfg=sp.Config([*moments.items(), ("*", sp.Exact())])).summary()
    shown = [line.split(maxsplit=3)[3] for line in repr(rows).splitlines()[1:]]
    assert shown[0].startswith("exact ")
    assert re.match(r"<= 0\.\d+ ", shown[1])
    assert shown[3].startswith("exact ")


def test_a_slice_of_a_summary_prints_as_a_table() -> None:
    rows = sp.compress(STATE, kinds=KINDS).summary()
    assert repr(rows[:2]).splitlines() == repr(rows).splitlines()[:3]
    assert [row.path for row in rows[::-1]] == ["layer2.weight", "layer1.weight", "layer0.weight"]
    assert repr(rows[1:1]).split() == ["path", "codec", "bits", "relative", "L2", "why"]
    assert rows[-1].path == "layer2.weight"


def test_a_long_summary_is_cut_with_a_count() -> None:
    rows = sp.compress({str(i): np.zeros(3) for i in range(100)}).summary()
    assert len(rows) == 100
    assert repr(rows).splitlines()[-1].startswith("... 60 more")


def test_objects_in_a_notebook(tmp_path: Path) -> None:
    store = sp.Store(tmp_path, "exact_weights")
    ckpt = store.save(3, STATE, kinds=KINDS).checkpoint
    with sp.Saver(store, mode="thread") as saver:
        result = saver.save(4, STATE, kinds=KINDS).result()
    shown = {
        name: Tags(x._repr_html_()).text for name, x in {"c": ckpt, "s": store, "g": store.cfg, "r": result}.items()
    }
    assert "base" in shown["c"]
    assert "49.2 kB" in shown["c"]
    assert "newest 4" in shown["s"]
    assert "Exact()" in shown["g"]
    assert "durable after" in shown["r"]


def test_names_from_files_cannot_act() -> None:
    name = "<script>alert(1)</script>\x1b[31m"
    rows = sp.compress({name: np.zeros(3)}).summary()
    assert "\x1b" not in repr(rows)
    assert "script" not in Tags(rows._repr_html_()).tags
    assert "script" not in Tags(sp.Config([("<script>*", sp.Exact())])._repr_html_()).tags


def test_long_paths_that_differ_at_their_end_stay_apart() -> None:
    state = {f"{'block/' * 20}{end}": np.zeros(3) for end in ("left", "right")}
    lines = repr(sp.compress(state).summary()).splitlines()
    assert lines[1] != lines[2]
    assert max(map(len, lines)) <= 100
    assert "left" in lines[1]
    assert "right" in lines[2]
