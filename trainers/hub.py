"""Model folders compressed for transfer, alone or against a base model.

A folder of a model hub (`config.json`, tokenizer, `*.safetensors`) becomes a folder where each safetensors file is a
checkpoint, `NAME.safetensors.spt`; everything else is copied as it is. The model card states savings and losses.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from blake3 import blake3

from ..codec.checkpoint import Checkpoint, decompress
from ..codec.compress import compress
from ..codec.config import Config
from ..codec.display import Row
from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError, ShrinkpointWarning
from ..codec.format import container
from ..codec.format.bounded_json import loads
from ..codec.format.schema import StoredArray, StoredGroup, groups_to_json
from ..codec.groups import BytesReference
from ..codec.named_presets import check_config
from ..codec.presets import lossless
from ..codec.state import tree
from ..codec.state.leaves import as_bytes, is_array, read_leaf
from ..store.local import MOST_JSON, check_link, follow_umask, read_file, sync_folder

PathLike: TypeAlias = str | os.PathLike[str]
Tensors: TypeAlias = dict[str, torch.Tensor]
Sort: TypeAlias = tuple[str, tuple[int, ...]]
SUFFIX = ".spt"
_CARD = "README.md"
_INDEX = ".index.json"
_BEGIN, _END = "\n<!-- shrinkpoint: begin -->\n", "<!-- shrinkpoint: end -->\n"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Result of `save_pretrained`.

    Args:
        path: the folder.
        nbytes: bytes of its compressed files.
        raw_nbytes: bytes of the weights.
        rows: one a weight, see `Checkpoint.summary`.
        has_base: whether the base model is needed to read it.
    """

    path: Path
    nbytes: int
    raw_nbytes: int
    rows: tuple[Row, ...]
    has_base: bool

    @property
    def ratio(self) -> float:
        """`raw_nbytes / nbytes`."""
        return self.raw_nbytes / self.nbytes

    @property
    def is_lossless(self) -> bool:
        """Return whether every bit of the weights is kept."""
        return all(row.measure == "exact" for row in self.rows)


def save_pretrained(
    model_or_folder: Any, dir: PathLike, base: PathLike | None = None, cfg: Config | str | None = None
) -> Transfer:
    """Compress a model for transfer; `load_pretrained` is the inverse.

    One safetensors file is in memory at a time, and the part of the base that it is compared with.

    Args:
        model_or_folder: a folder with `*.safetensors` files, or a model. A model with `save_pretrained` (Transformers,
            Diffusers) is saved with all files that it writes, any other `torch.nn.Module` with its state dict.
        dir: folder to write, new or empty. It appears when it is complete.
        base: folder of the model that this one was made from (by fine-tuning), raw or compressed: only the
            differences are stored, and the same base is needed to read them. None: no base.
        cfg: how to compress; default `presets.lossless()`: every bit comes back.

    Raises:
        BadArgumentError: the folder does not exist, has no safetensors files, or has links that are broken, circular
            or lead out of it and its Hub cache; the target is not empty, or is within a folder that is read.
        CorruptDataError, MissingParentError: the base is compressed and not readable.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> done = save_pretrained(torch.nn.Linear(64, 64), folder + "/small")
        >>> done.is_lossless, sorted(load_pretrained(folder + "/small"))
        (True, ['bias', 'weight'])
    """
    cfg = lossless() if cfg is None else check_config(cfg)
    against = None if base is None else ModelFolder(base)
    read = [Path(model_or_folder)] if isinstance(model_or_folder, (str, os.PathLike)) else []
    refuse_within(dir, *read, *([] if against is None else [against.folder]))
    target = new_folder(dir)
    with _work_folder(target) as (work, result):
        return _compress_folder(_folder_of(model_or_folder, work / "source"), result, against, cfg, target)


@contextlib.contextmanager
def _work_folder(target: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a temporary folder, and the one in it that durably becomes the target at the end."""
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    result = work / "result"
    try:
        yield work, result
        sync_folder(str(result))
        os.replace(result, target)
        sync_folder(str(target.parent))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def load_pretrained(
    dir: PathLike, base: PathLike | None = None, *, model: Any = None, to: PathLike | None = None
) -> Any:
    """Read a model that `save_pretrained` compressed.

    Args:
        dir: the compressed folder.
        base: folder of its base model, raw or compressed; needed where `save_pretrained` was given one.
        model: a class with `from_pretrained` (`AutoModelForCausalLM`): that model is made and returned; a
            `torch.nn.Module`: the weights are loaded into it, and it is returned.
        to: folder to write, new or empty: the model folder as it was, for every program that reads safetensors.

    Returns:
        The model; else the folder `to` as a Path; else the weights, `{name: tensor}`.

    Raises:
        BadArgumentError: the folder does not exist or has no compressed files; `to` is within a folder that is read;
            `model` and `to` are both given; the model has other parameters.
        MissingParentError: the base is missing, or is not the one it was compressed against.
        CorruptDataError, NewerFormatError: the folder is not readable.

    Example:
        >>> import tempfile
        >>> folder, layer = tempfile.mkdtemp(), torch.nn.Linear(3, 2)
        >>> _ = save_pretrained(layer, folder + "/small")
        >>> bool((load_pretrained(folder + "/small", model=torch.nn.Linear(3, 2)).weight == layer.weight).all())
        True
    """
    source = ModelFolder(dir, base)
    if not source.compressed:
        raise BadArgumentError(f"{source.folder}: no *.safetensors{SUFFIX} in it; it is not compressed")
    if model is not None and to is not None:
        raise BadArgumentError("give model or to, not both")
    if to is not None:
        refuse_within(to, source.folder, *([] if source.base is None else [source.base.folder]))
        target = new_folder(to)
        with _work_folder(target) as (_, result):
            _restore_folder(source, result)
        return target
    if model is None:
        return source.all()
    if isinstance(model, torch.nn.Module):
        return _load_into(model, source)
    if not hasattr(model, "from_pretrained"):
        raise BadArgumentError(f"model is {model!r:.80}; it must be a torch.nn.Module or have from_pretrained")
    with tempfile.TemporaryDirectory(prefix="shrinkpoint-") as scratch:
        _restore_folder(source, Path(scratch) / "model")
        return model.from_pretrained(Path(scratch) / "model")


def _compress_folder(
    source: ModelFolder, result: Path, base: ModelFolder | None, cfg: Config, target: Path
) -> Transfer:
    if source.compressed:
        raise BadArgumentError(f"{source.folder} has {source.compressed[0]}; it is compressed already")
    if not source.raw:
        raise BadArgumentError(f"{source.folder}: no *.safetensors in it; only safetensors are compressed")
    result.mkdir()
    nbytes = raw = 0
    rows: list[Row] = []
    for file in source.raw:
        metadata, tensors = source.read(file)
        state = {"metadata": metadata, "tensors": tensors}
        sorts = {name: sort_of(tensor) for name, tensor in tensors.items()}
        parent = None if base is None else base_parent(base.some(tensors, file), sorts)
        ckpt = compress(state, parent, cfg)
        _write_new(result / f"{file}{SUFFIX}", ckpt.to_bytes())
        nbytes, raw = nbytes + ckpt.nbytes, raw + ckpt.raw_nbytes
        rows += ckpt.summary()
    for file in source.rest:
        copy_file(source.folder / file, result / file)
    done = Transfer(target, nbytes, raw, tuple(rows), base is not None)
    card = result / _CARD
    before = card.read_bytes() if card.exists() else b""
    if _BEGIN.encode() in before:
        raise BadArgumentError(f"{source.folder / _CARD} is the card of a compressed model already")
    card.write_bytes(before + _section(done, None if base is None else base.folder.name).encode())
    return done


def _restore_folder(source: ModelFolder, result: Path) -> None:
    from safetensors.torch import save_file

    result.mkdir()
    if said := source.incomplete():
        warnings.warn(said, ShrinkpointWarning, 2)
    for file in source.compressed:
        metadata, tensors = source.read(file)
        out = result / str(file).removesuffix(SUFFIX)
        out.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, out, metadata or None)
        follow_umask(str(out))
    for file in [*source.raw, *source.rest]:
        copy_file(source.folder / file, result / file)
    card = result / _CARD
    if card.exists():
        text = _without_section(card.read_bytes())
        if text:
            card.write_bytes(text)
        else:
            card.unlink()


def _folder_of(model_or_folder: Any, scratch: Path) -> ModelFolder:
    """Return the model's folder; a model in memory is written to `scratch`."""
    if isinstance(model_or_folder, (str, os.PathLike)):
        return ModelFolder(model_or_folder)
    scratch.mkdir()
    if hasattr(model_or_folder, "save_pretrained"):
        model_or_folder.save_pretrained(scratch)
    elif isinstance(model_or_folder, torch.nn.Module):
        from safetensors.torch import save_model

        save_model(model_or_folder, str(scratch / "model.safetensors"))
    else:
        raise BadArgumentError(
            f"model_or_folder is a {type(model_or_folder).__qualname__}; it must be a folder, a torch.nn.Module, "
            "or have save_pretrained"
        )
    return ModelFolder(scratch)


def _load_into(model: torch.nn.Module, source: ModelFolder) -> torch.nn.Module:
    """Load tensors into a module; tied weights are in the file once."""
    tensors = source.all()
    state = model.state_dict()
    places: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), sort_of(tensor), tensor.stride()) if tensor.numel() else name
        places.setdefault(place, []).append(name)
    for names in places.values():
        present = next((name for name in names if name in tensors), None)
        if present is not None:
            tensors |= {name: tensors[present] for name in names if name not in tensors}
    lines = [f"{name}: not in the folder" for name in state if name not in tensors]
    lines += [f"{name}: not in the model" for name in tensors if name not in state]
    for name, tensor in state.items():
        if name in tensors and sort_of(tensors[name]) != sort_of(tensor):
            lines.append(f"{name}: {sort_of(tensors[name])} in the folder, {sort_of(tensor)} in the model")
    if lines:
        shown = "\n  ".join(lines[:20])
        raise BadArgumentError(f"{source.folder}: the weights do not fit; nothing was changed\n  {shown}")
    model.load_state_dict(tensors)
    return model


class ModelFolder:
    """The safetensors files of a folder, raw or compressed."""

    def __init__(self, folder: PathLike, base: PathLike | None = None) -> None:
        self.folder = _path(folder)
        if not self.folder.is_dir():
            raise BadArgumentError(f"{self.folder} is not a folder")
        self.files = sorted(p.relative_to(self.folder) for p in _walk(self.folder, self.folder))
        self.compressed = [p for p in self.files if p.name.endswith(f".safetensors{SUFFIX}")]
        self.raw = [p for p in self.files if p.suffix == ".safetensors"]
        self.rest = [p for p in self.files if p not in {*self.compressed, *self.raw}]
        self.base = None if base is None else ModelFolder(base)
        self._names: dict[str, list[Path]] | None = None
        self._open: tuple[Path, Tensors] | None = None

    def read(self, file: Path) -> tuple[dict[str, str], Tensors]:
        """Return metadata and tensors of one file."""
        path = self.folder / file
        if file in self.raw:
            return read_safetensors(path)
        ckpt = _read_checkpoint(path)
        if ckpt.is_delta:
            if self.base is None:
                raise MissingParentError(f"{path}: a delta; the folder of its base model is needed as base")
            wanted = _keys(ckpt)
            plain = file.with_name(file.name.removesuffix(SUFFIX))
            parent = base_parent(self.base.some(wanted, plain), wanted)
            if parent.identity != ckpt.parent_id:
                raise MissingParentError(f"{path}: {self.base.folder} is not the base it was compressed against")
            state = decompress(ckpt, parent)
        else:
            state = decompress(ckpt)
        return _check_state(state, path)

    def all(self) -> Tensors:
        """Return all tensors of the folder.

        Raises:
            BadArgumentError: two files have one of the same name.
            CorruptDataError: a file that an index names is missing.
        """
        if said := self.incomplete():
            raise CorruptDataError(said)
        found: Tensors = {}
        for file in [*self.compressed, *self.raw]:
            tensors = self.read(file)[1]
            twice = next((name for name in tensors if name in found), None)
            if twice is not None:
                hint = "restore the folder with to=" if self.compressed else "choose one of them"
                raise BadArgumentError(f"{self.folder}: {twice} is in several files; {hint}")
            found |= tensors
        return found

    def incomplete(self) -> str:
        """Return a message about a missing file that an index in the folder names, or "".

        The index of "model.safetensors" is not used where that file exists, as in Transformers.
        """
        present = {*self.raw, *(file.with_name(file.name.removesuffix(SUFFIX)) for file in self.compressed)}
        named: set[Path] = set()
        for file in self.rest:
            whole = file.with_name(file.name.removesuffix(_INDEX))
            if file.name.endswith(f".safetensors{_INDEX}") and whole not in present:
                with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                    index = loads(read_file(self.folder / file, MOST_JSON))
                    named.update(file.with_name(name) for name in index["weight_map"].values())
        missing = min(named - present, default=None)
        return "" if missing is None else f"{self.folder}: {missing} is missing, which an index of its files names"

    def some(self, names: Mapping[str, Any], preferred: Path) -> Tensors:
        """Return the tensors of these names that exist, preferably from one file."""
        where = self._where()
        chosen: dict[Path, list[str]] = {}
        for name in names:
            files = where.get(name, [])
            fitting = [f for f in files if str(f).removesuffix(SUFFIX) == str(preferred)] or files
            if fitting:
                chosen.setdefault(fitting[0], []).append(name)
        found: Tensors = {}
        for file, present in chosen.items():
            tensors = self._cached(file)
            found |= {name: tensors[name] for name in present}
        return found

    def _cached(self, file: Path) -> Tensors:
        # The parts of a base follow those of the model, so the same file is asked for again and again.
        if self._open is None or self._open[0] != file:
            self._open = None
            self._open = (file, self.read(file)[1])
        return self._open[1]

    def _where(self) -> dict[str, list[Path]]:
        if self._names is None:
            self._names = {}
            for file in [*self.compressed, *self.raw]:
                path = self.folder / file
                if file in self.compressed:
                    names = list(_keys(_read_checkpoint(path)))
                else:
                    with open_safetensors(path) as opened:
                        names = list(opened.keys())
                for name in names:
                    self._names.setdefault(name, []).append(file)
            if not self._names:
                raise BadArgumentError(f"{self.folder}: no safetensors in it")
        return self._names


def base_parent(base: Tensors, wanted: Mapping[str, Sort]) -> Checkpoint:
    """Return the base's tensors that fit in name, dtype and shape, as a parent checkpoint.

    Its identity is a hash of these tensors, not of a compressed file. So a delta made with one release of the codec is
    readable with another, whether the given base is compressed or not. The base is not encoded.
    """
    same = {name: t for name, t in sorted(base.items()) if wanted.get(name) == sort_of(t)}
    nodes, found = tree.flatten({"tensors": same}, is_array)
    digest = blake3()
    arrays, memory, total = [], {}, 0
    for node in found:
        spec, flat = read_leaf(node.value, node.path)
        data = as_bytes(flat)
        digest.update(json.dumps([node.path, spec.dtype, list(spec.shape)]).encode())
        digest.update(data.data)
        memory[node.key] = BytesReference(data)
        arrays.append(StoredArray(spec.dtype, spec.shape).to_json())
        total += spec.nbytes
    groups = groups_to_json([StoredGroup([i], "bytes", []) for i in range(len(arrays))])
    header = {"parent": None, "as": digest.hexdigest(), "raw": total, "tree": nodes, "arrays": arrays, "groups": groups}
    return Checkpoint(container.write(header, [])[0], dict(memory))


def sort_of(tensor: torch.Tensor) -> Sort:
    """Return dtype and shape of a tensor, which are equal for interchangeable tensors."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _keys(ckpt: Checkpoint) -> dict[str, Sort]:
    """Return dtype and shape of a compressed file's tensors, by name."""
    return {r.path.removeprefix("tensors/"): (r.spec.dtype, r.spec.shape) for r in ckpt.records}


def _check_state(state: Any, path: Path) -> tuple[dict[str, str], Tensors]:
    ok = isinstance(state, dict) and set(state) == {"metadata", "tensors"}
    ok = ok and all(isinstance(part, dict) for part in state.values())
    ok = ok and all(isinstance(k, str) and isinstance(v, str) for k, v in state["metadata"].items())
    if not ok or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in state["tensors"].items()):
        raise CorruptDataError(f"{path}: not what save_pretrained writes")
    return state["metadata"], state["tensors"]


def _read_checkpoint(path: Path) -> Checkpoint:
    try:
        return Checkpoint.from_bytes(read_file(path))
    except CorruptDataError as e:
        raise CorruptDataError(f"{path}: {e}") from None


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file; CorruptDataError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as e:
        raise CorruptDataError(f"{path}: {e}") from None


def read_safetensors(path: Path) -> tuple[dict[str, str], Tensors]:
    """Return metadata and tensors of a safetensors file.

    Raises:
        CorruptDataError: it is damaged.
    """
    with open_safetensors(path) as file:
        return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _walk(folder: Path, top: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield the files below a folder, except in hidden folders, where tools keep caches.

    Args:
        folder: which.
        top: the folder that the user has named.
        above: the real folders that this one is in.

    Raises:
        BadArgumentError: an entry is a link to nothing, to a folder that it is in, or out of `top` (see `check_link`),
            or neither a file nor a folder.
    """
    above = (*above, folder.resolve())
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            if entry.name.startswith("."):
                continue
            if entry.resolve() in above:
                raise BadArgumentError(f"{entry} links to {entry.resolve()}, a folder that it is in")
            check_link(entry, top)
            yield from _walk(entry, top, above)
        elif entry.is_file():
            check_link(entry, top)
            yield entry
        else:
            what = f"a link to {os.readlink(entry)}, which is not there" if entry.is_symlink() else "no ordinary file"
            raise BadArgumentError(f"{entry} is {what}")


def _path(folder: PathLike) -> Path:
    try:
        return Path(folder)
    except TypeError:
        raise BadArgumentError(f"a folder must be a path, not {type(folder).__qualname__}") from None


def refuse_within(target: PathLike, *folders: Path) -> None:
    """Refuse to write into a folder that is read.

    Raises:
        BadArgumentError: the target is in one of the folders.
    """
    path = _path(target).resolve()
    for folder in folders:
        if folder.resolve() in path.parents:
            raise BadArgumentError(f"{path} is in {folder}, which it would be made from; choose a place outside")


def new_folder(path: PathLike) -> Path:
    """Check that a folder is new or empty, and create its parents."""
    target = _path(path).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadArgumentError(f"{target} is not empty")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _write_new(path: Path, data: bytes) -> None:
    """Write a new file durably, making its folder; FileExistsError if it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's bytes, and create the folder of the copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _without_section(card: bytes) -> bytes:
    """Return the card without the section."""
    begin, end = card.find(_BEGIN.encode()), card.rfind(_END.encode())
    return card[:begin] + card[end + len(_END) :] if 0 <= begin < end else card


def _section(done: Transfer, base: str | None) -> str:
    """Return the section of the model card: the stored bytes and the error of each weight."""
    lines = [
        "## Compressed weights",
        "",
        f"Weights of {done.raw_nbytes:,} bytes in {done.nbytes:,} ({done.ratio:.2f} to 1) by shrinkpoint. "
        f'Read them with `shrinkpoint.load_pretrained("{done.path.name}"{", base=..." if base else ""})`.',
        "",
    ]
    if base is not None:
        lines += [f"Stored as the difference to a base model, which is needed to read it: `{base}`.", ""]
    lossy = [row for row in done.rows if row.measure != "exact"]
    if not lossy:
        lines += ["**Lossless**: every bit of every weight comes back.", ""]
        return _BEGIN + "\n".join(lines) + _END
    share = sum(row.raw_bytes for row in lossy) / max(1, done.raw_nbytes)
    worst = max(lossy, key=lambda row: row.error)
    lines += [
        f"**Lossy**: {len(lossy)} of {len(done.rows)} arrays ({share:.1%} of the bytes) come back with an error, "
        f"at most {worst.error:g} ({worst.measure}, `{worst.path.removeprefix('tensors/')}`). The others are exact.",
        "",
        "| weight | dtype | bits per element | error | measure |",
        "|---|---|---|---|---|",
    ]
    for row in lossy:
        name = row.path.removeprefix("tensors/")
        lines.append(f"| `{name}` | {row.dtype} | {row.bits_per_element:.2f} | {row.error:g} | {row.measure} |")
    return _BEGIN + "\n".join([*lines, ""]) + _END
