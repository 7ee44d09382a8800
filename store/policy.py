"""When the next checkpoint is a base."""

from __future__ import annotations

from ..codec.config import ChainPolicy
from .manifest import Manifest


def wants_base(policy: ChainPolicy, last: Manifest, restore_cost: float) -> bool:
    """Whether the checkpoint after `last` shall be a base.

    The size predictor compares what the next i + 1 checkpoints will take if one is a base now and they grow as they did
    since the last one, `1 + S1 + ... + Si`, with the least they take as deltas, `(i + 1) Si`; sizes are in multiples of
    the base. It is made for deltas against the base, which grow; those of a linear chain hardly do.

    Args:
        policy: what was asked for.
        last: the checkpoint saved last.
        restore_cost: of the delta that would be made, in multiples of a base.

    Example:
        >>> from shrinkpoint import ChainPolicy
        >>> last = Manifest(1, "", "", "", 30, 100, ("base",), 0, since_base=2, base_nbytes=50, spent=40)
        >>> wants_base(ChainPolicy(None, predictor="size"), last, 2.0)  # 50 + 10 + 30 <= 3 * 30
        True

    Source: Check-N-Run, section 5.1 (intermittent differential checkpoint).
    """
    i = last.since_base
    if policy.base_every is not None and i + 1 >= policy.base_every:
        return True
    if policy.predictor == "size" and i >= 1 and last.base_nbytes + last.spent <= (i + 1) * last.nbytes:
        return True
    return policy.max_restore_cost is not None and restore_cost > policy.max_restore_cost
