"""How to compress, from the options of a command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ..codec.config import Config
from ..codec.errors import BadArgumentError
from ..demo.config import presets


def config(
    preset: str | None, file: Path | None, rate: float | None = None, max_rel_error: float | None = None
) -> Config:
    """The configuration that is asked for.

    Args:
        preset: a name of `demo.config.presets`; None: as `file` says, else "default".
        file: JSON of `Config.to_json`, or None.
        rate: in place of the configuration's own, or None.
        max_rel_error: in place of the configuration's own, or None.

    Raises:
        BadArgumentError: both a preset and a file; an unknown preset; a file that is no configuration; out of range.
        OSError: the file cannot be read.
    """
    if preset is not None and file is not None:
        raise BadArgumentError("--preset and --config are both given; say one of them")
    if file is not None:
        found = _read(file)
    else:
        known = presets()
        if (preset or "default") not in known:
            raise BadArgumentError(f"--preset is {preset!r}; it must be one of {', '.join(known)}")
        found = known[preset or "default"]()
    return replace(
        found,
        max_rel_error=found.max_rel_error if max_rel_error is None else max_rel_error,
        rate=found.rate if rate is None else rate,
    )


def _read(file: Path) -> Config:
    try:
        data = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadArgumentError(f"{file}: no JSON: {str(error)[:200]}") from None
    try:
        return Config.from_json(data)
    except BadArgumentError as error:
        raise BadArgumentError(f"{file}: {error}") from None
