"""Run the trainer to its end, killing and restarting it, and record its events."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .config import DemoError, Job
from .process import PATIENCE, Event, TrainerProcess

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .kills import Killer


@dataclass
class History:
    """The events of a run.

    A *life* is one process, from its start to its kill or the end of the run.
    """

    parameters: int = 0
    lives: list[list[tuple[int, float]]] = field(default_factory=list)  # (step, loss) of each
    readings: dict[int, float] = field(default_factory=dict)  # step -> held-out loss
    checkpoints: dict[int, Event] = field(default_factory=dict)  # step -> its "saved" event
    probes: list[Event] = field(default_factory=list)
    restores: list[dict[str, Any]] = field(default_factory=list)
    final: float | None = None
    seconds: float = 0.0
    saving: bool = False  # the last event was the start of a save

    def add(self, event: Event) -> None:
        """Record an event; steps repeated after a resume replace the earlier ones."""
        kind = event["event"]
        if kind == "killed":
            self.restores.append({"at": event["at"], "during": event["during"]})
            return
        self.saving = kind == "saving"
        if kind == "start":
            self.parameters = event["parameters"]
            if self.restores:
                self.restores[-1] |= {key: event[key] for key in ("resumed", "warnings", "seconds")}
            self.lives.append([])
        elif kind == "step":
            self.lives[-1].append((event["step"], event["loss"]))
        elif kind == "reading":
            self.readings[event["step"]] = event["loss"]
        elif kind == "saved":
            self.checkpoints[event["step"]] = event
        elif kind == "probe":
            self.probes = [*(probe for probe in self.probes if probe["step"] != event["step"]), event]
        elif kind == "final":
            self.final = event["loss"]

    def last_step(self) -> int:
        """The last step reported, 0 before the first."""
        if self.lives and self.lives[-1]:
            return self.lives[-1][-1][0]
        return (self.restores[-1].get("resumed") or 0) if self.restores else 0

    def losses(self) -> dict[int, float]:
        """step -> training loss, of the last life that made the step."""
        return {step: value for life in self.lives for step, value in life}


def supervise(job: Job, log: Path, watch: Callable[[Event], None], killer: Killer | None = None) -> History:
    """Run a job to its end, through every kill.

    Args:
        job: the trainer's job.
        log: file for the trainer's standard error.
        watch: called with every event, and with `{"event": "killed", "at": last step, "during": "save" or "step"}`.
        killer: decides when to kill; None: never.

    Raises:
        DemoError: the trainer failed or hangs.
    """
    history = History()
    begin = time.perf_counter()

    def take(event: Event) -> None:
        history.add(event)
        watch(event)

    while history.final is None:
        with TrainerProcess(job, log) as trainer:
            killed = _live(trainer, take, killer)
            if not killed:
                trainer.check()
        if history.final is None:
            if not killed:
                raise DemoError(f"the trainer ended before its work was done; see {log}")
            take({"event": "killed", "at": history.last_step(), "during": "save" if history.saving else "step"})
    history.seconds = time.perf_counter() - begin
    return history


def _live(trainer: TrainerProcess, take: Callable[[Event], None], killer: Killer | None) -> bool:
    """Follow one process to its end; True if that was a kill."""
    kill_at: float | None = None
    before = time.perf_counter()
    while True:
        try:
            event = trainer.next(PATIENCE if kill_at is None else kill_at - time.perf_counter())
        except TimeoutError as silence:
            if killer is None or kill_at is None:
                raise DemoError(str(silence)) from None
            trainer.kill()
            killer.done()
            while (event := trainer.next()) is not None:
                take(event)
            return True
        if event is None:
            return False
        take(event)
        now = time.perf_counter()
        if killer is not None:
            killer.learn(event, now - before)
            if kill_at is not None and killer.aims_at_save and event["event"] == "saved":
                killer.missed()
                kill_at = None
            if kill_at is None and (delay := killer.delay(event)) is not None:
                kill_at = now + delay
        before = now
