"""Dict keys that were made to collide are refused when saved and when read."""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict
from typing import Any

import pytest

import shrinkpoint as sp
from shrinkpoint.codec.state import tree
from shrinkpoint.codec.state.tree import FEW_KEYS, is_crowded

PERIOD = (1 << 61) - 1
"""What CPython takes the remainder of integers by for their hash."""
_PRIMES = (11400714785074694791, 14029467366897019727, 2870177450012600261)
_WORD = (1 << 64) - 1


def tuples_of_one_hash(count: int) -> list[tuple[int, int]]:
    """Return pairs of integers whose tuples all have the same hash."""
    one, two, five = _PRIMES
    turned = lambda x, n: ((x << n) | (x >> (64 - n))) & _WORD  # noqa: E731
    wanted, found = hash((0, 0)), []
    # hash((0, 0)): the state before the length is added, by going through it forwards.
    state = five
    for lane in (0, 0):
        state = turned((state + lane * two) & _WORD, 31) * one & _WORD
    back_one, back_two = pow(one, -1, 1 << 64), pow(two, -1, 1 << 64)
    before = turned(state * back_one & _WORD, 33)
    for first in itertools.count():
        middle = turned((five + first * two) & _WORD, 31) * one & _WORD
        second = (before - middle) * back_two & _WORD
        second = second if second < PERIOD else second - (1 << 64)
        if -PERIOD < second < PERIOD and hash(second) == second and hash((first, second)) == wanted:
            found.append((first, second))
            if len(found) == count:
                return found
    raise AssertionError


def on_one_path(count: int) -> list[int]:
    """Return 60-bit integers with distinct hashes that probe the same taken slots of 4096.

    The first keys are consecutive slots of the probe sequence after a hash is used up. In each other key every five
    more bits choose the next slot among 32 reachable ones, such that it is taken; then it follows the first keys.
    """
    mask, order = 4095, [0]
    while len(order) < count:
        order.append((5 * order[-1] + 1) & mask)
    keys = order[: count // 8]
    taken = {slot: place for place, slot in enumerate(keys)}

    def longer(key: int, at: int, known: int, step: int) -> int | None:
        if known > 57:
            # The rest of the hash; after it the key follows the taken slots, at best from the first to the last.
            while key >> 5 * (step - 1) and at in taken:
                at = (5 * at + (key >> 5 * step) + 1) & mask
                step += 1
            return key if taken.get(at, len(keys)) < len(keys) // 2 else None
        for more in RNG.sample(range(32), 32):
            grown = key | more << known
            there = (5 * at + (grown >> 5 * step) + 1) & mask
            if there in taken:
                found = longer(grown, there, known + 5, step + 1)
                if found is not None:
                    return found
        return None

    while len(keys) < count:
        start = RNG.choice(order[: len(keys)])
        key = longer(start, start, 12, 1)
        if key is not None and key < PERIOD:
            taken[order[len(keys)]] = len(keys)
            keys.append(key)
    return keys


RNG = random.Random(0)
FAMILIES: dict[str, list[Any]] = {
    "multiples of the period": [i * PERIOD for i in range(1, 1501)],
    "one and such": [1 + i * PERIOD for i in range(1500)],
    "negative": [-i * PERIOD - 7 for i in range(1500)],
    "tuples of such": [("x", i * PERIOD) for i in range(1, 1501)],
    "tuples": tuples_of_one_hash(1500),
    "numbers of 60 bits on one path": on_one_path(2700),
    "among text": [x for i in range(1, 1501) for x in (str(i), i * PERIOD)],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_hostile_keys_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Colliding keys are refused by `compress`, and are damage in a file."""
    keys = FAMILIES[name]
    with pytest.raises(sp.UnsupportedLeafError, match=r"^x/0: .*collide"):
        sp.compress({"x": [dict.fromkeys(keys, 0)]})
    with monkeypatch.context() as patch:
        patch.setattr(tree, "is_crowded", lambda keys: False)
        blobs = [sp.compress([kind(dict.fromkeys(keys, 0))]).to_bytes() for kind in (dict, OrderedDict, Counter)]
    for blob in blobs:
        with pytest.raises(sp.CorruptDataError, match="collide"):
            sp.decompress(sp.Checkpoint.from_bytes(blob))


def test_that_the_families_are_what_they_are_meant_to_be() -> None:
    for name, keys in FAMILIES.items():
        hashes = {hash(key) for key in keys if type(key) is not str}
        assert len(hashes) == (len(keys) if name.endswith("path") else 1), name


HONEST: dict[str, list[Any]] = {
    "in order": list(range(20_000)),
    "negative": list(range(-20_000, 0)),
    "shuffled": random.Random(1).sample(range(20_000), 20_000),
    "64 bits": [RNG.getrandbits(64) for _ in range(20_000)],
    "200 bits": [RNG.getrandbits(200) for _ in range(5000)],
    "addresses": [(1 << 40) + 4096 * i for i in range(20_000)],
    "high bits": [i << 44 for i in range(20_000)],
    "floats": [i + 0.5 for i in range(20_000)],
    "powers": [2.0 ** -(i % 900) * (i // 900 + 1) for i in range(20_000)],
    "not a number": [float("nan") for _ in range(5000)],
    "pairs": [(i // 200, i % 200) for i in range(20_000)],
    "pairs with text": [(str(i // 200), i % 200) for i in range(20_000)],
    "text": [str(i) for i in range(20_000)],
    "few with one hash": [i * PERIOD for i in range(1, FEW_KEYS)],
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_keys_are_not(name: str) -> None:
    state = {"x": dict.fromkeys(HONEST[name], 0)}
    found = sp.decompress(sp.Checkpoint.from_bytes(sp.compress(state).to_bytes()))
    assert list(map(repr, found["x"])) == list(map(repr, state["x"]))


@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 21, 22, 85, 86, 1000])
def test_any_number_of_keys(count: int) -> None:
    """Keys are judged equally at all table sizes: distinct slots pass, one slot fails."""
    assert not is_crowded(range(count), few=0)
    keys = [(i + 1) * PERIOD for i in range(count)]
    assert is_crowded(keys, few=0, most=4) == (count >= 6)
