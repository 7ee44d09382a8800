"""The report: its contents, escaped names, and its display in a real browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import shrinkpoint as sp
from shrinkpoint.__main__ import app
from shrinkpoint.report import collect as collecting
from shrinkpoint.report.charts import VARIABLES
from shrinkpoint.report.collect import BINS, _spread, collect, histogram
from shrinkpoint.report.page import SCRIPT, data, page, text

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = (
    "<img src=x onerror=\"document.title='pwned'\">",
    "</script><script>document.title='pwned'</script>",
    "\"'><svg onload=document.title='pwned'>",
    "<!--<script>",
    "]]>&lt;\u2028\u202e\x1b[31m",
)


def state(step: int, *, hostile: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> torch.Tensor:
        fixed, moving = rng.normal(size=(2, *shape)).astype(np.float32)
        return torch.from_numpy(fixed + 0.002 * step * moving)

    weight = drawn(64, 48)
    made: dict[str, Any] = {
        "model": {
            "emb.weight": drawn(100, 32),
            "fc.weight": weight,
            "norm.weight": torch.ones(48),
            "ids": torch.arange(9),
        },
        "optimizer": {"state": {0: {"exp_avg": drawn(64, 48) * 0.01, "exp_avg_sq": drawn(64, 48) ** 2}}},
    }
    if hostile:
        made["model"] |= {name: drawn(40, 40) for name in HOSTILE}
    return made


def made_store(path: Path, steps: int = 4, *, hostile: bool = False) -> sp.Store:
    """Copy a store of `steps` steps from one that is made once."""
    model = _model_store(hostile)
    path.parent.mkdir(exist_ok=True)
    store = model.copy(path, [10 * step for step in range(1, steps + 1)])
    assert len(store.steps()) == steps
    return store


@lru_cache(None)
def _model_store(hostile: bool) -> sp.Store:
    store = sp.Store(f"memory://face-report-{hostile}", sp.Config(chain=sp.ChainPolicy(base_every=3)))
    for step in range(1, 3 if hostile else 8):
        kinds = {
            "emb.weight": "embedding",
            "fc.weight": "linear",
            **dict.fromkeys(HOSTILE if hostile else (), "linear"),
        }
        metric = 2.0 / step if step % 2 else None
        store.save(10 * step, state(step, hostile=hostile), metric=metric, kinds=kinds)
    return store


def written(path: Path, *words: object) -> str:
    """Return the page that the command writes."""
    result = CliRunner().invoke(app, ["report", str(path), "-o", str(path.parent / "r.html"), *map(str, words)])
    assert result.exit_code == 0, result.stderr
    return (path.parent / "r.html").read_text()


class Parts(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self._inside: list[str] = []
        self.feed(source)
        self.close()
        assert self._inside == [], "unbalanced"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in ("meta", "link", "img", "br", "input"):
            self._inside.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._inside.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._inside and self._inside[-1] == "script":
            self.scripts[-1] += data
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def tensors(source: str) -> list[dict[str, Any]]:
    return json.loads(Parts(source).scripts[0])


# --- collected data ---


def test_sums_are_those_of_the_store(tmp_path: Path) -> None:
    store = made_store(tmp_path / "s")
    store.load(20)
    store.load(30)
    store.load(20)
    store.pin(10)
    (tmp_path / "s" / "restores" / ".tmp-0-000000004.json").write_text('{"step": 10}')
    run = collect(store, name="s")
    assert [s.step for s in run.steps] == store.steps()
    assert run.restored == (20, 30, 20)
    assert run.restores == 3
    for s in run.steps:
        manifest = store.describe(s.step)
        rows = store.read(s.step).summary()
        assert sum(s.parts.values()) == s.manifest.stored_nbytes == manifest.nbytes
        assert sum(s.raw_parts.values()) == s.manifest.raw_nbytes
        assert s.parts["first moments"] == sum(r.stored_bytes for r in rows if r.path.endswith("exp_avg"))
        assert s.parts["embedding weights"] == rows[0].stored_bytes
        worst = max(r.error for r in rows if r.measure == "relative L2" and r.path.startswith("model"))
        assert s.errors["weights", "relative L2"].largest == worst
        assert sum(s.choices.values()) == len(rows)
        assert s.manifest == manifest
    assert run.steps[0].labels == ("pinned",)
    assert [s.manifest.is_delta for s in run.steps] == [False, True, True, False]
    kinds = {(c.kind, c.codec, c.stream, c.note): c.why for c in run.steps[1].choices}
    assert ("linear weights", "quantize", "levels", "codebook frozen") in kinds
    assert all(kinds.values())  # each array has a reason
    assert run.tensor_step == 40


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    store = made_store(tmp_path / "s", 3)
    (tmp_path / "s" / "data" / store.describe(30).file).write_bytes(b"")
    (manifest,) = (tmp_path / "s" / "steps").glob("*10.json")
    manifest.write_bytes(b"{}")
    run = collect(store, name="s")
    assert [s.step for s in run.steps] == [20]
    assert run.all_steps == 3
    assert run.tensor_step == 20
    assert [problem.split(":")[0] for problem in run.problems] == ["step 10", "step 30"]
    assert "step 30" in Parts(page(run)).text
    with pytest.raises(sp.CorruptDataError):
        collect(store, name="s", step=30)


def test_large_runs_are_capped_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_store(tmp_path / "s", 7)
    for module in (collecting, __import__("shrinkpoint.report.page", fromlist=["x"])):
        monkeypatch.setattr(module, "MAX_STEPS", 3)
        monkeypatch.setattr(module, "MAX_TENSORS", 2)
        if hasattr(module, "MAX_NOTES"):
            monkeypatch.setattr(module, "MAX_NOTES", 2)
    source = written(tmp_path / "s")
    told = Parts(source).text
    assert "7 steps, 10 to 70" in told
    assert "3 of the steps are shown, evenly spaced (at most 3)" in told
    assert "The largest 2 of 5 float arrays (at most 2)" in told
    assert re.search(r"\d+ rarer choices are omitted \(at most 2 are shown\)", told)
    assert [t["path"] for t in tensors(source)] == ["model/emb.weight", "model/fc.weight"]


def test_choices_that_differ_in_their_numbers_are_one_row(tmp_path: Path) -> None:
    """Choices that differ only in numbers of their notes are one row."""
    store = sp.Store(tmp_path / "s", sp.Config([("w", sp.Changed())]))
    x = torch.arange(40_000.0)
    for step in range(1, 7):
        x = x.clone()
        x[: 40 * step] += 1
        store.save(step, {"w": x})
    notes = {note for s in collect(store, name="s").steps for *_, note in s.choices}
    assert len([note for note in notes if note.endswith("% changed")]) == 5
    told = Parts(written(tmp_path / "s")).text
    assert told.count("% changed") == 1
    assert re.search(r"0\.2 to 0\.6 % changed", told)


@given(st.lists(st.integers(), min_size=0, max_size=40, unique=True), st.integers(2, 9))
def test_spread(numbers: list[int], most: int) -> None:
    shown = _spread(numbers, most)
    assert len(shown) == min(len(numbers), most)
    assert len(set(shown)) == len(shown)
    if numbers:
        assert (shown[0], shown[-1]) == (numbers[0], numbers[-1])


# --- histograms ---


def made_histogram(values: np.ndarray[Any, Any], cfg: sp.Config | None = None) -> Any:
    ckpt = sp.compress([values], cfg=cfg or sp.presets.lossless())
    (record,) = ckpt.records
    return histogram(ckpt.reference_of(record), record.spec), sp.decompress(ckpt)[0]


floats = st.floats(width=32) | st.sampled_from([0.0, -0.0, 3e38, -3e38, 1e-45, float("nan"), float("inf")])


@given(st.lists(floats, min_size=1, max_size=50), st.sampled_from([np.float32, np.float64]))
def test_histograms_count_every_value(values: list[float], dtype: Any) -> None:
    x = np.array(values, dtype)
    found, _ = made_histogram(x)
    finite = x[np.isfinite(x)].astype(np.float64)
    assert found.odd == x.size - finite.size
    assert sum(found.counts) == finite.size
    assert found.zeros == (finite == 0).sum()
    if finite.size:
        assert (found.low, found.high) == (finite.min(), finite.max())
        assert len(found.counts) in (1, BINS)
    else:
        assert found.counts == ()


def test_the_largest_float64_has_a_histogram() -> None:
    found, _ = made_histogram(np.array([-1.7e308, 1.7e308, 0.0]))
    assert (found.counts[0], found.counts[BINS // 2], found.counts[-1]) == (1, 1, 1)


def test_the_codebook_is_that_of_the_values() -> None:
    x = np.random.default_rng(0).normal(size=(80, 100)).astype(np.float32)
    rule = sp.Quantize(bins=8, prune=0.1, protect=0.01, solver="exact")
    found, restored = made_histogram(x, sp.Config([("*", rule)]))
    values, times = np.unique(restored, return_counts=True)
    table = dict(zip(values.tolist(), times.tolist(), strict=True))
    assert len(found.codebook) == 8
    assert sum(found.uses) + found.protected + found.pruned == x.size
    assert found.pruned == table[0.0] == found.zeros
    assert 0 < found.protected < 0.03 * x.size
    for entry, uses in zip(found.codebook, found.uses, strict=True):
        assert table[entry] == uses


# --- the page ---


def test_the_page_says_what_is_there(tmp_path: Path) -> None:
    made_store(tmp_path / "s").tag("best", 20)
    source = written(tmp_path / "s")
    parts = Parts(source)
    for expected in (
        "best",
        "embedding weights",
        "header and checksums",
        "codebook frozen",
        "rank-one",
        "metric of the step",
    ):
        assert expected in parts.text
    assert [tag for tag, _ in parts.tags].count("svg") == 4
    found = {t["path"]: t for t in tensors(source)}
    assert set(found) == {
        "model/emb.weight",
        "model/fc.weight",
        "model/norm.weight",
        "optimizer/state/0/exp_avg",
        "optimizer/state/0/exp_avg_sq",
    }
    ckpt = sp.Store(tmp_path / "s").read(40)
    codebook = ckpt.reference_of(ckpt.records[1]).codebook  # type: ignore[attr-defined]
    assert found["model/fc.weight"]["codebook"] == codebook.tolist()
    assert found["model/norm.weight"]["codebook"] == []
    assert found["model/norm.weight"]["counts"] == [48]


def test_it_begins_with_the_result(tmp_path: Path) -> None:
    store = made_store(tmp_path / "s")
    source = written(tmp_path / "s")
    first = re.findall(r"<p[^>]*>(.*?)</p>", source)[0]
    manifests = [store.describe(step) for step in store.steps()]
    times = sum(m.raw_nbytes for m in manifests) / sum(m.nbytes for m in manifests)
    assert first.startswith(f"4 checkpoints are {times:.1f} times smaller: ")
    assert re.search(r"weights 0\.02\d* \(relative L2\)", source)


def test_colours_follow_the_reader(tmp_path: Path) -> None:
    """Text, axes and grid of charts take their colours from variables, which a dark page sets."""
    made_store(tmp_path / "s")
    source = written(tmp_path / "s")
    dark = source.partition("prefers-color-scheme: dark")[2].partition("body {")[0]
    drawn = source[source.index("<body>") : source.index("<h2>Choices")]
    for name, colour in VARIABLES.items():
        assert f"--{name}: " in dark
        assert colour not in drawn
        assert f"var(--{name})" in source
    assert "fill: #ffffff" not in drawn


def test_inspecting_is_not_a_restore(tmp_path: Path) -> None:
    store = made_store(tmp_path / "s")
    written(tmp_path / "s", "--step", 20)
    for words in (["info"], ["info", "--step", "20"], ["ls"], ["verify"], ["diff", "10", "20"], ["ls", "--json"]):
        result = CliRunner().invoke(app, [words[0], str(tmp_path / "s"), *words[1:]])
        assert result.exit_code == 0, result.stderr
    assert store.restores() == 0
    store.load(20)
    assert store.restores() == 1


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    store = made_store(tmp_path / "s", 2)
    assert page(collect(store, name="a")) == page(collect(sp.Store(store.url), name="a"))


def test_it_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    parts = Parts(written(tmp_path / "s" if made_store(tmp_path / "s", 2) else tmp_path))
    for tag, attributes in parts.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "a", "image")
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "action", "style", "clip-path"):
                assert "//" not in str(value)
            if name in ("href", "xlink:href"):
                assert str(value).startswith("#")
    ids = [a["id"] for _, a in parts.tags if "id" in a]
    assert len(ids) == len(set(ids))
    policy = next(a["content"] for t, a in parts.tags if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "http" not in SCRIPT.replace("http://www.w3.org/2000/svg", "")


def test_a_store_without_floats_or_metrics(tmp_path: Path) -> None:
    sp.Store(tmp_path / "s").save(0, {"n": torch.arange(5), "t": "x"})
    told = Parts(written(tmp_path / "s")).text
    for expected in ("Every array of every step is exact", "No metric is recorded", "No float array can be read"):
        assert expected in told


def test_the_folder_of_a_demo(tmp_path: Path) -> None:
    made_store(tmp_path / "d" / "store", 2)
    curves = {name: {"lives": [], "readings": [[1, 3.0], [2, 2.5]]} for name in ("run", "baseline")}
    (tmp_path / "d" / "results.json").write_text(json.dumps({"curves": curves}))
    assert "held-out loss, never killed" in Parts(written(tmp_path / "d")).text
    (tmp_path / "d" / "results.json").write_text('{"curves": {"run": 3}}')
    assert "held-out" not in Parts(written(tmp_path / "d", "--force")).text


def test_a_search_is_shown(tmp_path: Path) -> None:
    made_store(tmp_path / "s", 1)
    weight = state(1)["model"]["fc.weight"]

    def loss(restored: Any) -> float:
        return 1.0 + float((restored["weight"] - weight).square().mean())

    result = sp.search({"weight": weight}, loss, 0.05)
    (tmp_path / "search.json").write_text(json.dumps(result.to_json()))
    told = Parts(written(tmp_path / "s", "--search", tmp_path / "search.json")).text
    assert html.unescape(text(str(result))) in told
    assert all(trial.reason in told for trial in result.trials)
    # A trial may have been no number, and a file may say anything.
    no_number = sp.search({"weight": weight}, lambda s: 1.0 if (s["weight"] == weight).all() else float("nan"), 0.05)
    (tmp_path / "search.json").write_text(json.dumps(no_number.to_json()))
    assert (
        "quality is not a number"
        in Parts(written(tmp_path / "s", "--search", tmp_path / "search.json", "--force")).text
    )
    (tmp_path / "search.json").write_text(json.dumps({**result.to_json(), "nbytes": "many"}))
    failed = CliRunner().invoke(app, ["report", str(tmp_path / "s"), "--search", str(tmp_path / "search.json")])
    assert failed.exit_code == 2
    assert "its nbytes is 'many', not int" in failed.stderr


def test_what_the_command_says(tmp_path: Path) -> None:
    made_store(tmp_path / "s", 2)
    out = tmp_path / "r.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "s"), "-o", str(out), "--json"])
    assert json.loads(result.stdout) == {
        "report": str(out),
        "nbytes": out.stat().st_size,
        "steps": [10, 20],
        "all_steps": 2,
        "tensors": 5,
        "all_tensors": 5,
        "problems": [],
    }


# --- hostile names ---


@given(st.text())
def test_text_is_text(name: str) -> None:
    escaped = text(name)
    assert not set("<>\"'") & set(escaped)
    assert len(html.unescape(escaped)) <= 300
    if name.isprintable() and len(name) <= 300:
        assert html.unescape(escaped) == name


@given(
    st.recursive(
        st.text() | st.sampled_from(HOSTILE), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_data_stays_inside_its_script(value: Any) -> None:
    inside = data(value)
    assert "<" not in inside
    assert json.loads(inside) == value


def test_hostile_names_are_text(tmp_path: Path) -> None:
    store = made_store(tmp_path / "<b onclick=x>", 1, hostile=True)
    source = page(collect(store, name="<script>alert(1)</script>"))
    parts = Parts(source)
    assert parts.scripts[1] == SCRIPT
    assert [t for t, _ in parts.tags].count("script") == 2
    assert "<script>alert(1)</script>" in parts.text
    paths = [t["path"] for t in tensors(source)]
    assert "model/" + HOSTILE[0] in paths
    assert not any(ord(c) < 32 and c != "\n" for c in source)


# --- in a real browser ---


def in_browser(url: str, *flags: str) -> str:
    """Return the page's DOM after its script ran in a browser."""
    assert CHROMIUM is not None
    # The browser's own business (updates, the time) has no name to look up.
    quiet = ["disable-background-networking", "disable-component-update", "disable-sync", "no-first-run", "no-pings"]
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--{flag}" for flag in quiet]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=4000", *flags, "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def asked_by_page(log: Path) -> list[str]:
    """Return the URLs that a page requested, by the browser's log."""
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    found = [e["url"] for e in events if "url" in e and e.get("initiator", "not an origin") != "not an origin"]
    return sorted({url for url in found if not url.startswith("file:///")})


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt install chromium)")


@needs_browser
def test_a_browser_draws_it_and_hostile_names_do_nothing(tmp_path: Path) -> None:
    """A browser draws the tensor of the address, and hostile names are plain text."""
    made_store(tmp_path / "s", 2, hostile=True)
    source = written(tmp_path / "s")
    log = tmp_path / "net.json"
    wanted = "model/" + HOSTILE[0]
    shown = in_browser(f"file://{tmp_path}/r.html#tensor={quote(wanted, safe='')}", f"--log-net-log={log}")
    assert "pwned" not in re.findall(r"<title>(.*?)</title>", shown)[0]
    tags = [tag for tag, _ in Parts(shown).tags]
    assert "img" not in tags
    assert tags.count("script") == 2
    assert tags.count("svg") == 5
    numbers = next(t for t in tensors(source) if t["path"] == wanted)
    drawn = re.search(r'<div id="histogram">(.*?)</div>', shown, re.DOTALL)
    assert drawn is not None
    inside = Parts(drawn.group(1))
    assert sum(a.get("class") == "bar" for _, a in inside.tags) == len(numbers["counts"]) == 64
    assert sum(a.get("class") == "entry" for _, a in inside.tags) == len(numbers["codebook"]) > 4
    titles = re.findall(r"<title>(.*?)</title>", drawn.group(1))
    assert [int(t.rpartition(": ")[2]) for t in titles[:64]] == numbers["counts"]
    assert [int(t.split(": used ")[1].split()[0]) for t in titles[64:]] == numbers["uses"]
    options = re.findall(r"<option[^>]*>(.*?)</option>", shown)
    assert [html.unescape(o) for o in options] == [t["path"] for t in tensors(source)]
    assert f"<td>{html.escape(wanted, quote=False)}</td>" in shown
    assert asked_by_page(log) == []


@needs_browser
def test_a_page_that_loads_something_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "x.html").write_text('<img src="http://127.0.0.1:9/x"><script src="http://nosuch.invalid/y"></script>')
    in_browser(f"file://{tmp_path}/x.html", f"--log-net-log={tmp_path / 'log'}")
    assert asked_by_page(tmp_path / "log") == ["http://127.0.0.1:9/x", "http://nosuch.invalid/y"]


@needs_browser
def test_a_telephone_shows_it(tmp_path: Path) -> None:
    """Nothing is wider than a screen of 390 pixels but tables that scroll, and text of charts is legible."""
    made_store(tmp_path / "s", 2)
    written(tmp_path / "s")
    (tmp_path / "around.html").write_text(
        """<iframe src="r.html" width="390" height="800" onload="
        var inner = this.contentDocument, sizes = [];
        inner.querySelectorAll('svg text').forEach(function (t) { sizes.push(t.getBoundingClientRect().height); });
        document.body.append('width ' + inner.documentElement.scrollWidth + ', text ' + Math.min(...sizes) + ';');
        "></iframe>"""
    )
    shown = in_browser(f"file://{tmp_path}/around.html", "--allow-file-access-from-files")
    found = re.search(r"width (\d+), text ([\d.]+);", shown)
    assert found is not None, shown
    assert int(found[1]) <= 390
    assert float(found[2]) >= 8


@needs_browser
def test_the_drop_down_chooses(tmp_path: Path) -> None:
    """The drop-down changes the tensor that is drawn."""
    made_store(tmp_path / "s", 1)
    written(tmp_path / "s")
    (tmp_path / "around.html").write_text(
        """<iframe src="r.html#tensor=%E0%A4%A" onload="
        var inner = this.contentDocument, choice = inner.getElementById('tensor');
        var seen = function () { return inner.querySelector('#facts td').textContent; };
        var first = seen();
        choice.selectedIndex = 2;
        choice.dispatchEvent(new Event('change'));
        document.body.append('from ' + first + ' to ' + seen() + '; ' + choice.options[2].textContent);
        "></iframe>"""
    )
    shown = in_browser(f"file://{tmp_path}/around.html", "--allow-file-access-from-files")
    found = re.search(r"from (\S+) to (\S+); (\S+?)<", shown)
    assert found is not None, shown
    assert found.group(1) == "model/emb.weight"
    assert found.group(2) == found.group(3) != found.group(1)
