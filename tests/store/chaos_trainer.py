"""A small deterministic training run that resumes from its store; judged by `ckpt-chaos` from outside.

    python -m tests.store.chaos_trainer OUT [STEPS]

With RANK and WORLD_SIZE in the environment each rank keeps a store of its own, and all resume from the newest step
that every rank has.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import numpy as np

import shrinkpoint as sp
from shrinkpoint.store.retention import Retention


def main() -> None:
    """See the module."""
    out, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    folders = [out / f"rank{r}" if ranks > 1 else out for r in range(ranks)]
    stores = [sp.Store(folder, sp.presets.lossless()) for folder in folders]
    store = stores[rank]
    weights, begin = np.random.default_rng(rank).standard_normal(500), 0
    common = sorted(set.intersection(*(set(s.steps()) - set(s.verify()) for s in stores)))
    if common:
        found = store.load(common[-1])
        weights, begin = found["weights"], found["step"]
    print(f"resumed from step {begin}", flush=True)
    for step in range(begin + 1, steps + 1):
        weights = weights * 0.99 + np.random.default_rng([rank, step]).standard_normal(500) * 0.01
        store.save(step, {"weights": weights, "step": step})
        if step == 2:
            store.gc(Retention(last=10))
    result = out / f"result{rank}"
    # Written at the end only, and judged by its bytes.
    temporary = out / f"result{rank}.part"
    temporary.write_text(hashlib.sha256(weights.tobytes()).hexdigest())
    with temporary.open("rb") as f:
        os.fsync(f.fileno())
    os.replace(temporary, result)


if __name__ == "__main__":
    main()
