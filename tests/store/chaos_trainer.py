"""A small deterministic training that resumes from its store, for `ckpt-chaos`.

    python -m tests.store.chaos_trainer OUT [STEPS]

With RANK and WORLD_SIZE in the environment each rank keeps a store of its own, and all resume from what
`newest_common_step` says, over gloo.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np

import shrinkpoint as sp
from shrinkpoint.store.ranks import newest_common_step
from shrinkpoint.store.retention import Retention


def agreed(store: sp.Store, ranks: int) -> int:
    """Return the newest step that all ranks have, and drop newer ones."""
    if ranks > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    try:
        return newest_common_step(store, drop=True)
    finally:
        if ranks > 1:
            dist.destroy_process_group()


def main() -> None:
    """Train to `steps`, and write the result."""
    out, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    store = sp.Store(out / f"rank{rank}" if ranks > 1 else out, sp.presets.lossless())
    weights, begin = np.random.default_rng(rank).standard_normal(500), 0
    with contextlib.suppress(sp.CorruptDataError):  # there is none yet
        found = store.load(agreed(store, ranks))
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
