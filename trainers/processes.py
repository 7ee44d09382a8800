"""Collectives: errors of one process are raised on all; a state of the first comes to all."""

from __future__ import annotations

import builtins
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import xxhash

from ..codec import errors
from ..codec.errors import BadArgumentError, ShrinkpointError
from ..codec.state.leaves import LeafSpec, as_bytes, build_leaf, from_bytes, is_array, is_sharded, read_leaf, tie
from ..codec.state.tree import ArrayNode, flatten, unflatten

if TYPE_CHECKING:
    from ..searching.arguments import ProcessGroup
    from ..searching.result import SearchResult

A = TypeVar("A")
B = TypeVar("B")
_SMALL = 1 << 10
"""Elements up to which an array is sent with the outline: a broadcast of its own takes longer than its bytes."""


def world() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process among those that train together."""
    return dist.get_rank() if world() > 1 else 0


def on_all(work: Callable[[], A], brief: Callable[[A], B]) -> tuple[A, list[B]]:
    """Call `work` on all processes; return its result here and `brief` of all results."""
    if world() == 1:
        found = work()
        return found, [brief(found)]
    error, short = None, None
    try:
        found = work()
        short = brief(found)
    except BaseException as e:  # an interrupt of one, too, or the others would wait for it
        error = e
    everyone: list[Any] = [None] * world()
    with _preferring(error):
        dist.all_gather_object(everyone, (short, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    failed = [f"rank {number}: {why}" for number, (_, why) in enumerate(everyone) if why is not None]
    if failed:
        raise ShrinkpointError(f"nothing was saved, since another rank could not: {'; '.join(failed)}")
    return found, [one for one, _ in everyone]


def from_all(mine: Any) -> list[Any]:
    """Gather a value of each process on rank 0; return an empty list on the others."""
    if world() == 1:
        return [mine]
    everyone: list[Any] | None = [None] * world() if rank() == 0 else None
    dist.gather_object(mine, everyone)
    return everyone or []


@contextlib.contextmanager
def explaining(what: str) -> Iterator[None]:
    """Add a note to torch's errors about another process that is gone or does not answer."""
    try:
        yield
    except RuntimeError as e:
        if world() > 1:
            e.add_note(f"rank {rank()} of {world()}: {what}; another process is gone or does not answer")
        raise


@contextlib.contextmanager
def _preferring(error: BaseException | None) -> Iterator[None]:
    """Raise the local error, rather than the failure to send it to lost processes."""
    try:
        yield
    except RuntimeError:
        if error is not None:
            raise error from None
        raise


def on_rank_0(work: Callable[[], A], otherwise: str, light: Callable[[A], Any] | None = None) -> A:
    """Call `work` on rank 0, and return its result on all processes.

    Args:
        work: an error of it is raised on all.
        otherwise: says what became of it where the result cannot be sent (`explaining`).
        light: makes of the result what other processes get; None: the result itself.
    """
    if world() == 1:
        return work()
    found: Any = None
    error: BaseException | None = None
    if rank() == 0:
        try:
            found = work()
        except BaseException as e:  # an interrupt, too
            error = e
    sent: list[Any] = [
        found if found is None or light is None else light(found),
        None if error is None else (type(error).__name__, str(error), getattr(error, "errno", None)),
    ]
    with _preferring(error), explaining(otherwise):
        dist.broadcast_object_list(sent)
    if error is not None:
        raise error
    if sent[1] is not None:
        raise _received_error(*sent[1])
    result: A = found if rank() == 0 else sent[0]
    return result


def _received_error(name: str, text: str, errno: int | None) -> Exception:
    """Return an error of another process, with its class if that is known here.

    The error itself is not sent: errors of storage libraries may not be picklable, or need more arguments than a text.
    """
    known = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, Exception):
        with contextlib.suppress(TypeError):
            raised = known(text)
            if isinstance(raised, OSError):
                raised.errno = errno
            return raised
    return ShrinkpointError(f"rank 0: {name}: {text}")


@dataclass(frozen=True, slots=True)
class _Array:
    """Placeholder in the outline for an array that is broadcast separately."""

    shape: torch.Size
    dtype: torch.dtype


def redistributed(value: Any, like: Any) -> Any:
    """Return a whole tensor sharded as the DTensor `like`; other values unchanged."""
    if not hasattr(like, "device_mesh") or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    if hasattr(value, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Every process has the whole tensor: nothing needs to be sent.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def broadcast_entries(
    entries: Mapping[str, Any], settings: Any, parameters: Mapping[str, Any]
) -> tuple[dict[str, Any], Any]:
    """Return rank 0's entries and settings on every process, sharded as the parameters are.

    One sharded array is whole in memory at a time, on the parameter's device.

    Args:
        entries: parameter name -> entry (a value or a dict of values), on rank 0; empty on the others.
        settings: anything small, on rank 0; any value on the others.
        parameters: name -> parameter (anything else, if the entry is not sharded), of this process.
    """
    outlines: list[Any] = [{name: _outline(entry) for name, entry in entries.items()}, settings]
    if world() > 1:
        dist.broadcast_object_list(outlines)
    return {n: _received(entries.get(n), sent, parameters.get(n)) for n, sent in outlines[0].items()}, outlines[1]


def _outline(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _outline(one) for key, one in value.items()}
    if world() == 1 or type(value) is not torch.Tensor or value.numel() <= _SMALL:
        return value
    return _Array(value.shape, value.dtype)


def _received(mine: Any, sent: Any, parameter: Any) -> Any:
    if isinstance(sent, Mapping):
        return {key: _received(None if mine is None else mine[key], one, parameter) for key, one in sent.items()}
    value = sent
    if isinstance(sent, _Array):
        device = _device(parameter)
        empty = mine is None
        value = torch.empty(sent.shape, dtype=sent.dtype, device=device) if empty else mine.to(device).contiguous()
        dist.broadcast(value, 0)
    return redistributed(value, parameter)


def _device(parameter: Any) -> torch.device:
    """Return a parameter's device if the processes can send from it, else one where they can."""
    group: Any = dist.group.WORLD
    devices = list(group._device_types)
    own: torch.device | None = getattr(parameter, "device", None)
    first: torch.device = devices[0]
    return own if own is not None and own.type in {device.type for device in devices} else first


def of_first(team: ProcessGroup, tree: Any, group: Any) -> Any:
    """Return the first process's tree on all processes; only differing values are sent.

    Scalars, random number generators and buffers that are not synchronised differ between replicas. A collective; an
    error before the first transfer is raised on all processes.

    Args:
        team: the processes.
        tree: as for `compress`: this process's own.
        group: the team's process group.

    Raises:
        BadArgumentError: an array is in parts, one for each process; an error of another process.
        UnsupportedLeafError: see `compress`.
    """
    own: list[ArrayNode] = []

    def outline() -> Any:
        nodes, arrays = tie(*flatten(tree, is_array))
        parts = next((node.path for node in arrays if is_sharded(node.value)), None)
        if parts is not None:
            raise BadArgumentError(f"{parts}: each process has a part of it; replicas are searched together (DDP)")
        own.extend(arrays)
        return [nodes, [(node.key, _digest(node)) for node in arrays]]

    outlines = team.all(outline)
    nodes, first = outlines[0]
    # All processes compute from the outlines which arrays the others lack.
    held = [set(map(tuple, arrays)) for _, arrays in outlines]
    mine = {(key, digest): node.value for (key, digest), node in zip(outlines[team.rank][1], own, strict=True)}
    arrays = []
    for number, entry in enumerate(map(tuple, first)):
        found = own[number].value if team.rank == 0 else mine.get(entry)
        if not all(entry in one for one in held):
            sent: list[Any] = [_packed(own[number])] if team.rank == 0 else [None]
            dist.broadcast_object_list(sent, 0, group=group)
            if found is None:
                spec, data = sent[0]
                found = build_leaf(from_bytes(data, spec), spec)
        arrays.append(found)
    return tree if team.rank == 0 else unflatten(nodes, lambda number, _: arrays[number])


def _packed(node: ArrayNode) -> tuple[LeafSpec, Any]:
    spec, flat = read_leaf(node.value, node.path)
    return spec, as_bytes(flat)


def _digest(node: ArrayNode) -> str:
    spec, data = _packed(node)
    known: str = xxhash.xxh3_128_hexdigest(repr(spec).encode()) + xxhash.xxh3_128_hexdigest(data.data)
    return known


def agreed(team: ProcessGroup, found: SearchResult) -> SearchResult:
    """Check that all processes found the same, and return it; a collective.

    Raises:
        ShrinkpointError: they have not: it was not given the `group`.
    """
    configs = team.all(lambda: json.dumps(found.config.to_json()))
    for rank, other in enumerate(configs):
        if other != configs[0]:
            raise ShrinkpointError(
                f"search: rank {rank} has found another configuration than rank 0; hand `group` on to sp.search"
            )
    return found
