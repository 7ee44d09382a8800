"""Inshrinkerator is coded as published, also where another coder would be smaller."""

from __future__ import annotations

import dataclasses

import numpy as np

import shrinkpoint as sp
from shrinkpoint.codec import entropy


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
