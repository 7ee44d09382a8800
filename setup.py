"""Refuse a checkout without symbolic links; pyproject.toml says all else."""

from pathlib import Path

from setuptools import setup

BROKEN = [path for path in Path("src/shrinkpoint").iterdir() if path.is_file() and path.suffix not in (".py", ".typed")]
if BROKEN:
    raise SystemExit(
        f"{BROKEN[0]} is a file here and a symbolic link in the repository, so that this checkout cannot be installed. "
        "Clone it again with `git clone -c core.symlinks=true` (on Windows in developer mode), or install a wheel or "
        "source distribution, which hold no links."
    )
setup()
