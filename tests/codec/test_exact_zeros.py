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


NARROW = {
    "normal": lambda: torch.randn(500, 64),
    "eighths": lambda: torch.randint(-40, 41, (500, 64)) / 8 + 0.01,
    "integers": lambda: torch.randint(1, 10, (500, 64)).float(),
    "heavy": lambda: torch.distributions.StudentT(1.0).sample((500, 64)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", NARROW)
def test_a_padding_row_stays_zero_whatever_the_others_are(name: str, dtype: torch.dtype) -> None:
    """Neither the best codebook of 16-bit values nor a rate moves zeros."""
    torch.manual_seed(0)
    configs = [
        sp.Config([("embedding", sp.Quantize(bins=254))]),
        sp.Config(max_rel_error=0.05),
        sp.presets.precise(),
        sp.Config(rate=1.0),
    ]
    for cfg in configs:
        weight, prev = NARROW[name]().to(dtype), None
        weight[0] = 0.0
        for _ in range(2):
            prev = sp.compress({"emb.weight": weight}, prev, cfg, kinds={"emb.weight": "embedding"})
            assert bool((sp.decompress(prev)["emb.weight"][0] == 0).all())


def test_a_zero_that_a_frozen_codebook_has_no_entry_for_stays_zero() -> None:
    torch.manual_seed(0)
    weight = 1 + torch.rand(500, 64)
    base = sp.compress({"emb.weight": weight}, kinds={"emb.weight": "embedding"})
    weight[0, 0] = 0.0
    cfg = sp.Config([("embedding", sp.Quantize(trigger=1e9))])
    delta = sp.compress({"emb.weight": weight}, base, cfg, kinds={"emb.weight": "embedding"})
    assert float(sp.decompress(delta)["emb.weight"][0, 0]) == 0.0


def test_inshrinkerator_needs_a_rule_for_a_padding_row() -> None:
    published = sp.presets.inshrinkerator()
    assert zeros(published) == [0, 0, 0]
    rules = (sp.Rule("emb.weight", sp.Exact()), *published.rules)
    assert zeros(dataclasses.replace(published, rules=rules)) == [64, 64, 64]
    assert "padding_idx" in str(sp.presets.inshrinkerator.__doc__)
