"""Presets of published systems have their papers' parameters and coders."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import shrinkpoint as sp
from shrinkpoint.codec import entropy


def test_presets_have_the_parameters_of_their_papers() -> None:
    def codecs(config: sp.Config) -> list[Any]:
        return [rule.codec for rule in config.rules]

    published: dict[str, Any] = {"solver": "kmeans++", "policy": "refit", "coder": "published"}
    weights = sp.Quantize(bins=16, protect=0.0005, alpha=0.01, sigma=0.2, **published)
    assert codecs(sp.presets.inshrinkerator()) == [weights, *[sp.LogBuckets(alpha=0.01)] * 2]
    assert codecs(sp.presets.lc_checkpoint()) == [*[sp.ExponentDelta(2, "huffman")] * 2, sp.SecondMoment()]
    rows = [sp.Rows(4, "adaptive", coder="published"), *[sp.Rows(None)] * 3]
    assert codecs(sp.presets.check_n_run()) == [*rows, sp.Exact()]
    bitsnap = sp.presets.bitsnap(master=())
    assert codecs(bitsnap) == [*[sp.Clusters(16, "published")] * 2, sp.Changed("published")]
    assert bitsnap.chain == sp.ChainPolicy(10, against="base")


def test_inshrinkerator_takes_huffman_for_a_base_and_groups_for_a_delta() -> None:
    # Rows of different scale: a coder that has a context for them is smaller than Huffman codes of all rows together.
    random, scale = np.random.default_rng(0), np.ldexp(1.0, -(np.arange(256) % 8))[:, None]
    w = (scale * random.normal(size=(256, 512))).astype(np.float32)
    published = sp.presets.inshrinkerator().rules[0].codec
    methods, sizes = [], []
    for codec in (published, dataclasses.replace(published, coder="smallest")):
        cfg = sp.Config([("weight", codec)])
        base = sp.compress({"fc.weight": w}, cfg=cfg)
        delta = sp.compress({"fc.weight": w * np.float32(1.01)}, base, cfg)
        pieces = [ckpt.pieces_of(ckpt.records[0])[1] for ckpt in (base, delta)]
        methods.append([piece[0] for piece in pieces])
        sizes.append(len(pieces[0]))
    assert methods[0] == [entropy.HUFFMAN, entropy.REARRANGED]
    assert not {entropy.HUFFMAN, entropy.REARRANGED} & {*methods[1]}
    assert sizes[1] < sizes[0]
