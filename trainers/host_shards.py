"""Sharded tensors whose local part is on the host, for a mesh on any device."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def on_host(local: Tensor, like: Any) -> DTensor:
    """Return a DTensor laid out as another one, with its local part on the CPU.

    When it is gathered, it is moved through the device of its mesh, which an ordinary DTensor refuses. So a model's
    gradient averages take device memory only for one tensor at a time, when `compress` gathers it.
    """
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    make: Any = DTensor
    found: Any = make(local, spec, requires_grad=False)
    found.full_tensor = functools.partial(_whole, local, spec)
    return found  # type: ignore[no-any-return]


def _whole(local: Tensor, spec: DTensorSpec, *, grad_placements: Any = None) -> Tensor:
    """Gather the whole tensor on the device of the mesh; a collective."""
    there = DTensor.from_local(
        local.to(spec.mesh.device_type),
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=spec.shape,
        stride=spec.stride,
    )
    return there.full_tensor(grad_placements=grad_placements)
