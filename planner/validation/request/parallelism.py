"""The fixed decisions of a row: degrees of parallelism, micro-batch and recomputation, each as the row says, else as
frameworks do by default."""

import re

from planner.models.dimensions import Dimensions
from planner.plan.layout.kept import Kept
from planner.strategy_search.request.space import ContextBy, Pattern, Pinned
from planner.validation.frameworks.recipes import virtual_stages_by_recipe
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions
from planner.validation.request.recomputation import repeated, running
from planner.validation.request.zero_stages import zero_stage_of
from planner.validation.spared import Spared
from planner.validation.stack.losses import gathers_logits
from planner.validation.unsupported import UnsupportedError

_BY_HEADS = r"ulysses|\bcp[-_ ]comm[-_ ]type\s*[=: ]\s*\W?a2a(?!\+)"
"""Words for Ulysses context parallelism: DeepSpeed's name of it, and Megatron's --cp-comm-type a2a."""

_FOLDED = "2025"
"""Date from which Megatron-LM shards experts over tensor-parallel devices too (expert_tensor_parallel_size,
Megatron-Core 0.10). Published recipes for experts that are no wider than the model ask for it: Megatron Bridge,
Megatron-MoE-ModelZoo (model_configs/benchmarking at e865051), Pai-Megatron-Patch (examples/qwen3 at a098ca5)."""

_EXPERT_TENSOR = r"(?:\betp|expert[-_]tensor[-_]parallel[-_](?:size|degree))\s*[=: ]\s*(\d{1,9})"

_INTERLEAVED = (
    r"\binterleav(?:ed|ing)[\s_-]+(?:1f1b|vpp|virtual|pipeline|stages?|schedul)"
    r"|\b(?:1f1b|pipeline|stages|schedule)[\s_-]+interleav(?:ed|ing)\b"
    r"|(?:^|(?<=[;,(])|(?<=[;,(] ))interleav(?:ed|ing)(?=\s*(?:[;,.)=:]|$))"
)
"""Words for a rank with several stages (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). RoPE positions and
layers with a window are called interleaved, too."""


def pinned_of(row: Row, devices: int, model: Dimensions, spared: Spared | None, notes: list[str]) -> Pinned:
    """The decisions of a row on `devices` devices.

    Raises UnsupportedError for degrees that contradict each other or the model.
    """
    tensor, pipeline = (_degree(row, name, notes) for name in ("tp", "pp"))
    context = row.integer("cp") or 1
    virtual = _virtual_stages(row, model.layers // pipeline, notes) if pipeline > 1 else 1
    if pipeline == 1 and (row.integer("vpp") or 1) > 1:
        notes.append(f"vpp is {row.integer('vpp')}, and there is no pipeline: 1")
    data = _data_degree(row, devices, tensor, pipeline, context, notes)
    around: ContextBy = "heads" if mentions(row.text("other_flags").lower(), _BY_HEADS) else "ring"
    if context > 1:
        notes.append(f"context parallelism by {around}")
    sequence = row.truth("sp")
    if sequence is None and tensor > 1:
        notes.append("sequence parallelism unknown: off")
    micro_batch = _degree(row, "micro_batch", notes)
    expert, whole = _expert_degrees(row, model, tensor, data * context, notes)
    recompute = running(row, spared, notes)
    parts = Kept(but=spared.but) if spared is not None and spared.but else None
    zero, replicas = zero_stage_of(row, data, tensor * pipeline * context, context, notes)
    return Pinned(
        pipeline=pipeline,
        virtual_stages=virtual,
        schedule="1f1b" if virtual == 1 else None,
        data=data,
        context=context,
        context_by=around,
        tensor=tensor,
        expert=expert,
        whole_experts=whole,
        sequence_parallel=bool(sequence),
        zero=zero,
        replicas=replicas,
        micro_batch=micro_batch,
        recompute=recompute,
        never_kept=() if parts else repeated(row, recompute, notes),
        even=True,
        pattern=Pattern(selective=recompute == "selective", kept=parts, whole_logits=gathers_logits(row)),
    )


def _data_degree(row: Row, devices: int, tensor: int, pipeline: int, context: int, notes: list[str]) -> int:
    """The data-parallel degree, from the devices if it is unknown. Raises UnsupportedError if degrees do not make up
    the devices."""
    rest = tensor * pipeline * context
    data = row.integer("dp")
    if data is None:
        if devices % rest:
            raise UnsupportedError(
                f"tp {tensor} x pp {pipeline} x cp {context} = {rest} does not divide {devices} devices"
            )
        data = max(1, devices // rest)
        notes.append(f"dp unknown: {data}, from the devices")
    if data * rest != devices:
        raise UnsupportedError(
            f"tp {tensor} x pp {pipeline} x cp {context} x dp {data} = {data * rest} are not the {devices} devices"
        )
    return data


def _expert_degrees(
    row: Row, model: Dimensions, tensor: int, shards: int, notes: list[str]
) -> tuple[int | None, bool | None]:
    """The expert-parallel degree, and whether experts are whole on each tensor-parallel device (None: does not apply).

    `shards` devices split tokens, those of tensor parallelism excluded.
    """
    expert = row.integer("ep")
    if model.experts is None:
        if (expert or 1) > 1:
            raise UnsupportedError(f"ep is {expert}, and the model has no experts")
        return None, None
    expert = _degree(row, "ep", notes)
    if tensor == 1:
        return expert, None
    given = re.search(_EXPERT_TENSOR, row.model_and_flags())
    if given:
        within = int(given[1])
    elif shards % expert or (_folds(row) and model.experts.width <= model.hidden):
        within = 1
        notes.append("tensor parallelism of experts unknown: none, each is whole on a device")
    else:
        within = tensor
        notes.append("tensor parallelism of experts unknown: that of all else")
    if within not in (1, tensor):
        raise UnsupportedError(f"experts are split by {within} of {tensor} tensor parallel devices, not by all or none")
    return expert, within == 1


def _folds(row: Row) -> bool:
    return row.date() >= _FOLDED and not row.text("profile").startswith("ascend")


def _virtual_stages(row: Row, layers: int, notes: list[str]) -> int:
    """Virtual stages of a pipeline rank that has `layers` layers."""
    known = virtual_stages_by_recipe(row)
    if known is not None:
        notes.append(f"{known} virtual stages, by the script of the release")
        return known
    if row.integer("vpp") is None and mentions(row.text("other_flags").lower(), _INTERLEAVED):
        fewest = next((count for count in range(2, layers + 1) if layers % count == 0), 1)
        notes.append(f"vpp unknown, and stages are interleaved: {fewest}, the fewest that divide the layers of a rank")
        return fewest
    return _degree(row, "vpp", notes)


def _degree(row: Row, column: str, notes: list[str]) -> int:
    value = row.integer(column)
    if value is None:
        notes.append(f"{column} unknown: 1")
    return value or 1
