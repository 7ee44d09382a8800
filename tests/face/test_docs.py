"""The documents: code runs, examples are true, links work, the reference is complete."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import shrinkpoint as sp
from shrinkpoint.bench.__main__ import NAMES
from tests.face.test_report import in_browser, needs_browser
from tests.pages import RUN, PageError, blocks, run_page

HOME = Path(__file__).parents[2]
PAGES = [
    HOME / "README.md",
    HOME / "CONTRIBUTING.md",
    *sorted((HOME / "docs").glob("*.md")),
    *sorted((HOME / "docs" / "decisions").glob("*.md")),
    *sorted((HOME / "docs" / "trainers").glob("*.md")),
]
WITH_CODE = [p for p in PAGES if any(b.language in RUN for b in blocks(p.read_text(encoding="utf-8")))]
LANGUAGES = {"", "python", "console", "output", "json", "pycon"}


def name_of(path: Path) -> str:
    return str(path.relative_to(HOME))


# ------------------------------------------------------------------------------------------------------- their code


@pytest.mark.parametrize("path", WITH_CODE, ids=name_of)
@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_code_of_a_page_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    report = run_page(path)
    assert report.ran + len(report.left_out)


FRESH = [HOME / "README.md", *(HOME / "docs" / f"{name}.md" for name in ("cli", "security", "tutorial"))]
"""Pages whose commands also run in processes of their own, which takes seconds for each."""


@pytest.mark.slow
@pytest.mark.parametrize("path", FRESH, ids=name_of)
def test_commands_of_a_page_run_in_processes_of_their_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run_page(path, fresh=True).ran


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_no_code_hides_under_another_name(path: Path) -> None:
    for block in blocks(path.read_text(encoding="utf-8")):
        assert block.language in LANGUAGES, f"line {block.line}: {block.language}"
        if not block.language:
            assert not re.search(r"^\s*(import|from|sp\.|shrinkpoint )", block.code, re.MULTILINE), block.line


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    return path


def test_blocks_share_a_namespace_and_a_folder(tmp_path: Path) -> None:
    text = (
        "<!-- runs before\nx = 2\n-->\n```python\nfrom pathlib import Path\n"
        "Path('f').write_text('hi')\nprint(x)\n```\n\n```output\n2\n```\n"
        "```python\n>>> x + 1\n3\n```\n```console\n$ cat f && echo\nhi\n$ shrinkpoint ls f  # exit code 1\n"
        "shrinkpoint: ...\n```\n```console\ntrue\n```\n"
    )
    report = run_page(page(tmp_path, text))
    assert (report.ran, report.left_out) == (4, [])
    assert [p.name for p in tmp_path.iterdir()] == ["page.md"]


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)\n```\n```output\n2\n```\n",
        "```python\n>>> 1\n2\n```\n",
        "```console\n$ echo 1\n2\n```\n",
        "```console\nfalse\n```\n",
        "```console\n$ true  # exit code 1\n```\n",
        "```console\n$ shrinkpoint ls nowhere\n```\n",
        "```python\nprint('1,234 B')\n```\n<!-- numbers within 10 % -->\n```output\n1,000 B\n```\n",
        "```python\nprint('1,034 B')\n```\n<!-- numbers within 10 % -->\n```output\n1,000 kB\n```\n",
        "<!-- not run: -->\n```python\n1\n```\n",
        "<!-- not run -->\n```python\n1\n```\n",
    ],
)
def test_a_page_that_says_what_is_not_so_is_found(text: str, tmp_path: Path) -> None:
    with pytest.raises(PageError, match=r"line 1|page\.md"):
        run_page(page(tmp_path, text))


def test_numbers_may_be_a_little_off_where_the_page_says_so(tmp_path: Path) -> None:
    code = "```python\nprint('step 10:  1,034 B, -9.5 x, (why)\\nmore')\n```\n"
    text = f"{code}<!-- numbers within 10 % -->\n```output\nstep 10: 1,000 B, -10.0 x, (...\nmore\n```\n"
    assert run_page(page(tmp_path, text)).ran == 1


def test_code_that_fails_is_found(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run_page(page(tmp_path, "```python\n1 / 0\n```\n"))


def test_what_is_left_out_has_a_reason_and_no_other_block_is(tmp_path: Path) -> None:
    text = (
        "<!-- not run: it needs a GPU -->\n```python\n1 / 0\n```\n"
        "<!-- needs no_such_module: a framework -->\n\n```python\n1 / 0\n```\n"
        "<!-- needs torch: a framework -->\n```python\n2\n```\n"
        "<!-- not run: text stands between -->\nSome text.\n```python\n3\n```\n"
    )
    report = run_page(page(tmp_path, text))
    assert report.ran == 2
    assert [line.partition(": ")[2] for line in report.left_out] == [
        "not run: it needs a GPU",
        "needs no_such_module: a framework",
    ]


# --------------------------------------------------------------------------------------------------------- docstrings


def modules_with_examples() -> list[str]:
    found = []
    for folder in ("kernels", "codec", "search", "store", "trainers", "src/shrinkpoint"):
        for path in sorted((HOME / folder).rglob("*.py")):
            if ">>> " in path.read_text(encoding="utf-8"):
                parts = path.relative_to(HOME / "src" if folder.startswith("src") else HOME).with_suffix("").parts
                parts = ("searching", *parts[1:]) if parts[0] == "search" else parts
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                found.append(".".join(parts if parts[0] == "shrinkpoint" else ("shrinkpoint", *parts)))
    return found


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_of_docstrings(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as e:  # an adapter whose framework is not installed says so
        if (e.name or "").startswith("shrinkpoint"):
            raise
        pytest.skip(str(e))
    if not isinstance(module, ModuleType):
        pytest.fail(f"{name} is hidden by something else")
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted
    assert not result.failed


# ------------------------------------------------------------------------------------------------------ the reference

DIRECTIVE = re.compile(r"^::: (shrinkpoint[\w.]+)$", re.MULTILINE)
REFERENCE = sorted((HOME / "docs" / "reference").glob("*.md"))
ENTRIES = sorted({name for p in REFERENCE for name in DIRECTIVE.findall(p.read_text(encoding="utf-8"))})


def found(entry: str) -> Any:
    """Return the object of a reference entry; skip the test if its framework is missing."""
    thing: Any = sp
    try:
        for name in entry.split(".")[1:]:
            if inspect.ismodule(thing) and not hasattr(thing, name):
                importlib.import_module(f"{thing.__name__}.{name}")
            thing = getattr(thing, name)
    except ImportError as e:
        if (e.name or "").startswith("shrinkpoint"):
            raise
        pytest.skip(str(e))
    return thing


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_of_the_reference_has_a_docstring(entry: str) -> None:
    assert inspect.getdoc(found(entry))


def test_every_public_name_has_an_entry() -> None:
    names = {f"shrinkpoint.{name}" for name in sp.__all__ if name != "presets"}
    names |= {f"shrinkpoint.presets.{n}" for n, f in vars(sp.presets).items() if inspect.isfunction(f) and n[0] != "_"}
    names |= {f"shrinkpoint.trainers.{name}" for name in sp.trainers.__all__}
    assert names - set(ENTRIES) == set()


def unexplained(thing: Any) -> set[str]:
    """Return the parameters that a docstring does not explain."""
    text = inspect.getdoc(thing) or ""
    args = re.search(r"^Args:\n((?:(?: .*)?\n)+)", text + "\n", re.MULTILINE)
    if args:
        entries = re.findall(r"^    ([A-Za-z_*][\w*, ]*): ", args[1], re.MULTILINE)
        known = {name.strip(" *") for names in entries for name in names.split(",")}
    else:
        known = set(re.findall(r"\w+", text))
    # Arguments of the type Never are refused, with advice.
    parameters = inspect.signature(thing).parameters
    return {name for name, p in parameters.items() if name[0] != "_" and p.annotation != "Never"} - known


@pytest.mark.parametrize("lid", ["lid", "lid, hinge", "hinge, *lid"])
def test_an_argument_that_is_not_explained_is_found(lid: str) -> None:
    def box(width: float, lid: int = 0, *, _inner: int = 0) -> None:
        pass

    text = (
        "A box.\n\n    Args:\n        width: in m: a\n            long line.\n        {}: one.\n\n    A\n    lid: no."
    )
    box.__doc__ = text.format(lid)
    assert unexplained(box) == set()
    box.__doc__ = text.format("lids")
    assert unexplained(box) == {"lid"}


UNEXPLAINED: set[str] = set()
"""Still to be explained in their docstrings; this must only shrink."""


def test_every_argument_of_a_public_name_is_explained() -> None:
    missing = set()
    for entry in ENTRIES:
        name = entry.rpartition(".")[2]
        if entry.count(".") == 1 or entry.startswith("shrinkpoint.presets."):
            thing = found(entry)
            if name not in ("Checkpoint", "Codec") and not (isinstance(thing, type) and issubclass(thing, Exception)):
                missing |= {f"{name}: {p}" for p in unexplained(thing)}
    assert missing == UNEXPLAINED


WITHOUT_EXAMPLE = {
    *("ChainPolicy", "Codec", "Evidence", "FirstMoment", "Kind", "Published", "Quantize", "Rule", "SaveResult"),
    *("SecondMoment", "Subscriber", "set_threads", "threads"),
}
"""Still to be given an example; this must only shrink."""


def test_every_public_name_has_an_example() -> None:
    missing = set()
    for name in sp.__all__:
        thing = getattr(sp, name)
        if inspect.ismodule(thing) or (isinstance(thing, type) and issubclass(thing, Exception)):
            continue
        parts = [p for n, p in vars(thing).items() if n[0] != "_" and callable(p)] if isinstance(thing, type) else []
        if not any(">>> " in (inspect.getdoc(part) or "") for part in (thing, *parts)):
            missing.add(name)
    assert missing == WITHOUT_EXAMPLE


# ------------------------------------------------------------------------------------------------------------ figures


def values_of(name: str) -> dict[str, dict[str, object]]:
    files = sorted((HOME / "bench" / "results").glob(f"{name}.json"))
    assert files, name
    return {row["row"]: row for f in files for row in json.loads(f.read_text(encoding="utf-8"))["rows"]}


MODELS = ("embedding", "GPT", "MLP", "CNN")
"""Of `bench ratio`, the largest first."""


def search_rows() -> list[str]:
    lines = []
    for model in ("MLP", "CNN", "embedding", "GPT"):
        rows = values_of(f"search-{model.lower()}")
        for threshold in ("0.1", "1.0", "5.0"):
            of = {k.partition(": ")[2]: r for k, r in rows.items() if k.startswith(f"{model}, {threshold}%: ")}
            first, later = (of[f"evaluations, {when}"]["value"] for when in ("first checkpoint", "later checkpoints"))
            smaller, loss = of["bytes of the chain"]["ratio"], of["largest loss on other held-out data"]["value"]
            lines.append(f"| {model}, {threshold} % | {first} / {later} | {smaller:.2f} x | {loss:+.2f} % |")
    return lines


def test_figures_are_those_of_the_results() -> None:
    text = (HOME / "docs" / "choosing.md").read_text(encoding="utf-8")
    table = re.search(r"^<!-- figures: search -->\n.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    assert table[1].splitlines() == search_rows(), "\n".join(search_rows())


def test_figures_of_the_comparison_with_alternatives() -> None:
    rows = values_of("ratio-*")
    text = " ".join((HOME / "docs" / "alternatives.md").read_text(encoding="utf-8").split())

    def of(system: str, what: str) -> list[float]:
        return [float(str(rows[f"{m}, {system}: {what}"]["value"])) for m in MODELS]

    chains, exact = (of(level, "whole state, chain with its bases") for level in ("default", "lossless"))
    assert f"| {min(chains):.0f} to {max(chains):.0f} x along a chain |" in text
    assert f"| {min(exact):.1f} to {max(exact):.1f} x along a chain;" in text
    rows_of = json.loads((HOME / "bench" / "results" / "systems.json").read_text(encoding="utf-8"))["rows"]
    peers = {
        (r["row"].rpartition(", ")[2], r["peer"]): r for r in rows_of if r["row"].startswith("lossless ratio: float32")
    }
    for peer, label in (("zstd -19", "zstandard -19"), ("zipnn", "zipnn")):
        alone, apart = peers["single", peer], peers["10 steps apart", peer]
        assert (
            f"| {label} | weights: {alone['peer_value']:.2f} x | nothing | of XOR: {apart['peer_value']:.2f} x |"
            in text
        )
        assert f"weights: {alone['value']:.2f} x | nothing | yes; weights: {apart['value']:.2f} x |" in text


# -------------------------------------------------------------------------------------------------------------- links


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings on GitHub."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        made = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = 1
        while made in found:
            made = re.sub(r"(-\d+)?$", f"-{number}", made, count=1)
            number += 1
        found.add(made)
    return found


@pytest.mark.parametrize("path", [*PAGES, *REFERENCE], ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?^```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_every_page_is_in_the_index() -> None:
    text = (HOME / "docs" / "documents.md").read_text(encoding="utf-8")
    assert {p.name for p in (HOME / "docs").glob("*.md")} - {"documents.md"} <= set(
        re.findall(r"\]\(([\w-]+\.md)", text)
    )


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_files_and_tests_that_are_named_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for file, test in re.findall(r"`(tests/[a-z0-9_/]+\.py)(?:::(\w+))?`", text):
        assert (HOME / file).exists(), file
        if test:
            names = {
                n.name for n in ast.walk(ast.parse((HOME / file).read_text(encoding="utf-8"))) if hasattr(n, "name")
            }
            assert test in names, f"{file}::{test}"
    for bench in re.findall(r"python -m bench ([a-z]+)", text):
        assert bench in NAMES, bench
    for result in re.findall(r"`(bench/results/[\w.-]+)`", text):
        assert (HOME / result).exists(), result


# --------------------------------------------------------------------------------------------------------------- site


@needs_browser
def test_workers_run_in_pages_from_a_disk(tmp_path: Path) -> None:
    """The site's search, a worker, answers also in pages that are opened without a server."""
    (tmp_path / "double.js").write_text("addEventListener('message', (event) => postMessage(2 * event.data))")
    (tmp_path / "page.html").write_text(
        f"""<body><script src="file://{HOME}/docs/javascripts/worker.js"></script><script>
        const worker = new Worker("double.js");
        worker.addEventListener("message", (event) => (document.title = "got " + event.data));
        worker.postMessage(21);
        </script>"""
    )
    assert "<title>got 42</title>" in in_browser(f"file://{tmp_path}/page.html")
