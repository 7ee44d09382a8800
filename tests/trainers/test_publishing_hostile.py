"""Updates from altered published files with right checksums.

An update reaches a version or raises an error of the library.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec.lossless.exact import UNCHANGED
from shrinkpoint.trainers.publishing.layout import Version, data_name, version_name
from shrinkpoint.trainers.publishing.subscriber import HostCopy
from tests.codec.common import pieces_of, put_together, stored_records, take_apart

SHAPES = {"float32": (60, 9), "bfloat16": (700,), "complex64": (40, 7), "int64": (300,), "uint8": (900,)}


def values(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {d: (50 * torch.randn(*shape, generator=g)).to(getattr(torch, d)) for d, shape in SHAPES.items()}


@pytest.fixture(scope="module", params=[False, True])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """A base and a delta with few changes; whether receivers may take slices."""
    folder = tmp_path_factory.mktemp("published")
    publisher = sp.Publisher(folder, sliced=request.param)
    now = values(0)
    publisher.publish(1, now)
    for tensor in now.values():
        tensor.view(-1)[::97] = tensor.view(-1)[5]
    publisher.publish(2, now)
    return folder, request.param


def replaced(folder: Path, number: int, blob: bytes) -> None:
    """Let a version name a file with these bytes, under their right hash."""
    path = folder / version_name(number)
    version = Version.from_bytes(path.read_bytes(), number)
    (file,) = version.files
    identity = sp.Checkpoint.from_bytes(blob).id
    (folder / data_name(number, file.kind, identity)).write_bytes(blob)
    changes = (
        {"delta": identity, "delta_bytes": len(blob)} if file.delta else {"base": identity, "base_bytes": len(blob)}
    )
    path.write_bytes(replace(version, files=(replace(file, **changes),)).to_bytes())


PIECE = st.sampled_from(["empty", "cut", "longer", "byte", "first", "noise"])
FIELD = st.sampled_from(["f", "d", "s", "b", "p", "m", "l", "v", "gone"])
ODD = st.sampled_from([None, True, -1, 0, 1, 1 << 62, -(1 << 70), 1.5, "", "bytes", "float64", [], [[]], [1 << 47], {}])


def altered(data: st.DataObject, header: dict[str, Any], chunks: list[bytes]) -> bytes:
    """Alter a piece, its header's record, or a value of the header."""
    pieces = pieces_of(header, b"".join(chunks))
    records = stored_records(header)
    at = data.draw(st.integers(0, len(records) - 1))
    if data.draw(st.integers(0, 3)):
        old = pieces[at][0]
        where = data.draw(st.integers(0, max(0, len(old) - 1)))
        noise = data.draw(st.binary(min_size=1, max_size=9))
        pieces[at][0] = {
            "empty": b"",
            "cut": old[:where],
            "longer": old + noise,
            "byte": old[:where] + noise[:1] + old[where + 1 :],
            "first": bytes([noise[0] % 12]) + old[1:],
            "noise": bytes([noise[0] % 12]) + noise,
        }[data.draw(PIECE)]
        records[at]["b"] = [len(piece) for piece in pieces[at]]
    elif (field := data.draw(FIELD)) == "gone":
        records[at].pop(data.draw(st.sampled_from(sorted(records[at]))))
    else:
        records[at][field] = data.draw(ODD)
    body = b"".join(piece for own in pieces for piece in own)
    return put_together(header, [body] if body else [])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), number=st.sampled_from([1, 2]), part=st.booleans())
def test_altered_files(published: tuple[Path, bool], data: st.DataObject, number: int, part: bool) -> None:
    folder, sliced = published
    kept = {path: path.read_bytes() for path in (folder / "versions").iterdir()}
    tensors = {name: torch.zeros_like(tensor) for name, tensor in values(0).items()}
    select = None
    if part and sliced:
        tensors["float32"], tensors["complex64"] = torch.zeros(20, 4), torch.zeros(5, 3, dtype=torch.complex64)
        select = {
            name: (name, (slice(7, 7 + t.shape[0]), slice(1, 1 + t.shape[1])))
            for name, t in tensors.items()
            if t.dim() == 2
        }
    version = Version.from_bytes(kept[folder / version_name(number)], number)
    try:
        (file,) = version.files
        name = data_name(number, file.kind, file.id(file.kind) or "")
        blob = altered(data, *take_apart((folder / name).read_bytes()))
        try:
            sp.Checkpoint.from_bytes(blob)
        except sp.ShrinkpointError:
            return
        subscriber = sp.Subscriber(folder, tensors, select=select)
        if number == 2:
            subscriber.update(version=1)
        replaced(folder, number, blob)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                subscriber.update()
            except sp.ShrinkpointError:
                assert all(
                    torch.equal(tensors[n].view(-1).view(torch.uint8), before[n].view(-1).view(torch.uint8))
                    for n in tensors
                )
            with contextlib.suppress(sp.ShrinkpointError):
                HostCopy(folder).changes()
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


@pytest.mark.parametrize("sliced", [False, True])
def test_an_empty_piece_and_changes_in_a_base(tmp_path: Path, sliced: bool) -> None:
    publisher = sp.Publisher(tmp_path, sliced=sliced)
    publisher.publish(1, {"w": torch.ones(64, 64)})
    header, _ = take_apart(next(tmp_path.glob("data/*-b-*")).read_bytes())
    model = {"w": torch.full((64, 64), 7.0)}
    for piece, said in ((b"", "a malformed piece of 0 bytes"), (bytes([UNCHANGED]), "changes in a base")):
        header["groups"][0]["b"] = [len(piece)]
        replaced(tmp_path, 1, put_together(header, [piece] if piece else []))
        with pytest.raises(sp.CorruptDataError, match=said):
            sp.Subscriber(tmp_path, model).update()
        assert (model["w"] == 7).all()


@pytest.mark.parametrize("other", [torch.ones(8, 2), torch.ones(4, 4, dtype=torch.int32)])
def test_a_file_with_other_arrays(tmp_path: Path, other: torch.Tensor) -> None:
    sp.Publisher(tmp_path / "a").publish(1, {"w": torch.ones(4, 4)})
    sp.Publisher(tmp_path / "b").publish(1, {"w": other})
    replaced(tmp_path / "a", 1, next((tmp_path / "b").glob("data/*-b-*")).read_bytes())
    with pytest.raises(sp.CorruptDataError, match="its arrays are not the shards of version 1"):
        sp.Subscriber(tmp_path / "a", {"w": torch.zeros(4, 4)}).update()


def test_a_copy_allocates_no_more_than_the_machine_has(tmp_path: Path) -> None:
    sp.Publisher(tmp_path).publish(1, {"w": torch.ones(4)})
    path = tmp_path / version_name(1)
    version = Version.from_bytes(path.read_bytes(), 1)
    (file,) = version.files
    shard = replace(file.shards[0], shape=(1 << 46,), where=((0, 1 << 46),))
    path.write_bytes(replace(version, files=(replace(file, shards=(shard,)),)).to_bytes())
    with pytest.raises(sp.CorruptDataError, match="this machine or container has"):
        HostCopy(tmp_path)
