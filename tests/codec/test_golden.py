"""Golden files of every version and feature stay readable, and a missing one fails."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shrinkpoint as sp
from shrinkpoint.codec import entropy

from ..golden.make import AGAIN, FILES, INDEX, arrays_of, cases, check, fingerprint

ROOT = Path(__file__).parent.parent.parent


def load(name: str) -> sp.Checkpoint:
    """Return a golden file, resolved by its chain."""
    entry = json.loads(INDEX.read_text())[name]
    prev = load(entry["parent"]) if entry["parent"] else None
    return sp.Checkpoint.from_bytes((INDEX.parent / name).read_bytes(), prev)


@pytest.mark.parametrize("name", FILES)
def test_golden_file(name: str) -> None:
    entry = json.loads(INDEX.read_text())[name]
    ckpt = load(name)
    assert ckpt.identity == entry["id"]
    assert sorted({row.stream for row in ckpt.summary()}) == entry["streams"]
    assert fingerprint(sp.decompress(ckpt)) == entry["state"]
    assert arrays_of(ckpt, sp.decompress(ckpt)) == entry["arrays"]
    stem, t = name.removesuffix(".spt").rsplit("-", 1)
    make, _, _ = cases()[AGAIN[stem][0] if stem in AGAIN else stem]
    assert (fingerprint(make(int(t))) == entry["state"]) == entry["exact"]
    assert entry["exact"] or stem not in ("lossless", "everything", "flipped", "numbers")


def test_golden_files_use_every_stream_and_coder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Golden files use every stream, coder and exact storage method."""

    from shrinkpoint.codec.entropy import coders, plain
    from shrinkpoint.codec.lossless import exact
    from shrinkpoint.codec.registry import STREAMS

    used, methods, formats, together = set(), set(), set(), set()
    decoded, chunk = plain.decoded, exact.decode_chunk

    def spy(data: memoryview, *args: Any) -> Any:
        used.add(data[0])
        return decoded(data, *args)

    def spy_chunk(piece: memoryview, *args: Any) -> None:
        methods.add(piece[0])
        chunk(piece, *args)

    for module in (plain, coders):
        monkeypatch.setattr(module, "decoded", spy)
    monkeypatch.setattr(exact, "decode_chunk", spy_chunk)
    with_sp = sp.threads()
    sp.set_threads(1)
    try:
        for name in FILES:
            ckpt = load(name)
            sp.decompress(ckpt)
            formats |= {row.stream for row in ckpt.summary()}
            together |= {(group.stream, group.is_delta) for group in ckpt.groups if len(group.members) > 1}
    finally:
        sp.set_threads(with_sp)
    assert formats == set(STREAMS)
    shared = {stream: of for stream, of in STREAMS.items() if of.is_shared}
    deltas = {stream for stream, of in shared.items() if of.has_deltas}
    assert together == {(stream, False) for stream in shared} | {(stream, True) for stream in deltas}
    assert methods == set(range(8))
    every = set(range(entropy.MATRIX + 1))
    assert used == every, f"no golden file uses {sorted(every - used)}"


def test_golden_files_are_never_overwritten() -> None:
    before = {p.name: p.read_bytes() for p in INDEX.parent.iterdir()}
    done = subprocess.run([sys.executable, "-m", "tests.golden.make"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "not overwritten" in done.stderr
    assert {p.name: p.read_bytes() for p in INDEX.parent.iterdir()} == before


def test_every_case_is_encoded_to_the_same_bytes_again(tmp_path: Path) -> None:
    assert check() == []
    copy = Path(shutil.copytree(INDEX.parent, tmp_path / "v1"))
    blob = bytearray((copy / FILES[0]).read_bytes())
    blob[-1] ^= 1
    (copy / FILES[0]).write_bytes(blob)
    (copy / FILES[1]).unlink()
    (copy / "of-no-case.spt").write_bytes(b"")
    assert check(copy) == sorted(
        [
            f"{FILES[0]}: {len(blob)} bytes instead of {len(blob)}, the first difference at byte {len(blob) - 1}",
            f"{FILES[1]}: the file is missing",
            "of-no-case.spt: no case writes this file",
        ]
    )
