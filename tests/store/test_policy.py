"""Policies that decide whether the next checkpoint is a base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec import plan
from shrinkpoint.codec.compress import compress_inputs
from shrinkpoint.codec.state import tree
from shrinkpoint.store import session as module
from shrinkpoint.store.chain import Size, is_pointless, wants_base
from shrinkpoint.store.manifest import Manifest
from tests.store.common import lossless


def manifest(base: int, sizes: list[int]) -> Manifest:
    """Return the last manifest of a base and deltas of these sizes."""
    return Manifest(
        9,
        "",
        "",
        "",
        sizes[-1] if sizes else base,
        10,
        (),
        0,
        since_base=len(sizes),
        base_nbytes=base,
        spent=sum(sizes),
    )


@given(st.integers(1, 100), st.lists(st.integers(1, 150), max_size=12))
def test_the_size_predictor(base: int, sizes: list[int]) -> None:
    """The size predictor follows the paper: F_c = 1 + S_1 + ... + S_i against I_c = (i + 1) S_i."""
    policy = sp.ChainPolicy(None, "base", predictor="size")
    shares = [size / base for size in sizes]
    expected = bool(shares) and 1 + sum(shares) <= (len(shares) + 1) * shares[-1] + 1e-9
    assert wants_base(policy, manifest(base, sizes), 99.0) == expected


def test_growing_deltas_are_cut_off(tmp_path: Path) -> None:
    """Growing deltas against the base end where the rule's sum says."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(40_000)
    cfg = lossless(against="base", predictor="size")
    store = sp.Store(tmp_path, cfg)
    sizes: list[float] = []
    for step in range(14):
        saved = store.save(step, {"weight": weights})
        weights = weights.copy()
        weights[2000 * step : 2000 * (step + 1)] = rng.standard_normal(2000)
        if not saved.is_delta and step:
            break
        sizes.append(saved.nbytes / sp.Store(tmp_path).describe(0).nbytes)
    deltas = sizes[1:]
    assert 3 < len(deltas) < 13
    for i in range(1, len(deltas) + 1):
        assert (1 + sum(deltas[:i]) <= (i + 1) * deltas[i - 1]) == (i == len(deltas))
    # The same rule goes on in another process.
    other = sp.Store(tmp_path, cfg)
    other.load(step - 1, count=False)
    assert not other.save(99, {"weight": weights}).is_delta


@pytest.mark.parametrize(("bound", "period"), [(1, 1), (2, 2), (3.5, 3), (5, 5)])
def test_the_restore_cost(bound: float, period: int, tmp_path: Path) -> None:
    """Each exact delta counts as one whole decode in the restore cost."""
    store = sp.Store(tmp_path, lossless(max_restore_cost=bound))
    saved = [store.save(step, {"weight": np.arange(3000.0) + step}) for step in range(12)]
    assert [s.is_delta for s in saved] == [step % period != 0 for step in range(12)]
    assert max(store.describe(step).restore_cost for step in store.steps()) == period
    assert store.describe(0).restore_cost == 1.0


def test_no_rule_at_all(tmp_path: Path) -> None:
    store = sp.Store(tmp_path, lossless())
    saved = [store.save(step, {"weight": np.arange(50) + step}) for step in range(40)]
    assert [s.is_delta for s in saved] == [False] + [True] * 39


@pytest.mark.filterwarnings("ignore::shrinkpoint.codec.plan.UnknownArraysWarning")
@pytest.mark.parametrize("cfg", [lossless(), sp.Config(chain=sp.ChainPolicy(None, "base"))], ids=["exact", "default"])
def test_a_delta_that_spares_nothing_is_a_base(cfg: sp.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    store = sp.Store(f"memory://pointless-{cfg.chain.against}", cfg)
    redrawn = {2, 5}
    made, flattened, gathered = [], [], []
    monkeypatch.setattr(module, "compress_inputs", lambda *a, **k: made.append(compress_inputs(*a, **k)) or made[-1])
    flatten, gather = tree.flatten, plan.gather
    monkeypatch.setattr(tree, "flatten", lambda *a, **k: flattened.append(1) or flatten(*a, **k))
    monkeypatch.setattr(plan, "gather", lambda *a, **k: gathered.append(1) or gather(*a, **k))
    rng = np.random.default_rng(0)
    saved = []
    for step in range(8):
        if not step or step in redrawn:
            w = rng.standard_normal((500, 600)).astype(np.float32)
        w = w.copy()
        w[step] += 0.1
        saved.append(store.save(step, {"weight": w, "step": step}))
    assert [not s.is_delta for s in saved] == [step in {0, *redrawn} for step in range(8)]
    # Only where it was in doubt was the state compressed twice.
    assert len(made) == 8 + len(redrawn)
    # The base uses the arrays and the evidence of the delta.
    assert len(flattened) == len(gathered) == 8
    for step in range(8):
        assert sp.Store(store.url).load(step)["step"] == step


def test_a_delta_may_be_as_large_as_it_is_where_that_is_asked() -> None:
    store = sp.Store("memory://as-large", lossless(only_smaller=False))
    rng = np.random.default_rng(0)
    saved = [store.save(step, {"weight": rng.standard_normal(100_000)}) for step in range(3)]
    assert [s.is_delta for s in saved] == [False, True, True]


def test_a_state_that_grew_is_no_reason_for_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deltas of a state that grew stay deltas if they are smaller than a base."""
    made = []
    monkeypatch.setattr(module, "compress_inputs", lambda *a, **k: made.append(compress_inputs(*a, **k)) or made[-1])
    store = sp.Store("memory://grown", lossless(against="base"))
    rng = np.random.default_rng(0)
    w = rng.standard_normal(50_000).astype(np.float32)
    assert not store.save(0, {"weight": w}).is_delta
    for step in range(1, 6):
        moments = {k: rng.standard_normal(50_000).astype(np.float32) for k in "abc"}
        assert store.save(step, {"weight": w, **moments}).is_delta
    assert len(made) == 6


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(1, 10**9))
def test_what_is_pointless(stored: int, base: int, raw: int) -> None:
    assert is_pointless(Size(stored, raw), Size(base, raw)) == (stored >= max(0.99 * base, 65536))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("predictor", v) for v in ("sizes", 1, True, [])],
        *[("only_smaller", v) for v in (None, 1, "no")],
        *[("max_restore_cost", v) for v in (0.5, 0, -1, float("nan"), "3", True, 2e6)],
    ],
)
def test_policies_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(sp.BadArgumentError, match=name):
        sp.ChainPolicy(**{name: value})


def test_policies_in_json() -> None:
    for policy in (sp.ChainPolicy(None, "base", "size", 2.5, only_smaller=False), sp.ChainPolicy()):
        cfg = sp.Config(chain=policy)
        assert sp.Config.from_json(cfg.to_json()) == cfg
