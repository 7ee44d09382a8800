"""Compress a fine-tuned model against the model it was made from, and read it back.

python examples/publish_model.py FINE_TUNED BASE SMALL RESTORED
"""

from __future__ import annotations

import sys

import shrinkpoint as sp


def main(tuned: str, base: str, small: str, restored: str) -> float:
    """Four folders; the last two are made. Returns the ratio."""
    done = sp.save_pretrained(tuned, small, base)
    print(f"{done.raw_nbytes:,} -> {done.nbytes:,} bytes, {done.ratio:.1f} to 1, lossless: {done.is_lossless}")
    sp.load_pretrained(small, base, to=restored)
    return done.ratio


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit("usage: publish_model.py FINE_TUNED BASE SMALL RESTORED (four folders; the last two are made)")
    main(*sys.argv[1:])
