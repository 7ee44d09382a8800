"""Published systems as configurations: a preset is nothing but a `Config`."""

from __future__ import annotations

from .config import ChainPolicy, Config, Rule
from .exact import Exact
from .moments import LogBuckets
from .quantize import Quantize


def inshrinkerator(
    bins: int = 16,
    *,
    embedding_bins: int | None = None,
    prune: float = 0.0,
    prune_metric: str = "magnitude",
    protect: float = 0.0005,
    alpha: float = 0.01,
    sigma: float = 0.2,
    seed: int = 0,
    chain: ChainPolicy | None = None,
) -> Config:
    """Inshrinkerator / DynaQuant as published: k-means++ refit at every checkpoint, run lengths and Huffman per level.

    Args:
        bins: codebook entries, 2 to 254; default 16.
        embedding_bins: the same for embeddings; default: as `bins`.
        prune: fraction pruned per layer type, in [0, 1); default 0 (on small models 40 % ruins the loss).
        prune_metric: "magnitude" or "sensitivity" (needs `grads`).
        protect: fraction kept as bfloat16, in [0, 1); default 0.0005.
        alpha: relative error of the sketch, and of optimizer moments (the paper is silent on them), in [2**-13, 1);
            default 0.01.
        sigma: weight of frequency against magnitude in the codebook, in [0, 1]; default 0.2.
        seed: of k-means++.
        chain: when to take a base; default `ChainPolicy()`.

    Raises:
        BadArgumentError: a value out of range.

    Example:
        >>> inshrinkerator(bins=8, prune=0.1).rules[0].codec.bins
        8

    Source: Inshrinkerator, sections 4 and 6, appendix A.2; DynaQuant.
    """
    weights = Quantize(
        bins=bins,
        embedding_bins=embedding_bins,
        prune=prune,
        prune_metric=prune_metric,
        protect=protect,
        alpha=alpha,
        sigma=sigma,
        solver="kmeans++",
        policy="refit",
        coder="published",
        seed=seed,
    )
    moments = LogBuckets(alpha=min(alpha, 0.5))
    rules = [Rule("weight", weights), Rule("first moment", moments), Rule("second moment", moments)]
    return Config(rules, chain=chain)


def lossless(*, chain: ChainPolicy | None = None) -> Config:
    """Every bit of every array, deltas included.

    Args:
        chain: when to take a base; default `ChainPolicy()`.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> w = np.random.default_rng(0).normal(size=(64, 64))
        >>> bool((sp.decompress(sp.compress([w], cfg=lossless()))[0] == w).all())
        True
    """
    return Config([Rule("*", Exact())], chain=chain)
