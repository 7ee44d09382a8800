"""The cache of compiled code: used by the next process, and never a reason for failure."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from shrinkpoint.kernels.backend import cache, jit

pytestmark = pytest.mark.skipif(
    bool(numba.config.DISABLE_JIT),  # type: ignore[attr-defined]
    reason="nothing is compiled where NUMBA_DISABLE_JIT is set",
)
PACKAGE = Path(__file__).parents[2] / "src" / "shrinkpoint"
COUNT = """
import json, sys
def counted():
    found = {id(v): v for n, m in list(sys.modules.items()) if n.startswith("shrinkpoint.") and m for v in
             vars(m).values() if hasattr(v, "targetoptions") and hasattr(v, "py_func")}.values()
    found = [v for v in found if "no_cpython_wrapper" not in v.targetoptions]
    hits, misses = (sum(sum(getattr(v.stats, n).values()) for v in found) for n in ("cache_hits", "cache_misses"))
    return {"hits": hits, "misses": misses}
"""
PACK = f"""{COUNT}
import numpy as np, shrinkpoint.kernels.packing.cpu as k
packed = k.pack_mask(np.array([True, False, True] * 5)).tolist()
print(json.dumps({{"packed": packed, **counted()}}))
"""
NOTICE = "Compiling kernels, once per machine"
RIGHT = np.packbits(np.array([True, False, True] * 5), bitorder="little").tolist()


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    """A new interpreter that runs `code`; an environment variable that is "" is not set there."""
    own = {**os.environ, **environment}
    own = {name: value for name, value in own.items() if value or name not in environment}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own
    )


def ended(process: subprocess.Popen[str]) -> tuple[Any, str]:
    """Return the JSON that a process printed, and its standard error."""
    printed, said = process.communicate(timeout=300)
    assert process.returncode == 0, said[-2000:]
    return json.loads(printed), "".join(line for line in said.splitlines(True) if NOTICE not in line)


def files_of(folder: Path) -> list[Path]:
    """All files below a folder."""
    return sorted(p for p in folder.rglob("*") if p.is_file())


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of compiled code, as the first process leaves it."""
    folder = tmp_path_factory.mktemp("numba")
    found, said = ended(start(PACK, NUMBA_CACHE_DIR=str(folder)))
    assert found["packed"] == RIGHT
    assert not found["hits"]
    assert found["misses"]
    assert not said
    assert len(files_of(folder)) == found["misses"]
    return folder


def test_the_second_process_compiles_nothing(filled: Path) -> None:
    found, said = ended(start(PACK, NUMBA_CACHE_DIR=str(filled)))
    assert found["packed"] == RIGHT
    assert not found["misses"]
    assert found["hits"]
    assert not said


def test_compiling_is_said_once_and_only_where_it_takes_long(filled: Path, tmp_path: Path) -> None:
    """A long compilation is logged once, and not if the cache is read."""
    at_once = f"import shrinkpoint.kernels.backend.jit as c\nc.PATIENCE = 0.0\n{PACK}"
    for folder, times in ((tmp_path, 1), (filled, 0)):
        process = start(at_once, NUMBA_CACHE_DIR=str(folder))
        assert process.communicate(timeout=300)[1].count(NOTICE) == times


def test_damaged_files_are_compiled_anew_and_whole_again(filled: Path, tmp_path: Path) -> None:
    """Empty cache files, as after a power loss, are compiled and written again."""
    folder = tmp_path / "numba"
    shutil.copytree(filled, folder)
    for file in files_of(folder):
        file.write_bytes(b"")
    found, said = ended(start(PACK, NUMBA_CACHE_DIR=str(folder)))
    assert found["packed"] == RIGHT
    assert not found["hits"]
    assert not said
    assert all(file.stat().st_size for file in files_of(folder))
    found, _ = ended(start(PACK, NUMBA_CACHE_DIR=str(folder)))
    assert found["packed"] == RIGHT
    assert not found["misses"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_without_room_for_files_everything_runs(tmp_path: Path) -> None:
    """Kernels run if the cache cannot grow on a full disk."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n" + PACK
    found, said = ended(start(code, NUMBA_CACHE_DIR=str(tmp_path)))
    assert found["packed"] == RIGHT
    assert said.count("RuntimeWarning: compiled kernels cannot be stored on disk") == 1
    assert "File too large" in said
    assert not files_of(tmp_path)  # nothing half written is left


def test_without_any_folder_everything_runs(tmp_path: Path) -> None:
    """Kernels run if neither the package folder nor a home can be written."""
    copy = tmp_path / "shrinkpoint"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "results", "baselines"))
    (copy / "kernels" / "packing" / "__pycache__").touch()
    nothing = {"NUMBA_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": os.devnull}
    code = PACK.replace("print(", "assert k.__file__.startswith(" + repr(str(tmp_path)) + "); print(")
    found, said = ended(start(code, PYTHONPATH=str(tmp_path), **nothing))
    assert found["packed"] == RIGHT
    assert found["misses"]
    assert said.count("RuntimeWarning: compiled kernels cannot be stored on disk") == 1
    assert "NUMBA_CACHE_DIR" in said


def test_processes_that_compile_at_once_leave_what_both_can_use(tmp_path: Path) -> None:
    calls = [f"k.changed_mask(np.arange(9, dtype='{d}'), np.zeros(9, '{d}')).tolist()" for d in ("u1", "u2")]

    def code(*calls: str) -> str:
        body = f"import numpy as np, shrinkpoint.kernels.packing.cpu as k\nfound = [{', '.join(calls)}]\n"
        return f"{COUNT}{body}print(json.dumps({{'found': found, **counted()}}))"

    together = [start(code(call), NUMBA_CACHE_DIR=str(tmp_path)) for call in calls]
    assert [ended(process)[0]["found"] for process in together] == [[[254, 1]]] * 2
    found, said = ended(start(code(*calls), NUMBA_CACHE_DIR=str(tmp_path)))
    assert found["found"] == [[254, 1]] * 2
    assert (found["misses"], said) == (0, "")


# The rest needs no process of its own: new dispatchers here look for their code on disk as a process does.


@pytest.fixture
def twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Make dispatchers of one function whose code is cached below `tmp_path / "kept"`."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(cache, "_warned", False)
    source = tmp_path / "its_module.py"
    source.write_text("def twice(x):\n    return x + x\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("its_module", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["its_module"] = module
    spec.loader.exec_module(module)
    yield lambda: jit.njit(module.twice)
    del sys.modules["its_module"]


def outcome(dispatcher: Any, x: Any = 2) -> tuple[Any, int, int]:
    """Return result, hits and misses of a call."""
    result = dispatcher(x)
    return result, sum(dispatcher.stats.cache_hits.values()), sum(dispatcher.stats.cache_misses.values())


HIT, MISS = (4, 1, 0), (4, 0, 1)


@pytest.mark.parametrize(
    "harm",
    [
        lambda f: f.write_bytes(b""),
        lambda f: f.write_bytes(bytes(f.stat().st_size)),
        lambda f: f.write_bytes(f.read_bytes()[:7]),
        lambda f: f.write_bytes(f.read_bytes()[:-1]),
        lambda f: f.write_bytes(f.read_bytes() + b"\0"),
        lambda f: f.write_bytes(f.read_bytes()[:-40] + b"\xff" + f.read_bytes()[-39:]),
        lambda f: f.write_bytes(cache.checksum(b"cgarbage\n.") + b"cgarbage\n."),
        lambda f: f.write_bytes(cache.checksum(b"") + b""),
        lambda f: f.unlink(),
    ],
    ids=["empty", "zeros", "stub", "shorter", "longer", "one byte", "another pickle", "no pickle", "gone"],
)
def test_what_is_not_what_was_written_is_a_miss(
    twice: Callable[[], Any], tmp_path: Path, harm: Callable[[Path], object]
) -> None:
    assert outcome(twice()) == MISS
    assert outcome(twice()) == HIT
    (file,) = files_of(tmp_path / "kept")
    harm(file)
    assert outcome(twice()) == MISS
    assert files_of(tmp_path / "kept") == [file]
    assert outcome(twice()) == HIT


def test_a_warmed_cache_that_cannot_be_written_is_read(
    twice: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filled cache on a read-only file system is used."""
    assert outcome(twice()) == MISS

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    def opened(path: str, mode: str) -> Any:
        return refuse() if "w" in mode else open(path, mode)

    monkeypatch.setattr("numba.core.caching.tempfile.TemporaryFile", refuse)
    monkeypatch.setattr(cache, "open", opened, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert outcome(twice()) == HIT
    with pytest.warns(RuntimeWarning, match="cannot be stored on disk"):
        assert outcome(twice(), 2.0) == (4.0, 0, 1)


def test_code_that_cannot_be_rebuilt_is_a_miss(twice: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(twice()) == MISS
    kept = twice()
    monkeypatch.setattr(kept._cache._impl, "rebuild", lambda *a: 1 // 0)
    assert outcome(kept) == MISS
    assert outcome(twice()) == HIT


def test_a_folder_in_the_place_of_the_file_costs_a_warning(twice: Callable[[], Any], tmp_path: Path) -> None:
    assert outcome(twice()) == MISS
    (file,) = files_of(tmp_path / "kept")
    file.unlink()
    (file / "inside").mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="cannot be stored on disk"):
        assert outcome(twice()) == MISS
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        assert outcome(twice()) == MISS
    assert not files_of(tmp_path / "kept")


def test_a_changed_source_is_compiled_anew_and_takes_the_place_of_the_old(
    twice: Callable[[], Any], tmp_path: Path
) -> None:
    assert outcome(twice()) == MISS
    source = tmp_path / "its_module.py"
    source.write_text("def twice(x):\n    return x + x + 1\n", encoding="utf-8")
    sys.modules["its_module"].__spec__.loader.exec_module(sys.modules["its_module"])  # type: ignore[union-attr]
    assert outcome(twice()) == (5, 0, 1)
    assert len(files_of(tmp_path / "kept")) == 1


def test_two_signatures_written_at_once_do_not_mix(twice: Callable[[], Any], tmp_path: Path) -> None:
    """Two writers that both saw an empty cache do not overwrite each other."""
    first, second = twice(), twice()
    assert outcome(first, 2) == MISS
    assert outcome(second, 2.0) == (4.0, 0, 1)
    assert len(files_of(tmp_path / "kept")) == 2
    one, other = files_of(tmp_path / "kept")
    assert [outcome(twice(), x)[1:] for x in (2, 2.0)] == [(1, 0), (1, 0)]
    shutil.copy(one, other)  # if names did agree, a file states its contents
    assert sorted(outcome(twice(), x)[1:] for x in (2, 2.0)) == [(0, 1), (1, 0)]


def test_recompiling_forgets_what_was_kept(twice: Callable[[], Any], tmp_path: Path) -> None:
    dispatcher = twice()
    assert outcome(dispatcher) == MISS
    dispatcher._cache.flush()
    assert not files_of(tmp_path / "kept")
    assert outcome(twice()) == MISS
