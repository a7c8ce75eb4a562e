"""What frameworks did until a date, as a table.

A stack is described as its framework is today. A row that was measured earlier gets the stack with the changes of every
entry of `VERSIONS` whose period contains its date.

Dates of rows may be less exact than a day. For a bound by the month, a year alone counts as before all of its months. A
bound by the day is compared as far as the date of the row goes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hardware_profiles import Software
from planner.validation.frameworks.traits import uses_torchtitan
from planner.validation.reading.rows import Row

SORTED_ROWS = "2025"
"""Date from which MindSpeed-LLM sorts rows of tokens with a kernel for whole rows. Before, it had the dispatcher of
Megatron-Core 0.6, by default the one that gathers all tokens (`MoEAllGatherTokenDispatcher`)."""

_MONTH = len("2025-01")


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What stacks did from one date until another.

    Attributes:
        stacks: names of the stacks.
        until: the date from which they no longer do it.
        changes: fields of `Software` and their values in this period.
        source: the commit or release that shows it.
        since: the date from which they did it; empty: always.
        torchtitan: whether it applies only to torchtitan among the users of these stacks.
        undated: whether it applies to rows without a date.
    """

    stacks: tuple[str, ...]
    until: str
    changes: Mapping[str, Any]
    source: str
    since: str = ""
    torchtitan: bool = False
    undated: bool = False


VERSIONS = (
    Version(
        stacks=("megatron-2021",),
        until="2022-03",
        undated=True,
        changes={"accumulates": True},
        source="Megatron-LM 83b1e42f30 (February 2022): gradient accumulation fusion; a pass of its own before",
    ),
    Version(
        stacks=("megatron", "nemo"),
        since="2022-10",
        until="2024-07",
        changes={"loss": "whole"},
        source="Megatron-LM 55817ec9b9 (September 2022) to 9634c0e4a3 (June 2024): the loss left the fp32 copy of the"
        " logits in memory while it made the softmax in another",
    ),
    Version(
        stacks=("megatron",),
        until="2024-04",
        changes={"bucket_per_device": 0},
        source="Megatron-Core 0.7, 0fda386c04: buckets are larger for more devices",
    ),
    Version(
        stacks=("mindspeed",),
        until=SORTED_ROWS,
        changes={"bucket_per_device": 0},
        source="MindSpeed-LLM on Megatron-Core 0.6, which had buckets of one size",
    ),
    Version(
        stacks=("fsdp-compiled",),
        torchtitan=True,
        until="2024-10-22",
        changes={"loss": "whole"},
        source="torchtitan e10cb9494: the cast of logits moved into the loss, which is compiled; before, the model cast"
        " them, and the loss was PyTorch's own",
    ),
    Version(
        stacks=("fsdp-compiled",),
        torchtitan=True,
        since="2024-12",
        until="2025-04",
        changes={"loss": "whole"},
        source="torchtitan e8977b007 (December 18, 2024) to bbb1b616e (April 2, 2025): the loss was not compiled",
    ),
    Version(
        stacks=("fsdp", "fsdp-compiled"),
        torchtitan=True,
        until="2025-02-24",
        changes={"foreach": True},
        source="torchtitan 6e4988550: the optimizer is one kernel by default",
    ),
    Version(
        stacks=("fsdp", "fsdp-compiled"),
        torchtitan=True,
        until="2026-01-27",
        changes={"repeats_keys": True},
        source="torchtitan ff0829c10: keys and values are no longer copied for every query head (`repeat_kv`)",
    ),
)


def of_its_time(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack as it was when a row was measured."""
    date = row.date()
    for version in VERSIONS:
        if stack.name not in version.stacks or (version.torchtitan and not uses_torchtitan(row)):
            continue
        if not _before(date, version.since) and _before(date, version.until) if date else version.undated:
            stack = replace(stack, **version.changes)
    return stack


def _before(date: str, bound: str) -> bool:
    """Whether a date is before a bound, a month or a day."""
    return date < bound[: len(date)] if len(bound) > _MONTH else date[:_MONTH] < bound
