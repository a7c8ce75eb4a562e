"""torchtitan: the TOML file of 0.2, the last version that reads one; later ones read the same as a configuration in
Python (`planner.export.pytorch.torchtitan_registry`).

    ZeRO 0                data_parallel_replicate_degree: DDP, which it runs without any other parallelism
    HSDP                  data_parallel_replicate_degree replicas of data_parallel_shard_degree shards
    ZeRO 1                data_parallel_shard_degree beside a pipeline: weights are gathered, and gradients scattered,
                          once a step, whatever fsdp_reshard_after_forward says (`planner.engines.fsdp`), here "never"
    ZeRO 2                the same without a pipeline: gradients are scattered, in fp32, with every micro-batch
    ZeRO 3                with "always", without a pipeline
    tensor                with sequence parallel norms, the embedding and the loss along the vocabulary, always
    experts               expert_parallel_degree, over context and data parallel devices of a replica; with an
                          expert_tensor_parallel_degree of 1 over tensor parallel ones too, else these cut each
    context               a ring (rotate method "alltoall", which plan_ring.py sets) in zigzag order ("headtail")
    stages                module_fqns_per_model_part, which names the layers of every one
    recomputation         mode "full"; "selective" by the number: every nth layer of a rank; by "op": products and
                          attention are kept, but for every second product
    micro-batches         with a pipeline pipeline_parallel_microbatch_size of local_batch_size, else accumulation

FSDP does the mixed precision: with only tensor or pipeline parallelism everything is in bf16, without fp32 masters.
Source: torchtitan 0.2.2, torchtitan/config/job_config.py, models/llama3/infra/parallelize.py,
distributed/{parallel_dims,pipeline_parallel,activation_checkpoint}.py.
"""

from planner.engines.space import sample_step
from planner.export import common
from planner.export.description import Description, ExportError
from planner.export.pytorch.torchtitan_reading import read
from planner.export.pytorch.torchtitan_writing import (
    DTYPES,
    FP8_RECIPES,
    GATHERED,
    OPERATORS,
    SCHEDULES,
    fill_in,
    gradient_dtype,
    purely_bf16,
    recomputed_every,
    recomputed_layers,
    says_left_out,
    write,
)
from planner.export.target import Giving, Loss, Target


def nearest(description: Description) -> tuple[Loss, ...]:
    """What torchtitan cannot be told."""
    common.refuse_other_training(description, "torchtitan", ("adamw",))
    if description.precision not in DTYPES:
        raise ExportError("torchtitan trains in bf16 or fp32, not in fp16; plan again with --precision bf16")
    step = sample_step("context and tensor", description.context, description.tensor)
    if description.sequence_length is not None and description.sequence_length % step:
        raise ExportError(
            f"torchtitan takes samples of a multiple of 2 x context x tensor = {step} tokens, and the plan has"
            f" {description.sequence_length}; plan again with another --seq-len, --context or --tensor"
        )
    giving = Giving(description)
    common.give_up_offload(giving)
    common.give_up_schedules(giving, tuple(SCHEDULES))
    common.give_up_few_micro_batches(giving)
    common.give_up_interleave(giving)
    leaves_out = says_left_out(giving.description.fp8)
    common.give_up_fp8(giving, tuple(FP8_RECIPES), leaves_out=leaves_out, gathers=GATHERED)
    _give_up_splits(giving)
    _give_up_experts(giving)
    _give_up_zero(giving)
    _give_up_recomputation(giving)
    plain = purely_bf16(giving.description)
    common.give_up_updates(
        giving,
        master_weights=(not plain,),
        gradient_dtypes=(gradient_dtype(giving.description, plain),),
        moment_dtypes=("bf16" if plain else "fp32",),
    )
    return tuple(giving.losses)


def _give_up_splits(giving: Giving) -> None:
    common.give_up_other_rings(giving)
    d = giving.description
    if d.tensor > 1 and not d.sequence_parallel:
        giving.up("norms", "whole", "along the sequence", sequence_parallel=True)
    common.give_up_cut_hidden(giving)


def _give_up_experts(giving: Giving) -> None:
    """Give up expert parallelism that its mesh does not have: experts lie within a replica, and over all of a
    context."""
    d = giving.description
    if d.expert is None or _cut_evenly(d, d.expert, d.whole_experts):
        return
    ways = [
        (expert, whole)
        for whole in (d.whole_experts, not d.whole_experts)
        for expert in range(d.expert, 0, -1)
        if d.expert % expert == 0 and _cut_evenly(d, expert, whole)
    ]
    expert, whole = max(ways)
    words = [
        f"{n}, {'whole' if w else 'each cut'}" if d.tensor > 1 else n
        for n, w in ((d.expert, d.whole_experts), (expert, whole))
    ]
    giving.up("expert parallelism", *words, expert=expert, whole_experts=whole and d.tensor > 1)


def _cut_evenly(d: Description, expert: int, whole: bool) -> bool:
    """Whether its mesh supports this expert-parallel degree. Without expert parallelism, tensor-parallel devices shard
    each expert."""
    if expert == 1:
        return not whole
    within, rest = divmod(expert, d.tensor if whole else 1)
    return not rest and (within == 1 or (within % d.context == 0 and d.shards % within == 0))


def _give_up_zero(giving: Giving) -> None:
    d = giving.description
    alone = d.tensor == d.pipeline == d.context == 1 and (d.expert or 1) == 1
    if d.data * d.context == 1:
        return
    if d.pipeline > 1 and d.zero != 1:
        giving.up("ZeRO", d.zero, "1: a pipeline accumulates whole gradients", zero=1)
    elif d.pipeline == 1 and (d.zero == 1 or (d.zero == 0 and not alone)):
        giving.up("ZeRO", d.zero, "2: torchtitan has no 1, and ZeRO 0 only without other parallelism", zero=2)


def _give_up_recomputation(giving: Giving) -> None:
    d = giving.description
    if any(d.selective) and not (d.selective == d.layers and d.kept.but == OPERATORS):
        common.give_up_selective(giving, "whole blocks")
    d = giving.description
    if any(d.full) and d.full != d.layers and recomputed_every(d) is None:
        step = next((n for n in range(max(d.layers), 0, -1) if _covers(recomputed_layers(d, n), d.full)), 1)
        full = recomputed_layers(d, step)
        there = "all" if step == 1 else f"every {step}. layer of a rank"
        giving.up("recomputed blocks", ", ".join(map(str, d.full)), there, full=full)


def _covers(full: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return all(have >= want for have, want in zip(full, wanted, strict=True))


TORCHTITAN = Target(
    name="torchtitan",
    about="torchtitan 0.2: train.toml (later ones: plan_config.py)",
    main="train.toml",
    nearest=nearest,
    write=write,
    read=read,
    fill_in=fill_in,
    latent=True,
)
