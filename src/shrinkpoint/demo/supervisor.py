"""Run the trainer to its end, killing and restarting it, and record its events.

The trainer is a child process. It is killed at random times, and once in the middle of a save.
"""

from __future__ import annotations

import json
import os
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from ..store.saver.channel import module_folders
from . import DemoError, Job, checkpoint_steps

Event = dict[str, Any]
PATIENCE = 900.0
"""Seconds without an event after which a trainer counts as hung, far more than any step or compilation takes."""


class TrainerProcess:
    """Start the trainer; use it in a `with` statement, which ends the process.

    Args:
        job: what to do.
        log: file that the trainer's standard error is appended to.
    """

    def __init__(self, job: Job, log: Path) -> None:
        self._log = log
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._ended = False
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                # Not with the modules of the current folder.
                [sys.executable, "-P", "-m", "shrinkpoint.demo.trainer", json.dumps(asdict(job))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                # Threads that wait actively would slow training down many times on a busy machine.
                env={"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": os.pathsep.join(module_folders())},
            )
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def next(self, timeout: float = PATIENCE) -> Event | None:
        """The next event, or None once the trainer has ended.

        Raises:
            TimeoutError: none came in `timeout` seconds.
        """
        if self._ended:
            return None
        try:
            event = self._events.get(timeout=max(0.0, timeout))
        except queue.Empty:
            raise TimeoutError(f"the trainer sent no event for {timeout:.0f} seconds") from None
        self._ended = event is None
        return event

    def kill(self) -> None:
        """Kill the trainer with SIGKILL; events that it sent before can still be read."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def check(self) -> None:
        """Raise DemoError unless the trainer ended by itself with exit code 0."""
        code = self._process.wait()
        if code:
            tail = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            how = f"exit status {code}" if code > 0 else f"killed by signal {-code}, perhaps because memory ran out"
            raise DemoError(f"the trainer failed ({how}): {' '.join(tail) or 'no message'}; see {self._log}")

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                if line.endswith(b"\n"):  # the last line of a killed trainer may be cut
                    self._events.put(json.loads(line))
        self._events.put(None)


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
