"""Settings before Triton is imported: without a CUDA device its kernels are interpreted."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from shrinkpoint.codec import plan
from shrinkpoint.codec.evidence import gather, names
from shrinkpoint.codec.evidence.entries import Outline, entries_of
from shrinkpoint.kernels.backend import dispatch
from tests.seeds import is_fixed

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if not os.environ.get("SHRINKPOINT_TEST_FIRST_CALLS"):  # set: small arrays go to NumPy, as in a user's first process
    dispatch.compile_at_once()
settings.register_profile(
    "default",
    deadline=None,
    max_examples=40,
    derandomize=is_fixed(),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _weights_are_trained(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Say of weights that stand alone in a state that they are trained, as `kinds=` of their module would.

    Most tests are about what happens to weights after that. Those about evidence have the mark `no_evidence`.
    """
    if request.node.get_closest_marker("no_evidence") is not None:
        return

    def with_kinds(nodes: list[Any], arrays: Any, kinds: Any) -> Any:
        if kinds is None and not any(entries_of(arrays.paths, Outline())):
            kinds = {
                path: names.layer_of(path, spec)
                for path, spec in zip(arrays.paths, arrays.specs, strict=True)
                if len(spec.shape) >= 2 and names.has_weight_name(path) and not names.is_average(path)
            }
        return gather.gather(nodes, arrays, kinds)

    monkeypatch.setattr(plan, "gather", with_kinds)


LONG = (
    "store/test_crash.py",
    "trainers/test_pointers.py",
    "store/test_saver.py",
    "store/test_maintenance.py",
    "codec/test_gpu.py",
    "trainers/test_run.py",
    "trainers/test_preemption.py",
    "kernels/test_gpu_aot.py",
    "store/test_rewinds.py",
    "trainers/test_killed_ranks.py",
    "trainers/test_dcp.py",
    "trainers/test_loop.py",
    "trainers/test_background.py",
    "store/test_thinning.py",
    "face/test_docs.py",
    "codec/test_past_weights.py",
    "trainers/test_examples.py",
)
"""Files that take minutes. They run first, so that no process is left with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of long files first."""
    order = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get("/".join(item.path.parts[-2:]), len(LONG)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the global generators before each test, so that tests are independent of order."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
