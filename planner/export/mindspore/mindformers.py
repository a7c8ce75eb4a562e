"""MindSpore Transformers (MindFormers): the YAML of `run_mindformer.py`.

    data, tensor, pipeline         parallel_config: data_parallel, model_parallel, pipeline_stage
    norms, vocabulary              use_seq_parallel; vocab_emb_dp, which leaves the vocabulary whole
    context                        context_parallel with context_parallel_algo ulysses_cp (heads), hybrid_cp with
                                   ulysses_degree_in_cp; model_config.use_ring_attention makes the rest a ring,
                                   contiguous, where keys are gathered otherwise
    experts                        expert_parallel; with moe_config.use_gmm over tensor parallel devices first, whole;
                                   else over data parallel ones, each cut by the tensor parallel ones
    ZeRO 1, 2, 3                   parallel.enable_parallel_optimizer; with gradient_accumulation_shard; and with
                                   parallel_optimizer_comm_recompute, which regathers where blocks are recomputed
    HSDP                           parallel_optimizer_config.optimizer_weight_shard_size: devices that shard
    stages                         model_config.offset: layers more or less than an equal part, a row for each of
                                   pp_interleave_num; parallel.pipeline_config has the scheduler
    interleave                         model_config.fine_grain_interleave: parts of runner_config.batch_size samples
    slices                         parallel_config.seq_split_num with scheduler seqpipe; not beside rings or recomputed
                                   blocks
    micro-batches                  micro_batch_num, with one stage runner_config.gradient_accumulation_steps
    recomputation                  recompute_config.recompute: layers of each stage; select_recompute: those whose
                                   activation and product of it are recomputed, select_comm_recompute: their norms

Gradients are reduced in fp32 (`gradient_fp32_sync`). Source: mindformers 2.1.0,
mindformers/modules/transformer/transformer.py (TransformerOpParallelConfig), tools/register/template.py,
core/config_args.py, parallel_core/training_graph/transformer/utils.py (LayerSetting), models/llama/llama_config.py;
MindSpore Transformers, "Distributed Parallelism Training".
"""

import math

from planner.export import common
from planner.export.description import Description, default_gradient_dtype, schedule_of
from planner.export.mindspore.mindformers_reading import read
from planner.export.mindspore.mindformers_writing import SCHEDULES, SELECTED, fill_in, write
from planner.export.target import Giving, Loss, Target


def nearest(description: Description) -> tuple[Loss, ...]:
    """What MindFormers cannot be told."""
    common.refuse_other_training(description, "MindFormers", ("adamw",))
    giving = Giving(description)
    common.give_up_offload(giving)
    common.give_up_schedules(giving, SCHEDULES)
    common.give_up_empty_stages(giving)
    common.give_up_fp8(giving)
    _give_up_experts(giving)
    _give_up_splits(giving)
    _give_up_recomputation(giving)
    _give_up_slices(giving)
    d = giving.description
    if d.zero == 3 and d.full != d.layers:
        giving.up("ZeRO", 3, "2: it gathers weights again only where blocks are recomputed", zero=2)
    common.give_up_updates(giving, gradient_dtypes=(default_gradient_dtype(giving.description),))
    return tuple(giving.losses)


def _give_up_splits(giving: Giving) -> None:
    d = giving.description
    if d.ring > 1 and d.zigzag:
        giving.up("order of the ring", "zigzag", "contiguous", zigzag=False)
    if d.interleave > 1 and not (d.tensor > 1 and d.sequence_parallel):
        giving.up("interleaved micro-batches without sequence parallelism", d.interleave, 1, interleave=1)
    common.give_up_cut_hidden(giving)


def _give_up_experts(giving: Giving) -> None:
    """Give up whole experts with context parallelism, and expert parallelism that is not over the innermost devices."""
    d = giving.description
    if d.expert is None:
        return
    if d.tensor > 1 and not d.sequence_parallel:  # refused: mindformers/tools/check_rules.py, _check_moe_parallel_valid
        giving.up("norms of a model with experts", "whole", "along the sequence", sequence_parallel=True)
    d = giving.description
    if d.expert is not None and d.whole_experts and d.context > 1:
        within = max(1, d.expert // d.tensor)
        giving.up("experts beside a context", "whole", "each cut", whole_experts=False, expert=within)
    d = giving.description
    assert d.expert is not None
    inner = d.tensor if d.whole_experts else 1
    most = math.gcd(d.expert // inner, d.data if d.context == 1 else d.data * d.context)
    if most * inner != d.expert:
        giving.up("expert parallelism", d.expert, most * inner, expert=most * inner)


def _give_up_slices(giving: Giving) -> None:
    """Give up slices beside recomputed blocks ("When using seq pipe, cannot apply full recompute", trainer/
    base_trainer.py) and beside rings ("the use_ring_attention cannot be True", models/llama/llama.py)."""
    d = giving.description
    if d.slices > 1 and (any(d.full) or d.ring > 1):
        why = "1: it slices no sequence of recomputed blocks, nor of rings"
        giving.up("slices of a sequence", d.slices, why, slices=1, schedule=schedule_of(d.pipeline, d.virtual_stages))


def _give_up_recomputation(giving: Giving) -> None:
    d = giving.description
    if any(d.selective) and d.kept.but not in SELECTED:
        common.give_up_selective(giving, "whole blocks")


MINDFORMERS = Target(
    name="mindformers",
    about="MindSpore Transformers 2.1: train.yaml",
    main="train.yaml",
    nearest=nearest,
    write=write,
    read=read,
    fill_in=fill_in,
)
