"""Decision whether the next checkpoint is a base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..codec.checkpoint import Checkpoint
from ..codec.config import ChainPolicy
from .manifest import Manifest

_LEAST = 1 << 16
_WORTH = 0.99


def wants_base(policy: ChainPolicy, last: Manifest, restore_cost: float) -> bool:
    """Return whether the checkpoint after `last` must be a base.

    The size predictor compares two sums for the next i + 1 checkpoints, in multiples of the base. If the first is a
    base and the others grow as since the last base, they take `1 + S1 + ... + Si`; as deltas they take at least
    `(i + 1) Si`. The predictor is meant for deltas against the base, which grow; deltas of a linear chain grow little.

    Args:
        policy: the chain policy.
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
        """Return the size of a checkpoint."""
        return Size(ckpt.nbytes, ckpt.raw_nbytes)


def is_pointless(delta: Size, base: Size) -> bool:
    """Return whether a delta saves less than a hundredth of a base's bytes.

    With a mask of one bit per value, as in BitSnap, this is so if over 15/16 of the 16-bit values changed. The
    hundredth allows for the few arrays (norms, counters) that are coded differently. Below 64 KiB the answer is no:
    headers dominate there.

    Args:
        delta: a delta.
        base: a base. It may be of another state, of another size: shares of the raw bytes are compared.

    Example:
        >>> [is_pointless(Size(n, 400_000), Size(90_000, 300_000)) for n in (118_000, 119_000)]
        [False, True]

    Source: BitSnap, section 3.3.
    """
    return delta.stored >= _LEAST and delta.stored * base.raw >= _WORTH * base.stored * delta.raw


def smaller(
    policy: ChainPolicy, delta: Checkpoint, base: Size, whole: Callable[[], Checkpoint]
) -> tuple[Checkpoint, Size | None]:
    """Return a delta, or a base if the policy allows it and the delta saves almost nothing.

    Args:
        policy: the chain policy.
        delta: the delta.
        base: the size of a base, as far as it is known.
        whole: makes the base; called only if the decision is close.

    Returns:
        The one to be saved, and the size of the base of this state; None if it was not made.
    """
    if not policy.only_smaller or not is_pointless(Size.of(delta), base):
        return delta, None
    made = whole()
    return made if is_pointless(payload(delta), payload(made)) else delta, Size.of(made)


def payload(ckpt: Checkpoint) -> Size:
    """Return the size of all arrays without the header, which is larger in a delta."""
    return Size(sum(record.nbytes for record in ckpt.records), ckpt.raw_nbytes)
