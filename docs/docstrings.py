"""A griffe extension: the sections of this project's docstrings as mkdocstrings knows them."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import griffe

_LOG = logging.getLogger("mkdocs.plugins.docstrings")
_SOURCE = re.compile(r"^Source:\s*\n((?:^ +.*\n?)+)", re.MULTILINE)


def _linked(match: re.Match[str]) -> str:
    """Return a link to the page that a docstring names.

    MkDocs checks no links in docstrings, so a missing page is logged here.
    """
    if not (Path(__file__).parent / f"{match[1]}.md").exists():
        _LOG.warning("a docstring names docs/%s.md, which does not exist", match[1])
    return f"[{match[1]}](../{match[1]}.html)"


class Sections(griffe.Extension):
    """Read `Example:` as examples and `Source:` as a paragraph; link the pages that are named."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = _SOURCE.sub(lambda found: f"**Source**: {' '.join(found[1].split())}\n", text)
            text = re.sub(r"^Source: ", "**Source**: ", text, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"`docs/([a-z/-]+)\.md`", _linked, text)
