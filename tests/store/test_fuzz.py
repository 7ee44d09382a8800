"""Random bytes as manifests, tags and partly read files: typed errors or right values."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec.checkpoint import Checkpoint
from shrinkpoint.codec.format.ranged import FRONT, Ranged
from shrinkpoint.codec.partial import decompress_only
from shrinkpoint.store.files import seal, unseal
from shrinkpoint.store.labels import read_tag
from shrinkpoint.store.manifest import Manifest, parse_name
from tests.codec.common import put_together, take_apart
from tests.store.common import fill, lossless, state

SECONDS = float(os.environ.get("SHRINKPOINT_FUZZ_SECONDS", "3"))
"""Each of the time-boxed tests; set it higher to run them for longer."""
LEAST = 50
"""Rounds of each, however long they take."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def a_manifest() -> dict[str, Any]:
    """Return a valid manifest."""
    store = fill(sp.Store(f"memory://{uuid.uuid4()}", lossless()), 0, 1, 2)
    return unseal(store.describe(2).to_bytes())


SOUND = a_manifest()


@settings(max_examples=300)
@given(
    st.dictionaries(st.sampled_from([*SOUND, "x"]), JSON, max_size=3), st.sets(st.sampled_from(list(SOUND)), max_size=2)
)
def test_manifests(fields: dict[str, Any], without: set[str]) -> None:
    data = {k: v for k, v in {**SOUND, **fields}.items() if k not in without}
    try:
        found = Manifest.from_bytes(seal(data), 2)
    except (sp.CorruptDataError, sp.NewerFormatError):
        return
    assert found.step == 2
    assert all(set(name) <= set("0123456789abcdef-.spt") for name in found.chain)
    assert Manifest.from_bytes(found.to_bytes(), 2) == found
    assert found.restore_cost >= 1


@settings(max_examples=300)
@given(st.binary(max_size=80) | st.text(max_size=40).map(str.encode), st.integers(0, 5))
def test_manifests_of_bytes(data: bytes, step: int) -> None:
    with pytest.raises((sp.CorruptDataError, sp.NewerFormatError), match=f"step {step}"):
        Manifest.from_bytes(data, step)


def test_every_bit_of_a_manifest_counts() -> None:
    """Every flipped bit of a manifest is found."""
    whole = seal(SOUND)
    for at in range(8 * len(whole)):
        data = bytearray(whole)
        data[at // 8] ^= 1 << at % 8
        with pytest.raises((sp.CorruptDataError, sp.NewerFormatError)):
            Manifest.from_bytes(bytes(data), 2)


@given(st.text(alphabet="0123456789.rjson-/\n", max_size=30) | st.from_regex(r"\d{12}(\.r\d+)?\.json"))
def test_names(name: str) -> None:
    parsed = parse_name(name)
    if parsed is not None:
        step, generation = parsed
        assert name == (f"{step:012d}.r{generation}.json" if generation else f"{step:012d}.json")


@settings(max_examples=150)
@given(st.binary(max_size=40) | JSON.map(lambda j: seal({"step": j})))
def test_tags(data: bytes) -> None:
    store = sp.Store("memory://fuzz-tags")
    store._files.write("tags/x.json", data)
    try:
        step = read_tag(store._files, "x")
    except sp.CorruptDataError:
        return
    assert type(step) is int


def ranged(data: bytes) -> Ranged:
    return Ranged(len(data), lambda start, stop: data[start:stop])


def chain() -> list[bytes]:
    """Return the files of a base and a delta over it, in several chunks."""
    rng = np.random.default_rng(0)
    states = [{**state(s), "big": [rng.standard_normal(40_000), {"x": rng.standard_normal(9)}]} for s in (0, 1)]
    base = sp.compress(states[0], cfg=lossless())
    return [sp.compress(states[1], base, lossless()).to_bytes(), base.to_bytes()]


FILES = chain()
IDS = [Checkpoint.from_bytes(FILES[0]).id, Checkpoint.from_bytes(FILES[1]).id]
PATTERNS = ["big/1/*", "model/*"]


def open_parts(files: list[bytes]) -> Any:
    """Return the result of `decompress_only` on these files."""
    left = list(zip(files, IDS, strict=True))

    def open_next(above: Checkpoint | None) -> Checkpoint:
        if not left:
            raise sp.MissingParentError("no more files")
        data, claimed = left.pop(0)
        return Checkpoint(ranged(data), None, claimed)

    return decompress_only(open_next, PATTERNS)


EXPECTED = open_parts(FILES)


def judge(files: list[bytes]) -> None:
    """Check that files give the stored values or a typed error, within memory."""
    tracemalloc.start()
    try:
        found = open_parts(files)
    except sp.ShrinkpointError:
        found = EXPECTED
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 * sum(map(len, FILES)) + (8 << 20), peak
    assert found["model"]["weight"].tobytes() == EXPECTED["model"]["weight"].tobytes()
    assert found["big"][1]["x"].tobytes() == EXPECTED["big"][1]["x"].tobytes()


def test_parts_are_right() -> None:
    assert EXPECTED["big"][0] is None
    assert EXPECTED["model"]["weight"].tobytes() == state(1)["model"]["weight"].tobytes()


def test_files_altered_anywhere_for_a_while() -> None:
    """Flips, cuts and insertions are found by checksums in whichever part is read."""
    rng = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
    end = time.monotonic() + SECONDS
    done = 0
    while time.monotonic() < end or done < LEAST:
        files = [bytearray(f) for f in FILES]
        target = files[rng.integers(2)]
        at = int(rng.integers(len(target))) if rng.random() < 0.5 else int(rng.integers(300))
        change = rng.integers(4)
        if change == 0:
            target[at] ^= 1 << int(rng.integers(8))
        elif change == 1:
            del target[at:]
        elif change == 2:
            target[at:at] = rng.bytes(int(rng.integers(1, 50)))
        else:
            target[at : at + 8] = rng.bytes(8)
        judge([bytes(f) for f in files])
        done += 1


def test_headers_that_lie_for_a_while() -> None:
    """Any replaced header field with valid checksums gives right values or a typed error."""
    rng = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
    apart = [take_apart(f) for f in FILES]
    values: list[Any] = [0, -1, 1, 2**31, 2**62, 10**30, "", "x", None, [], {}, [2**40], 1.5, True, [0], [-5], {"a": 0}]
    end = time.monotonic() + SECONDS
    done = 0
    while time.monotonic() < end or done < LEAST:
        which = int(rng.integers(2))
        header, chunks = json.loads(json.dumps(apart[which][0])), apart[which][1]
        place: Any = header
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = keys[rng.integers(len(keys))]
            if isinstance(place[key], (dict, list)) and rng.random() < 0.8:
                place = place[key]
                continue
            place[key] = values[rng.integers(len(values))]
            break
        files = list(FILES)
        files[which] = put_together(header, chunks)
        try:
            tracemalloc.start()
            open_parts(files)
        except sp.ShrinkpointError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 400 << 20, peak
        done += 1


@settings(max_examples=100)
@given(st.binary(min_size=1, max_size=300), st.lists(st.tuples(st.integers(0, 310), st.integers(0, 310)), max_size=12))
def test_parts_of_a_file(data: bytes, spans: list[tuple[int, int]]) -> None:
    """Slices of a partly fetched file equal slices of its bytes."""
    file = ranged(data * 400)
    whole = data * 400
    file.load((a * 300, min(b * 300, len(whole))) for a, b in spans[:4])
    for a, b in spans:
        assert bytes(file[a * 250 : b * 250]) == whole[a * 250 : b * 250]
        assert bytes(file[a:b]) == whole[a:b]
        assert bytes(file[a:]) == whole[a:]
    assert len(file) == len(whole)
    short = Ranged(FRONT, lambda start, stop: b"x" * (stop - start - 1))
    with pytest.raises(sp.CorruptDataError, match="ended at"):
        short[0:4]
