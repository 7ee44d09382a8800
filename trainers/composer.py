"""Composer: one callback that saves compressed checkpoints, resumes from them, and watches gradients for the codec.

`Trainer(..., callbacks=[CompressedCheckpoints(sp.Store("run"), every=500)])` is all. Composer's last release asks for
an older torch than this package runs with; what it was tested with is in docs/trainers.md.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..kernels.arguments import integer, or_none
from ..kernels.errors import BadArgumentError
from ..store.saver import Saver
from ..store.store import Store
from .loop import resume, save
from .sensitivity import SensitivityTracker
from .state import capture_rng, restore_rng

if TYPE_CHECKING:
    from composer.core import Callback
else:
    try:
        from composer.core import Callback
    except ImportError:
        raise ImportError("this adapter needs Composer: pip install mosaicml") from None


class CompressedCheckpoints(Callback):  # type: ignore[misc]
    """Saves model, optimizers, schedulers, timestamp and random number generators; resumes from the newest by itself.

    Give the trainer no `save_folder` and no `load_path` beside it. Composer passes over the batches of a begun epoch by
    its own timestamp, so that a resumed run sees none twice. Algorithms and metrics are not saved.

    Args:
        saver: a Saver, in the background; or a Store.
        every: batches from one save to the next, 1 or more; None: a save at the end of each epoch.
        sensitivity: average gradients, for codecs that ask for `grads`, before every so many batches: those at which
            checkpoints are saved. None (default): none.

    Raises:
        BadArgumentError: an argument of the wrong kind; on resuming, a model or optimizer that does not fit.

    Source: Inshrinkerator, section 7 (use as a single callback of Composer).
    """

    def __init__(self, saver: Saver | Store, every: int | None = None, *, sensitivity: int | None = None) -> None:
        super().__init__()
        if not isinstance(saver, (Saver, Store)):
            raise BadArgumentError(f"saver must be a Saver or a Store, not {type(saver).__qualname__}")
        self.saver = saver
        self.every = or_none("every", every, integer, 1)
        self.sensitivity = or_none("sensitivity", sensitivity, integer, 1)
        self._tracker: SensitivityTracker | None = None
        self._rng: Any = None

    def after_load(self, state: Any, logger: Any) -> None:
        """Called by Composer when the trainer is built: resume, where there is something to resume from."""
        if resume(self.saver, state.model, list(state.optimizers), more=_more(state)):
            # Composer seeds anew after this, and passes over batches with that seed: put back when training goes on.
            self._rng = capture_rng()
        if self.sensitivity is not None:
            done = int(state.timestamp.batch)
            self._tracker = SensitivityTracker(state.model, self.sensitivity, done=done)

    def epoch_start(self, state: Any, logger: Any) -> None:
        """Called by Composer, before it draws the order of the epoch."""
        if int(state.timestamp.batch_in_epoch) == 0:
            self._restore()

    def after_dataloader(self, state: Any, logger: Any) -> None:
        """Called by Composer with the first batch that was not passed over."""
        self._restore()

    def _restore(self) -> None:
        if self._rng is not None:
            restore_rng(self._rng)
            self._rng = None

    def batch_start(self, state: Any, logger: Any) -> None:
        """Called by Composer before each batch: a step that AMP skips is a batch, too."""
        if self._tracker is not None:
            self._tracker.at(int(state.timestamp.batch))

    def batch_checkpoint(self, state: Any, logger: Any) -> None:
        """Called by Composer after each batch."""
        if self.every is not None and int(state.timestamp.batch) % self.every == 0:
            self._save(state)

    def epoch_checkpoint(self, state: Any, logger: Any) -> None:
        """Called by Composer after each epoch."""
        if self.every is None:
            self._save(state)

    def _save(self, state: Any) -> None:
        step, optimizers = int(state.timestamp.batch), list(state.optimizers)
        save(self.saver, step, state.model, optimizers, more=_more(state), sensitivity=self._tracker)

    def fit_end(self, state: Any, logger: Any) -> None:
        """Called by Composer; what is in flight is durable afterwards."""
        if isinstance(self.saver, Saver):
            self.saver.wait()

    def close(self, state: Any, logger: Any) -> None:
        """Called by Composer when the trainer is closed."""
        if self._tracker is not None:
            self._tracker.remove()
            self._tracker = None


class _Clock:
    """A timestamp whose durations are seconds: nothing in it needs pickle."""

    def __init__(self, timestamp: Any) -> None:
        self.timestamp = timestamp

    def state_dict(self) -> dict[str, Any]:
        found = self.timestamp.state_dict()
        return {k: v.total_seconds() if isinstance(v, timedelta) else v for k, v in found.items()}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        durations = {k for k, v in self.timestamp.state_dict().items() if isinstance(v, timedelta)}
        self.timestamp.load_state_dict({k: timedelta(seconds=v) if k in durations else v for k, v in state.items()})


def _more(state: Any) -> dict[str, Any]:
    schedulers = {f"scheduler {i}": scheduler for i, scheduler in enumerate(state.schedulers or ())}
    return {"timestamp": _Clock(state.timestamp), **schedulers}
