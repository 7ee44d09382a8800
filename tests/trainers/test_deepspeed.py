"""DeepSpeed's ZeRO on two ranks: killed at random, resumed with the same losses, to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shrinkpoint as sp

pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install deepspeed")
pytest.importorskip("transformers", reason="transformers is not installed; `make frameworks` has it")

from ..forking import Script
from .killing import kill_together, resumed_as_if_never_killed

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
RUN = Path(__file__).with_name("deepspeed_run.py")


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with Script(RUN) as found:
        yield found


@pytest.mark.parametrize(
    "how",
    [
        "plain 0 bf16",
        "plain 1",
        "plain 2 bf16",
        "plain 3 bf16",
        "accelerate 2",
        "accelerate 3 background",
        "trainer 1 background",
        "trainer 3",
    ],
)
def test_killed_ranks_go_on_where_they_were(script: Script, tmp_path: Path, how: str) -> None:
    rng, arguments, killed = random.Random(how), how.split(), tmp_path / "killed"
    script.together(2, killed, 4, *arguments)  # there is something to resume from
    for kill in range(2):
        kill_together(script, 2, killed, 4000, *arguments, after=rng.uniform(0, 1), alone=kill == 0)
    resumed_as_if_never_killed(script, tmp_path, *arguments)
    assert all(len(torch.load(killed / rank / "end.pt")) >= 6 for rank in "01")
    (folder,) = {p.parent for p in killed.glob("*/steps")}
    store = sp.Store(folder)
    assert store.verify() == {}
    assert all(store.describe(step).shards for step in store.steps())
    assert how.startswith("plain") or len(store.steps()) <= 4


@pytest.fixture(scope="module")
def facts() -> Iterator[Script]:
    with Script(RUN.with_name("deepspeed_facts.py")) as found:
        yield found


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "what", ["only_moments_of_matrices_change", "expanded_files_are_raw", "refusals_leave_the_checkpoint_before"]
)
def test_what_an_engine_saves(facts: Script, tmp_path: Path, what: str, stage: int) -> None:
    facts.together(2, tmp_path, what, stage)


def test_another_number_of_ranks_is_refused(facts: Script, tmp_path: Path) -> None:
    facts.together(2, tmp_path, "saved", 2)
    facts.together(1, tmp_path, "another_number_is_refused", 2)
