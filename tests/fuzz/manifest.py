"""Fuzzer of manifests and tags: `python -m tests.fuzz.manifest --seconds 60`.

What a store opens because a manifest says so has a name inside its folder, and nothing but the library's errors comes
of it.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import uuid
from collections.abc import Callable

from tests.fuzz.common import alter_json, fuzz, instrumented

with instrumented():
    import shrinkpoint as sp
    from shrinkpoint.store.files import seal
    from shrinkpoint.store.manifest import Manifest
    from tests.store.common import fill, lossless

STORE = fill(sp.Store(f"memory://{uuid.uuid4()}", lossless()), 0, 1, 2)
STORE.tag("x", 1)
MANIFESTS = [STORE.describe(step).to_bytes() for step in (0, 1, 2)]
DATA = re.compile(r"[0-9]{12}-[0-9a-f]{16}\.spt")


def read(data: bytes) -> None:
    """Read bytes as a tag and as the manifest of step 2, with loads."""
    STORE._files.write("tags/x.json", data)
    with contextlib.suppress(sp.ShrinkpointError):
        STORE.load("x", count=False)
    with contextlib.suppress(sp.ShrinkpointError):
        found = Manifest.from_bytes(data, 2)
        assert found.step == 2
        assert all(DATA.fullmatch(name) for name in found.chain), found.chain
        assert Manifest.from_bytes(found.to_bytes(), 2) == found
        assert found.restore_cost >= 1
        STORE._files.write("steps/000000000002.json", data)
        try:
            STORE.verify()
            STORE.load(2, count=False)
        finally:
            STORE._files.write("steps/000000000002.json", MANIFESTS[2])
    assert STORE.load(0, count=False)["step"] == 0


def mutate(rng: random.Random, data: bytes, at_random: Callable[[bytes, int], bytes]) -> bytes:
    """Alter fields and restore the checksum; sometimes alter the raw bytes."""
    try:
        fields = json.loads(data)
        assert isinstance(fields, dict)
    except (ValueError, AssertionError, RecursionError):
        return at_random(data, 2 * len(data) + 64)
    if rng.random() < 0.1:
        return at_random(data, 2 * len(data) + 64)
    fields.pop("checksum", None)
    for _ in range(rng.choice([1, 1, 2])):
        fields = alter_json(rng, fields)
    return seal(fields) if isinstance(fields, dict) else json.dumps(fields).encode()


if __name__ == "__main__":
    fuzz("manifest", [*MANIFESTS, seal({"step": 1})], read, mutate)
