"""Training text that every machine has: the source code of Python's standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .config import DemoError

# Tests are repetitive, code tables and help topics are not programs, and the rest is not part of the library.
_LEFT_OUT = {
    "test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__",
}  # fmt: skip
_HELD_OUT_OF = 20  # one file in this many is held out
_LEAST_BYTES = 500_000


class Corpus:
    """Bytes to train on and bytes held out, from the same library, split by file.

    Which files are held out depends only on their names, so two runs agree.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        root = Path(folder or sysconfig.get_path("stdlib"))
        parts: dict[bool, list[bytes]] = {False: [], True: []}
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            if not _LEFT_OUT.intersection(name.parts):
                parts[_held_out(name.as_posix())].append(path.read_bytes())
        self.train = _join(parts[False])
        self.held_out = _join(parts[True])
        if len(self.train) < _LEAST_BYTES:
            raise DemoError(
                f"the source code of the standard library is missing: {root} holds {len(self.train):,} bytes of it "
                "(a minimal or zipped Python? the demo needs a complete one)"
            )

    def held_out_windows(self, count: int, context: int) -> Tensor:
        """`count` evenly spaced windows of the held-out text, int64 [count, context + 1]."""
        starts = np.linspace(0, len(self.held_out) - context - 1, count).astype(np.int64)
        return _windows(self.held_out, starts, context)


class Batches:
    """Random windows in an order fixed by the seed, each visited once per epoch.

    The position can be saved and restored. The text is cut into windows, and an epoch is a permutation of them. Each
    batch is shifted by a few bytes drawn from NumPy's global generator, so that the state of that generator matters to
    a resumed run.

    Args:
        text: uint8 [length].
        context: number of bytes to predict in a window.
        batch: number of windows in a batch.
        seed: seed of the permutations.
    """

    def __init__(self, text: npt.NDArray[np.uint8], context: int, batch: int, seed: int) -> None:
        self._text, self._context, self._batch, self._seed = text, context, batch, seed
        self._count = len(text) // context - 2
        self.seek({"epoch": 0, "window": 0})

    def position(self) -> dict[str, int]:
        """The position of the next batch; windows before it have been used."""
        return {"epoch": self._epoch, "window": self._window}

    def seek(self, position: dict[str, int]) -> None:
        self._epoch, self._window = position["epoch"], position["window"]
        self._order = np.random.default_rng([self._seed, self._epoch]).permutation(self._count)

    def next(self) -> Tensor:
        """The next batch, int64 [batch, context + 1]."""
        if self._window + self._batch > self._count:
            self.seek({"epoch": self._epoch + 1, "window": 0})
        chosen = self._order[self._window : self._window + self._batch]
        self._window += self._batch
        shift = np.random.randint(self._context)  # noqa: NPY002 - the global generator is part of the demonstration
        return _windows(self._text, chosen * self._context + shift, self._context)


def _held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT_OF == 0


def _join(texts: list[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"\0".join(texts), dtype=np.uint8)


def _windows(text: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], context: int) -> Tensor:
    return torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))
