"""Files of others: `.pt`, safetensors and DCP folders, read without running anything in them, and written."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..codec.errors import BadArgumentError, CorruptDataError, UnsupportedLeafError
from ..codec.state import tree
from ..codec.state.leaves import is_array
from .dcp import is_dcp, load_dcp, load_plain, save_dcp
from .files import check_apart, check_free, write_file, write_folder
from .output import note

FORMATS = ("pt", "safetensors", "dcp")
_TREE = "shrinkpoint.tree"
_ENDINGS = {".pt": "pt", ".pth": "pt", ".bin": "pt", ".ckpt": "pt", ".safetensors": "safetensors"}


def format_of(target: Path, asked: str | None) -> str:
    """The format of an output: as asked, else by its ending."""
    if asked is not None:
        if asked not in FORMATS:
            raise BadArgumentError(f"--to is {asked!r}; it must be one of {', '.join(FORMATS)}")
        return asked
    found = _ENDINGS.get(target.suffix)
    if found is None:
        raise BadArgumentError(f"{target} ends in none of {', '.join(_ENDINGS)}; say --to {'|'.join(FORMATS)}")
    return found


def load_state(path: Path) -> Any:
    """The state in a `.pt` file, a safetensors file or a DCP folder, told apart by what they are.

    Raises:
        CorruptDataError: it cannot be read as one of them.
        UnsupportedLeafError: it holds objects that only pickle can load.
        OSError: it is not there.
    """
    if path.is_dir():
        if not is_dcp(path):
            kind = "a store" if (path / "steps").is_dir() else "no folder of torch.distributed.checkpoint"
            raise CorruptDataError(f"{path}: is {kind}; a .pt or safetensors file or a DCP folder is needed here")
        return load_dcp(path)
    with open(path, "rb") as file:
        start = file.read(9)
    if path.suffix == ".safetensors" or (len(start) == 9 and start[8:] == b"{" and start[:2] != b"PK"):
        return _load_safetensors(path)
    state = load_plain(path, str(path))
    if not isinstance(state, (dict, list, tuple)):
        raise UnsupportedLeafError(f"{path}: holds a {type(state).__qualname__}, not a dict, list or tuple of tensors")
    return state


def _load_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except SafetensorError as error:
        raise CorruptDataError(f"{path}: {error}") from None
    if _TREE not in metadata:
        return arrays
    used: set[str] = set()

    def place(_number: int, where: Any) -> Any:
        name = where()[0]
        if name not in arrays:
            raise CorruptDataError(f"{path}: its tree has an array {name[:80]!r} that the file has not")
        used.add(name)
        return arrays[name]

    try:
        nodes = json.loads(metadata[_TREE])
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{path}: {_TREE}: {str(error)[:200]}") from None
    if not isinstance(nodes, list):
        raise CorruptDataError(f"{path}: {_TREE} is no tree")
    state = tree.unflatten(nodes, place)
    if used != set(arrays):
        raise CorruptDataError(f"{path}: its tree leaves out {len(set(arrays) - used)} of its arrays")
    return state


def check_target(target: Path, kind: str, force: bool, read: Iterable[str]) -> None:
    """Refuse an output of `kind` (one of `FORMATS`) that may not be written, before the work is done.

    Args:
        target: the output.
        kind: what it will be.
        force: whether it may replace what is there; of folders only one of DCP.
        read: files, folders and URLs that it is made from, see `check_apart`.
    """
    check_apart(target, read)
    check_free(target, force)
    is_store = (target / "steps").is_dir()
    if target.is_dir() and (is_store or not (kind == "dcp" and (is_dcp(target) or not any(target.iterdir())))):
        what = "a store" if is_store else "no DCP folder" if kind == "dcp" else "a folder"
        raise BadArgumentError(f"{target} is {what}, which --force does not replace")


def save_state(state: Any, target: Path, kind: str, force: bool) -> None:
    """Write a state as `kind` (one of `FORMATS`), whole or not at all, where `check_target` has nothing against it."""
    if kind == "safetensors":
        arrays, metadata = _for_safetensors(state)
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        with _as_os_error(target, SafetensorError):
            write_file(target, force, lambda path: save_file(arrays, path, metadata))
    elif kind == "dcp":
        _check_dcp(state)
        with _as_os_error(target, CorruptDataError):
            write_folder(target, force, lambda path: save_dcp(state, path))
    else:
        import numpy as np
        import torch

        _, found = tree.flatten(state, is_array)
        foreign = sum(not isinstance(a.value, torch.Tensor) for a in found)
        if any(not isinstance(a.value, (torch.Tensor, np.ndarray, np.generic)) for a in found):
            raise UnsupportedLeafError(f"{target}: arrays that are neither torch's nor NumPy's would be pickled")
        if foreign:
            note(f"{foreign} NumPy arrays are written as such: torch.load needs weights_only=False to read them")
        with _as_os_error(target, RuntimeError):
            write_file(target, force, lambda path: _torch_save(state, path))


class _Remembering(io.BufferedWriter):
    """A file that keeps what the system said of a write: torch makes a wrong position of it."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        """As any file."""
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def _torch_save(state: Any, path: Path) -> None:
    """`torch.save`; of a full disk the system's error."""
    import torch

    with _Remembering(io.FileIO(path, "wb")) as file:
        try:
            torch.save(state, file)
        except RuntimeError:
            if file.error is None:
                raise
            raise file.error from None


@contextlib.contextmanager
def _as_os_error(target: Path, kind: type[Exception]) -> Iterator[None]:
    """What a library makes of a full disk is said as what it is: the output could not be written."""
    try:
        yield
    except kind as error:
        raise OSError(f"{target} could not be written: {str(error).strip().splitlines()[0][:300]}") from None


def _for_safetensors(state: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors by path; the tree around them as metadata where it is more than one dict of them."""
    import numpy as np
    import torch

    nodes, found = tree.flatten(state, is_array)
    arrays: dict[str, Any] = {}
    pointers: set[int] = set()
    tied = 0
    for node in found:
        value = node.value
        if not isinstance(value, torch.Tensor):
            array = np.array(value)
            try:
                value = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
            except TypeError as error:
                raise UnsupportedLeafError(f"{node.path}: safetensors: {error}") from None
        if node.path == "__metadata__" or not _is_utf8(node.path):
            raise BadArgumentError(f"safetensors cannot name an array {ascii(node.path)[:80]}; --to pt can")
        if node.path in arrays:
            raise BadArgumentError(f"two arrays have the path {node.path!r}, and safetensors has but one name for each")
        value = value.contiguous()
        if value.numel() and value.data_ptr() in pointers:
            value, tied = value.clone(), tied + 1
        pointers.add(value.data_ptr())
        arrays[node.path] = value
    if tied:
        note(f"{tied} tied arrays are written once for each of their names")
    flat = type(state) is dict and all(is_array(v) for v in state.values()) and list(state) == list(arrays)
    if flat:
        return arrays, {"format": "pt"}
    # Places of arrays are found by their paths; numbers only have to be there.
    return arrays, {"format": "pt", _TREE: json.dumps(nodes)}


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_dcp(state: Any) -> None:
    """Refuse, or say, what a DCP folder does not keep."""
    if not isinstance(state, dict):
        raise BadArgumentError(f"a DCP folder holds a dict, not a {type(state).__qualname__}; say --under PATH")
    lost: list[str] = []
    renamed = 0
    stack: list[tuple[str, Any]] = [("", state)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict):
            if not value and path:
                lost.append(path)
            renamed += sum(type(k) is not str for k in value)
            if len({str(k) for k in value}) != len(value):
                raise BadArgumentError(f"{path}: two keys become the same text, as DCP writes them")
            stack.extend((f"{path}/{k}" if path else str(k), v) for k, v in value.items())
        elif isinstance(value, list):
            stack.extend((f"{path}/{i}", v) for i, v in enumerate(value))
    if renamed:
        note(f"{renamed} keys that are no text become text: DCP has no others")
    if lost:
        note(f"DCP has no empty dicts; left out: {listed(lost)}")


def listed(names: Sequence[str], most: int = 8) -> str:
    """A few names of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def is_spt(path: Path) -> bool:
    """Whether a file is a checkpoint of ours."""
    from ..codec.format.container import MAGIC

    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC
