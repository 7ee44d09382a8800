"""Quality levels and published systems as configurations; a preset is a `Config`."""

from __future__ import annotations

from collections.abc import Iterable

from ..kernels.backend import arguments
from .config import ChainPolicy, Config, Rule
from .embeddings.rows import Rows
from .embeddings.rows import code_width as _code_width
from .embeddings.rows import expected_failures as expected_failures
from .errors import BadArgumentError
from .lossless.changed import Changed
from .lossless.exact import Exact
from .moments.clusters import Clusters
from .moments.firstmoment import FirstMoment
from .moments.logbuckets import LogBuckets
from .moments.secondmoment import SecondMoment
from .weights.exponent import ExponentDelta
from .weights.quantize import Quantize


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
    """Return Inshrinkerator / DynaQuant as published: k-means++, run lengths and Huffman.

    As published, the codebook need not have 0, so zeros that are not pruned restore as the entry next to zero: also the
    zero row of an embedding with `padding_idx`, which then stays different from zero, because its gradient is zero.
    `Config()` and the levels keep exact zeros. Here a rule in front, such as `("emb.weight", Exact())`, does.

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

    Source: Inshrinkerator, sections 4 and 6, appendix A.3; DynaQuant.
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


def lc_checkpoint(
    bits: int | None = 2,
    *,
    huffman: bool = True,
    second_moments: str = "relative",
    chain: ChainPolicy | None = None,
) -> Config:
    """Return LC-Checkpoint as published: quantized differences, priority promotion, Huffman.

    Weights and first moments (SGD's whole state) follow the paper. Adaptive optimizers, which it leaves to future work,
    also have second moments, where a difference that is not promoted leaves a value wrong by orders of magnitude under
    a root and a division: they are kept to a relative error instead (docs/decisions/lc-checkpoint.md).

    Args:
        bits: x of x-bit priority promotion, 1 to 8; default 2. None: exponent buckets only (the paper's "E").
        huffman: Huffman codes; False: fixed-width codes ("E+P").
        second_moments: "relative" (`SecondMoment()`, default) or "exponent" (like everything else).
        chain: when to take a base; default `ChainPolicy()`. Errors do not add up along a chain.

    Raises:
        BadArgumentError: a value out of range.

    Example:
        >>> lc_checkpoint(3).rules[0].codec
        ExponentDelta(bits=3, coder='huffman', max_error=None)

    Source: LC-Checkpoint, section 3.
    """
    arguments.choice("second_moments", second_moments, ("relative", "exponent"))
    differences = ExponentDelta(bits, "huffman" if arguments.flag("huffman", huffman) else "packed")
    second = SecondMoment() if second_moments == "relative" else differences
    rules = [Rule("weight", differences), Rule("first moment", differences), Rule("second moment", second)]
    return Config(rules, chain=chain)


_OPTIMIZERS = ("optim", "optims", "optim_state*", "optimizer*")
_MODELS = ("model", "models", "model_*", "module", "state_dict")
_COPIES = ("master", "masters", "master_weights*", "master_params*", "fp32_from_*", "fp32_groups*", "fp32_flat_groups*")
"""Keys of optimizer states and of model states, and of the copies of weights that Megatron, DeepSpeed and Apex keep."""
_WIDE = ("float32",)


def _masters(states: Clusters, exact: Changed) -> list[Rule]:
    """Return rules: clusters for float32 weight copies in optimizer states, exact for models."""
    return [
        *(Rule(f"{key}/*", states, _WIDE) for key in _OPTIMIZERS),
        *(Rule(match, exact) for key in _MODELS for match in (f"{key}/*", f"*/{key}/*")),
        *(Rule(f"*/{key}/*", states, _WIDE) for key in _OPTIMIZERS),
        *(Rule(f"{above}{key}", states, _WIDE) for key in _COPIES for above in ("", "*/")),
        *(Rule(f"{above}{key}/*", states, _WIDE) for key in _COPIES for above in ("", "*/")),
    ]


def bitsnap(
    clusters: int = 16,
    *,
    max_cached_iteration: int = 10,
    master: Iterable[str] = "known",
) -> Config:
    """Return BitSnap as published: weights as exact changes, optimizer states in clusters.

    Plain float32 weights in the model are exact, too; nearly all of them change, so that they are mostly stored in
    full. Tiny optimizer entries, and those that are not known moments, are exact at any path.

    Args:
        clusters: for optimizer states, 1 to 16; default 16.
        max_cached_iteration: a base every so many checkpoints, 1 or more; default 10. Deltas are against the base.
        master: patterns of the paths of float32 arrays that are the optimizer's own copies of weights, which the paper
            counts as optimizer states; () if they must be exact. "known" (default): float32 arrays below a key such as
            "optimizer", or with the names that Megatron, DeepSpeed and Apex use ("master_params",
            "fp32_from_fp16_params"), except below a key such as "model".

    Raises:
        BadArgumentError: a value out of range.

    Example:
        >>> chain = bitsnap(max_cached_iteration=5).chain
        >>> chain.base_every, chain.against
        (5, 'base')

    Source: BitSnap, sections 3.3, 3.4 and 4.4.
    """
    states = Clusters(clusters, "published")
    exact = Changed("published")
    rules = [Rule("first moment", states), Rule("second moment", states)]
    if isinstance(master, str) and master == "known":
        rules += _masters(states, exact)
    else:
        rules += [Rule(match, states, _WIDE) for match in arguments.strings("master", master)]
    chain = ChainPolicy(arguments.integer("max_cached_iteration", max_cached_iteration, 1), against="base")
    return Config([*rules, Rule("*", exact)], chain=chain)


_POLICIES = {
    "intermittent": ChainPolicy(base_every=None, against="base", predictor="size", only_smaller=False),
    "one_shot": ChainPolicy(base_every=None, against="base", only_smaller=False),
    "consecutive": ChainPolicy(base_every=None, against="previous", only_smaller=False),
}


def check_n_run(
    bits: int | str = 4,
    expected_restores: float | None = None,
    policy: str = "intermittent",
    *,
    method: str = "adaptive",
    num_bins: int | None = None,
    ratio: float | None = None,
    moment_bits: int | None = None,
    coder: str = "published",
) -> Config:
    """Return Check-N-Run as published: changed embedding rows, quantized; other arrays exact.

    Optimizer state of an embedding follows its rows: a delta holds the rows that changed. It is exact by default, for a
    row of second moments spans many powers of two, and an even grid rounds its small ones to the row's minimum, which
    a later update divides by. Which rows changed is found by comparing, or known from a `RowTracker`.

    Args:
        bits: width of a code, 2, 3, 4 or 8; default 4. "auto": by `expected_restores` (1: 2 bits, up to 3: 3, up to 20:
            4, else 8), the paper's limits for trainings on billions of samples. Short trainings lose more than its
            0.01 %: use 8 bits there (`docs/systems.md` has figures).
        expected_restores: how often the run is expected to resume; beyond it `Store` falls back to 8 bits.
            `expected_failures(probability, nodes, duration)` estimates it.
        policy: "intermittent" (default: deltas against the base, a new base when the predictor says so), "one_shot"
            (against the base, always the same), "consecutive" (against the checkpoint before).
        method: "adaptive" (greedy search; plain at 8 bits), "asymmetric", "symmetric" or "kmeans".
        num_bins: of the greedy search, 1 to 4096; None: picked on a sample.
        ratio: of the greedy search, in (0, 1]; None: picked on a sample.
        moment_bits: width for moments of the tables' shape, 2, 3, 4 or 8; None (default): exact.
        coder: "published" (codes bit-packed, numbers and masks as they are) or "smallest".

    Raises:
        BadArgumentError: a value out of range; "auto" without `expected_restores`.

    Example:
        >>> check_n_run("auto", expected_failures(0.001, nodes=16, duration=72)).rules[0].codec.width
        3

    Source: Check-N-Run, sections 5 and 6.
    """
    arguments.choice("policy", policy, _POLICIES)
    if bits is None:
        raise BadArgumentError("bits is None; it must be 2, 3, 4, 8 or 'auto'")
    moment_bits = arguments.or_none("moment_bits", moment_bits, _code_width)
    table = Rows(bits, method, num_bins, ratio, expected_restores, coder)
    exact = Rows(None)
    moments = exact if moment_bits is None else Rows(moment_bits, method, num_bins, ratio, expected_restores, coder)
    rules = [
        Rule("embedding", table),
        Rule("first moment", moments),
        Rule("second moment", moments),
        Rule("state", exact),
        Rule("*", Exact()),
    ]
    return Config(rules, chain=_POLICIES[policy])


def lossless(*, chain: ChainPolicy | None = None) -> Config:
    """Return the level that keeps every bit of every array, deltas included.

    Promise: a loaded state equals the saved one to the bit.

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


_FINE_MOMENTS = (
    Rule("first moment", FirstMoment(step=0.25, alpha=0.125)),
    Rule("second moment", SecondMoment(octaves=0.125, alpha=0.045)),
)
"""Moments finer than those of `Config()`, for trainings that small errors change; 0.045 is half of 1/8 octave."""


def exact_weights(*, chain: ChainPolicy | None = None) -> Config:
    """Return the level with exact weights and finely quantized optimizer moments.

    Promise: evaluated or published weights are never changed. A training that resumes differs by the error of its
    moments: first moments are rounded to steps of a quarter of the update m / sqrt(v), without bias; second moments
    keep to about 4 %.

    Args:
        chain: when to take a base; default `ChainPolicy()`.

    Example:
        >>> [(rule.match, rule.codec) for rule in exact_weights().rules][0]
        ('weight', Exact())
    """
    return Config([Rule("weight", Exact()), *_FINE_MOMENTS], chain=chain)


def precise(*, chain: ChainPolicy | None = None) -> Config:
    """Return the level for tasks that small errors change: weights within 0.13 %, fine moments.

    Promise: each weight array has a relative L2 error of at most 0.00125, as multiples of a step; moments are those of
    `exact_weights()`. Restores change regression and physics much less than with `Config()` (docs/choosing.md).
    Weights in 16 bits are exact, because they have few more bits than this error needs.

    Args:
        chain: when to take a base; default `ChainPolicy()`.

    Example:
        >>> precise().rules[0].codec.max_error
        0.00125
    """
    return Config([Rule("weight", Quantize(max_error=0.00125, residual=True)), *_FINE_MOMENTS], chain=chain)


def compact(*, chain: ChainPolicy | None = None) -> Config:
    """Return the smallest level: 24 bins, rate-distortion coding of weights, coarse moments.

    Promise: small, for trainings that are restored now and then. First moments are rounded to steps of
    four updates, so most become zero and a resumed optimizer builds up its momentum again. Second moments are rounded
    to steps of a factor of four. The restored model differs visibly from the saved one (docs/choosing.md has figures).

    Args:
        chain: when to take a base; default `ChainPolicy()`.

    Example:
        >>> [rule.codec for rule in compact().rules][1]
        FirstMoment(step=4.0, alpha=0.25, max_error=1.0)
    """
    rules = [
        Rule("weight", Quantize(bins=24)),
        Rule("first moment", FirstMoment(step=4.0, max_error=1.0)),
        Rule("second moment", SecondMoment(octaves=2.0)),
    ]
    return Config(rules, rate=0.0005, chain=chain)
