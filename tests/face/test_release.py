"""Version, Python versions and oldest dependencies agree everywhere."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import shrinkpoint as sp

HOME = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def found(pattern: str, path: str) -> list[str]:
    """Return the first groups of all matches in a file."""
    return [match[1] for match in re.finditer(pattern, (HOME / path).read_text(encoding="utf-8"), re.MULTILINE)]


def test_the_version_is_one() -> None:
    version = PROJECT["version"]
    assert version == sp.__version__
    assert found(r"^version: (\S+)$", "CITATION.cff") == [version]
    # Changes after the last release stand under a heading without a date.
    first = found(r"^## (\S+)", "CHANGELOG.md")[0]
    assert first == ("Unreleased" if ".dev" in version else version)


def test_the_classifiers_are_what_is_tested() -> None:
    pythons = [
        c.rpartition(" ")[2] for c in PROJECT["classifiers"] if c.startswith("Programming Language :: Python :: 3.")
    ]
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert found(r"Linux, Python ([\d.]+ to [\d.]+),", "README.md") == [f"{pythons[0]} to {pythons[-1]}"]
    (matrix,) = found(r"^ +python: \[(.*)\]$", ".github/workflows/ci.yml")
    assert set(pythons) <= set(re.findall(r"[\d.]+", matrix))
    assert "Operating System :: POSIX :: Linux" in PROJECT["classifiers"]
    assert ("Typing :: Typed" in PROJECT["classifiers"]) == (files("shrinkpoint") / "py.typed").is_file()


@pytest.mark.parametrize("dependency", PROJECT["dependencies"])
def test_the_oldest_lane_has_the_oldest_versions(dependency: str) -> None:
    name, bound = re.match(r"([\w-]+)>=([\d.]+)", dependency).groups()  # type: ignore[union-attr]
    (pinned,) = found(rf"^{name}==([\d.]+)$", "constraints-oldest.txt")
    assert (pinned + ".0").startswith(bound + ".")
    assert pinned.removeprefix(bound).strip(".0") in ("", "1")  # typer 0.15.0 was withdrawn


def test_each_step_of_a_workflow_is_a_command_of_this_checkout() -> None:
    targets = set(found(r"^([a-z-]+):", "Makefile"))
    steps = [
        step for path in (HOME / ".github/workflows").glob("*.yml") for step in found(r"^ +-? ?run: (.*)$", str(path))
    ]
    assert len(steps) >= 7
    for step in steps:
        command, *arguments = step.split()
        assert command in ("make", "bash", "test"), step
        if command == "make":
            assert arguments[0] in targets, step
        if command == "bash":
            assert (HOME / arguments[0]).is_file(), step
