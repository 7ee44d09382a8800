"""Model folders compressed for transfer, alone or against a base model.

A folder of a model hub (`config.json`, tokenizer, `*.safetensors`) becomes a folder where each safetensors file is a
checkpoint, `NAME.safetensors.spt`; everything else is copied as it is. The model card states savings and losses.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..codec.compress import compress
from ..codec.config import Config
from ..codec.display import Row
from ..codec.named_presets import check_config
from ..codec.presets import lossless
from ..kernels.errors import BadArgumentError
from ..store.local import follow_umask, sync_folder
from . import model_card as cards
from .model_card import Transfer
from .model_folder import (
    SUFFIX,
    ModelFolder,
    PathLike,
    base_parent,
    copy_file,
    new_folder,
    refuse_within,
    sort_of,
    write_file,
)


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
    if not source.raw:
        why = "it is compressed already" if source.compressed else "only safetensors are compressed"
        raise BadArgumentError(f"{source.folder}: no *.safetensors in it; {why}")
    result.mkdir()
    nbytes = raw = 0
    rows: list[Row] = []
    for file in source.raw:
        metadata, tensors = source.read(file)
        state = {"metadata": metadata, "tensors": tensors}
        sorts = {name: sort_of(tensor) for name, tensor in tensors.items()}
        parent = None if base is None else base_parent(base.some(tensors, file), sorts)
        ckpt = compress(state, parent, cfg)
        write_file(result / f"{file}{SUFFIX}", ckpt.to_bytes())
        nbytes, raw = nbytes + ckpt.nbytes, raw + ckpt.raw_nbytes
        rows += ckpt.summary()
    for file in source.rest:
        copy_file(source.folder / file, result / file)
    done = Transfer(target, nbytes, raw, tuple(rows), base is not None)
    card = result / cards.NAME
    before = card.read_bytes() if card.exists() else b""
    if cards.has_section(before):
        raise BadArgumentError(f"{source.folder / cards.NAME} is the card of a compressed model already")
    card.write_bytes(before + cards.section(done, None if base is None else base.folder.name).encode())
    return done


def _restore_folder(source: ModelFolder, result: Path) -> None:
    from safetensors.torch import save_file

    result.mkdir()
    for file in source.compressed:
        metadata, tensors = source.read(file)
        out = result / str(file).removesuffix(SUFFIX)
        out.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, out, metadata or None)
        follow_umask(str(out))
    for file in [*source.raw, *source.rest]:
        copy_file(source.folder / file, result / file)
    card = result / cards.NAME
    if card.exists():
        text = cards.without_section(card.read_bytes())
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
