"""Times at which the trainer is killed: random ones, and one in the middle of a save."""

from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING, Any

from .config import checkpoint_steps

if TYPE_CHECKING:
    from collections.abc import Mapping


class Killer:
    """Decide after each event of the trainer whether to kill it, and after which delay.

    The run is divided into one interval per kill. The kill is at a random step of the interval or, for one of them,
    during a random save. The duration of a save is estimated from those before; if a save ends before the kill, the
    next one is tried with a shorter delay.

    Args:
        kills: number of kills.
        steps, every: steps of the run, and steps between checkpoints.
        seed: seed of the random choices.
    """

    def __init__(self, kills: int, steps: int, every: int, seed: int) -> None:
        self._random = random.Random(seed)
        saves = checkpoint_steps(steps, every)
        # Before the first checkpoint the run could not resume, and after the last one it has ended.
        first = 1 if len(saves) > kills + 1 else 0
        room = len(saves) - 1 - first
        in_save = self._random.randrange(kills) if kills else -1
        self._plan: list[tuple[int, bool]] = []
        for kill in range(kills):
            low, high = first + kill * room // kills, first + (kill + 1) * room // kills
            at = self._random.randrange(low, high)
            saving = kill == in_save
            self._plan.append(
                (saves[at] + (0 if saving else self._random.randrange(saves[at + 1] - saves[at])), saving)
            )
        self._misses = 0
        self._save_times: list[float] = []
        self._step_time = 0.0

    @property
    def left(self) -> int:
        """Number of kills left."""
        return len(self._plan)

    @property
    def aims_at_save(self) -> bool:
        """Return whether the next kill is meant for the middle of a save."""
        return bool(self._plan) and self._plan[0][1]

    def learn(self, event: Mapping[str, Any], seconds: float) -> None:
        """Record the durations of steps and saves; `seconds` since the event before."""
        if event["event"] == "saved":
            self._save_times.append(event["ms"] / 1e3)
        if event["event"] == "step":
            self._step_time = seconds

    def delay(self, event: Mapping[str, Any]) -> float | None:
        """Seconds after this event at which to kill, or None."""
        if not self._plan or event.get("step", -1) < self._plan[0][0]:
            return None
        if not self.aims_at_save:
            return self._random.random() * self._step_time if event["event"] == "step" else None
        if event["event"] != "saving":
            return None
        usual = statistics.median(self._save_times) if self._save_times else 0.0
        return self._random.uniform(0.1, 0.9) * usual * (0.5**self._misses if self._misses < 3 else 0.0)

    def missed(self) -> None:
        """Record that the save ended before the kill."""
        self._misses += 1

    def done(self) -> None:
        """Record that the kill was carried out."""
        self._plan.pop(0)
