"""When the next checkpoint is a base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..codec.checkpoint import Checkpoint
from ..codec.config import ChainPolicy
from .manifest import Manifest

_LEAST = 1 << 16
_WORTH = 0.99


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


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of a checkpoint, stored and raw."""

    stored: int
    raw: int

    @staticmethod
    def of(ckpt: Checkpoint) -> Size:
        """Of this one."""
        return Size(ckpt.nbytes, ckpt.raw_nbytes)


def is_pointless(delta: Size, base: Size) -> bool:
    """Whether a delta spares less than a hundredth of what a base takes.

    Of values stored beside a mask of one bit each, as BitSnap does, that is so from where 15/16 of those of 16 bits
    changed. The hundredth is for the few arrays (norms, counters) that are coded otherwise. Below 64 KiB the answer is
    no: there are frames to spare, and nothing else.

    Args:
        delta: a delta.
        base: a base. Where it is of another state, which may have been smaller, shares of the raw bytes are compared.

    Example:
        >>> [is_pointless(Size(n, 400_000), Size(90_000, 300_000)) for n in (118_000, 119_000)]
        [False, True]

    Source: BitSnap, section 3.3.
    """
    return delta.stored >= _LEAST and delta.stored * base.raw >= _WORTH * base.stored * delta.raw


def smaller(
    policy: ChainPolicy, delta: Checkpoint, base: Size, whole: Callable[[], Checkpoint]
) -> tuple[Checkpoint, Size | None]:
    """A delta, or a base in its place where the policy asks for it and the delta would spare next to nothing.

    Args:
        policy: what was asked for.
        delta: what was made.
        base: what a base takes, as far as that is known.
        whole: makes the base; called where there is doubt.

    Returns:
        The one that is to be saved, and what a base of the state takes; None where none was made.
    """
    if not policy.only_smaller or not is_pointless(Size.of(delta), base):
        return delta, None
    made = whole()
    return made if is_pointless(payload(delta), payload(made)) else delta, Size.of(made)


def payload(ckpt: Checkpoint) -> Size:
    """Of all arrays, without the header: that of a delta names its parent, which is no reason for a base."""
    return Size(sum(sum(record.lengths) for record in ckpt.records), ckpt.raw_nbytes)
