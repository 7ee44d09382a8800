"""Model folders: exact transfer, and losses, on request, in the model card."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shrinkpoint as sp
from shrinkpoint.trainers import hub

from ..codec.common import bits, difference

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")


def weights(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(100, 64, generator=generator).to(dtype),
        "layer/0.weight": torch.randn(64, 96, generator=generator).to(dtype),
        "layer/0.norm": torch.ones(64, dtype=dtype),
        "ids": torch.arange(7),
    }


def folder(path: Path, *parts: dict[str, torch.Tensor], card: bytes | None = b"---\nlicense: mit\n---\n# M") -> Path:
    """Return a model folder as on a hub."""
    (path / "nested" / "vocab").mkdir(parents=True)
    (path / ".cache").mkdir()
    (path / ".cache" / "big").write_bytes(b"x")
    (path / "config.json").write_text('{"a": 1}')
    (path / "nested" / "vocab" / "words.txt").write_bytes(b"\x00\r\nwords")
    if card is not None:
        (path / "README.md").write_bytes(card)
    for i, part in enumerate(parts):
        safetensors.save_file(part, path / f"model-{i}.safetensors", {"format": "pt"})
    return path


def everything(path: Path) -> dict[str, bytes]:
    files = [p for p in sorted(path.rglob("*")) if p.is_file() and ".cache" not in p.parts]
    return {str(p.relative_to(path)): p.read_bytes() for p in files}


@pytest.mark.parametrize("card", [b"---\nlicense: mit\n---\n# M", b"", b"text\n", None])
def test_a_folder_comes_back_file_by_file(tmp_path: Path, card: bytes | None) -> None:
    source = folder(tmp_path / "m", weights(0), weights(1, torch.float32), card=card)
    done = sp.save_pretrained(source, tmp_path / "small")
    assert done.is_lossless
    assert not done.has_base
    assert sorted(everything(tmp_path / "small")) == [
        "README.md",
        "config.json",
        "model-0.safetensors.spt",
        "model-1.safetensors.spt",
        "nested/vocab/words.txt",
    ]
    assert sp.load_pretrained(tmp_path / "small", to=tmp_path / "again") == tmp_path / "again"
    expected = everything(source)
    if card == b"":
        del expected["README.md"]  # an empty card equals a missing one
    assert everything(tmp_path / "again") == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "m", "small"]
    with pytest.raises(sp.BadArgumentError, match="is in several files"):
        sp.load_pretrained(tmp_path / "small")


def test_parts_of_the_same_names_are_compared_each_with_its_own(tmp_path: Path) -> None:
    """Equal names in two parts are compared within each part."""
    source = folder(tmp_path / "m", weights(0), weights(1))
    done = sp.save_pretrained(source, tmp_path / "small", source)
    assert done.ratio > 20
    assert everything(sp.load_pretrained(done.path, source, to=tmp_path / "again")) == everything(source)


def test_weights_come_as_a_dictionary(tmp_path: Path) -> None:
    sp.save_pretrained(folder(tmp_path / "m", weights(0), {"head": torch.ones(3)}), tmp_path / "small")
    found = sp.load_pretrained(tmp_path / "small")
    expected = weights(0) | {"head": torch.ones(3)}
    assert difference(dict(sorted(found.items())), dict(sorted(expected.items()))) == ""


@settings(max_examples=25)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda n: n != "__metadata__"),
        st.tuples(st.sampled_from(["float32", "bfloat16", "float16", "int8", "bool", "float64", "uint8"]),
                  st.lists(st.integers(0, 5), max_size=3)),
        min_size=1, max_size=5,
    ),
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), st.text(max_size=5), max_size=2),
    st.booleans(),
)  # fmt: skip
def test_any_tensors_and_metadata(
    tmp_path_factory: pytest.TempPathFactory, plan: dict[str, Any], metadata: dict[str, str], against: bool
) -> None:
    home = tmp_path_factory.mktemp("any")
    tensors = {n: torch.randint(0, 2, shape).to(getattr(torch, dtype)) for n, (dtype, shape) in plan.items()}
    (home / "m").mkdir()
    safetensors.save_file(tensors, home / "m" / "x.safetensors", metadata)
    base = folder(home / "b", {n: t for i, (n, t) in enumerate(tensors.items()) if i % 2} or {"other": torch.ones(2)})
    sp.save_pretrained(home / "m", home / "small", base if against else None)
    again = sp.load_pretrained(home / "small", base if against else None, to=home / "again")
    found = safetensors.load_file(again / "x.safetensors")
    assert {n: (t.dtype, t.shape, bits(t)) for n, t in found.items()} == {
        n: (t.dtype, t.shape, bits(t)) for n, t in tensors.items()
    }
    with safetensors.safe_open(again / "x.safetensors", "pt") as file:
        assert (file.metadata() or {}) == metadata


def tuned(base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a fine-tuned model: weights changed a little, one resized, one new."""
    moved = {n: t.clone() for n, t in base.items()}
    moved["embed.weight"] = torch.cat([moved["embed.weight"], moved["embed.weight"][:3]])
    moved["layer/0.weight"][:2] *= 1.01
    moved["head.weight"] = torch.full((80, 20), 0.5)
    return moved


@pytest.mark.parametrize("compressed_base", [False, True])
def test_against_a_base_only_what_differs_is_stored(tmp_path: Path, compressed_base: bool) -> None:
    model = weights(0, torch.float32) | {"same.weight": torch.randn(300, 300)}
    parts = {n: t for n, t in model.items() if n != "ids"}, {"ids": model["ids"]}
    base = folder(tmp_path / "base", *parts)
    source = folder(tmp_path / "m", tuned(model))
    alone = sp.save_pretrained(source, tmp_path / "alone")
    sp.save_pretrained(base, tmp_path / "base-small")
    done = sp.save_pretrained(source, tmp_path / "small", base)
    assert done.has_base
    assert done.nbytes < 0.3 * alone.nbytes
    at_hand = tmp_path / ("base-small" if compressed_base else "base")
    assert everything(sp.load_pretrained(tmp_path / "small", at_hand, to=tmp_path / "again")) == everything(source)
    # The base is known by its weights: which files they are in, and how these are compressed, is all the same.
    other = sp.save_pretrained(source, tmp_path / "small2", tmp_path / "base-small")
    files = [(path / "model-0.safetensors.spt").read_bytes() for path in (done.path, other.path)]
    assert files[0] == files[1]
    assert "`base`" in (tmp_path / "small" / "README.md").read_text()


def test_a_wrong_or_missing_base_is_an_error(tmp_path: Path) -> None:
    base, source = folder(tmp_path / "base", weights(0)), folder(tmp_path / "m", tuned(weights(0)))
    sp.save_pretrained(source, tmp_path / "small", base)
    with pytest.raises(sp.MissingParentError, match="the folder of its base model is needed"):
        sp.load_pretrained(tmp_path / "small")
    wrong = weights(0)
    wrong["ids"][3] += 1
    for other in (folder(tmp_path / "weight", wrong), folder(tmp_path / "v", weights(1))):
        with pytest.raises(sp.MissingParentError, match="is not the base it was compressed against"):
            sp.load_pretrained(tmp_path / "small", other)
    with pytest.raises(sp.BadArgumentError, match="no safetensors in it"):
        sp.load_pretrained(tmp_path / "small", folder(tmp_path / "u"))


def test_what_was_written_into_the_card_afterwards_stays(tmp_path: Path) -> None:
    done = sp.save_pretrained(folder(tmp_path / "m", weights(), card=b"before"), tmp_path / "small")
    with (done.path / "README.md").open("ab") as card:
        card.write(b"after")
    again = sp.load_pretrained(done.path, to=tmp_path / "again")
    assert (again / "README.md").read_bytes() == b"beforeafter"


@pytest.mark.parametrize("against", [False, True])
def test_what_is_lost_stands_in_the_card(tmp_path: Path, against: bool) -> None:
    model = {"a.weight": torch.randn(200, 100), "b.weight": torch.randn(100, 100), "norm.weight": torch.ones(64)}
    source = folder(tmp_path / "m", model)
    base = folder(tmp_path / "base", {n: t * 1.001 for n, t in model.items()}) if against else None
    done = sp.save_pretrained(source, tmp_path / "small", base, sp.Config(max_rel_error=0.05))
    assert not done.is_lossless
    found = sp.load_pretrained(tmp_path / "small", base)
    card = (tmp_path / "small" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n# M")
    errors = {n: float((found[n] - t).norm() / t.norm()) for n, t in model.items()}
    assert 0 < max(errors.values()) <= 0.05
    for row in done.rows:
        name = row.path.removeprefix("tensors/")
        assert errors[name] <= row.error * 1.001 + 1e-9
        assert (f"| `{name}` | float32 |" in card) == (errors[name] > 0)
        assert row.measure == "exact" or f" {row.error:g} | relative L2 |" in card
    assert "**Lossy**: 2 of 3 arrays" in card
    lossless = sp.save_pretrained(source, tmp_path / "exact")
    assert "**Lossless**" in (lossless.path / "README.md").read_text()
    assert f"{lossless.raw_nbytes:,} bytes in {lossless.nbytes:,}" in (lossless.path / "README.md").read_text()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(20, 20), nn.Linear(20, 20), nn.BatchNorm1d(20)
        self.b.weight = self.a.weight


def test_any_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = Tied(), Tied()
    sp.save_pretrained(model, tmp_path / "small")
    assert sp.load_pretrained(tmp_path / "small", model=other) is other
    assert difference(dict(model.state_dict()), dict(other.state_dict())) == ""
    assert other.b.weight is other.a.weight
    with pytest.raises(sp.BadArgumentError, match=r"a\.bias: not in the model"):
        sp.load_pretrained(tmp_path / "small", model=nn.Linear(3, 3))
    before = dict(nn.Linear(20, 20).state_dict())
    sp.save_pretrained(nn.Linear(20, 20), tmp_path / "one")
    with pytest.raises(sp.BadArgumentError, match=r"\(20, 20\)\) in the folder, .*\(20, 21\)\) in the model"):
        sp.load_pretrained(tmp_path / "one", model=nn.Linear(21, 20))
    assert list(before) == ["weight", "bias"]


def test_a_transformers_model_comes_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed; `make frameworks` has it")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=50, n_positions=16)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight += 0.01
    sp.save_pretrained(model, tmp_path / "small", tmp_path / "base")
    again = sp.load_pretrained(tmp_path / "small", tmp_path / "base", model=transformers.AutoModelForCausalLM).eval()
    assert type(again) is type(model)
    assert difference(dict(model.state_dict()), dict(again.state_dict())) == ""
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, again(ids).logits)


def test_targets_that_are_not_empty_are_left_alone(tmp_path: Path) -> None:
    source = folder(tmp_path / "m", weights())
    before = everything(source)
    with pytest.raises(sp.BadArgumentError, match="is not empty"):
        sp.save_pretrained(source, source)
    with pytest.raises(sp.BadArgumentError, match="is not empty"):
        sp.save_pretrained(nn.Linear(2, 2), source / "config.json")
    sp.save_pretrained(source, tmp_path / "small")
    with pytest.raises(sp.BadArgumentError, match="is not empty"):
        sp.load_pretrained(tmp_path / "small", to=source)
    assert everything(source) == before


def test_nothing_is_written_into_what_it_is_made_from(tmp_path: Path) -> None:
    source, base = folder(tmp_path / "m", weights()), folder(tmp_path / "base", weights(1))
    small = sp.save_pretrained(source, tmp_path / "small", base).path
    (tmp_path / "link").symlink_to(source)
    before = {path: everything(path) for path in (source, base, small)}
    for call in (
        lambda: sp.save_pretrained(source, source / "out"),
        lambda: sp.save_pretrained(str(source), str(source / "deep" / "out")),
        lambda: sp.save_pretrained(source, tmp_path / "link" / "out"),
        lambda: sp.save_pretrained(tmp_path / "link", source / "out"),
        lambda: sp.save_pretrained(source, base / "out", base),
        lambda: sp.save_pretrained(nn.Linear(2, 2), base / "out", base),
        lambda: sp.load_pretrained(small, base, to=small / "out"),
        lambda: sp.load_pretrained(small, base, to=base / "out"),
    ):
        with pytest.raises(sp.BadArgumentError, match=r"out is in .*, which it would be made from"):
            call()
    assert {path: everything(path) for path in before} == before
    assert not (source / "deep").exists()


@pytest.mark.parametrize(
    ("link", "to", "why"),
    [
        ("tokenizer.json", "gone.json", "tokenizer.json is a link to gone.json, which is not there"),
        ("a.safetensors", "gone", "a.safetensors is a link to gone, which is not there"),
        ("self", "self", "self is a link to self, which is not there"),
        ("again", ".", "again links to .*/m, a folder that it is in"),
        ("nested/up", "..", "up links to .*/m, a folder that it is in"),
    ],
)
def test_links_to_nothing_and_in_circles_are_named(tmp_path: Path, link: str, to: str, why: str) -> None:
    source = folder(tmp_path / "m", weights())
    (source / link).symlink_to(to)
    with pytest.raises(sp.BadArgumentError, match=why):
        sp.save_pretrained(source, tmp_path / "small")
    assert not (tmp_path / "small").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


def cached(home: Path, files: dict[str, bytes]) -> Path:
    """Return a snapshot in a cache of the Hub with these files."""
    model = home / "models--org--name"
    for number, (name, data) in enumerate(files.items()):
        blob, link = model / "blobs" / f"{number:040x}", model / "snapshots" / "rev" / name
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return model / "snapshots" / "rev"


def test_a_snapshot_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    source = folder(tmp_path / "m", weights())
    (source / "again.json").symlink_to("config.json")
    snapshot = cached(tmp_path, everything(source))
    (tmp_path / "main").symlink_to(snapshot)
    for number, place in enumerate((source, snapshot, tmp_path / "main")):
        small = sp.save_pretrained(place, tmp_path / f"small{number}", place).path
        assert everything(sp.load_pretrained(small, place, to=tmp_path / f"to{number}")) == everything(source)
    sp.save_pretrained(snapshot / "nested/..", tmp_path / "small")


@pytest.mark.parametrize("where", ["plain", "snapshot"])
@pytest.mark.parametrize("link", ["notes.txt", "nested/notes.txt", "extra", "b.safetensors", "through"])
def test_links_that_lead_out_are_refused(tmp_path: Path, where: str, link: str) -> None:
    source = folder(tmp_path / "m", weights())
    small = sp.save_pretrained(source, tmp_path / "small").path
    place = source if where == "plain" else cached(tmp_path, everything(source))
    home = tmp_path / "home"
    home.mkdir()
    secret = home / ("b.safetensors" if link.startswith("b.") else "secret")
    secret.write_bytes(next(source.glob("*.safetensors")).read_bytes())
    target = home if link == "extra" else secret
    if link == "through":  # in two steps, by way of what may be followed
        blobs = tmp_path / "models--org--name" / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        (blobs / "ff").symlink_to(secret)
        target = blobs / "ff"
    for folder_ in (place, small):
        (folder_ / link).parent.mkdir(exist_ok=True)
        (folder_ / link).symlink_to(target)
    for call in (
        lambda: sp.save_pretrained(place, tmp_path / "out"),
        lambda: sp.save_pretrained(nn.Linear(2, 2), tmp_path / "out", place),
        lambda: sp.load_pretrained(small, to=tmp_path / "out"),
        lambda: sp.load_pretrained(small),
    ):
        with pytest.raises(
            sp.BadArgumentError, match=rf"{link} links to .*{target.name if link == 'extra' else secret.name}"
        ):
            call()
    assert not (tmp_path / "out").exists()


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    source = folder(tmp_path / "m", weights())
    os.mkfifo(source / "pipe")
    with pytest.raises(sp.BadArgumentError, match="pipe is no ordinary file"):
        sp.save_pretrained(source, tmp_path / "small")


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    source = folder(tmp_path / "m", weights())
    (source / "model-9.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ")
    (source / "model-1.safetensors").write_bytes(b"nonsense")
    with pytest.raises(sp.CorruptDataError, match=r"model-1\.safetensors"):
        sp.save_pretrained(source, tmp_path / "small")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_bad_folders(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for call, why in (
        (lambda: sp.save_pretrained(tmp_path / "none", tmp_path / "x"), "is not a folder"),
        (lambda: sp.save_pretrained(3, tmp_path / "x"), "model_or_folder is a int"),
        (lambda: sp.save_pretrained(tmp_path / "empty", tmp_path / "x"), "only safetensors are compressed"),
        (lambda: sp.save_pretrained(nn.Linear(2, 2), 3), "a folder must be a path, not int"),  # type: ignore[arg-type]
        (lambda: sp.load_pretrained(tmp_path), "it is not compressed"),
        (lambda: sp.load_pretrained(3), "a folder must be a path, not int"),  # type: ignore[arg-type]
    ):
        with pytest.raises(sp.BadArgumentError, match=why):
            call()
    sp.save_pretrained(nn.Linear(2, 2), tmp_path / "small")
    for keywords, why in (({"model": 3}, "must be a torch.nn.Module"), ({"model": nn.Linear, "to": "x"}, "not both")):
        with pytest.raises(sp.BadArgumentError, match=why):
            sp.load_pretrained(tmp_path / "small", **keywords)  # type: ignore[arg-type]
    with pytest.raises(sp.BadArgumentError, match="it is compressed already"):
        sp.save_pretrained(tmp_path / "small", tmp_path / "x")
    # With a raw file next to it, neither call leaves one of them out.
    safetensors.save_file({"more": torch.ones(3)}, tmp_path / "small" / "more.safetensors")
    assert set(sp.load_pretrained(tmp_path / "small")) == {"weight", "bias", "more"}
    with pytest.raises(sp.BadArgumentError, match="it is compressed already"):
        sp.save_pretrained(tmp_path / "small", tmp_path / "x")


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    done = sp.save_pretrained(nn.Linear(30, 30), tmp_path / "small")
    file = done.path / "model.safetensors.spt"
    whole = file.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 40)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        with pytest.raises((sp.CorruptDataError, sp.NewerFormatError)):
            sp.load_pretrained(done.path)
    for state in (
        {"tensors": {}},
        {"metadata": {"a": 1}, "tensors": {}},
        {"metadata": {}, "tensors": {"a": 1}},
        {"metadata": {}, "tensors": [torch.ones(1)]},
        [1],
    ):
        file.write_bytes(sp.compress(state).to_bytes())
        with pytest.raises(sp.CorruptDataError, match="not what save_pretrained writes"):
            sp.load_pretrained(done.path)


def test_the_index_of_a_sharded_model_is_kept(tmp_path: Path) -> None:
    source = folder(tmp_path / "m", {"a": torch.ones(3)}, {"b": torch.ones(4)})
    index = {"weight_map": {"a": "model-0.safetensors", "b": "model-1.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    sp.save_pretrained(source, tmp_path / "small")
    again = sp.load_pretrained(tmp_path / "small", to=tmp_path / "again")
    assert json.loads((again / "model.safetensors.index.json").read_text()) == index


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    source = folder(tmp_path / "m", weights(0), {"more": torch.ones(40, 40)})
    names = dict.fromkeys(weights(), "model-0.safetensors") | {"more": "model-1.safetensors"}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    small = sp.save_pretrained(source, tmp_path / "small").path
    assert set(sp.load_pretrained(small)) == set(names)
    (small / "model-1.safetensors.spt").rename(tmp_path / "lost")
    with pytest.raises(sp.CorruptDataError, match=r"small: model-1\.safetensors is missing"):
        sp.load_pretrained(small)
    with pytest.warns(sp.ShrinkpointWarning, match=r"small: model-1\.safetensors is missing"):
        sp.load_pretrained(small, to=tmp_path / "part")
    assert not (tmp_path / "part" / "model-1.safetensors").exists()
    # Transformers reads a file for all weights rather than the index of its shards.
    (tmp_path / "lost").rename(small / "model.safetensors.spt")
    assert set(sp.load_pretrained(small)) == set(names)


def test_names_that_are_not_the_hubs() -> None:
    assert hub.SUFFIX == ".spt"
    assert sp.save_pretrained is hub.save_pretrained


def test_a_folder_is_durable_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    real = os.fsync

    def noted(fd: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", noted)
    hub.save_pretrained(nn.Linear(64, 64), tmp_path / "small")
    assert done[-1] == str(tmp_path), "the last thing is the folder that has the new name"
    hub.load_pretrained(tmp_path / "small", to=tmp_path / "whole")
    assert done.count(str(tmp_path)) == 2
