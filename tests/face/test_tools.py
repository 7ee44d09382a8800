"""Tools of a checkout: help of make targets, and links that pre-commit skips."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_every_target_has_help() -> None:
    text = (HOME / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    shown = subprocess.run(["make", "-C", HOME, "help"], capture_output=True, text=True, check=True).stdout
    lines = dict(line.split(maxsplit=1) for line in shown.splitlines() if not line.startswith("make"))
    assert set(lines) == set(phony.split())


def test_pre_commit_skips_the_linked_folders() -> None:
    (excluded,) = re.findall(r"^exclude: (.*)$", (HOME / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    links = [path.name for path in (HOME / "src/shrinkpoint").iterdir() if path.is_symlink()]
    assert links
    for name in links:
        assert re.search(excluded, f"src/shrinkpoint/{name}/module.py"), name
        assert not re.search(excluded, f"{name}/module.py")
