"""Fuzzer of files with valid checksums: `python -m tests.fuzz.container --seconds 60`.

For any bytes, a reader gives a state or one of the library's errors, within limits of time and memory.
"""

from __future__ import annotations

import contextlib
import json
import random
import warnings
from collections.abc import Callable

from tests.fuzz.common import alter_json, fuzz, instrumented

with instrumented():
    import numpy as np

    import shrinkpoint as sp
    from shrinkpoint.codec.checkpoint import Checkpoint
    from shrinkpoint.codec.format.ranged import Ranged
    from shrinkpoint.codec.partial import decompress_only
    from tests.codec.common import put_together, stored_records, take_apart
    from tests.codec.test_corruption import _sources

SOURCES = _sources()
PARENTS = {base.identity: base for _, base in SOURCES if base is not None}


def read(data: bytes) -> None:
    """Read a file in every way: whole, over its parent, in part, as a parent."""
    with contextlib.suppress(sp.ShrinkpointError), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ckpt = Checkpoint.from_bytes(data)
        repr(ckpt)
        ckpt.summary()
        parent = PARENTS.get(str(ckpt.parent_id))
        with contextlib.suppress(sp.ShrinkpointError):
            sp.decompress(ckpt, parent)
        files = iter([Checkpoint(Ranged(len(data), lambda start, stop: data[start:stop]), None, ckpt.id), parent])
        with contextlib.suppress(sp.ShrinkpointError):
            decompress_only(lambda above: next(files) or ckpt, ["o/*", "weight"])
        sp.compress({"weight": np.zeros(1500, np.float32)}, Checkpoint.from_bytes(data, parent))


def mutate(rng: random.Random, data: bytes, at_random: Callable[[bytes, int], bytes]) -> bytes:
    """Alter the header or pieces; sometimes the raw bytes."""
    if rng.random() < 0.1:
        return at_random(data, 2 * len(data))
    try:
        header, chunks = take_apart(data)
        rows = stored_records(header)
        lengths = [n for row in rows for n in row["b"]]
        if sum(lengths) != sum(map(len, chunks)):
            raise ValueError(lengths)
    except Exception:
        return at_random(data, 2 * len(data) + 64)
    if rng.random() < 0.4:
        for _ in range(rng.choice([1, 1, 2])):
            header = alter_json(rng, header)
        if rng.random() < 0.1:
            return put_together(at_random(json.dumps(header).encode(), 1 << 16), chunks)
        return put_together(header, chunks)
    body, number = b"".join(chunks), rng.randrange(max(1, len(lengths)))
    at, end = sum(lengths[:number]), sum(lengths[: number + 1])
    piece = at_random(body[at:end], 2 * (end - at) + 16)
    left = number
    for row in rows:
        if left < len(row["b"]):
            row["b"][left] = len(piece)
            break
        left -= len(row["b"])
    return put_together(header, [body[:at] + piece + body[end:]])


if __name__ == "__main__":
    fuzz("container", [blob for blob, _ in SOURCES], read, mutate)
