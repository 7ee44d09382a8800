"""Arguments of presets and kinds: each wrong one is an error with its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.presets import bitsnap, check_n_run, expected_failures, lc_checkpoint
from shrinkpoint.codec.state.casting import rounded
from shrinkpoint.codec.state.leaves import LeafSpec

WRONG: list[tuple[Callable[..., Any], str, list[Any]]] = [
    (lc_checkpoint, "huffman", ["no", 1, 0, None, [], np.zeros(2), torch.zeros(2)]),
    (lc_checkpoint, "second_moments", ["both", None, ["relative"], np.zeros(2)]),
    (
        bitsnap,
        "master",
        [None, 3, True, "optim*", b"optim*", [1], ["a", None], [""], np.array(3), np.zeros(2), torch.tensor(1.0), str],
    ),
    (sp.Kind, "parameter", [5, ["weight"], b"weight", np.zeros(2), str]),
    (sp.Kind, "optimizer", [5, ["Adam"], np.zeros(2), torch.optim.Adam]),
    (check_n_run, "policy", [["one_shot"], {}, None, "always", np.zeros(2), ("one_shot", "consecutive")]),
    (check_n_run, "bits", [None, 5, [4], "4", np.zeros(2), np.array(5)]),
    (check_n_run, "moment_bits", [5, 0, True, "4", "auto", 4.0, [4], np.zeros(2)]),
    (check_n_run, "method", [None, "best", ["adaptive"], np.zeros(2)]),
    (check_n_run, "coder", [None, "smaller", ["published"], np.zeros(2)]),
]
CASES = [pytest.param(f, n, v, id=f"{f.__name__}-{n}-{i}") for f, n, vs in WRONG for i, v in enumerate(vs)]


@pytest.mark.parametrize(("preset", "name", "value"), CASES)
def test_a_wrong_argument_is_named(preset: Callable[..., sp.Config], name: str, value: Any) -> None:
    with pytest.raises(sp.BadArgumentError, match=rf"^{name} is "):
        preset(**{name: value})


@pytest.mark.parametrize("nodes", [0, -1, 10**15 + 1, 10**400, 2.0, None, [2], True])
def test_a_number_of_nodes_out_of_range_is_refused(nodes: Any) -> None:
    with pytest.raises(sp.BadArgumentError, match=r"^nodes is .*; it must be an integer in \[1, 10+\]$"):
        expected_failures(0.1, nodes, 5)


@pytest.mark.parametrize("value", [None, 3, [], np.zeros(2), torch.zeros(2), "second"])
def test_a_kind_that_is_unknown_is_shown(value: Any) -> None:
    for name, said in (("layer", "kind"), ("role", "role")):
        with pytest.raises(sp.BadArgumentError, match=f"^{said} .* is unknown; one of "):
            sp.Kind(**{name: value})


def test_the_limits_themselves_are_taken() -> None:
    assert expected_failures(1, 10**15, 1e15) == int(1e30)
    assert expected_failures(0, 1, 0) == 0
    assert check_n_run(moment_bits=8).rules[1].codec == sp.Rows(8, coder="published")
    assert lc_checkpoint(huffman=np.True_).rules[0].codec == lc_checkpoint().rules[0].codec  # type: ignore[arg-type]


def test_patterns_of_any_iterable() -> None:
    for master in (["a/*", "b"], ("a/*", "b"), np.array(["a/*", "b"]), iter(["a/*", "b"]), {"a/*": 1, "b": 2}):
        assert [r.match for r in bitsnap(master=master).rules[2:4]] == ["a/*", "b"]
    assert len(bitsnap(master=()).rules) == 3


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("state", ["warn", "raise"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rounding_does_not_mind_the_error_state_of_the_caller(dtype: str, state: Any) -> None:
    values = np.array([1e300, -1e300, 1e-300, 1e-43, 1e-7, 1.0, np.inf])
    spec = LeafSpec("torch", dtype, values.shape)
    with np.errstate(all="ignore"):
        narrow = values.astype(np.float32)
    with np.errstate(all=state):
        found = rounded(narrow, spec)
    expected = torch.from_numpy(narrow).to(getattr(torch, dtype))
    assert found.tobytes() == expected.view(torch.uint8).numpy().tobytes()
