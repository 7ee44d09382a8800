"""Check the contents of a wheel and a source distribution: `python tests/dist.py dist`."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path


def problems(folder: Path) -> list[str]:
    """Return the problems of the distributions in a folder."""
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        installed = set(archive.namelist())
    with tarfile.open(source) as archive:
        links = [member.name for member in archive if not (member.isfile() or member.isdir())]
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    found = [f"the source distribution holds a link: {name}" for name in links]
    modules = ("codec/compress.py", "kernels/backend/jit.py", "searching/run.py", "store/store.py", "trainers/loop.py")
    for name in ("py.typed", "__main__.py", *modules):
        if f"shrinkpoint/{name}" not in installed:
            found.append(f"the wheel lacks {name}")
    for part in ("tests", "results", "studies", "baselines"):
        found += [f"the wheel holds {name}" for name in installed if part in name.split("/")]
    tests = ("tests/codec/test_golden.py", "tests/golden/make.py", "tests/conftest.py")
    root = Path(__file__).parents[1]
    files = (path for path in (root / "tests/golden").rglob("*") if path.is_file() and path.suffix != ".pyc")
    golden = (path.relative_to(root).as_posix() for path in files)
    for name in (*tests, *golden, "README.md", "LICENSE", "docs/format.md", "setup.py"):
        if name not in shipped:
            found.append(f"the source distribution lacks {name}")
    return found


def main() -> int:
    """Print the problems; return 0 if there are not any."""
    found = problems(Path(sys.argv[1]))
    print("\n".join(found) or "dist: wheel and source distribution hold what they should")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
