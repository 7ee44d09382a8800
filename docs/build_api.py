"""Build the API reference (`docs/api/`) from the docstrings: `python docs/build_api.py`.

Sources are read, not imported: the adapters' frameworks need not be installed, and the pages are the same everywhere.
A docstring's sections are the project's own (`Args`, `Returns`, `Raises`, `Example`, `Source`), so a page is a plain
rewriting of it; signatures are the source's own lines.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parents[1]
OUT = HOME / "docs" / "api"
PACKAGE = HOME / "src" / "shrinkpoint"
SECTIONS = ("Args", "Returns", "Raises", "Example", "Source")
FIELDS = ("Args", "Raises")
NOTE = "<!-- Written by docs/build_api.py from the docstrings; not to be edited by hand. -->"
IN_SIGHT = "Examples see the names of their own module, NumPy as `np`, `torch` and `torch.nn` as `nn`."
INTERNAL = "not by users"
"""Methods below a comment with these words do not belong to the interface."""

Definition = ast.FunctionDef | ast.ClassDef
Part = tuple[str, tuple[str, ...] | None]


@dataclass(frozen=True, slots=True)
class Page:
    """One page: modules in order, of each all public definitions, or those named.

    Args:
        file: name without suffix.
        title: heading.
        about: a sentence under it.
        modules: (module, names), None for all public ones; a module is dotted, below the package.
    """

    file: str
    title: str
    about: str
    modules: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed source file."""

    name: str
    source: str
    tree: ast.Module


def load(name: str) -> Module:
    """Read a module of the package by its dotted name."""
    path = PACKAGE.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    return Module(name, source, ast.parse(source))


def folder(name: str, *without: str) -> tuple[Part, ...]:
    """The modules of a folder, whole."""
    stems = sorted(p.stem for p in (PACKAGE / name).glob("*.py"))
    return tuple((f"{name}.{stem}", None) for stem in stems if stem not in ("__init__", *without))


def pages() -> list[Page]:
    """Return all pages, from the public names down to the kernels."""
    return [
        Page(
            "shrinkpoint",
            "shrinkpoint",
            "The names of `import shrinkpoint as sp`, and the types that its functions return.",
            (
                ("codec.compress", ("compress",)),
                ("codec.checkpoint", ("decompress", "Checkpoint", "Row", "ArrayRecord")),
                ("codec.config", ("Config", "Rule", "ChainPolicy", "UnmatchedRuleWarning")),
                ("codec.evidence.module", ("kinds",)),
                ("codec.evidence.kind", ("Kind",)),
                ("codec.evidence.gather", ("Evidence",)),
                ("codec.plan", ("UnknownArraysWarning",)),
                ("store.weight_average", ("WeightAverage",)),
                ("store.store", ("Store", "DiskUsage")),
                ("store.session", ("Saved",)),
                ("store.files", ("StoreWarning",)),
                ("store.store", ("SkippedCheckpointWarning", "RestoreNotCountedWarning", "NotCompactedWarning")),
                ("store.manifest", ("Manifest",)),
                ("store.retention", ("Retention",)),
                ("store.saver", ("Saver", "SaveResult", "SaverWarning")),
                ("store.memory_copies", ("InMemoryWarning",)),
                ("store.ranks", ("newest_common_step",)),
                ("codec.weights.quantize", ("Quantize",)),
                ("codec.weights.drift", ("Earlier",)),
                ("codec.moments.firstmoment", ("FirstMoment",)),
                ("codec.moments.secondmoment", ("SecondMoment",)),
                ("codec.moments.logbuckets", ("LogBuckets",)),
                ("codec.lossless.exact", ("Exact",)),
                ("codec.lossless.changed", ("Changed",)),
                ("codec.embeddings.rows", ("Rows",)),
                ("codec.weights.exponent", ("ExponentDelta",)),
                ("codec.moments.clusters", ("Clusters",)),
                ("codec.parallel", ("set_threads", "threads")),
                ("trainers.publishing.publisher", ("Publisher", "Published", "PublishConflictError")),
                ("trainers.publishing.subscriber", ("Subscriber",)),
                ("kernels.errors", None),
                ("codec.errors", None),
            ),
        ),
        Page(
            "presets",
            "shrinkpoint.presets",
            "Quality levels and the published systems as configurations.",
            (("codec.presets", None), ("codec.embeddings.rows", ("expected_failures",))),
        ),
        Page(
            "search",
            "shrinkpoint.searching",
            "The smallest configuration that keeps a quality threshold: `sp.search` and its parts.",
            (
                ("searching.run", ("search",)),
                ("searching.arguments", ("SearchOptions",)),
                ("searching.result", None),
                ("searching.cube", None),
                ("searching.quality", None),
                ("searching.progress", None),
            ),
        ),
        Page(
            "trainers",
            "shrinkpoint.trainers",
            "Adapters; `sp` itself exports `SensitivityTracker`, `RowTracker` and `save_pretrained`.",
            (
                ("trainers.loop", None),
                ("trainers.loader", None),
                *folder(
                    "trainers",
                    "loop",
                    "loader",
                    "model_state",
                    "broadcast",
                    "save_timing",
                    "pointers",
                    "background",
                    "model_folder",
                    "state",
                    "model_card",
                    "state_mismatch",
                    "optimizer_hooks",
                    "gradient_averages",
                    "host_shards",
                    "module_names",
                ),
                ("trainers.dcp.writer", None),
                ("trainers.dcp.reader", None),
                ("trainers.dcp.planner", None),
                ("trainers.dcp.torchtitan", None),
            ),
        ),
        Page(
            "codec",
            "shrinkpoint.codec",
            "For writing a codec of your own, or reading the records of one.",
            (
                ("codec.base", None),
                ("codec.weights.codebook", None),
                ("codec.weights.partition", None),
                ("codec.weights.ratedistortion", None),
            ),
        ),
        Page(
            "kernels",
            "shrinkpoint.kernels",
            "Pure array functions; they know nothing of checkpoints. [kernels.md](../kernels.md) is the map.",
            folder("kernels", "arguments", "arrays", "errors", "coder_arguments", "gradient_products"),
        ),
    ]


def definitions(module: Module, names: tuple[str, ...] | None) -> Iterator[Definition]:
    """Return the public functions and classes of a module, in order of `names` or source."""
    found = {n.name: n for n in module.tree.body if isinstance(n, Definition)}
    for name in names if names is not None else [n for n in found if not n.startswith("_")]:
        if name in found and ast.get_docstring(found[name]):
            yield found[name]


def methods(module: Module, node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Return the public methods of a class that have a docstring."""
    lines = module.source.splitlines()
    stop = next((i for i in range(node.lineno, node.end_lineno or 0) if INTERNAL in lines[i]), len(lines))
    is_codec = any(isinstance(p, ast.AnnAssign) and ast.unparse(p.annotation) == "ClassVar[str]" for p in node.body)
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_") and part.lineno <= stop:
            if is_codec and part.name in ("prepare", "encode") and node.name != "Codec":
                continue
            if part.name.startswith("on_"):
                continue  # a framework calls them
            if ast.get_docstring(part):
                yield part


def signature(module: Module, node: Definition) -> str:
    """Return the call signature: the source's own lines; for a dataclass its fields."""
    if isinstance(node, ast.FunctionDef):
        text = _head(module, node)
        kinds = [ast.unparse(d) for d in node.decorator_list]
        return "\n".join([f"@{k}" for k in kinds if k in ("property", "staticmethod", "classmethod")] + [text])
    init = next((p for p in node.body if isinstance(p, ast.FunctionDef) and p.name == "__init__"), None)
    if init is not None and not (ast.get_docstring(init) or "").startswith("Use "):
        text = re.sub(r"^def __init__\(\s*self(,\s*|(?=\)))", f"{node.name}(", _head(module, init))
        return re.sub(r"\s*->\s*None$", "", text) if "\n" not in text else _closed(text, node.name)
    shown = [
        _field(p) for p in node.body if isinstance(p, ast.AnnAssign) and "ClassVar" not in ast.unparse(p.annotation)
    ]
    if not shown or not any("dataclass" in ast.unparse(d) for d in node.decorator_list):
        bases = ", ".join(ast.unparse(b) for b in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    short = f"{node.name}({', '.join(shown)})"
    return short if len(short) <= 100 else f"{node.name}(\n    " + ",\n    ".join(shown) + ",\n)"


def _field(node: ast.AnnAssign) -> str:
    """A field of a dataclass as an argument."""
    text = f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
    default = node.value
    if isinstance(default, ast.Call) and ast.unparse(default.func) == "field":
        of = {k.arg: k.value for k in default.keywords}
        default = of.get("default", of.get("default_factory"))
    return text if default is None else f"{text} = {ast.unparse(default)}"


def _closed(text: str, name: str) -> str:
    """A constructor's signature over several lines, as a call."""
    return re.sub(r"\)\s*->\s*None$", ")", re.sub(rf"^{name}\(\s*", f"{name}(\n    ", text))


def _head(module: Module, node: ast.FunctionDef) -> str:
    """`def name(...) -> type`, without the body."""
    lines = module.source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
    if node.body[0].lineno == node.lineno:
        lines = [module.source.splitlines()[node.lineno - 1]]
    text = textwrap.dedent("\n".join(lines)).strip()
    return re.sub(r":\s*(#.*)?$", "", text)


def sections(docstring: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its text and its sections by name.

    A section that begins on the line of its name ends with the next empty line, another with the next line that is not
    indented.
    """
    text: list[str] = []
    found: dict[str, list[str]] = {}
    here, inline = text, False
    for line in docstring.splitlines():
        start = re.match(rf"({'|'.join(SECTIONS)}):(?: (.*))?$", line)
        if start:
            here, inline = found.setdefault(start[1], []), bool(start[2])
            line = start[2] or ""
        elif (inline and not line.strip()) or (not inline and line.strip() and not line.startswith(" ")):
            here, inline = text, False
        here.append(line)
    return "\n".join(text).strip(), {k: textwrap.dedent("\n".join(v)).strip() for k, v in found.items()}


def items(text: str) -> list[tuple[str, str]]:
    """Return the entries of `Args` or `Raises` as (name, description).

    Text that is not a list becomes one entry without a name.
    """
    found: list[tuple[str, str]] = []
    for line in textwrap.dedent(text).splitlines():
        entry = re.match(r"([A-Za-z_*][\w*, ]*): (.*)", line)
        if entry:
            found.append((entry[1], entry[2]))
        elif found:
            name, before = found[-1]
            found[-1] = (name, f"{before} {line.strip()}".strip())
        else:
            found.append(("", line.strip()))
    return found


def _body(docstring: str) -> list[str]:
    text, parts = sections(docstring)
    out = [text, ""]
    for name in SECTIONS:
        if name not in parts:
            continue
        if name in FIELDS:
            listed = [f"- `{n}`: {d}" if n else f"- {d}" for n, d in items(parts[name])]
            out += [f"**{name}**", "", *listed, ""]
        elif name == "Example" and ">>>" in parts[name]:
            out += [f"**{name}**", "", "```pycon", parts[name], "```", ""]
        else:
            out += [f"**{name}**: {parts[name]}" if "\n\n" not in parts[name] else f"**{name}**\n\n{parts[name]}", ""]
    return out


def entry(module: Module, node: Definition, level: int, owner: str = "") -> list[str]:
    """Return the lines of one definition, methods included."""
    out = [
        f"{'#' * level} {owner}{node.name}",
        "",
        "```python",
        signature(module, node),
        "```",
        "",
        *_body(ast.get_docstring(node) or ""),
    ]
    if isinstance(node, ast.ClassDef):
        for method in methods(module, node):
            out += entry(module, method, level + 1, f"{node.name}.")
    return out


def render(page: Page) -> str:
    """Return a page as Markdown."""
    out = [NOTE, f"# {page.title}", "", page.about, "", IN_SIGHT, ""]
    for name, names in page.modules:
        module = load(name)
        found = list(definitions(module, names))
        if not found:
            continue
        if len(page.modules) > 1:
            out += [f"## shrinkpoint.{name}", ""]
            about = ast.get_docstring(module.tree) or ""
            out += [about.split("\n\n")[0].replace("\n", " "), ""]
        for node in found:
            out += entry(module, node, 3)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).rstrip() + "\n"


def render_index(all_of_them: list[Page]) -> str:
    """Return the table of contents: every definition with its first line."""
    out = [
        NOTE,
        "# API reference",
        "",
        "From the docstrings: shapes, dtypes, units, ranges, defaults, errors, sources. The tests run every example.",
        "",
    ]
    for page in all_of_them:
        out += [f"## [{page.title}]({page.file}.md)", "", page.about, "", "| | |", "|---|---|"]
        seen: dict[str, int] = {}
        for name, names in page.modules:
            for node in definitions(load(name), names):
                first = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
                anchor = node.name.lower()
                # GitHub numbers headings that differ in case only, or not at all.
                number = seen[anchor] = seen.get(anchor, -1) + 1
                anchor += f"-{number}" if number else ""
                out.append(f"| [`{node.name}`]({page.file}.md#{anchor}) | {first} |")
        out.append("")
    return "\n".join(out).rstrip() + "\n"


def built() -> dict[str, str]:
    """Return the text of every file in `docs/api/` by file name."""
    every = pages()
    return {"index.md": render_index(every)} | {f"{p.file}.md": render(p) for p in every}


def main() -> int:
    """Write the pages that differ; with `--check` write nothing and return 1 if any differs."""
    check = "--check" in sys.argv[1:]
    wanted = built()
    there = {p.name: p.read_text(encoding="utf-8") for p in OUT.glob("*.md")} if OUT.is_dir() else {}
    differ = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
    for name in differ:
        print(f"docs/api/{name}{' is out of step; run python docs/build_api.py' if check else ''}")
        if check:
            continue
        OUT.mkdir(exist_ok=True)
        if name in wanted:
            (OUT / name).write_text(wanted[name], encoding="utf-8")
        else:
            (OUT / name).unlink()
    return int(check and bool(differ))


if __name__ == "__main__":
    sys.exit(main())
