"""Megatron-LM: arguments of `pretrain_gpt.py`, for the parser of core 0.16.

    tensor, pipeline, context     --tensor-model-parallel-size, --pipeline-..., --context-parallel-size
    data                          the remaining degree of the launcher's devices
    ring, heads, both             --cp-comm-type p2p, a2a, a2a+p2p with --hierarchical-context-parallel-sizes HEADS RING
    ZeRO 1                        --use-distributed-optimizer: states are cut; gradients are kept whole, and scattered;
                                  with Adam alone, as ZeRO 2 and 3: SGD has ZeRO 0
    ZeRO 2, 3                     --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads, optim_grads_params
    HSDP                          --num-distributed-optimizer-instances replicas of everything that is sharded
    uneven stages                 --pipeline-model-parallel-layout, the content of every stage: Ett|ttt|ttL
    recomputation                 --recompute-granularity full by block: the first N layers of each (virtual) stage;
                                  selective: modules, of which core_attn is attention and layernorm the norms
    weights gathered in fp8       --fp8-param-gather, where Megatron-FSDP cuts them (ZeRO 3); with the distributed
                                  optimizer it gathers once a step and stores whole fp8 weights, which no plan does
    offload of states             --optimizer-cpu-offload with the distributed optimizer, all of them or none

The order of its rings is always zigzag. Gradients are clipped to 1.0 by default. Source: NVIDIA/Megatron-LM, branch
core_r0.16.0, megatron/training/arguments.py and megatron/core.
"""

from planner.export import common
from planner.export.description import Description, default_gradient_dtype
from planner.export.megatron.megatron_reading import read
from planner.export.megatron.megatron_refusals import check_samples
from planner.export.megatron.megatron_writing import (
    FP8_GATHERED,
    FP8_RECIPES,
    MODULES,
    OPTIMIZERS,
    WHOLE_SHARDED,
    fill_in,
    tells,
    write,
)
from planner.export.target import Giving, Loss, Target

SCHEDULES = ("1f1b", "interleaved_1f1b")


def nearest(description: Description) -> tuple[Loss, ...]:
    """What Megatron-LM cannot be told."""
    giving = Giving(description)
    give_up_replicated_experts(giving)
    return (*giving.losses, *nearest_of(giving.description, gathers=_gathers(giving.description)))


def give_up_replicated_experts(giving: Giving) -> None:
    """Give up replicas (HSDP) of Megatron-FSDP beside expert parallelism.

    Up to core 0.16 it shards experts as if all devices had the same ones (mcore_fsdp_adapter.py, _init_dist_index).
    """
    d = giving.description
    if d.zero > 1 and (d.expert or 1) > 1:
        common.give_up_replicas(giving)


def _gathers(d: Description) -> tuple[str, ...]:
    """Recipes under which weights are gathered in fp8: with states on the host delayed scaling alone (validate_args,
    core 0.16 to 0.20)."""
    if d.zero != WHOLE_SHARDED:
        return ()
    on_host = d.states_at == "host" and d.optimizer == "adamw"
    return tuple(name for name in FP8_GATHERED if not on_host or name == "delayed")


def nearest_of(
    description: Description,
    schedules: tuple[str, ...] = SCHEDULES,
    *,
    gathers: tuple[str, ...] = (),
    aware: bool = True,
) -> tuple[Loss, ...]:
    """What Megatron-LM, or an engine based on it, cannot be told.

    Args:
        description: the description.
        schedules: schedules of the engine.
        gathers: fp8 recipes under which it gathers weights in fp8.
        aware: whether it can be told the dtype of moments.
    """
    common.refuse_other_training(description, "Megatron-LM", tuple(OPTIMIZERS))
    check_samples(description)
    giving = Giving(description)
    _give_up_shards_of_sgd(giving)
    common.give_up_schedules(giving, schedules)
    common.give_up_interleave(giving)
    gathers = gathers if giving.description.zero else ()
    common.give_up_fp8(giving, tuple(FP8_RECIPES), leaves_out=False, takes_experts=True, gathers=gathers)
    _give_up_layouts(giving)
    _give_up_recomputation(giving)
    d = giving.description
    common.give_up_offload(giving, states=("host",) if d.zero and d.optimizer == "adamw" else ())
    narrow = () if description.precision == "fp32" else ("parameter",)
    dtypes = (default_gradient_dtype(d), *narrow)
    moments = _moment_dtypes(giving.description) if aware else ("fp32",)
    buckets = not giving.description.in_a_v  # DualPipeV of MindSpeed refuses --overlap-grad-reduce
    common.give_up_updates(giving, buckets=buckets, gradient_dtypes=dtypes, moment_dtypes=moments)
    return tuple(giving.losses)


def _give_up_shards_of_sgd(giving: Giving) -> None:
    """Give up ZeRO beside SGD: the distributed optimizer, on which Megatron-FSDP is built, too, takes Adam alone
    (megatron/core/optimizer/distrib_optimizer.py, core 0.12 to 0.20)."""
    d = giving.description
    if d.optimizer != "adamw" and d.zero:
        giving.up("ZeRO", d.zero, "0: its distributed optimizer takes Adam alone", zero=0, replicas=1)


def _moment_dtypes(d: Description) -> tuple[str, ...]:
    """Possible dtypes of moments.

    The precision-aware optimizer is Adam with the distributed optimizer, and keeps moments in fp32 on the host
    (megatron/core/optimizer/optimizer_config.py). With weights of Megatron-FSDP it does not do the same as plans.
    """
    narrow = d.zero == 1 and d.optimizer == "adamw" and d.precision != "fp32" and d.states_at == "device"
    return ("fp32", "bf16") if narrow else ("fp32",)


def _give_up_layouts(giving: Giving) -> None:
    d = giving.description
    if d.ring > 1 and not d.zigzag:
        giving.up("order of the ring", "contiguous", "zigzag", zigzag=True)
    common.give_up_cut_hidden(giving)
    if d.expert is not None and d.tensor > 1 and not d.sequence_parallel:
        giving.up("norms of a model with experts", "whole", "along the sequence", sequence_parallel=True)


def _give_up_recomputation(giving: Giving) -> None:
    d = giving.description
    if any(d.selective) and not _says_modules(d):
        common.give_up_selective(giving, "whole blocks")
    if not any(giving.description.selective):
        common.give_up_uneven_recomputation(giving, "equally many")


def _says_modules(d: Description) -> bool:
    """Whether all recomputed parts are modules that it knows, in every block.

    With delayed scaling of fp8 it refuses norms (megatron/core/transformer/transformer_config.py,
    TransformerConfig.__post_init__, core 0.16 to 0.20).
    """
    if d.fp8.delayed and "normalisation" in d.kept.but:
        return False
    return d.selective == d.layers and bool(d.kept.but) and set(d.kept.but) <= MODULES.keys()


MEGATRON = Target(
    name="megatron",
    about="Megatron-LM core 0.16: arguments of pretrain_gpt.py in launch.sh",
    main="launch.sh",
    nearest=nearest,
    write=write,
    read=read,
    fill_in=fill_in,
    tells=tells,
    latent=True,
)
