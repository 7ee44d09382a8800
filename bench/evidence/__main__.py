"""The command `python -m bench.evidence [--check]`: renew tables and pictures of documents.

`--check` only says which pages are out of step, and returns 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .pages import FOLDER, PICTURES, out_of_step, renew


def main(arguments: Sequence[str] | None = None) -> int:
    """Write pages and pictures again, or only check the pages."""
    parser = argparse.ArgumentParser(prog="bench.evidence", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page is out of step")
    asked = parser.parse_args(arguments)
    if asked.check:
        wrong = out_of_step()
        for page in wrong:
            print(f"{page}: its tables are not those of bench/results; run python -m bench.evidence")
        return 1 if wrong else 0
    renew()
    for name, draw in PICTURES.items():
        draw(FOLDER / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
