"""Runs that go back: `load()` gives the continued end, and both ends are kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import shrinkpoint as sp
from shrinkpoint.__main__ import app
from shrinkpoint.store import parts
from shrinkpoint.store.files import Files, StoreWarning, seal, unseal
from shrinkpoint.store.retention import Retention
from shrinkpoint.store.saver.saver import SaverWarning
from shrinkpoint.store.store import SkippedCheckpointWarning
from tests.store.common import data_path, fill, lossless, same, state

TENS = tuple(range(10, 110, 10))
LEFT = "continues from step 50 and leaves steps 70, 80, 90, 100 behind"


def second(step: int) -> dict[str, Any]:
    """Return the state of the run's second end at a step."""
    return state(1000 + step)


def newest(url: Any) -> int:
    """Return the step that a new process gets from `load()`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)
        return int(sp.Store(url).load(count=False)["step"])


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "folder" else f"memory://{uuid.uuid4()}"


@pytest.fixture
def gone_back(url: str) -> sp.Store:
    """Return a store saved to 100, loaded at 50, and saved at 60 and 70 again."""
    fill(sp.Store(url, lossless()), *TENS)
    store = sp.Store(url, lossless())
    assert same(store.load(50), 50)
    with pytest.warns(StoreWarning, match=LEFT):
        store.save(60, second(60))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.save(70, second(70))
    return store


def test_the_end_that_was_saved_last_is_loaded(gone_back: sp.Store) -> None:
    other = sp.Store(gone_back.url, lossless())
    assert other.steps() == list(TENS)
    assert other.candidates() == [70, 60, 50, 40, 30, 20, 10, 100, 90, 80]
    with pytest.warns(StoreWarning, match=r"loaded step 70; skipped steps 80, 90, 100, .* went back to step 50"):
        assert same(other.load(), 1070)
    assert other.verify() == {}
    # By number the other end is unchanged, and compaction does not bring it back.
    other.compact(2.0)
    other.gc()
    assert same(other.load(100), 100)
    assert newest(other.url) == 1070
    # Gone on from, it is the end again.
    fill(other, 110)
    assert newest(other.url) == 110
    assert other.candidates()[:3] == [110, 70, 60]


def test_a_step_that_is_saved_again_is_not_left_behind(gone_back: sp.Store) -> None:
    gone_back.save(80, second(80))
    assert newest(gone_back.url) == 1080
    gone_back.save(90, second(90))
    gone_back.save(100, second(100))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(sp.Store(gone_back.url).load(), 1100)
    gone_back.gc()
    assert gone_back._files.list("left") == []


def test_the_very_same_checkpoint_saved_again_counts(url: str) -> None:
    """Saving the same checkpoint again after going back keeps the same end."""
    fill(sp.Store(url, lossless()), 10, 20, 30, 40)
    store = sp.Store(url, lossless())
    store.load(10)
    fill(store, 20)
    assert newest(url) == 40, "nothing was saved: the step is what it was"
    store.load(10)
    with pytest.warns(StoreWarning, match="leaves steps 20, 30, 40 behind"):
        store.save(15, state(15))
    assert newest(url) == 15
    # Over the same parents, as another process would that had loaded these.
    for step, parent in ((20, 10), (30, 20)):
        other = sp.Store(url, lossless())
        other.load(parent)
        fill(other, step)
    assert newest(url) == 30
    assert sp.Store(url).candidates() == [30, 20, 15, 10, 40]


@pytest.mark.parametrize("replayed", [1, 2, 4])
def test_a_run_that_replays_steps_before_it_parts_has_gone_back(url: str, replayed: int) -> None:
    """A run that replays equal steps goes back at the first different one."""
    fill(sp.Store(url, lossless()), *TENS)
    store = sp.Store(url, lossless())
    store.load(50)
    steps = list(range(60, 60 + 10 * replayed, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill(store, *steps)
        assert newest(url) == 100
        assert store.loaded == steps[-1]
    with pytest.warns(StoreWarning, match=f"continues from step {steps[-1]} and leaves steps? .*100 behind"):
        store.save(steps[-1] + 5, second(steps[-1] + 5))
    assert store.loaded is None
    assert newest(url) == 1000 + steps[-1] + 5
    assert not set(steps) & set(sp.Store(url).candidates()[-(5 - replayed) :])


def test_damage_at_the_end_goes_back_along_the_run(tmp_path: Path) -> None:
    fill(sp.Store(tmp_path, lossless(base_every=1)), *TENS)
    store = sp.Store(tmp_path, lossless(base_every=1))
    store.load(80)
    with pytest.warns(StoreWarning, match="leaves steps 90, 100 behind"):
        store.save(85, second(85))
    for step in range(10, 90, 10):
        data_path(tmp_path, step).write_bytes(b"torn")
    data_path(tmp_path, 85).write_bytes(b"torn")
    with pytest.warns(SkippedCheckpointWarning, match="loaded step 100; skipped step 85.*step 80.*step 10"):
        assert same(sp.Store(tmp_path).load(), 100)


@pytest.mark.parametrize("last", [1, 2, 3])
def test_gc_keeps_either_end(gone_back: sp.Store, last: int) -> None:
    """`gc` keeps both ends, in the same object and in a new process."""
    for store in (gone_back, sp.Store(gone_back.url, lossless())):
        store.gc(Retention(last=last))
        assert store.steps() == [*[50, 60, 70][-last:], *[80, 90, 100][-last:]]
        assert store.verify() == {}
    assert newest(gone_back.url) == 1070
    assert gone_back.save(75, second(75)).is_delta
    store.drop(*[80, 90, 100][-last:])
    store.gc(Retention(last=1))
    assert store.steps() == [75]
    assert store._files.list("left") == []


def test_gc_keeps_what_was_saved_below_others(url: str) -> None:
    """A lower step without a load gives one warning, and both ends are kept."""
    fill(sp.Store(url, lossless()), *TENS)
    store = sp.Store(url, lossless())
    with pytest.warns(StoreWarning, match=r"step 5 is saved below steps 10, 20, .*, 100: .*drop_after"):
        store.save(5, second(5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.save(6, second(6))
        assert same(sp.Store(url).load(), 100)
    store.gc(Retention(last=2))
    assert store.steps() == [5, 6, 90, 100]
    fill(sp.Store(url, lossless()), 110)
    store.gc(Retention(last=2))
    assert store.steps() == [6, 100, 110]


def test_another_writer_is_not_left_behind(url: str) -> None:
    """Steps of a concurrent writer are not treated as left behind."""
    fill(sp.Store(url, lossless()), 10, 20, 30)
    one, two = sp.Store(url, lossless()), sp.Store(url, lossless())
    one.load()
    two.load()
    fill(one, 40, 50)
    with pytest.warns(StoreWarning, match="step 35 is saved below steps 40, 50"):
        fill(two, 35)
    assert newest(url) == 50


def test_starting_over_on_purpose(url: str) -> None:
    store = fill(sp.Store(url, lossless()), *TENS)
    store.tag("best", 80)
    with pytest.raises(sp.BadArgumentError, match="step 80 is pinned or tagged"):
        store.drop_after(50)
    store.untag("best")
    assert store.steps() == list(TENS)
    assert store.drop_after(50) == [60, 70, 80, 90, 100]
    assert store.drop_after(50) == []
    with pytest.raises(sp.BadArgumentError, match="step 60 is not in"):
        store.drop_after(60)
    again = sp.Store(url, lossless())
    assert same(again.load(), 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill(again, 60, 70)
    assert again.steps() == [10, 20, 30, 40, 50, 60, 70]
    assert again.verify() == {}


def test_the_highest_is_dropped_first(tmp_path: Path) -> None:
    """Steps are dropped from the highest down, so that a crash leaves no gap."""
    store = fill(sp.Store(tmp_path, lossless()), *TENS)
    real, gone = store._files.remove, list[str]()
    store._files.remove = lambda names: (gone.extend(names), real(names))[1]  # type: ignore[method-assign]
    store.drop_after(70)
    assert gone == [f"steps/{step:012d}.json" for step in (100, 90, 80)]


def test_by_the_command_line(tmp_path: Path) -> None:
    fill(sp.Store(tmp_path, lossless()), *TENS)
    done = CliRunner().invoke(app, ["drop", str(tmp_path), "--after", "70"])
    assert (done.exit_code, done.stdout) == (0, "removed 80, 90, 100\n")
    assert CliRunner().invoke(app, ["drop", str(tmp_path), "--after", "70"]).stdout == "removed none\n"
    for wrong in ([], ["10", "--after", "70"], ["--after", "75"]):
        assert CliRunner().invoke(app, ["drop", str(tmp_path), *wrong]).exit_code != 0
    assert sp.Store(tmp_path).steps() == [10, 20, 30, 40, 50, 60, 70]


def test_commands_take_the_same_step(gone_back: sp.Store, tmp_path: Path) -> None:
    if gone_back.url.startswith("memory"):
        pytest.skip("the command line opens it by its URL, as the folder")
    done = CliRunner().invoke(app, ["restore", gone_back.url, str(tmp_path / "out.pt"), "--json"])
    assert done.exit_code == 0
    assert '"step": 70' in done.stdout


def test_a_saver_that_goes_back(tmp_path: Path) -> None:
    fill(sp.Store(tmp_path, lossless()), *TENS)
    store = sp.Store(tmp_path, lossless())
    store.load(50)
    with pytest.warns(SaverWarning, match=LEFT), sp.Saver(store) as saver:
        saver.save(60, second(60)).result()
    assert newest(tmp_path) == 1060


def told(saver: sp.Saver, step: int) -> None:
    """Save at the second end, and wait for the warnings."""
    saver.save(step, second(step))
    saver.wait()


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_saver_that_is_at_work_goes_back(mode: str, tmp_path: Path) -> None:
    """A running saver goes back after `load(step)`; other loads do not matter."""
    store = sp.Store(tmp_path / "run", lossless())
    with sp.Saver(store, mode=mode) as saver:
        for step in TENS[:-1]:
            saver.save(step, state(step)).result()
        store.load(30)
        saver.save(100, state(100))
        store.load(50)
        with pytest.warns((StoreWarning, SaverWarning), match=LEFT):
            told(saver, 60)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            told(saver, 70)
    over = {step: [int(name[:12]) for name in store.describe(step).parents[:1]] for step in (60, 70, 100)}
    assert over == {60: [50], 70: [60], 100: [90]}
    assert newest(store.url) == 1070
    assert store.verify() == {}


@pytest.mark.skipif(sys.platform != "linux", reason="stops and kills a process")
@pytest.mark.parametrize("saved", [False, True])
def test_a_saver_that_goes_back_does_so_after_its_worker_was_killed(saved: bool, tmp_path: Path) -> None:
    """Going back survives a killed worker, before and after the first save."""
    store = sp.Store(tmp_path / "run", lossless())
    with sp.Saver(store, mode="process") as saver:
        for step in TENS:
            saver.save(step, state(step)).result()
        store.load(50)
        if saved:
            with pytest.warns(SaverWarning, match=LEFT):
                told(saver, 60)
        assert saver.pid is not None
        os.kill(saver.pid, signal.SIGSTOP)
        lost = saver.save(70 if saved else 60, second(70 if saved else 60))
        os.kill(saver.pid, signal.SIGKILL)
        with pytest.raises(ChildProcessError, match="killed by SIGKILL"):
            saver.wait()
        assert lost.exception() is not None
        if not saved:
            with pytest.warns(SaverWarning, match=LEFT):
                told(saver, 60)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if saved else "error")
            told(saver, 70)
            told(saver, 80)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            told(saver, 110)  # it has gone back once, not again and again
    over = {step: [int(name[:12]) for name in store.describe(step).parents[:1]] for step in (60, 70, 80, 110)}
    assert over == {60: [50], 70: [60], 80: [70], 110: [80]}
    assert sp.Store(store.url).candidates() == [110, 80, 70, 60, 50, 40, 30, 20, 10, 100, 90]
    assert store.verify() == {}


@pytest.mark.skipif(sys.platform != "linux", reason="stops and kills a process")
def test_a_saver_whose_way_back_was_lost_may_go_on_at_the_end(tmp_path: Path) -> None:
    """After a lost save, a load of the end continues there."""
    store = sp.Store(tmp_path / "run", lossless())
    with sp.Saver(store, mode="process") as saver:
        for step in TENS:
            saver.save(step, state(step)).result()
        store.load(50)
        assert saver.pid is not None
        os.kill(saver.pid, signal.SIGSTOP)
        saver.save(60, second(60))
        os.kill(saver.pid, signal.SIGKILL)
        with pytest.raises(ChildProcessError, match="killed by SIGKILL"):
            saver.wait()
        store.load(100)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            told(saver, 110)
    assert store.describe(110).parents[0] == store.describe(100).file
    assert same(sp.Store(store.url).load(60), 60)
    assert store.candidates()[:2] == [110, 100]


def test_going_back_to_what_is_gone_is_told(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "run", lossless())
    with sp.Saver(store, mode="process") as saver:
        for step in (10, 20):
            saver.save(step, state(step)).result()
        store.load(10)
        sp.Store(store.url).drop(10)
        with pytest.warns(SaverWarning) as caught:
            told(saver, 15)
    why = "the chain of the last save continues, because the one of step 10 cannot be"
    assert any(why in str(warning.message) for warning in caught)
    assert store.describe(15).parents[0] == store.describe(20).file


def test_copies_have_the_same_end(gone_back: sp.Store, tmp_path: Path) -> None:
    other = gone_back.copy(tmp_path / "copy")
    assert newest(other.url) == 1070
    assert newest(gone_back.copy(tmp_path / "copy").url) == 1070
    assert newest(gone_back.copy(tmp_path / "few", [50, 70, 100]).url) == 1070


def test_a_copy_without_the_new_way_has_the_old_end(gone_back: sp.Store, tmp_path: Path) -> None:
    assert newest(gone_back.copy(tmp_path / "before", [10, 40, 100]).url) == 100
    assert newest(gone_back.copy(tmp_path / "after", [10, 70, 100]).url) == 1070


def test_a_copy_whose_steps_all_go_before_their_turn_takes_those_that_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(sp.Store(tmp_path / "run", lossless()), 10, 20)
    real, calls = parts.copy_files, []

    def meanwhile(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            other = fill(sp.Store(tmp_path / "run", lossless()), 30)
            other.gc(Retention(last=1))
        real(*args)

    monkeypatch.setattr(parts, "copy_files", meanwhile)
    said = CliRunner().invoke(app, ["copy", str(tmp_path / "run"), str(tmp_path / "copy"), "--json"])
    assert sp.Store(tmp_path / "copy").steps() == json.loads(said.stdout)["steps"] == [30]


def test_a_copy_that_never_gets_a_step_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fill(sp.Store(tmp_path / "run", lossless()), 1)
    real, calls = parts.copy_files, []

    def meanwhile(*args: Any) -> None:
        calls.append(args)
        fill(sp.Store(tmp_path / "run", lossless()), 1 + len(calls)).gc(Retention(last=1))
        real(*args)

    monkeypatch.setattr(parts, "copy_files", meanwhile)
    with pytest.raises(sp.MissingParentError, match="every step was removed before it was copied, 10 times"):
        store.copy(tmp_path / "copy")


def test_a_copy_taken_while_the_run_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy made while the run goes back does not have the record of it."""
    fill(sp.Store(tmp_path / "run", lossless()), *TENS)
    real, calls = parts.copy_files, []

    def meanwhile(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            other = sp.Store(tmp_path / "run", lossless())
            other.load(50)
            with pytest.warns(StoreWarning, match="continues from step 50"):
                other.save(55, second(55))
        real(*args)

    monkeypatch.setattr(parts, "copy_files", meanwhile)
    copy = sp.Store(tmp_path / "run", lossless()).copy(tmp_path / "copy")
    assert (newest(tmp_path / "run"), newest(copy.url)) == (1055, 100)


@pytest.mark.parametrize("at", ["write", "create"])
def test_a_save_that_fails_goes_nowhere(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(sp.Store(tmp_path, lossless()), *TENS)
    store = sp.Store(tmp_path, lossless())
    store.load(50)
    real: Callable[..., Any] = getattr(store._files, at)

    def fail(name: str, data: bytes) -> Any:
        if name.startswith(("left/", "steps/")):
            raise OSError("broken")
        return real(name, data)

    with monkeypatch.context() as patch:
        patch.setattr(store._files, at, fail)
        with pytest.warns(StoreWarning, match=LEFT), pytest.raises(OSError, match="broken"):
            store.save(60, second(60))
    assert newest(tmp_path) == 100
    with pytest.warns(StoreWarning, match=LEFT):
        store.save(60, second(60))
    assert newest(tmp_path) == 1060


@pytest.mark.parametrize("step", [25, 30], ids=["a new step", "an old one anew"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_comes_after_the_commit_does_not_undo_it(
    step: int, error: type[BaseException], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error after the commit keeps both the step and its record.

    Such errors are an interrupt, or an error of a network library, while the lock is released or an old generation is
    removed.
    """
    fill(sp.Store(url, lossless()), 10, 20, 30, 40)
    store = sp.Store(url, lossless())
    store.load(20)
    real, create = store._files.remove, store._files.create
    committed, removals = [], []

    def created(name: str, data: bytes) -> bool:
        done = create(name, data)
        committed.append(name)
        return done

    def removed(names: list[str]) -> None:
        if committed and names and not removals:
            removals.append(names)
            raise error("torn off")
        real(names)

    monkeypatch.setattr(store._files, "create", created)
    monkeypatch.setattr(store._files, "remove", removed)
    with pytest.warns(StoreWarning, match="continues from step 20"), contextlib.suppress(KeyboardInterrupt):
        store.save(step, second(step))  # a RuntimeError gives no warning: its remains are garbage
    assert bool(removals) == (step == 30 or "memory" in url)
    assert newest(url) == 1000 + step
    assert sp.Store(url).verify() == {}


def record(store: sp.Store) -> tuple[Files, str]:
    (name,) = store._files.list("left")
    return store._files, f"left/{name}"


@pytest.mark.parametrize(
    "broken", [b"", b"{}", b"[]", b"[" * 10**5, b'{"version": 1, "left": 3}', b"\0", None], ids=repr
)
def test_records_that_are_none(gone_back: sp.Store, broken: bytes | None) -> None:
    """An invalid record removes nothing, and `load()` takes the highest step with a warning."""
    files, path = record(gone_back)
    whole = unseal(files.read(path))
    files.write(path, seal({**whole, "left": {"80": "../x"}}) if broken is None else broken)
    with pytest.raises(sp.CorruptDataError, match="left/"):
        gone_back.gc(Retention())
    with pytest.raises(sp.CorruptDataError, match="left/"):
        gone_back.candidates()
    assert gone_back.steps() == list(TENS)
    with pytest.warns(StoreWarning, match="not a record of a run that went back.*takes the highest"):
        assert same(gone_back.load(), 100)
    ((name, why),) = gone_back.verify_labels().items()
    assert name == path
    assert "remove it once you know which steps are wanted" in why


def test_two_runs_that_went_back(gone_back: sp.Store) -> None:
    other = sp.Store(gone_back.url, lossless())
    other.load(40)
    with pytest.warns(StoreWarning, match="leaves steps 50, 60, 70, 80, 90, 100 behind"):
        other.save(45, second(45))
    assert newest(other.url) == 1045
    assert other.candidates() == [45, 40, 30, 20, 10, 100, 90, 80, 70, 60, 50]
    # The former is still at work: its saves are new, although another went back meanwhile.
    fill(gone_back, 72)
    assert newest(other.url) == 72
