"""The way of a state through `compress` leads through no more files than today."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import call_graph

MOST = {"as far as a codec": (25, 39), "with the codec of weights": (41, 114)}
"""Files entered, and returns to a file left before; lower them when the way becomes shorter."""


@pytest.mark.parametrize(("name", "behind"), [*zip(MOST, ({}, call_graph.WEIGHTS), strict=True)])
def test_the_way_of_a_state_gets_no_longer(name: str, behind: dict[str, str]) -> None:
    assert call_graph.Walk(behind).counts() == MOST[name], "more is worse; less is to be kept"


FILES = {
    "codec/compress.py": """
from .inputs import Inputs, unrelated
from .work import Base, Worker, helped

def compress(state, cfg):
    unrelated(cfg)
    inputs = Inputs.of(state)
    for part in inputs.parts:
        Worker(cfg).work(part)
    return helped(inputs)
""",
    "codec/inputs.py": """
from .work import helped

class Inputs:
    parts: list

    @staticmethod
    def of(state):
        return Inputs(read(helped(state)))

def read(state): ...
def unrelated(cfg): ...
""",
    "codec/work.py": """
class Base:
    def work(self, part): finish(part)

class Worker(Base): ...

def finish(part): ...
def helped(state): ...
""",
}


def test_calls_are_followed_with_what_comes_from_the_state(tmp_path: Path) -> None:
    (tmp_path / "codec").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    walk = call_graph.Walk({}, tmp_path)
    names = [step.split("/")[1] for step in walk.steps]
    assert names == [
        "compress.py:compress",
        "inputs.py:Inputs.of",
        "work.py:helped",
        "inputs.py:read",
        "work.py:Base.work",
        "work.py:finish",
    ]
    assert walk.counts() == (3, 2)
