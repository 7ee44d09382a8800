"""Optional packages are named, and this project is not, in installation hints."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from shrinkpoint.codec.extras import EXTRAS, install

HOME = Path(__file__).parents[2]
SAID_IN = ("*.md", "bench", "codec", "docs", "examples", "kernels", "search", "src/shrinkpoint", "store", "trainers")


def test_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {name: tuple(packages) for name, packages in project["optional-dependencies"].items()}
    assert EXTRAS.keys() == asked.keys() - {"test", "bench", "models", "docs"}
    assert {name: asked[name] for name in EXTRAS} == EXTRAS


@pytest.mark.parametrize("name", EXTRAS)
def test_the_command_names_every_package(name: str) -> None:
    command = install(name)
    assert command.startswith("pip install ")
    assert re.findall(r"'([^']+)'", command) == list(EXTRAS[name])


def test_nobody_is_told_to_install_this_project_from_an_index() -> None:
    """No text tells users to install this project from an index, where its name is free."""
    found = []
    for where in SAID_IN:
        paths = HOME.glob(where) if "*" in where else (HOME / where).rglob("*")
        for path in paths:
            if path.suffix in (".py", ".md") and path.name != "extras.py":
                text = path.read_text(encoding="utf-8")
                found += [
                    f"{path}: {hit}" for hit in re.findall(r"install ['\"]?shrinkpoint\b.*|shrinkpoint\[\w+\]", text)
                ]
    assert found == []
