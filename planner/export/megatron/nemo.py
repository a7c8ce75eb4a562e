"""NeMo 2.5: a Python recipe with the settings of a plan assigned over it.

    recipe = llm.llama3_8b.pretrain_recipe(num_nodes=8, num_gpus_per_node=8)
    recipe.trainer.strategy.tensor_model_parallel_size = 8

It is based on Megatron-LM, so everything is as in `megatron.py`; `nemo_paths.py` has the place of each argument.
Defaults of Megatron-LM are written too, because recipes change them. The recipe of one size of a family is taken, and
all dimensions of the model are assigned. A context is a ring or Ulysses, not both:
`hierarchical_context_parallel_sizes` does not reach the process groups.

NeMo 2.7.3 is the last version with recipes of language models; those written here are the same from 2.5.3 on, and every
path is a field in NeMo 2.5.3, 2.6.2 and 2.7.3 and in megatron-core 0.14.0, 0.15.3 and 0.16.1. Source: nemo/lightning/
pytorch/strategies/megatron_strategy.py, plugins/mixed_precision.py, nemo/collections/llm/recipes; megatron-core 0.14.0,
transformer/transformer_config.py, distributed/distributed_data_parallel_config.py, optimizer/optimizer_config.py.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hardware_profiles import engine_words
from planner.export import common
from planner.export.architecture import Architecture
from planner.export.description import Description, ExportError
from planner.export.files.arguments import Option, option
from planner.export.files.quoting import in_docstring
from planner.export.megatron import megatron
from planner.export.megatron.megatron_writing import (
    OPTIMIZERS,
    bucket_elements,
    degree_options,
    dispatch_options,
    model_options,
    overlap_options,
    recompute_options,
    sends_once,
    stage_options,
    tells,
    training_options,
    zero_options,
)
from planner.export.megatron.nemo_paths import DDP, MODEL, PATHS, STRATEGY, TORCH_DTYPES
from planner.export.megatron.nemo_reading import read
from planner.export.shell import torchrun_script
from planner.export.target import Asked, Giving, Job, Loss, Target


class _Written(str):
    """A value that is written into the recipe as it is, not as a string."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


_DTYPES_OF_STATES = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_OF_STATES = (*(f"--{name.replace('_', '-')}" for name in _DTYPES_OF_STATES), "--megatron-fsdp-main-grads-dtype")
_GRANTED: Mapping[str, object] = {
    f"{STRATEGY}virtual_pipeline_model_parallel_size": None,
    f"{STRATEGY}sequence_parallel": False,
    f"{STRATEGY}fsdp": None,
    f"{STRATEGY}account_for_embedding_in_pipeline_split": False,
    f"{STRATEGY}account_for_loss_in_pipeline_split": False,
    f"{DDP}use_distributed_optimizer": False,
    f"{DDP}overlap_grad_reduce": False,
    f"{DDP}overlap_param_gather": False,
    f"{DDP}data_parallel_sharding_strategy": "no_shard",
    f"{MODEL}recompute_granularity": None,
    f"{MODEL}recompute_method": None,
    f"{MODEL}recompute_num_layers": None,
}
"""Defaults of Megatron-LM that recipes may change."""

_BASES: Mapping[str, Mapping[str, int]] = {
    "dense": {"llama3_8b": 4096, "llama3_70b": 8192, "llama31_405b": 16384},
    "experts": {"mixtral_8x7b": 4096, "mixtral_8x22b": 6144},
    "gpt": {"gpt3_175b": 12288},
    "latent": {"deepseek_v2_lite": 2048, "deepseek_v3": 7168},
}
"""Recipes of each family, with the widths of their models, in their order."""

_STATES: Mapping[str, object] = {
    "optim.config.use_precision_aware_optimizer": False,
    **{f"optim.config.{name}": _Written("torch.float32") for name in ("main_params_dtype", *_DTYPES_OF_STATES)},
}
"""Dtypes of the optimizer, which the recipe of DeepSeek-V3 changes."""

_DEEPSEEK: Mapping[str, object] = {
    **_STATES,
    f"{STRATEGY}num_layers_in_first_pipeline_stage": None,
    f"{STRATEGY}num_layers_in_last_pipeline_stage": None,
    f"{STRATEGY}pipeline_model_parallel_layout": None,
    f"{MODEL}mtp_num_layers": None,
    f"{MODEL}apply_rope_fusion": False,
    f"{MODEL}rotary_scaling_factor": 1.0,
    f"{MODEL}mscale": 1.0,
    f"{MODEL}mscale_all_dim": 0.0,
    f"{MODEL}moe_enable_deepep": False,
    f"{MODEL}moe_shared_expert_overlap": False,
    f"{MODEL}q_lora_rank": None,
    f"{MODEL}moe_router_enable_expert_bias": False,
    f"{MODEL}moe_router_num_groups": None,
    f"{MODEL}moe_router_group_topk": None,
}
"""Settings of the DeepSeek recipes that other recipes do not change.

Their factors of YaRN also scale attention without YaRN, by 1.87 (nemo/collections/llm/gpt/model/deepseek.py:
DeepSeekConfig; megatron/core/transformer/multi_latent_attention.py: softmax_scale, core 0.14).
"""

_PRECISIONS = engine_words("nemo")
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.half", "fp32": "torch.float32"}


def nearest(description: Description) -> tuple[Loss, ...]:
    """What NeMo cannot be told."""
    giving = Giving(description)
    megatron.give_up_replicated_experts(giving)
    losses = nearest_of_recipes(giving.description, "NeMo")
    return (*giving.losses, *losses)


def nearest_of_recipes(description: Description, engine: str) -> tuple[Loss, ...]:
    """What neither NeMo nor Megatron Bridge can be told."""
    common.refuse_other_training(description, engine, tuple(OPTIMIZERS))
    giving = Giving(description)
    common.give_up_offload(giving)
    if description.ring > 1 and description.heads > 1:
        common.give_up_other_rings(giving)
    return (*giving.losses, *megatron.nearest_of(giving.description))


def write(job: Job) -> Mapping[str, str]:
    """`recipe.py`, and the script that starts it. Raises ExportError for a model with unknown dimensions."""
    job = as_told(job)
    return recipe_files(job, "NeMo", "NeMo 2.5 on megatron-core 0.14", _recipe)


def as_told(job: Job) -> Job:
    """The job without what core 0.14 has not: HybridEP; NeMo's step does not overlap the exchange of experts."""
    overlapped = tuple(name for name in job.overlapped if name != "exchange")
    return replace(job, overlapped=overlapped, dispatcher=job.dispatcher if job.dispatcher == "deepep" else "")


def recipe_files(job: Job, engine: str, version: str, recipe: Callable[[Job, Architecture], str]) -> Mapping[str, str]:
    """The recipe of an engine that is told all dimensions of a model, and the script that starts it.

    Raises ExportError for a model with unknown dimensions.
    """
    if job.architecture is None:
        raise ExportError(
            f"{engine} is told all dimensions of a model, and those of {job.model} are not known: export to megatron,"
            " and add the arguments that describe the model"
        )
    return {
        "recipe.py": recipe(job, job.architecture),
        "launch.sh": torchrun_script(job, f"{job.model} with {version}.", '"$(dirname "$0")/recipe.py"', ()),
    }


def fill_in(_: Job) -> Asked:
    """What the recipe leaves open."""
    return (("", "your data (`recipe.data`), which is made up now, and where to keep checkpoints (`recipe.log`)"),)


def _recipe(job: Job, a: Architecture) -> str:
    d = job.description
    base = _base(a)
    lines = [f"recipe.{path} = {value!r}" for path, value in sorted(_assignments(job, a).items())]
    dtype = _DTYPES[d.precision]
    overlaps = [f"run.Config(MegatronCommOverlapCallback, {comm_overlap(job)})"] if overlap_options(job) else []
    return f'''"""{in_docstring(job.model)} with NeMo 2.5 on megatron-core 0.14: what a plan says, over a recipe.

`bash launch.sh` runs it. Data is made up (`recipe.data`) and nothing is kept but logs, until you put in your own.
"""

import nemo_run as run
import torch
from nemo import lightning as nl
from nemo.collections import llm
{_OVERLAPS if overlaps else ""}from nemo.utils.exp_manager import TimingCallback

recipe = llm.{base}.pretrain_recipe(num_nodes={job.nodes}, num_gpus_per_node={job.processes})
recipe.trainer.plugins = run.Config(
    nl.MegatronMixedPrecision,
    precision={_PRECISIONS[d.precision]!r},
    params_dtype={dtype},
    pipeline_dtype={dtype},
    autocast_enabled=False,
    grad_reduce_in_fp32={d.precision == "fp32" or d.update.gradient_dtype != "parameter"},
)
recipe.trainer.callbacks = [{", ".join(("run.Config(TimingCallback)", *overlaps))}]
{chr(10).join(lines)}

if __name__ == "__main__":
    run.run(recipe, direct=True)
'''


_OVERLAPS = "from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback\n"
"""It makes the buffers of tensor parallelism that overlaps, and buckets as large as the stack's."""


def comm_overlap(job: Job) -> str:
    """What overlaps, as arguments of NeMo's callback and of Megatron Bridge's `CommOverlapConfig`. Both decide what
    they are not told."""
    told = {name for name, _ in overlap_options(job)}
    names = ("tp-comm-overlap", "overlap-grad-reduce", "overlap-param-gather")
    found = {name.replace("-", "_"): f"--{name}" in told for name in names}
    buckets = job.description.update.bucket_size
    own = {"overlap_grad_reduce": True, "bucket_size": bucket_elements(job.description)} if buckets else {}
    return ", ".join(f"{name}={value}" for name, value in {**found, **own}.items())


def _base(a: Architecture) -> str:
    """The recipe of the family whose model has the same width, or the widest one that is narrower."""
    family = "gpt" if a.family == "gpt" else "latent" if a.latent else "dense" if a.experts is None else "experts"
    recipes = _BASES[family]
    narrow = [name for name, width in recipes.items() if width <= a.hidden]
    return narrow[-1] if narrow else next(iter(recipes))


def _assignments(job: Job, a: Architecture) -> dict[str, object]:
    """Every setting by its path."""
    d = job.description
    found: dict[str, object] = {**_GRANTED, **(_DEEPSEEK if a.latent else {})}
    options: list[Option] = [
        *model_options(a, d),
        *dispatch_options(job),
        *degree_options(d),
        *stage_options(d, a.predicted),
        *zero_options(d),
        *recompute_options(d),
        *training_options(d),
        *overlap_options(job),
        option("nnodes", job.nodes),
        option("nproc-per-node", job.processes),
    ]
    for name, values in options:
        path = PATHS.get(name.removeprefix("--"))
        if path is not None:
            found[path] = value_of(name, values)
    if d.context > 1:
        found[f"{MODEL}cp_comm_type"] = "p2p" if d.ring > 1 else "a2a"
    if d.virtual_stages > 1:  # Megatron-LM overlaps transfers of virtual stages by default, its configuration does not
        found[f"{STRATEGY}virtual_pipeline_model_parallel_size"] = d.virtual_stages
        found |= {f"{MODEL}overlap_p2p_comm": True, f"{MODEL}batch_p2p_comm": False}
    if sends_once(job):
        found[f"{MODEL}moe_enable_deepep"] = True
    found["optim.config.use_distributed_optimizer"] = d.zero > 0
    found[f"{MODEL}seq_length"] = d.sequence_length or a.sequence
    found[f"{MODEL}vocab_size"] = a.vocabulary
    found[f"{MODEL}share_embeddings_and_output_weights"] = a.tied
    if d.zero > 1:
        found[f"{STRATEGY}fsdp"] = "megatron"
        found[f"{DDP}average_in_collective"] = False
        found[f"{MODEL}gradient_accumulation_fusion"] = False
    return found


def value_of(name: str, values: Any) -> object:
    """The values of an argument in Python form."""
    if name in ("--recompute-modules",):
        return [str(value) for value in values]
    if name == "--moe-layer-freq":  # Megatron-LM evaluates `([0]*3+[1]*58)`, its configuration does not
        dense, sparse = map(int, re.findall(r"\*(\d+)", values[0]))
        return [0] * dense + [1] * sparse
    if not values:
        return True
    if name in _OF_STATES:
        return _Written(TORCH_DTYPES[values[0]])
    return values[0]


NEMO = Target(
    name="nemo",
    about="NeMo 2.5: recipe.py",
    main="recipe.py",
    nearest=nearest,
    write=write,
    read=read,
    fill_in=fill_in,
    tells=lambda job: tells(as_told(job)),
    needs_architecture=True,
    latent=True,
)
