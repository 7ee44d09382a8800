"""JSON of files is counted before it is parsed; headers have only the keys of the format."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec.format import bounded_json, container
from shrinkpoint.codec.format.bounded_json import MOST_DEPTH, loads
from tests.codec.common import put_together, take_apart

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.text('[]{},:"\\aé', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\{', max_size=3), inner, max_size=4),
    max_leaves=20,
)


def containers(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + sum(map(containers, inside))


@given(_json, st.booleans(), st.integers(1, 9))
@settings(max_examples=100)
def test_marks_in_texts_are_not_counted(value: Any, ascii_only: bool, block: int) -> None:
    """The count is exact for all contents of texts and all ends of blocks."""
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_json, "_BLOCK", block)
        patch.setattr(bounded_json, "MOST_CONTAINERS", containers(value))
        assert loads(data) == value
        if containers(value):
            patch.setattr(bounded_json, "MOST_CONTAINERS", containers(value) - 1)
            with pytest.raises(ValueError, match="JSON of more than"):
                loads(data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"[" * (MOST_DEPTH + 1), "nested deeper than 256"),
        (b'{"a":' * 10**6, "nested deeper than 256"),
        (b'["]]]]",' * 300, "nested deeper than 256"),
        (b'["\\"]]",' * 300, "nested deeper than 256"),
        (b"[" + b"{}," * (1 << 22) + b"{}]", "more than 8388608 values, or 4194304"),
        (b"[" + b"0," * (1 << 23) + b"0]", "more than 8388608 values, or 4194304"),
        (b"[NaN]", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b'"\xff"', "can't decode"),
        ("[1]".encode("utf-16"), "can't decode"),
        (b"9" * 10**5, "4300 digits"),
    ],
)
def test_what_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        loads(data)


def test_deep_but_allowed() -> None:
    assert loads(b"[" * MOST_DEPTH + b"]" * MOST_DEPTH) is not None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: h.update(x=[]), "it has the unknown key 'x'"),
        (lambda h: h["arrays"][0].update(zz=1), "a record has the unknown key 'zz'"),
        (lambda h: h["groups"][0].update(zz=1), "a record has the unknown key 'zz'"),
        (lambda h: h.update(arrays={"count": 1, "d": {"v": ["float64"], "zz": 1}}), "the column 'd' does not fit"),
        (lambda h: h.update(arrays={"count": 2}), "more records than the tree has arrays"),
        (lambda h: h.update(tree=["é"]), None),
    ],
)
def test_headers_with_other_keys(change: Any, said: str | None) -> None:
    header, chunks = take_apart(sp.compress({"w": np.ones(3)}).to_bytes())
    change(header)
    with pytest.raises(sp.CorruptDataError, match=said):
        sp.Checkpoint.from_bytes(put_together(header, chunks))


def test_a_state_beyond_the_limits_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_json, "MOST_VALUES", 1000)
    sp.compress({"w": np.ones(3), "order": list(map(str, range(500)))})
    with pytest.raises(sp.BadArgumentError, match=r"more than 1000 values.*store large ones as arrays"):
        sp.compress({"w": np.ones(3), "order": list(map(str, range(1500)))})
    monkeypatch.setattr(container, "MOST_ARRAYS", 3)
    blob = sp.compress({i: np.ones(3) for i in range(3)}).to_bytes()
    with pytest.raises(sp.BadArgumentError, match="has 4 arrays; the limit is 3"):
        sp.compress({i: np.ones(3) for i in range(4)})
    monkeypatch.setattr(container, "MOST_ARRAYS", 2)
    with pytest.raises(sp.CorruptDataError, match="3 arrays; the limit is 2"):
        sp.Checkpoint.from_bytes(blob)
