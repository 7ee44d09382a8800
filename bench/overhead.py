"""What something that watches a training costs it: steps with and without it, in turn."""

from __future__ import annotations

import torch

from .harness import ROUNDS, interleave, one_thread_clock
from .workloads import Run


def of_steps(plain: Run, watched: Run) -> tuple[float | None, str]:
    """By how many percent of its processor time a step of `watched` is longer, and a note; None if it trains otherwise.

    Args:
        plain: a training, not begun.
        watched: the same training, with what watches it attached.
    """
    plain.train(3)
    watched.train(3)
    pairs = zip(plain.model.parameters(), watched.model.parameters(), strict=True)
    if not all(torch.equal(a, b) for a, b in pairs):
        return None, "CHECK FAILED: what watches the training changed it"
    times = interleave(
        {
            "plain": (lambda: plain.train(plain.step + 1), 4),
            "watched": (lambda: watched.train(watched.step + 1), 4),
        },
        rounds=5 * ROUNDS,
        clock=one_thread_clock(),
        budget=8.0,
    )
    without, recording = times["plain"], times["watched"]
    note = (
        f"step {1e3 * without.median:.2f} ms, {len(without.seconds)} rounds, quartiles {without.spread:.1%} apart; "
        "checked: weights equal to the bit"
    )
    return 100 * (recording.median / without.median - 1), note
