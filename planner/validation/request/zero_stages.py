"""The ZeRO stage of a row, and the replicas of the groups that shard states (HSDP)."""

from planner.validation.frameworks.traits import OVERLAPPED_OPTIMIZER, uses_maxtext
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions, says
from planner.validation.request.replicas import hybrid_stage, replicas_of
from planner.validation.unsupported import UnsupportedError

_STATES_ALONE = r"shard[-_]optimizer[-_]over[-_]data\s*[=: ]\s*true"
"""MaxText shards weights, gradients and states alike over its axis `fsdp`, to which ici_fsdp_parallelism = -1 of
configs/base.yml gives all devices of a slice; states alone only by this flag (2025)."""

_PIPELINE_ENGINE = r"deepspeed(?:'s)? pipeline engine"
_RESHARDS = r"reshard[-_ ]after[-_ ]forward"
"""FSDP2 gathers weights twice a step, or once if this is false or "never" (torchtitan)."""


def zero_stage_of(row: Row, data: int, others: int, context: int, notes: list[str]) -> tuple[int, int | None]:
    """The ZeRO stage, and the number of replicas of the groups that shard states; None for a single group."""
    replicas = replicas_of(row, data, others, notes)
    if replicas is None:
        return _zero(row, data * context, notes), None
    said = row.zero_stage()
    if replicas == data and data > 1:  # every group is one device: plain DistributedDataParallel
        return 0, None
    if replicas > 1 and said == 0:
        raise UnsupportedError(f"zero_stage is 0, and {data // replicas} devices share states out (HSDP)")
    stage = _zero(row, data * context, notes) if said is not None or row.shares_optimizer() else hybrid_stage(row)
    return stage, replicas if replicas > 1 else None


def _zero(row: Row, shards: int, notes: list[str]) -> int:
    """The ZeRO stage; if none is stated, 1 with a distributed optimizer, else 0 (3 for DeepSpeed)."""
    stage = row.zero_stage()
    if stage == 1 and "mindformers" in row.text("source").lower() and _one_micro_batch(row, shards):
        notes.append("parallel optimizer of MindSpore: gradients are shared out as they come, no micro-batches add up")
        return 2
    if stage == 3 and says(row.text("other_flags").lower(), _RESHARDS) is False:
        notes.append("weights stay gathered after the forward pass: ZeRO 2")
        return 2
    if (
        stage == 3
        and (row.integer("pp") or 1) > 1
        and mentions(f"{row.words('source', 'stack')}; {row.model_and_flags()}", "torchtitan")
    ):
        notes.append(
            "weights stay gathered, and gradients are reduced once, as torchtitan does with a pipeline: ZeRO 1"
        )
        return 1
    if stage == 0 and _owns_states(row):
        notes.append("optimizer states are sharded, as DeepSpeed's pipeline engine does in bf16: ZeRO 1")
        return 1
    if stage in (None, 1) and mentions(row.words("other_flags", "distributed_optimizer"), OVERLAPPED_OPTIMIZER):
        notes.append("OverlappedDistributedOptimizer reduces gradients of every micro-batch: ZeRO 2")
        return 2
    if stage in (None, 1, 2) and _shards_all(row):
        notes.append("MaxText shards weights as it does states: ZeRO 3")
        return 3
    if stage is not None:
        return stage
    shared = row.shares_optimizer()
    if shared is None and row.text("zero_stage").lower().startswith("deepspeed"):
        notes.append("ZeRO stage of DeepSpeed unknown: 3")
        return 3
    stage = int(shared or False)
    if shards > 1:
        notes.append(f"ZeRO stage unknown: {stage}")
    return stage


def _owns_states(row: Row) -> bool:
    """Whether DeepSpeed shards optimizer states without ZeRO: its pipeline engine does in bf16
    (`_do_optimizer_sanity_check` of runtime/engine.py, runtime/bf16_optimizer.py, since 2022)."""
    return row.precision() == "bf16" and mentions(row.words("other_flags"), _PIPELINE_ENGINE)


def _shards_all(row: Row) -> bool:
    """Whether MaxText shards weights, too."""
    return uses_maxtext(row) and not mentions(row.words("other_flags"), _STATES_ALONE)


def _one_micro_batch(row: Row, shards: int) -> bool:
    """Whether a step has a single micro-batch, so that no gradients are accumulated."""
    return (row.integer("micro_batch") or 1) * shards >= (row.integer("global_batch") or 1)
