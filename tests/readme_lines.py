"""Run the Python blocks of a Markdown file, in order, in one namespace and a scratch folder."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path


def blocks(text: str) -> list[str]:
    """The fenced Python blocks."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def main(path: str) -> int:
    """Run them; returns how many there were."""
    found = blocks(Path(path).read_text(encoding="utf-8"))
    namespace: dict[str, object] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder:
        home = Path.cwd()
        os.chdir(folder)
        try:
            for number, block in enumerate(found, 1):
                exec(compile(block, f"{path} block {number}", "exec"), namespace)
        finally:
            os.chdir(home)
    return len(found)


if __name__ == "__main__":
    count = main(sys.argv[1])
    print(f"{sys.argv[1]}: {count} blocks ran")
    sys.exit(0 if count else 1)
