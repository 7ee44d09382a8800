"""The store: chains, both policies, fall-back with a warning, failed saves."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import uuid
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.store.files import StoreWarning, seal
from shrinkpoint.store.local import LocalFiles
from shrinkpoint.store.store import SkippedCheckpointWarning

LOSSLESS = sp.presets.lossless()


def state(step: int) -> dict[str, Any]:
    """Return a different state for each step."""
    rng = np.random.default_rng(step // 3)
    return {"step": step, "weight": torch.from_numpy(rng.standard_normal((40, 50)) + step), "n": [np.arange(5) + step]}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["step"] == b["step"] and torch.equal(a["weight"], b["weight"]) and bool((a["n"][0] == b["n"][0]).all())


def listing(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def deltas(store: sp.Store, root: Path) -> dict[int, tuple[bool, str | None]]:
    """Return (is a delta, id of its parent) by step, from the files."""
    found = {}
    for name in (root / "data").iterdir():
        ckpt = sp.Checkpoint.from_bytes(name.read_bytes())
        found[int(name.name.split("-")[0])] = (ckpt.is_delta, ckpt.parent_id)
    return dict(sorted(found.items()))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "er" / "run"


def filled(root: Path, steps: int = 6, **policy: Any) -> sp.Store:
    store = sp.Store(root, sp.presets.lossless(chain=sp.ChainPolicy(**policy)))
    for i in range(steps):
        store.save(10 * i, state(10 * i))
    return store


def files_of(root: Path, step: int) -> tuple[Path, Path]:
    """Return data file and manifest of a step."""
    manifest = root / "steps" / f"{step:012d}.json"
    return root / "data" / json.loads(manifest.read_text())["file"], manifest


@pytest.mark.filterwarnings("ignore:.*step 3 is saved below step 5")
@pytest.mark.parametrize("make", [str, Path, lambda p: f"file://{p}", lambda p: f"{p}/"])
def test_save_load_steps(root: Path, make: Any) -> None:
    store = sp.Store(make(root), LOSSLESS)
    assert store.steps() == []
    assert store.verify() == {}
    with pytest.raises(sp.BadArgumentError, match="no checkpoint"):
        store.load()
    for step in (0, 5, 3, 999_999_999_999):
        saved = store.save(step, state(step))
        assert saved.step == step
        assert saved.nbytes > 0
        assert saved.ratio == pytest.approx(saved.raw_nbytes / saved.nbytes)
        assert saved.is_delta == (step != 0)
        assert os.path.exists(saved.path)
        assert [row.path for row in saved.summary()] == ["weight", "n/0"]
    assert store.steps() == [0, 3, 5, 999_999_999_999]
    fresh = sp.Store(make(root))
    for step in (3, 0, 999_999_999_999, 5):
        assert same(fresh.load(step), state(step))
    assert same(fresh.load(), state(999_999_999_999))
    assert fresh.verify() == {}
    assert fresh.gc() == []


@pytest.mark.parametrize("step", [-1, 10**12, 1.0, "1", None, True, np.float64(1)])
def test_steps_that_are_none(root: Path, step: Any) -> None:
    store = sp.Store(root)
    with pytest.raises(sp.BadArgumentError, match="step"):
        store.save(step, {"a": 1})
    assert not root.exists()


def test_steps_of_other_kinds_of_integers(root: Path) -> None:
    store = sp.Store(root, LOSSLESS)
    for step in (np.int64(3), np.uint8(4), torch.tensor(5)):
        assert type(store.save(step, {"a": 1}).step) is int  # type: ignore[arg-type]
    assert sp.Store(root).steps() == [3, 4, 5]
    assert store.load(np.int32(4)) == {"a": 1}  # type: ignore[arg-type]
    with sp.Saver(store, mode="thread") as saver:
        assert saver.save(np.int64(6), {"a": 1}).result().step == 6  # type: ignore[arg-type]
    store.drop(np.int64(3))  # type: ignore[arg-type]
    assert store.steps() == [4, 5, 6]


def test_loading_a_step_that_is_not_there(root: Path) -> None:
    store = filled(root, 2)
    for step in (5, -1, "10", 10.5):
        with pytest.raises(sp.BadArgumentError, match=r"0, 10"):
            store.load(step)  # type: ignore[arg-type]


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"x"


@pytest.mark.parametrize(
    "url",
    [
        5,
        None,
        b"x",
        "nosuch://x",
        ["a"],
        "",
        "a\0b",
        "\ud800",
        BytesPath(),
        "dir:///x",
        "w::x",
        "/a::b",
        "file:///a::b",
        "zip:///",
    ],
)
def test_urls_that_are_none(url: Any) -> None:
    with pytest.raises(sp.BadArgumentError, match="url"):
        sp.Store(url)


def test_a_store_is_called_as_it_was_opened() -> None:
    store = sp.Store("memory://called/so")
    assert repr(store) == "<Store memory://called/so>"
    with pytest.raises(sp.BadArgumentError, match="memory://called/so holds no checkpoint"):
        store.load()


def test_a_home_of_nobody_is_a_name_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = filled(Path("~nobody-of-this-name/run"), 1)
    monkeypatch.chdir("/")
    assert sp.Store(store.url).steps() == [0]


def test_configurations_that_are_none(root: Path) -> None:
    with pytest.raises(sp.BadArgumentError, match="cfg"):
        sp.Store(root, sp.presets.lossless)  # type: ignore[arg-type]


def test_linear_chain_with_a_base_every_so_often(root: Path) -> None:
    store = filled(root, 8, base_every=3)
    ids = {step: sp.Checkpoint.from_bytes(files_of(root, step)[0].read_bytes()).id for step in store.steps()}
    got = deltas(store, root)
    for i, step in enumerate(store.steps()):
        assert got[step] == ((False, None) if i % 3 == 0 else (True, ids[step - 10]))
        assert same(sp.Store(root).load(step), state(step))


def test_every_delta_against_the_base(root: Path) -> None:
    store = filled(root, 8, base_every=4, against="base")
    ids = {step: sp.Checkpoint.from_bytes(files_of(root, step)[0].read_bytes()).id for step in store.steps()}
    got = deltas(store, root)
    for i, step in enumerate(store.steps()):
        assert got[step] == ((False, None) if i % 4 == 0 else (True, ids[10 * (i - i % 4)]))
        assert same(sp.Store(root).load(step), state(step))
    # Losing one delta takes no other with it.
    files_of(root, 50)[0].unlink()
    assert list(sp.Store(root).verify()) == [50]


def test_only_bases(root: Path) -> None:
    store = filled(root, 3, base_every=1)
    assert not any(d for d, _ in deltas(store, root).values())


def test_going_on_after_a_load(root: Path) -> None:
    """The chain continues from the loaded step, with its distance from the base."""
    filled(root, 2, base_every=4)
    store = sp.Store(root, sp.presets.lossless(chain=sp.ChainPolicy(4)))
    store.load()
    assert [store.save(step, state(step)).is_delta for step in (20, 30, 40, 50)] == [True, True, False, True]
    store.load(20)
    with pytest.warns(StoreWarning, match="25 continues from step 20 and leaves steps 30, 40, 50 behind"):
        assert store.save(25, state(25)).is_delta
    assert same(sp.Store(root).load(25), state(25))
    fresh = sp.Store(root, LOSSLESS)
    assert not fresh.save(60, state(60)).is_delta
    assert sp.Store(root).verify() == {}
    for step in sp.Store(root).steps():
        assert same(sp.Store(root).load(step), state(step))


def test_saving_a_step_again(root: Path) -> None:
    """A step saved again is replaced; steps over the old one stay readable."""
    store = filled(root, 4)
    store.load(0)
    with pytest.warns(StoreWarning, match="leaves steps 20, 30 behind"):
        store.save(10, state(77))
    for store in (sp.Store(root), sp.Store(root)):
        assert same(store.load(10), state(77))
        for step in (0, 20, 30):
            assert same(store.load(step), state(step))
        assert store.verify() == {}
        store.gc()
    again = sp.Store(root, LOSSLESS)
    before = listing(root)
    again.save(0, state(0))
    assert listing(root) == before
    assert sp.Store(root).verify() == {}


def test_a_refused_state_changes_nothing(root: Path) -> None:
    store = filled(root, 2)
    before = listing(root)
    with pytest.raises(sp.UnsupportedLeafError, match="bad"):
        store.save(20, {**state(20), "bad": object()})
    assert listing(root) == before
    store.save(20, state(20))
    assert same(sp.Store(root).load(), state(20))


DAMAGE = {
    "flipped": lambda p: p.write_bytes(p.read_bytes()[:-3] + bytes([p.read_bytes()[-3] ^ 4]) + p.read_bytes()[-2:]),
    "torn": lambda p: p.write_bytes(p.read_bytes()[: len(p.read_bytes()) // 2]),
    "empty": lambda p: p.write_bytes(b""),
    "missing": lambda p: p.unlink(),
    "other": lambda p: p.write_bytes(b"something else" * 50),
    "grown": lambda p: p.write_bytes(p.read_bytes() + b"\0"),
    "a folder": lambda p: (p.unlink(), p.mkdir()),
    "a link to itself": lambda p: (p.unlink(), p.symlink_to(p)),
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("what", ["data", "manifest"])
def test_damaged_files(root: Path, how: str, what: str) -> None:
    """`load()` falls back to the newest intact step and names the skipped ones."""
    if what == "manifest" and how == "missing":
        pytest.skip("then there is no such step")
    filled(root, 6, base_every=3)
    for step in (50, 40):
        data, manifest = files_of(root, step)
        DAMAGE[how](data if what == "data" else manifest)
    store = sp.Store(root, LOSSLESS)
    with pytest.warns(SkippedCheckpointWarning, match=r"loaded step 30; skipped step 50.*step 40"):
        assert same(store.load(), state(30))
    for step in (40, 50):
        with pytest.raises(sp.ShrinkpointError, match=f"step {step}"):
            store.load(step)
    problems = store.verify()
    assert sorted(problems) == [40, 50]
    assert all(problems.values())
    assert store.save(60, state(60)).is_delta
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(sp.Store(root).load(), state(60))


def test_a_damaged_base_takes_its_deltas_with_it_and_no_more(root: Path) -> None:
    filled(root, 6, base_every=3)
    DAMAGE["flipped"](files_of(root, 30)[0])
    store = sp.Store(root)
    assert sorted(store.verify()) == [30, 40, 50]
    with pytest.warns(SkippedCheckpointWarning, match=r"loaded step 20.*step 50.*step 40.*step 30"):
        assert same(store.load(), state(20))
    DAMAGE["missing"](files_of(root, 0)[0])
    with pytest.raises(sp.CorruptDataError, match=r"no checkpoint is intact.*50.*0"):
        sp.Store(root).load()


def test_data_of_another_step_is_noticed(root: Path) -> None:
    """A valid data file of another step is damage."""
    filled(root, 3, base_every=1)
    a, b = files_of(root, 10)[0], files_of(root, 20)[0]
    shutil.copy(a, b)
    with pytest.raises(sp.CorruptDataError, match="20"):
        sp.Store(root).load(20)


@pytest.mark.parametrize(
    "fields",
    [
        {"file": "../../etc/passwd"},
        {"file": "/etc/passwd"},
        {"file": "../steps/000000000020.json"},
        {"file": "000000000020-0123456789abcdef.spt\n"},
        {"file": 3},
        {"file": ""},
        {"parents": ["../x"]},
        {"parents": ["x/../000000000020-0123456789abcdef.spt"]},
        {"parents": [3]},
        {"parents": "000000000020-0123456789abcdef.spt"},
        {"parents": None},
        {"since_base": "x"},
        {"since_base": -1},
        {"since_base": True},
        {"step": 21},
        {"step": "20"},
        {"id": 5},
        {"id": "0" * 64},
        {"version": "x"},
        {"version": 0},
        {"version": None},
        {"nbytes": "x"},
        {"raw_nbytes": -5},
        {"from the future": 1},
    ],
    ids=str,
)
def test_manifests_that_lie(root: Path, fields: dict[str, Any]) -> None:
    filled(root, 3)
    manifest = files_of(root, 20)[1]
    whole = json.loads(manifest.read_text())
    del whole["checksum"]
    manifest.write_bytes(seal({**whole, **fields}))
    store = sp.Store(root)
    with pytest.raises((sp.CorruptDataError, sp.MissingParentError), match="20"):
        store.load(20)
    with pytest.warns(SkippedCheckpointWarning, match="step 20"):
        assert same(store.load(), state(10))


@pytest.mark.parametrize("text", ["", "[", "[]", "null", "3", "{}", "\0", "[" * 10**5, "9" * 5000, '{"version": 1}'])
def test_manifests_that_are_none(root: Path, text: str) -> None:
    filled(root, 2)
    files_of(root, 10)[1].write_text(text)
    before = listing(root)
    with pytest.raises(sp.CorruptDataError, match="step 10"):
        sp.Store(root).load(10)
    with pytest.raises(sp.CorruptDataError, match="step 10"):
        sp.Store(root).gc()
    assert listing(root) == before


def test_newer_manifests_are_refused_by_name(root: Path) -> None:
    filled(root, 2)
    manifest = files_of(root, 10)[1]
    manifest.write_text(json.dumps({"version": 4, "what": "ever"}))
    with pytest.raises(sp.NewerFormatError, match="version 4"):
        sp.Store(root).load(10)
    with pytest.warns(SkippedCheckpointWarning, match="version 4"):
        assert same(sp.Store(root).load(), state(0))


def test_strangers_files_are_let_be(root: Path) -> None:
    store = filled(root, 2)
    for name in (
        "steps/notes.txt",
        "data/notes.txt",
        "steps/00000000001.json",
        "steps/000000000010.json.bak",
        "README",
    ):
        (root / name).write_text("mine")
    assert store.steps() == [0, 10]
    assert store.gc() == []
    assert (root / "data/notes.txt").read_text() == "mine"


def test_gc_removes_what_nobody_needs(root: Path) -> None:
    store = filled(root, 3)
    (root / "data" / ".tmp-123-x.spt").write_bytes(b"half")
    (root / "steps" / ".tmp-123-x.json").write_bytes(b"half")
    files_of(root, 20)[1].unlink()
    removed = store.gc()
    assert len(removed) == 3
    assert sp.Store(root).verify() == {}
    assert same(sp.Store(root).load(), state(10))
    assert store.gc() == []


FAULTS = ["os.replace", "os.fsync", "write"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("when", [1, 2, 3, 4, 5, 6])
def test_errors_leave_nothing_behind(root: Path, fault: str, when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed save leaves the earlier files, and the next save works."""
    store = filled(root, 2)
    before = listing(root)
    calls = 0

    def failing(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == when:
                raise OSError(errno.ENOSPC, "no space left on device")
            return real(*args, **kwargs)

        return call

    most = {"os.replace": 1, "os.fsync": 4, "write": 1}[fault]
    with monkeypatch.context() as patch:
        if fault == "write":
            patch.setattr(LocalFiles, "write", failing(LocalFiles.write))
        else:
            patch.setattr(fault, failing(getattr(os, fault.split(".")[1])))
        try:
            store.save(20, state(20))
        except OSError as e:
            assert e.errno == errno.ENOSPC  # noqa: PT017 - not every call fails
            left = listing(root)
            committed = "steps/000000000020.json" in left
            if not committed:
                assert left == before
        else:
            assert calls < when
        # Every call of a save is met, one a trial; the rest of the trials have none to meet.
        assert calls == min(when, most) or (calls > when and fault == "os.fsync")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sp.Store(root).load()
        assert same(found, state(10)) or same(found, state(20))
        store.save(30, state(30))
        assert same(sp.Store(root).load(), state(30))
        assert sp.Store(root).verify() == {}


_FULL_DISK = """
import resource, sys, warnings
sys.path.insert(0, {root!r})
import shrinkpoint as sp
from pathlib import Path
from tests.store.test_store import filled, listing, same, state
folder = Path(sys.argv[1])
store = filled(folder, 2)
before = listing(folder)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit in (0, 1, 100, 1000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        store.save(20, state(20))
    except OSError as e:
        pass
    else:
        raise SystemExit(f"limit {{limit}}: no error")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert listing(folder) == before, (limit, set(listing(folder)) ^ set(before))
store.save(30, state(30))
warnings.simplefilter("error")
assert same(sp.Store(folder).load(), state(30))
assert sp.Store(folder).verify() == {{}}
print("fine")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs file size limits")
def test_a_full_disk(root: Path) -> None:
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    script = _FULL_DISK.format(root=here)
    done = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for url in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(sp.BadArgumentError, match=f"{tmp_path / 'file'} is not a folder"):
            sp.Store(url)
    (tmp_path / "dangling").symlink_to("gone/far")
    for url in (tmp_path / "dangling", tmp_path / "dangling" / "run"):
        with pytest.raises(
            sp.BadArgumentError, match=f"dangling is a link to {tmp_path}/gone/far, which does not exist"
        ):
            sp.Store(url)
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(sp.BadArgumentError, match=f"circle is a link to {tmp_path}/circle, in a circle"):
        sp.Store(tmp_path / "circle")
    (tmp_path / "linked").symlink_to(tmp_path)
    assert sp.Store(tmp_path / "linked" / "run").steps() == []
    store = sp.Store(tmp_path / "later" / "run")
    (tmp_path / "later").write_text("in the way")
    with pytest.raises(OSError, match="later"):
        store.save(1, state(1))
    assert (tmp_path / "file").read_text() == "in the way"
    if hasattr(os, "geteuid") and os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(OSError):
            sp.Store(tmp_path / "locked" / "run").save(1, state(1))


@pytest.mark.parametrize("mode", ["store", "thread", "process"])
@pytest.mark.parametrize("how", ["moved", "removed"])
def test_a_store_that_goes_away_under_a_run_is_told(mode: str, how: str, tmp_path: Path) -> None:
    """A store that disappears during a run gives a warning at the next save."""
    root = tmp_path / "run"
    store = sp.Store(root, sp.presets.lossless())

    def save(step: int) -> None:
        store.save(step, state(step)) if mode == "store" else saver.save(step, state(step)).result()

    def run() -> None:
        save(0)
        save(1)
        os.rename(root, tmp_path / "elsewhere") if how == "moved" else shutil.rmtree(root)
        save(2)
        closed.close()

    with contextlib.ExitStack() as closed:
        if mode != "store":
            saver = closed.enter_context(sp.Saver(store, mode=mode))
        with pytest.warns(match="all others are missing from .*unmounted"):
            run()
    assert sp.Store(root).steps() == [2]
    assert same(sp.Store(root).load(), state(2))


def test_a_store_that_was_emptied_on_purpose_is_not_missed(root: Path) -> None:
    store = filled(root, 3)
    store.drop(*store.steps())
    store.gc()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.save(7, state(7))
    assert same(store.load(), state(7))


def test_a_store_that_is_moved_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """A step is not committed if its data are elsewhere."""
    root = tmp_path / "run"
    store = filled(root, 2)
    write = store._files.write

    def moving(name: str, data: bytes) -> None:
        write(name, data)
        if name.startswith("data/"):
            os.rename(root, tmp_path / "elsewhere")

    store._files.write = moving  # type: ignore[method-assign]
    with pytest.raises(FileNotFoundError, match="moved or removed during the save"):
        store.save(2, state(2))
    assert sp.Store(root).steps() == []
    moved = sp.Store(tmp_path / "elsewhere")
    assert moved.steps() == [0, 10]
    assert not moved.verify()


def test_in_memory() -> None:
    url = f"memory://{uuid.uuid4()}/run"
    store = sp.Store(url, sp.presets.lossless(chain=sp.ChainPolicy(3)))
    assert store.steps() == []
    for step in range(5):
        store.save(step, state(step))
    again = sp.Store(url)
    assert again.steps() == list(range(5))
    assert all(same(again.load(step), state(step)) for step in range(5))
    assert same(again.load(), state(4))
    assert again.verify() == {}
    assert again.gc() == []
    name = next(p for p in again._files.fs.find(again._files.root) if "000000000004-" in p)
    again._files.fs.rm_file(name)
    with pytest.warns(SkippedCheckpointWarning, match="step 4"):
        assert same(again.load(), state(3))
    assert list(again.verify()) == [4]


def test_gradients_and_kinds_go_to_the_codec(root: Path) -> None:
    w = torch.randn(64, 64)
    store = sp.Store(root)
    saved = store.save(1, {"weight": w}, kinds={"weight": "norm"})
    assert saved.summary()[0].stream == "bytes"
    with pytest.raises(sp.BadArgumentError, match="grads/x"):
        store.save(2, {"weight": w}, grads={"x": w})
    assert store.save(2, {"weight": w}, grads={"weight": w}).summary()[0].stream == "levels"


def test_what_is_loaded_may_be_changed(root: Path) -> None:
    store = filled(root, 3)
    loaded = store.load()
    loaded["weight"].zero_()
    loaded["n"][0][:] = 0
    store.save(30, state(30))
    assert same(sp.Store(root).load(30), state(30))
    assert same(store.load(20), state(20))


def test_two_stores_in_one_folder_do_not_build_on_each_others_heads(root: Path) -> None:
    a, b = sp.Store(root, LOSSLESS), sp.Store(root, LOSSLESS)
    for i in range(4):
        (a if i % 2 else b).save(i, state(i))
    assert sp.Store(root).verify() == {}
    for i in range(4):
        assert same(sp.Store(root).load(i), state(i))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda store: store.copy("memory://nowhere", steps=np.int64(1)), "steps is"),
        (lambda store: store.verify(progress=3), "progress is 3"),
        (lambda store: store.compact(progress="x"), "progress is 'x'"),
        (lambda store: store.header(1), "manifest is 1"),
        (lambda store: store.gc(dry_run=np.array([1, 2])), "dry_run is"),
        (lambda store: store.load(count=np.array([1, 2])), "count is"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(tmp_path: Path, call: Any, said: str) -> None:
    store = sp.Store(tmp_path)
    store.save(1, {"weight": np.zeros(2000, np.float32)})
    with pytest.raises(sp.BadArgumentError, match=said):
        call(store)
    store.save(2, {"weight": np.ones(2000, np.float32)})
    assert store.steps() == [1, 2]
