"""States on two pretended devices: bytes as on a CPU, no host operand in device operations.

A script, for a process of its own (`tests/pretended.py`).
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import shrinkpoint as sp
from shrinkpoint.codec.entropy import blocks
from shrinkpoint.codec.parallel import set_threads
from shrinkpoint.codec.rebase import rebase
from shrinkpoint.codec.state import leaves
from shrinkpoint.codec.weights import planning
from shrinkpoint.kernels.backend import arguments, arrays
from tests import pretended
from tests.codec import test_gpu as gpu

CONFIGS = (
    "default, gradients", "exact, gradients", "target", "residual", "rate, earlier", "inshrinkerator, gradients",
    "lc", "check-n-run", "bitsnap", "fine log buckets", "rows", "default, coded there",
)  # fmt: skip
"""Each codec, with all that it does on a device."""


def take_for_gpus() -> None:
    """Let the library treat the pretended devices as GPUs."""
    back_ends = 0
    for package in ("kernels", "codec"):
        path = importlib.import_module(f"shrinkpoint.{package}").__path__
        for module in pkgutil.walk_packages(path, f"shrinkpoint.{package}."):
            if package == "kernels" or module.name.count(".") == 2:
                importlib.import_module(module.name)
                back_ends += module.name.endswith(".gpu")
    assert back_ends > 10
    kind, of_others, plain = arrays.device_of, arrays.on_gpu, (*leaves._plain_tensors(), pretended.Elsewhere)

    def on_gpu(x: Any) -> bool:
        return isinstance(x, pretended.Elsewhere) or of_others(x)

    def device_of(x: Any) -> tuple[int, int]:
        return (2, x.place.index) if isinstance(x, pretended.Elsewhere) else kind(x)

    here: dict[str, Any] = {"on_gpu": on_gpu, "device_of": device_of, "DEVICES": ("cpu", pretended.KIND)}
    for name, module in list(sys.modules.items()):
        if name.startswith("shrinkpoint."):
            for known in here.keys() & vars(module).keys():
                setattr(module, known, here[known])
    leaves._plain_tensors = lambda: plain  # type: ignore[assignment]
    arguments._check_tensor = lambda name, x: None  # a subclass's storage is the host's


def refused(work: Any) -> None:
    """Print "refused" if the rules refuse the work."""
    try:
        work()
    except RuntimeError:
        print("refused")


def coded(name: str, device: str = "cpu") -> list[sp.Checkpoint]:
    """Compress a base and a delta; "there" also lets the device code blocks of symbols."""
    blocks.set_device_coding("there" in name)
    found = gpu.coded_twice(name, device)
    blocks.set_device_coding(None)
    return found


def check_values(chain: list[sp.Checkpoint], expected: list[sp.Checkpoint], device: str, others: str = "") -> None:
    """Check that a device restores the values of the host, and that none is sent as such.

    Args:
        chain: coded on a device.
        expected: coded on the host.
        device: where the state is restored.
        others: where first moments are restored, if that is elsewhere.
    """
    values = sp.decompress(expected[1])
    room = torch.utils._pytree.tree_map(lambda x: x * 0 if isinstance(x, torch.Tensor) else x, values)
    entries = [gpu.to(entry, device) for entry in room["optimizer"]["state"].values()]
    for entry in entries:
        entry["exp_avg"] = entry["exp_avg"].to(others or device)
    room = {"model": gpu.to(room["model"], device), "optimizer": {"state": dict(enumerate(entries))}, "step": 0}
    pretended.Rules.sent.clear()
    check_restored(chain[1], None, values, room, values_may_be_sent=bool(others))
    check_restored(sp.Checkpoint(chain[1].to_bytes(), None), chain[0], values, room, values_may_be_sent=bool(others))


def check_restored(
    ckpt: sp.Checkpoint, parent: sp.Checkpoint | None, values: Any, room: Any, *, values_may_be_sent: bool = False
) -> None:
    """Check that a state is restored in arrays on devices to the bit."""
    pretended.Rules.sent.clear()
    restored = sp.decompress(ckpt, parent, out=room)
    sent = [(dtype, size) for dtype, size in pretended.Rules.sent if dtype.is_floating_point and size > LARGE]
    assert values_may_be_sent or not sent, sent
    for x, y in zip(*map(torch.utils._pytree.tree_leaves, (restored, values)), strict=True):
        assert not isinstance(x, torch.Tensor) or torch.equal(bits(x), bits(y))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().reshape(-1).view(torch.uint8)


LARGE = 600
"""Elements above the factors of a matrix's rows and columns, and below each matrix of the states."""


def exact(cfg: sp.Config, device: str) -> list[sp.Checkpoint]:
    """Compress a base and two deltas (all elements, few) of a large array and of small ones."""
    chain: list[sp.Checkpoint] = []
    steps = torch.randn(264, 256, generator=torch.Generator().manual_seed(1))
    for way in (torch.zeros(264, 256), 0.01 * steps.sin(), (0.01 * steps.sin()).where(steps < 2, 0.1 * steps)):
        now = steps + way
        others = {"complex": torch.view_as_complex(now.double().reshape(-1, 2)), "wide": (now * 1e4).long()}
        state = {"large": now, "many": list(now.bfloat16().reshape(4, 132, 128)), **others, "byte": now.sign().char()}
        chain.append(sp.compress(gpu.to(state, device), chain[-1] if chain else None, cfg))
    return chain


def check_exact(cfg: sp.Config, device: str) -> None:
    """Check bytes of a chain, its values, and those of a super-step."""
    chain, expected = exact(cfg, device), exact(cfg, "cpu")
    gpu.check_same_bytes(chain, expected)
    chain.append(rebase(expected[2], expected[0]))
    for k, ckpt in enumerate(chain):
        values = sp.decompress(expected[min(k, 2)])
        room = gpu.to(torch.utils._pytree.tree_map(torch.zeros_like, values), device)
        parent = (None, chain[0], chain[1], expected[0])[k]
        check_restored(sp.Checkpoint(ckpt.to_bytes(), None), parent, values, room)


def main() -> None:
    pretended.register()
    take_for_gpus()
    set_threads(1)  # Triton's interpreter runs one kernel at a time
    together = planning.solve_together
    blocks.LEAST = 3000
    expected = {name: coded(name) for name in CONFIGS}
    with pretended.pretending():
        one, other = (torch.ones(4, device=f"{pretended.KIND}:{i}") for i in range(2))
        refused(lambda: one + torch.ones(4))
        refused(lambda: one + other)
        for name in CONFIGS:
            planning.solve_together = together if name.startswith(gpu.SOLVED_THERE) else gpu.one_by_one
            chain = coded(name, f"{pretended.KIND}:0")
            gpu.check_same_bytes(chain, expected[name])
            check_values(chain, expected[name], f"{pretended.KIND}:0")
            if "gradients" in name:
                for others in ("cpu", f"{pretended.KIND}:1"):
                    check_values(chain, expected[name], f"{pretended.KIND}:0", others)
        for codec in (sp.Exact(), sp.Changed(), sp.ExponentDelta(2), sp.ExponentDelta(None, "packed")):
            check_exact(sp.Config([("*", codec)]), f"{pretended.KIND}:0")
        state = gpu.to(gpu.training(0), f"{pretended.KIND}:0")
        state["optimizer"] = gpu.to(state["optimizer"], f"{pretended.KIND}:1")
        whole = sp.compress(state, cfg=gpu.CONFIGS["default"])
        gpu.check_same_bytes([whole], [sp.compress(gpu.training(0), cfg=gpu.CONFIGS["default"])])
    if pretended.Rules.launches > 100 and pretended.Rules.operations > 1000:
        print("done")


if __name__ == "__main__":
    main()
