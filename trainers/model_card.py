"""The result of a transfer, and the section of the model card that reports it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..codec.display import Row

NAME = "README.md"
_BEGIN, _END = "\n<!-- shrinkpoint: begin -->\n", "<!-- shrinkpoint: end -->\n"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Result of `save_pretrained`.

    Args:
        path: the folder.
        nbytes: bytes of its compressed files.
        raw_nbytes: bytes of the weights.
        rows: one a weight, see `Checkpoint.summary`.
        has_base: whether the base model is needed to read it.
    """

    path: Path
    nbytes: int
    raw_nbytes: int
    rows: tuple[Row, ...]
    has_base: bool

    @property
    def ratio(self) -> float:
        """`raw_nbytes / nbytes`."""
        return self.raw_nbytes / self.nbytes

    @property
    def is_lossless(self) -> bool:
        """Return whether every bit of the weights is kept."""
        return all(row.measure == "exact" for row in self.rows)


def has_section(card: bytes) -> bool:
    """Return whether a card already has the section of a compressed model."""
    return _BEGIN.encode() in card


def without_section(card: bytes) -> bytes:
    """Return the card without the section."""
    begin, end = card.find(_BEGIN.encode()), card.rfind(_END.encode())
    return card[:begin] + card[end + len(_END) :] if 0 <= begin < end else card


def section(done: Transfer, base: str | None) -> str:
    """Return the section of the model card: the stored bytes and the error of each weight."""
    lines = [
        "## Compressed weights",
        "",
        f"Weights of {done.raw_nbytes:,} bytes in {done.nbytes:,} ({done.ratio:.2f} to 1) by shrinkpoint. "
        f'Read them with `shrinkpoint.load_pretrained("{done.path.name}"{", base=..." if base else ""})`.',
        "",
    ]
    if base is not None:
        lines += [f"Stored as the difference to a base model, which is needed to read it: `{base}`.", ""]
    lossy = [row for row in done.rows if row.measure != "exact"]
    if not lossy:
        lines += ["**Lossless**: every bit of every weight comes back.", ""]
        return _BEGIN + "\n".join(lines) + _END
    share = sum(row.raw_bytes for row in lossy) / max(1, done.raw_nbytes)
    worst = max(lossy, key=lambda row: row.error)
    lines += [
        f"**Lossy**: {len(lossy)} of {len(done.rows)} arrays ({share:.1%} of the bytes) come back with an error, "
        f"at most {worst.error:g} ({worst.measure}, `{worst.path.removeprefix('tensors/')}`). The others are exact.",
        "",
        "| weight | dtype | bits per element | error | measure |",
        "|---|---|---|---|---|",
    ]
    for row in lossy:
        name = row.path.removeprefix("tensors/")
        lines.append(f"| `{name}` | {row.dtype} | {row.bits_per_element:.2f} | {row.error:g} | {row.measure} |")
    return _BEGIN + "\n".join([*lines, ""]) + _END
