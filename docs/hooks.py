"""MkDocs hooks: pages from outside docs/, such as README, and links that lead out of it."""

from __future__ import annotations

import ast
import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

HOME = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "bench/results/tables.md": "tables.md",
    "bench/studies/systems/items.md": "items.md",
    "examples": "examples.md",
}
"""Files of the repository by their address on the site."""
SOURCE_OF = {address: file for file, address in PAGES.items()}
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^]]*)\]\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that stand outside docs/."""
    for name, address in PAGES.items():
        text = examples() if name == "examples" else (HOME / name).read_text(encoding="utf-8")
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at pages of the site, by title, or else at the repository, if there is one."""
    address = page.file.src_uri
    source = SOURCE_OF.get(address, f"docs/{address}")
    folder = os.path.dirname(source)

    def replaced(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        file = os.path.normpath(os.path.join(folder, target))
        if not (HOME / file).exists():
            return match[0]  # MkDocs reports it
        if file.startswith("examples/"):
            file, anchor = "examples", Path(file).name.replace(".", "")
        text = match["text"]
        to = PAGES.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else "")
        if to.startswith("decisions") and not to.endswith(".md"):
            to = "decisions/default.md"
        if to:
            where = os.path.relpath(to, os.path.dirname(address) or ".") + (f"#{anchor}" if anchor else "")
            if match["text"].strip("`").endswith(".md"):
                text = files.get_file_from_path(to).page.title
        elif config.repo_url:
            where = f"{config.repo_url.rstrip('/')}/blob/main/{file}"
        else:
            return text
        link = f"[{text}]({where})"
        return f"[!{link}]({where})" if match["image"] else link  # a picture opens at its full size

    parts = _FENCE.split(markdown)
    fences = [*_FENCE.findall(markdown), ""]
    return "".join(_LINK.sub(replaced, part) + fence for part, fence in zip(parts, fences, strict=True))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Leave out the repository's stars, for which the theme asks another server."""
    return output.replace(' data-md-component="source"', "")


@event_priority(-100)
def on_post_build(config: Any) -> None:
    """Write the search index as a script too, which pages opened from a disk can load."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text(encoding='utf-8')}", encoding="utf-8")
    print(f"The site: {os.path.relpath(config.site_dir, HOME)}/index.html")


def examples() -> str:
    """Return a page with every script of examples/."""
    out = ["# Examples", "", "Whole scripts. The tests run them.", ""]
    for path in sorted((HOME / "examples").glob("*.py")):
        code = path.read_text(encoding="utf-8")
        about, _, rest = (ast.get_docstring(ast.parse(code)) or "").partition("\n")
        out += [f"## {path.name}", "", about, rest, "", "```python", code.partition('"""\n\n')[2].rstrip(), "```", ""]
    return "\n".join(out)
