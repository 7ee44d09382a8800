"""Detection of hostile dict keys that have the same hash or collide in the dict's table.

Hashes of text and bytes are secret in each process; those of numbers, and of tuples of them, are not. Integers that
differ by multiples of 2**61 - 1 have one hash, tuples with one hash are easily found, and of integers of 64 bits some
walk through all slots that the others hold. A dict of n such keys takes n**2 / 2 steps to build, and a file of some
kilobytes hours. So before a dict is built its insertions are counted, by numbers that are not used as keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST = 100
"""Taken slots met for each key, on average, beyond which keys are refused. Numbers at random meet 2, multiples of a
large power of two 40, the worst honest family tried (20,000 floats of 900 powers of two) 80."""
FEW = 1024
"""This number of keys is never checked: at worst they take half a million steps."""
_SHIFT, _WORD = 5, (1 << 64) - 1


def is_crowded(keys: Sequence[Any], *, few: int = FEW, most: int = MOST) -> bool:
    """Return whether a dict with these keys takes more than `most` steps per key.

    The table of CPython's dict is walked as it does: slot `h mod 2**k` first, then `i -> 5 i + p + 1` with the hash's
    higher bits shifted into p; it grows when two thirds are taken.

    Args:
        keys: what can be hashed, all different.
        few: fewer keys, text and bytes not counted, are not looked at. Default 1024.
        most: steps a key. Default 100.

    Example:
        >>> is_crowded(range(5000)), is_crowded([i * (2**61 - 1) for i in range(5000)])
        (False, True)
    """
    hashes = [hash(key) for key in keys if type(key) is not str and type(key) is not bytes]
    if len(hashes) < max(1, few):
        return False
    if min(hashes) >= 0 and max(hashes) < 4 * len(hashes) and len(set(hashes)) == len(hashes):
        # Small numbers, all different: near to slots of their own.
        return False
    left = most * len(hashes)
    # Every size of the table on the way, each filled to two thirds; the last with the remaining keys.
    bits = 3
    while left >= 0:
        slots, mask = bytearray(1 << bits), (1 << bits) - 1
        for h in hashes[: (2 << bits) // 3]:
            at, rest = h & mask, h & _WORD
            while slots[at]:
                rest >>= _SHIFT
                at = (5 * at + rest + 1) & mask
                left -= 1
                if left < 0:
                    return True
            slots[at] = 1
        if len(hashes) <= (2 << bits) // 3:
            return False
        bits += 1
    return True
