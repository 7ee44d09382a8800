"""Exact zeros, such as the padding row of an embedding: which presets keep them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import shrinkpoint as sp

KEEPING = {
    "default": sp.Config(),
    "error target": sp.Config(max_rel_error=0.05),
    "rate": sp.Config(rate=0.002),
    "exact_weights": sp.presets.exact_weights(),
    "precise": sp.presets.precise(),
    "compact": sp.presets.compact(),
    "lc_checkpoint": sp.presets.lc_checkpoint(),
    "check_n_run": sp.presets.check_n_run(),
    "bitsnap": sp.presets.bitsnap(),
}


def zeros(cfg: sp.Config) -> list[int]:
    """Return how many zeros of a padding row of 64 are kept, in a base and in two deltas."""
    weight = torch.nn.Embedding(500, 64, padding_idx=0).weight.detach()
    prev, kept = None, []
    for _ in range(3):
        prev = sp.compress({"emb.weight": weight}, prev, cfg, kinds={"emb.weight": "embedding"})
        kept.append(int((sp.decompress(prev)["emb.weight"][0] == 0).sum()))
        weight = weight * (1 + 0.01 * torch.randn_like(weight))
    return kept


@pytest.mark.parametrize("name", KEEPING)
def test_a_padding_row_stays_zero(name: str) -> None:
    assert zeros(KEEPING[name]) == [64, 64, 64]


def test_inshrinkerator_needs_a_rule_for_a_padding_row() -> None:
    published = sp.presets.inshrinkerator()
    assert zeros(published) == [0, 0, 0]
    rules = (sp.Rule("emb.weight", sp.Exact()), *published.rules)
    assert zeros(dataclasses.replace(published, rules=rules)) == [64, 64, 64]
    assert "padding_idx" in str(sp.presets.inshrinkerator.__doc__)
