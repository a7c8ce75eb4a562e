"""Words of a row that say it was run in a way that is not priced: it is refused, instead of read as something else.

    adapters                LoRA, QLoRA
    schedules               GPipe, zero bubble, DualPipe of a pipeline, which is priced as 1F1B
    optimizers              Muon, Adafactor, SGD, eight-bit Adam and others: bytes and time are those of AdamW
    JAX                     no stack of ours runs it
    PCIe                    every profile of a data center has NVLink, or what its vendor has instead, in a node
    context                 a2a+p2p: heads inside, a ring outside

Flags and the name of the model count, notes for adapters alone: notes compare with other runs. A word that is denied
("no LoRA") does not count.
"""

import re

from planner.validation.rows import Row
from planner.validation.unsupported import UnsupportedError
from planner.validation.words import mentions

_IN_NOTES: tuple[tuple[str, str], ...] = (
    (r"(?<![/\w])q?lora\b", "only adapters are trained (LoRA), which cannot be planned yet"),
)
_IN_FLAGS: tuple[tuple[str, str], ...] = (
    (r"lora", _IN_NOTES[0][1]),
    (
        r"\bmuon\b|adafactor|\bshampoo\b|\bsophia\b|\blion\b|\blamb\b|\boptim(?:izer)?\s*[=:]\s*sgd\b|optimizer sgd\b"
        r"|\b(?:8|eight)[-_ ]?bit[-_ ]?adam|adamw?[-_]?8[-_ ]?bit",
        "its optimizer is not AdamW, whose states and time are priced",
    ),
    (r"\bjax\b|\bmaxtext\b|\bpaxml\b|\blevanter\b", "it ran on JAX, and none of `plan stacks` does"),
    (r"\bcp[-_ ]comm[-_ ]type\s*[=: ]\s*\W?a2a\+p2p", "context parallelism is by heads inside and by a ring outside"),
)
_SCHEDULES = r"\bgpipe\b|zero[-_ ]?bubble|\bzb[-_]?(?:h1|h2|v|1p)\b|\bdual[-_ ]?pipe|\bafab\b"


def refuse_otherwise(row: Row) -> None:
    """Raise UnsupportedError where a row says in words that it was run in a way that is not priced."""
    flags = " ".join(row.text(column) for column in ("model", "other_flags", "flag", "distributed_optimizer")).lower()
    notes = f"{flags} {row.text('notes').lower()}"
    for words, table in ((flags, _IN_FLAGS), (notes, _IN_NOTES)):
        for pattern, reason in table:
            if mentions(words, pattern):
                raise UnsupportedError(reason)
    if (row.integer("pp") or 1) > 1 and (named := re.search(_SCHEDULES, flags)) and mentions(flags, _SCHEDULES):
        raise UnsupportedError(f"its pipeline has another schedule ({named[0]}) than 1F1B, which is priced")
    for column in ("device", "intra_bw"):
        text = row.text(column).lower()
        if "pcie" in text and "nvlink" not in text:
            profile = row.text("profile")
            raise UnsupportedError(
                f"{column} '{row.text(column):.40}': devices are joined by PCIe, and profile {profile} has faster links"
            )
