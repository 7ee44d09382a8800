"""Retention, pins, tags, metrics, dropping and copying keep every needed file."""

from __future__ import annotations

import errno
import json
import os
import uuid
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.store import local
from shrinkpoint.store.files import StoreWarning, seal
from shrinkpoint.store.local import LocalFiles
from shrinkpoint.store.retention import Retention
from shrinkpoint.store.store import RestoreNotCountedWarning, Saved
from tests.store.common import data_path, fill, listing, lossless, manifest_path, same, state


@given(
    st.dictionaries(st.integers(0, 60), st.none() | st.integers(-3, 3).map(float), max_size=15),
    st.integers(1, 5),
    st.none() | st.integers(1, 12),
    st.integers(0, 5),
    st.booleans(),
)
def test_what_is_kept(metrics: dict[int, float | None], last: int, every: int | None, best: int, largest: bool) -> None:
    """A step stays if it is among the `last`, divided by `every`, or among the `best`."""
    kept = Retention(last, every, best, largest).kept(metrics)
    for step, metric in metrics.items():
        newer = sum(other > step for other in metrics)
        stays = newer < last or (every is not None and step % every == 0)
        if metric is not None:
            others = [(m if largest else -m, s) for s, m in metrics.items() if m is not None]
            stays = stays or sum(o > (metric if largest else -metric, step) for o in others) < best
        assert (step in kept) == stays, step


@pytest.mark.parametrize(
    "given_",
    [
        *({"last": value} for value in (0, -1, 1.5, None, True)),
        *({"every": value} for value in (0, "x")),
        *({"best": value} for value in (-1, True)),
        {"largest": 1},
    ],
    ids=str,
)
def test_retentions_that_are_none(given_: dict[str, Any]) -> None:
    with pytest.raises(sp.BadArgumentError, match=next(iter(given_))):
        Retention(**given_)


@pytest.mark.parametrize("against", ["previous", "base"])
def test_gc(against: str, tmp_path: Path) -> None:
    store = sp.Store(tmp_path, lossless(against=against, base_every=4))
    for step in range(12):
        store.save(step, state(step), metric=abs(step - 5.5) if step != 7 else None)
    store.pin(1)
    store.tag("start", 2)
    removed = store.gc(Retention(last=2, every=9, best=2))
    assert store.steps() == [0, 1, 2, 5, 6, 9, 10, 11]
    assert sorted(n for n in removed if n.startswith("steps/")) == [f"steps/{s:012d}.json" for s in (3, 4, 7, 8)]
    # 4 and 8 are the bases of others; 7 nobody needs, nor 3 (a linear chain ends with it).
    assert {int(p.name[:12]) for p in (tmp_path / "data").iterdir()} == set(range(12)) - {3, 7}
    for other in (store, sp.Store(tmp_path)):
        assert other.verify() == {}
        assert all(same(other.load(step, count=False), step) for step in other.steps())
    assert store.save(12, state(12)).is_delta is False
    store.unpin(1)
    store.untag("start")
    store.gc(Retention())
    assert store.steps() == [12]
    assert len(list((tmp_path / "data").iterdir())) == 1


def test_the_head_may_go(tmp_path: Path) -> None:
    """If the saver's last step was dropped, the chain continues or a base is stored."""
    store = fill(sp.Store(tmp_path, lossless()), 0, 1, 2)
    other = sp.Store(tmp_path)
    other.drop(2)
    assert store.save(3, state(3)).is_delta
    other.drop(3)
    other.gc()
    assert not store.save(4, state(4)).is_delta
    manifest_path(tmp_path, 4).write_bytes(b"{}")
    assert store.save(5, state(5)).is_delta
    assert same(sp.Store(tmp_path).load(5), 5)
    manifest_path(tmp_path, 4).unlink()
    # Saved again by another: the chain continues from the old file, not from the step's new one.
    again = sp.Store(tmp_path, lossless())
    again.load(5, count=False)
    fill(sp.Store(tmp_path, lossless()), 5)
    assert again.save(6, state(6)).is_delta
    assert sp.Store(tmp_path).verify() == {}
    assert all(same(sp.Store(tmp_path).load(s), s) for s in sp.Store(tmp_path).steps())


def test_a_chain_whose_files_are_gone_is_not_gone_on_with(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path, lossless()), 1, 2)
    data_path(tmp_path, 1).unlink()
    with pytest.warns(StoreWarning, match="step 2: .*000000000001-.* is missing: a new chain begins"):
        assert not store.save(3, state(3)).is_delta
    assert store.save(4, state(4)).is_delta
    assert same(sp.Store(tmp_path).load(), 4)
    assert sorted(store.verify()) == [1, 2]


def test_best_without_a_metric_keeps_all(tmp_path: Path) -> None:
    """Without metrics `best` keeps all steps."""
    store = fill(sp.Store(tmp_path, lossless(base_every=1)), *range(5))
    with pytest.warns(StoreWarning, match="best=2, but no step has a metric: all are kept"):
        assert store.gc(Retention(best=2)) == []
    assert store.steps() == [0, 1, 2, 3, 4]
    store.rate(1, 0.5)
    store.rate(2, 0.7)
    store.rate(3, 0.6)
    store.gc(Retention(best=2))
    assert store.steps() == [1, 3, 4]


def test_what_is_done_to_nothing_makes_no_folder(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "nothing")
    assert (store.gc(), store.gc(Retention()), store.compact(), store.verify(), store.steps()) == ([], [], [], {}, [])
    store.unpin(1)
    store.untag("x")
    for act in (lambda: store.drop(1), lambda: store.drop_after(1), lambda: store.pin(1), lambda: store.tag("x", 1)):
        with pytest.raises(sp.BadArgumentError, match=r"step 1 is not in .*nothing; it is empty"):
            act()
    with pytest.raises(sp.BadArgumentError, match="step 1"):
        store.rate(1, 1.0)
    assert not (tmp_path / "nothing").exists()


def test_a_folder_in_the_place_of_a_manifest(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path, lossless()), 1, 2)
    path = manifest_path(tmp_path, 2)
    path.unlink()
    path.mkdir()
    with pytest.raises(sp.CorruptDataError, match=f"{path} is a folder"):
        store.drop(2)
    path.rmdir()
    assert store.steps() == [1]


def test_the_last_generation_there_can_be(tmp_path: Path) -> None:
    """The highest generation number is an error for changes, and nothing is lost."""
    store = fill(sp.Store(tmp_path, lossless()), 1, 2)
    last = tmp_path / "steps" / "000000000002.r999999999.json"
    manifest_path(tmp_path, 2).rename(last)
    before = listing(tmp_path)
    assert same(sp.Store(tmp_path).load(count=False), 2)
    for act in (lambda: store.save(2, state(77)), lambda: store.rate(2, 1.0), lambda: store.compact(1.0)):
        with pytest.raises(sp.CorruptDataError, match=f"{last} is the last generation"):
            act()
        assert {name: data for name, data in listing(tmp_path).items() if name in before} == before
        assert same(sp.Store(tmp_path).load(count=False), 2)
    store.drop(2)
    store.save(2, state(77))
    assert same(sp.Store(tmp_path).load(count=False), 77)


def test_the_last_restore_there_can_be(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path, lossless()), 1)
    store.load()
    (tmp_path / "restores" / "999999999.json").write_bytes(b"{}")
    for _ in range(2):
        with pytest.warns(
            RestoreNotCountedWarning, match=r"999999999\.json: a run is not restored so often; remove it"
        ):
            assert same(sp.Store(tmp_path).load(), 1)
    assert len(list((tmp_path / "restores").iterdir())) == 2
    (tmp_path / "restores" / "999999999.json").unlink()
    store.load()
    assert sp.Store(tmp_path).restores() == 2


def test_damaged_steps_take_no_place(tmp_path: Path) -> None:
    """Damaged steps do not count as kept, and are not removed."""
    store = fill(sp.Store(tmp_path, lossless(base_every=1)), *range(5))
    for step in (3, 4):
        data_path(tmp_path, step).write_bytes(b"torn")
    store.gc(Retention())
    assert store.steps() == [2, 3, 4]
    assert sorted(store.verify()) == [3, 4]
    with pytest.warns(UserWarning, match="skipped step 4"):
        assert same(store.load(), 2)
    store.drop(3, 4)
    assert store.verify() == {}


def test_nothing_goes_while_something_cannot_be_read(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path, lossless()), *range(4))
    store.tag("best", 1)
    for path in (tmp_path / "tags" / "best.json", manifest_path(tmp_path, 2)):
        whole = path.read_bytes()
        for broken in (b"", b"[]", seal({"step": "1"}), seal({"step": -1}), b'{"step": 3}', b"[" * 10**5):
            path.write_bytes(broken)
            before = listing(tmp_path)
            with pytest.raises(sp.CorruptDataError):
                store.gc(Retention())
            assert listing(tmp_path) == before
        path.write_bytes(whole)
    store.gc(Retention())
    assert store.steps() == [1, 3]


@pytest.mark.parametrize("retention", [3, "last", {"last": 1}, Retention])
def test_gc_by_something_else(retention: Any, tmp_path: Path) -> None:
    with pytest.raises(sp.BadArgumentError, match="retention"):
        sp.Store(tmp_path).gc(retention)


def test_metrics(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path, lossless()), 1, 2)
    store.save(3, state(3), metric=2)
    assert [store.describe(s).metric for s in (1, 2, 3)] == [None, None, 2.0]
    store.rate(1, 0.5)
    store.rate(3, None)
    store.tag("x", 1)
    store.rate("x", 0.25)
    for other in (store, sp.Store(tmp_path)):
        assert [other.describe(s).metric for s in (1, 2, 3)] == [0.25, None, None]
    assert store.describe("x") == store.describe(1)
    for metric in (float("nan"), float("inf"), "1", True, [], object(), 10**400):
        with pytest.raises(sp.BadArgumentError, match="metric"):
            store.rate(1, metric)  # type: ignore[arg-type]
        with pytest.raises(sp.BadArgumentError, match="metric"):
            store.save(4, state(4), metric=metric)  # type: ignore[arg-type]
    with pytest.raises(sp.BadArgumentError, match="step 9"):
        store.rate(9, 1.0)
    assert store.steps() == [1, 2, 3]


def test_pins_and_tags(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path, lossless()), 1, 2)
    store.tag("best", 1)
    store.tag("v1.0-rc", "best")
    store.tag("best", 2)
    store.pin("best")
    store.pin(2)
    for other in (store, sp.Store(tmp_path)):
        assert other.tags() == {"best": 2, "v1.0-rc": 1}
        assert other.pins() == [2]
        assert same(other.load("best"), 2)
        assert same(other.load("v1.0-rc", "*"), 1)
        assert other.read("best").raw_nbytes == other.describe(2).raw_nbytes
    for step in (2, 1):
        with pytest.raises(sp.BadArgumentError, match=f"step {step} is pinned or tagged"):
            store.drop(step)
    for missing in (3, "other", "../best", "", None, True, -1, 10**13):
        for act in (store.pin, lambda s: store.tag("t", s), store.describe, store.read):
            with pytest.raises(sp.BadArgumentError, match=r"is not in .*; it has 1, 2"):
                act(missing)
    for name in ("", "1", "12", "a/b", "../x", ".x", "-x", "a" * 101, "é", "a b", "a\n", None, 3, b"x"):
        for act in (lambda n: store.tag(n, 1), store.untag):
            with pytest.raises(sp.BadArgumentError, match="a tag is"):
                act(name)
    with pytest.raises(sp.BadArgumentError, match="'best' exists, which is the same file on disks that ignore case"):
        store.tag("Best", 1)
    other = fill(sp.Store(tmp_path / "other", lossless()), 3)
    other.tag("BEST", 3)
    with pytest.raises(sp.BadArgumentError, match="'BEST' exists"):
        store.copy(other.url)
    assert other.steps() == [3]
    (tmp_path / "tags" / "BEST.json").write_bytes((tmp_path / "tags" / "best.json").read_bytes())
    store.tag("best", 2)  # as it was before names were looked at: a tag that is there moves
    assert store.untag("BEST")
    store.unpin("best")
    assert store.pins() == []
    store.pin(2)
    store.unpin(2)
    store.unpin(2)
    store.unpin(77)
    store.unpin("never")
    assert store.untag("best")
    assert not store.untag("never")
    assert (store.tags(), store.pins()) == ({"v1.0-rc": 1}, [])
    with pytest.raises(sp.BadArgumentError, match="'best'"):
        store.load("best")
    with pytest.raises(sp.BadArgumentError, match="step 9"):
        store.drop(9)
    for wrong in ([1], "1", True, None):
        with pytest.raises(sp.BadArgumentError, match="step is"):
            store.drop(wrong)  # type: ignore[arg-type]
    for wrong in (1, "1"):
        with pytest.raises(sp.BadArgumentError, match="steps is"):
            store.copy(tmp_path / "other", wrong)  # type: ignore[arg-type]


def test_restores_are_counted(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path, lossless()), 1, 2)
    assert store.restores() == 0
    store.load()
    store.load(1)
    store.load(count=False)
    store.load(1, "ids")
    store.read(1)
    store.verify()
    other = sp.Store(tmp_path)
    assert other.restores() == store.restores() == 2
    other.load()
    assert store.restores() == 3
    store.gc()
    assert sp.Store(tmp_path).restores() == 3
    files = sorted((tmp_path / "restores").iterdir())
    assert [json.loads(p.read_text())["step"] for p in files] == [2, 1, 2]


def test_a_restore_beside_a_collection_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fill(sp.Store(tmp_path, lossless()), 1)
    real, collected = local.link, list[str]()

    def link(temporary: str, target: str) -> None:
        if not collected:
            collected.extend(sp.Store(tmp_path).gc())
        real(temporary, target)

    monkeypatch.setattr(local, "link", link)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.load()
    assert [name.partition("/")[0] for name in collected] == ["restores"]
    assert store.restores() == 1


def table(seed: int) -> dict[str, Any]:
    """Return an embedding table whose rows all depend on the seed."""
    return {"emb.weight": np.random.default_rng(seed).standard_normal((64, 32)).astype(np.float32)}


def widths(saved: Saved) -> set[int]:
    """Return the bit widths of the rows in a saved table."""
    (record,) = sp.Checkpoint.from_bytes(saved.checkpoint.to_bytes(), None).records
    return {bits for _, bits, *_ in record.meta["s"]}


def test_a_run_restored_more_often_than_expected_is_stored_in_eight_bits(tmp_path: Path) -> None:
    """One restore too many widens all later saves to eight bits."""
    cfg = sp.presets.check_n_run("auto", expected_restores=1, policy="consecutive")
    store, beside = sp.Store(tmp_path, cfg), sp.Store(tmp_path, cfg)
    assert widths(store.save(0, table(0))) == {2}
    assert widths(beside.save(1, table(1))) == {2}
    sp.Store(tmp_path).load()
    assert widths(store.save(2, table(2))) == {2}
    first = store.load(2, count=False)["emb.weight"]
    store.load(2, "emb*")
    sp.Store(tmp_path).load()
    for step, one in ((3, store), (4, beside), (5, sp.Store(tmp_path, cfg))):
        assert widths(one.save(step, table(step))) == {8}
    error = [np.linalg.norm(store.load(s, count=False)["emb.weight"] - table(s)["emb.weight"]) for s in (2, 3, 4, 5)]
    assert max(error[1:]) < 0.03 * error[0]
    assert store.restores() == 2
    # Earlier rows do not change.
    assert np.array_equal(store.load(2, count=False)["emb.weight"], first)
    with sp.Saver(sp.Store(tmp_path, cfg), mode="process") as saver:
        saver.save(6, table(6)).result()
    assert np.linalg.norm(store.load(6, count=False)["emb.weight"] - table(6)["emb.weight"]) < 0.03 * error[0]


def test_a_worker_hears_of_restores_elsewhere(tmp_path: Path) -> None:
    """A running saver notices restores by other processes."""
    cfg = sp.presets.check_n_run("auto", expected_restores=0, policy="consecutive")
    with sp.Saver(sp.Store(tmp_path, cfg), mode="process") as saver:
        before = saver.save(1, table(1), kinds={"emb.weight": "embedding"}).result()
        sp.Store(tmp_path).load()
        after = saver.save(2, table(2), kinds={"emb.weight": "embedding"}).result()
    assert after.nbytes > 2 * before.nbytes
    got = sp.Store(tmp_path).load(2)["emb.weight"]
    assert np.linalg.norm(got - table(2)["emb.weight"]) < 0.01 * np.linalg.norm(got)


@pytest.mark.parametrize("to", ["folder", "memory"])
def test_restores_are_copied_once(to: str, tmp_path: Path) -> None:
    """Copies keep the number of restores, and a second copy does not count them twice."""
    cfg = sp.presets.check_n_run("auto", expected_restores=1)
    url = str(tmp_path / "b") if to == "folder" else f"memory://{uuid.uuid4()}"
    store = sp.Store(tmp_path / "a", cfg)
    store.save(0, table(0))
    store.load()
    assert store.copy(url).restores() == store.copy(url).restores() == 1
    other = sp.Store(url, cfg)
    other.load()
    store.load()
    assert (store.restores(), other.restores()) == (2, 2)
    # One they share, and one of each.
    assert store.copy(url, []).restores() == other.restores() == 3
    assert store.restores() == 2
    for one in (store, other, sp.Store(url, cfg)):
        assert widths(one.save(1, table(1))) == {8}
    assert other.copy(tmp_path / "c").restores() == 3


@pytest.mark.parametrize("to", ["folder", "memory"])
def test_copy(to: str, tmp_path: Path) -> None:
    url = str(tmp_path / "b") if to == "folder" else f"memory://{uuid.uuid4()}"
    store = fill(sp.Store(tmp_path / "a", lossless(base_every=4)), *range(8))
    store.pin(1)
    store.pin(6)
    store.tag("best", 6)
    store.rate(6, 1.5)
    with pytest.raises(sp.BadArgumentError, match="step 77"):
        store.copy(url, [1, 77])
    other = store.copy(url, [6, 0])
    assert other.steps() == sp.Store(url).steps() == [0, 6]
    assert same(other.load(6), 6)
    assert (other.pins(), other.tags(), other.describe(6).metric) == ([6], {"best": 6}, 1.5)
    store.compact(2.0)
    assert store.copy(url).steps() == list(range(8))
    assert other.verify() == {}
    assert all(same(other.load(step, count=False), step) for step in range(8))
    other.gc()
    assert other.verify() == {}
    # Different contents are refused before anything is written.
    fresh = fill(sp.Store(tmp_path / "c", lossless()), 3, 100)
    with pytest.raises(sp.BadArgumentError, match="step 3"):
        fresh.copy(url)
    assert 100 not in other.steps()
    fresh.drop(3)
    fresh.tag("best", 100)
    with pytest.raises(sp.BadArgumentError, match="'best'"):
        fresh.copy(url)
    assert 100 not in other.steps()


def removing(store: sp.Store, times: int, keep: Retention, first: int | None = None) -> sp.Store:
    """Open the store; during its reads newer steps are saved and older ones removed."""
    reader, first = sp.Store(store.url), max(store.steps()) + 1 if first is None else first
    settled, left = reader._catalog.settled, iter(range(first, first + times))

    def raced(step: int, work: Any) -> Any:
        if (newer := next(left, None)) is not None:
            fill(store, newer)
            store.gc(keep)
        return settled(step, work)

    reader._catalog.settled = raced  # type: ignore[method-assign]
    return reader


def test_the_newest_step_is_loaded_beside_a_run_that_removes_steps(tmp_path: Path) -> None:
    """`load` returns the newest step while another process removes steps."""
    for name, keep in (("one", Retention(last=1)), ("some", Retention(last=1, every=10))):
        store = fill(sp.Store(tmp_path / name, lossless()), 10, 11)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert same(removing(store, 3, keep).load(), 14)
    # After a run went back, its newest step is not the highest one.
    store = fill(sp.Store(tmp_path / "back", lossless()), 0, 10, 40)
    store.load(10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fill(store, 11, 12)
        store.gc(Retention(last=1))
        assert store.steps() == [12, 40]
        reader = removing(store, 1, Retention(last=1), first=13)
        assert same(reader.load(), 13)
    assert any("step 40" in str(w.message) for w in caught)
    # Nobody is chased for ever.
    store = fill(sp.Store(tmp_path / "fast", lossless()), 0)
    with pytest.raises(sp.CorruptDataError, match="no checkpoint is intact: step 10: it was removed while it was read"):
        removing(store, 100, Retention(last=1)).load()
    assert store.steps() == [11]


def test_all_steps_are_copied_but_those_that_a_run_removes_meanwhile(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path / "a", lossless()), 0, 1, 2)
    store.pin(0)
    store.tag("last", 2)
    store.tag("first", 0)
    source = removing(store, 1, Retention(last=2))  # keeps 0, which is pinned, 2, which is tagged, and 3
    other = source.copy(tmp_path / "b")
    assert other.steps() == [0, 2]
    assert (other.pins(), other.tags()) == ([0], {"first": 0, "last": 2})
    assert other.verify() == {}
    with pytest.raises(sp.BadArgumentError, match="step 1"):
        source.copy(tmp_path / "c", [0, 1])
    gone = removing(fill(sp.Store(tmp_path / "d", lossless()), 0, 1), 1, Retention(last=1))
    with pytest.raises(sp.MissingParentError, match="step 0: it was removed while it was read"):
        gone.copy(tmp_path / "e", [0])


def test_no_step_is_copied_over_a_damaged_file(tmp_path: Path) -> None:
    """Copying replaces damaged files of the target."""
    store = fill(sp.Store(tmp_path / "a", lossless()), 0, 1)
    other = store.copy(tmp_path / "b")
    fill(store, 2)
    for damaged, asked in ((0, [2]), (1, None)):
        path = data_path(tmp_path / "b", damaged)
        path.write_bytes(path.read_bytes()[:-1])
        if asked is None:
            other.drop(damaged)
        assert store.copy(tmp_path / "b", asked).verify() == {}
    assert same(sp.Store(tmp_path / "b").load(), 2)


@pytest.mark.parametrize("compacted", ["neither", "source", "target"])
def test_damaged_files_are_put_back(compacted: str, tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path / "a", lossless()), *range(6))
    other = store.copy(tmp_path / "b")
    if compacted != "neither":
        (store if compacted == "source" else other).compact(1.0)
    path = next(p for p in (tmp_path / "b" / "data").iterdir() if f"/{p.name}" in f"/{_file_of(other, 4)}")
    path.write_bytes(bytes(100))
    assert 4 in store.copy(tmp_path / "b").verify()
    if compacted == "target":  # whose file of the step only it has
        with pytest.raises(sp.MissingParentError, match="step 4"):
            store.copy(tmp_path / "b", repair=True)
        other.drop(4)
    store.copy(tmp_path / "b", repair=compacted != "target")
    assert sp.Store(tmp_path / "b").verify() == {}
    assert same(sp.Store(tmp_path / "b").load(4), 4)


@pytest.mark.parametrize("where", ["source", "target"])
def test_a_file_that_a_disk_cannot_read_is_damaged(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector of the target is replaced, one of the source is named with its step."""
    store = fill(sp.Store(tmp_path / "source", lossless()), 0, 1)
    other = store.copy(tmp_path / "target")
    path = data_path(tmp_path / where, 1)
    read = LocalFiles.read

    def failing(files: LocalFiles, name: str) -> bytes:
        if files.path(name) == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(files, name)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "read", failing)
        if where == "target":
            before = path.stat().st_ino
            store.copy(tmp_path / "target", repair=True)
            assert path.stat().st_ino != before
        else:
            with pytest.raises(sp.CorruptDataError, match=r"step 1: .* cannot be read: .*Errno 5"):
                store.copy(tmp_path / "elsewhere")
            assert sp.Store(tmp_path / "elsewhere").steps() == [0]
    assert other.verify() == {}


def _file_of(store: sp.Store, step: int) -> str:
    return store._catalog.present(step).manifest.file


def test_copies_are_checked(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path / "a", lossless()), 0, 1, 2)
    path = data_path(tmp_path / "a", 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(sp.CorruptDataError, match="step 1"):
        store.copy(tmp_path / "b")
    assert sp.Store(tmp_path / "b").steps() == [0]
    path.unlink()
    with pytest.raises(sp.MissingParentError, match="step 1"):
        store.copy(tmp_path / "b")
    path.write_bytes(whole)
    assert store.copy(tmp_path / "b").verify() == {}
    assert same(sp.Store(tmp_path / "b").load(), 2)
