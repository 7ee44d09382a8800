"""Search with several processes that train copies of one model."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist
import xxhash

from ..codec.errors import BadArgumentError, ShrinkpointError
from ..codec.state.leaves import LeafSpec, as_bytes, build_leaf, from_bytes, is_array, is_sharded, read_leaf, tie
from ..codec.state.tree import ArrayNode, flatten, unflatten
from ..searching.process_group import ProcessGroup
from ..searching.result import SearchResult


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
