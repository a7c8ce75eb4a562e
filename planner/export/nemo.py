"""NeMo: a recipe in Python with what a plan says assigned over it, as NeMo 2.5 has it.

    recipe = llm.llama3_8b.pretrain_recipe(num_nodes=8, num_gpus_per_node=8)
    recipe.trainer.strategy.tensor_model_parallel_size = 8

Below it is Megatron-LM, so everything is as in `planner.export.megatron`; `_PATHS` says where each of its arguments
stands. What Megatron-LM takes for granted is written too, because recipes decide it otherwise. The recipe of one size
of a family is taken, and all dimensions of the model are assigned. Split contexts are rings or split by heads, not
both: `hierarchical_context_parallel_sizes` does not reach the process groups.

NeMo 2.5.3 is the last version with recipes of language models. Source: its nemo/lightning/pytorch/strategies/
megatron_strategy.py, plugins/mixed_precision.py, nemo/collections/llm/recipes; megatron-core 0.14.0, transformer/
transformer_config.py, distributed/distributed_data_parallel_config.py, optimizer/optimizer_config.py.
"""

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from hardware_profiles import engine_words
from hardware_profiles.foreign import ForeignTextError, literal, parse_python
from planner.export import common, megatron
from planner.export.architecture import Architecture
from planner.export.arguments import Option, Options, option
from planner.export.description import Description, ExportError
from planner.export.megatron_reading import read_options, read_run
from planner.export.megatron_writing import (
    OPTIMIZERS,
    degree_options,
    model_options,
    recompute_options,
    stage_options,
    training_options,
    zero_options,
)
from planner.export.quoting import in_docstring
from planner.export.shell import torchrun_script
from planner.export.target import Facts, Giving, Job, Loss, Reading, Target

_STRATEGY, _DDP, _MODEL = "trainer.strategy.", "trainer.strategy.ddp.", "model.config."

_PATHS: Mapping[str, str] = {
    "nnodes": "trainer.num_nodes",
    "nproc-per-node": "trainer.devices",
    "tensor-model-parallel-size": f"{_STRATEGY}tensor_model_parallel_size",
    "pipeline-model-parallel-size": f"{_STRATEGY}pipeline_model_parallel_size",
    "num-virtual-stages-per-pipeline-rank": f"{_STRATEGY}virtual_pipeline_model_parallel_size",
    "pipeline-model-parallel-layout": f"{_STRATEGY}pipeline_model_parallel_layout",
    "context-parallel-size": f"{_STRATEGY}context_parallel_size",
    "sequence-parallel": f"{_STRATEGY}sequence_parallel",
    "expert-model-parallel-size": f"{_STRATEGY}expert_model_parallel_size",
    "expert-tensor-parallel-size": f"{_STRATEGY}expert_tensor_parallel_size",
    "num-distributed-optimizer-instances": f"{_STRATEGY}num_distributed_optimizer_instances",
    "ckpt-format": f"{_STRATEGY}save_ckpt_format",
    "use-distributed-optimizer": f"{_DDP}use_distributed_optimizer",
    "use-megatron-fsdp": f"{_DDP}use_megatron_fsdp",
    "data-parallel-sharding-strategy": f"{_DDP}data_parallel_sharding_strategy",
    "overlap-grad-reduce": f"{_DDP}overlap_grad_reduce",
    "ddp-bucket-size": f"{_DDP}bucket_size",
    "cp-comm-type": f"{_MODEL}cp_comm_type",
    "recompute-granularity": f"{_MODEL}recompute_granularity",
    "recompute-method": f"{_MODEL}recompute_method",
    "recompute-num-layers": f"{_MODEL}recompute_num_layers",
    "recompute-modules": f"{_MODEL}recompute_modules",
    "micro-batch-size": "data.micro_batch_size",
    "global-batch-size": "data.global_batch_size",
    "seq-length": "data.seq_length",
    "optimizer": "optim.config.optimizer",
    "clip-grad": "optim.config.clip_grad",
    "num-layers": f"{_MODEL}num_layers",
    "hidden-size": f"{_MODEL}hidden_size",
    "ffn-hidden-size": f"{_MODEL}ffn_hidden_size",
    "num-attention-heads": f"{_MODEL}num_attention_heads",
    "num-query-groups": f"{_MODEL}num_query_groups",
    "kv-channels": f"{_MODEL}kv_channels",
    "norm-epsilon": f"{_MODEL}layernorm_epsilon",
    "attention-dropout": f"{_MODEL}attention_dropout",
    "hidden-dropout": f"{_MODEL}hidden_dropout",
    "rotary-base": f"{_MODEL}rotary_base",
    "qk-layernorm": f"{_MODEL}qk_layernorm",
    "make-vocab-size-divisible-by": f"{_MODEL}make_vocab_size_divisible_by",
    "num-experts": f"{_MODEL}num_moe_experts",
    "moe-router-topk": f"{_MODEL}moe_router_topk",
    "moe-ffn-hidden-size": f"{_MODEL}moe_ffn_hidden_size",
    "moe-token-dispatcher-type": f"{_MODEL}moe_token_dispatcher_type",
    "moe-grouped-gemm": f"{_MODEL}moe_grouped_gemm",
    "moe-router-load-balancing-type": f"{_MODEL}moe_router_load_balancing_type",
    "moe-aux-loss-coeff": f"{_MODEL}moe_aux_loss_coeff",
    "moe-shared-expert-intermediate-size": f"{_MODEL}moe_shared_expert_intermediate_size",
    "moe-layer-freq": f"{_MODEL}moe_layer_freq",
    "moe-router-pre-softmax": f"{_MODEL}moe_router_pre_softmax",
}
"""Where the arguments of Megatron-LM stand in a recipe."""

_ARGUMENTS = {path: name for name, path in _PATHS.items()}
_GRANTED: Mapping[str, object] = {
    f"{_STRATEGY}virtual_pipeline_model_parallel_size": None,
    f"{_STRATEGY}sequence_parallel": False,
    f"{_STRATEGY}fsdp": None,
    f"{_DDP}use_distributed_optimizer": False,
    f"{_DDP}overlap_grad_reduce": False,
    f"{_DDP}overlap_param_gather": False,
    f"{_DDP}data_parallel_sharding_strategy": "no_shard",
    f"{_MODEL}recompute_granularity": None,
    f"{_MODEL}recompute_method": None,
    f"{_MODEL}recompute_num_layers": None,
}
"""What Megatron-LM takes for granted, and recipes may not."""

_PRECISIONS = engine_words("nemo")
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.half", "fp32": "torch.float32"}
_ALSO = (
    "model.config.seq_length", "model.config.vocab_size", "model.config.gradient_accumulation_fusion",
    "model.config.share_embeddings_and_output_weights", "optim.config.use_distributed_optimizer",
    f"{_STRATEGY}fsdp", f"{_DDP}average_in_collective", f"{_DDP}overlap_param_gather", "trainer.max_steps",
)  # fmt: skip


def nearest(description: Description) -> tuple[Loss, ...]:
    """What NeMo cannot be told."""
    common.refuse_other_training(description, "NeMo", tuple(OPTIMIZERS))
    giving = Giving(description)
    if description.ring > 1 and description.heads > 1:
        common.give_up_other_rings(giving)
    return (*giving.losses, *megatron.nearest(giving.description))


def write(job: Job) -> Mapping[str, str]:
    """`recipe.py`, and the script that starts it. Raises ExportError for a model that no recipe builds."""
    a = job.architecture
    if a is None:
        raise ExportError(
            f"NeMo's recipes build Llama, Mixtral and GPT; there is none that builds {job.model}: export to megatron,"
            " whose arguments say who does what and leave the model to you"
        )
    title = f"{job.model} with NeMo 2.5 on megatron-core 0.14."
    return {
        "recipe.py": _recipe(job, a),
        "launch.sh": torchrun_script(job, title, '"$(dirname "$0")/recipe.py"', ()),
    }


def _recipe(job: Job, a: Architecture) -> str:
    d = job.description
    base = "gpt3_175b" if a.family == "gpt" else "llama3_8b" if a.experts is None else "mixtral_8x7b"
    lines = [f"recipe.{path} = {value!r}" for path, value in sorted(_assignments(job, a).items())]
    dtype = _DTYPES[d.precision]
    return f'''"""{in_docstring(job.model)} with NeMo 2.5 on megatron-core 0.14: what a plan says, over a recipe.

`bash launch.sh` runs it. Data is made up (`recipe.data`) and nothing is kept but logs, until you put in your own.
"""

import nemo_run as run
import torch
from nemo import lightning as nl
from nemo.collections import llm

recipe = llm.{base}.pretrain_recipe(num_nodes={job.nodes}, num_gpus_per_node={job.processes})
recipe.trainer.plugins = run.Config(
    nl.MegatronMixedPrecision,
    precision={_PRECISIONS[d.precision]!r},
    params_dtype={dtype},
    pipeline_dtype={dtype},
    autocast_enabled=False,
    grad_reduce_in_fp32={d.precision == "fp32" or d.update.gradient_dtype != "parameter"},
)
{chr(10).join(lines)}

if __name__ == "__main__":
    run.run(recipe, direct=True)
'''


def _assignments(job: Job, a: Architecture) -> dict[str, object]:
    """Every setting by its path."""
    d = job.description
    found: dict[str, object] = dict(_GRANTED)
    options: list[Option] = [
        *model_options(a, d),
        *degree_options(d),
        *stage_options(d),
        *zero_options(d),
        *recompute_options(d),
        *training_options(d),
        option("nnodes", job.nodes),
        option("nproc-per-node", job.processes),
    ]
    for name, values in options:
        path = _PATHS.get(name.removeprefix("--"))
        if path is not None:
            found[path] = _value(name, values)
    if d.context > 1:
        found[f"{_MODEL}cp_comm_type"] = "p2p" if d.ring > 1 else "a2a"
    if d.virtual_stages > 1:
        found[f"{_STRATEGY}virtual_pipeline_model_parallel_size"] = d.virtual_stages
    found["optim.config.use_distributed_optimizer"] = d.zero > 0
    found[f"{_MODEL}seq_length"] = d.sequence_length or a.sequence
    found[f"{_MODEL}vocab_size"] = a.vocabulary
    found[f"{_MODEL}share_embeddings_and_output_weights"] = a.tied
    if d.zero > 1:
        found[f"{_STRATEGY}fsdp"] = "megatron"
        found[f"{_DDP}average_in_collective"] = False
        found[f"{_MODEL}gradient_accumulation_fusion"] = False
    return found


def _value(name: str, values: Any) -> object:
    if name in ("--recompute-modules",):
        return [str(value) for value in values]
    if not values:
        return True
    return values[0]


def read(text: str, facts: Facts) -> Reading:
    """What is assigned in a recipe, as a description; what the recipe below decides itself is not known."""
    try:
        tree = parse_python(text)
    except ForeignTextError as error:
        raise ExportError(str(error)) from error
    given = dict(_assigned(tree))
    if not given:
        raise ExportError("no setting of a recipe is assigned; give a file with recipe.trainer.strategy... = ...")
    options = Options(dict(_options(given)))
    description, notes = read_options(options, facts)
    read_run(options)
    options.words("num-virtual-stages-per-pipeline-rank")  # said by a layout, too
    strange = sorted(path for path in given if path not in _ARGUMENTS and path not in (*_ALSO, _PRECISION, _REDUCED))
    strange += [_PATHS[name] for name in options.unread if name in _PATHS]
    if strange:
        notes.append(f"not read: {', '.join(strange)}")
    return Reading(description=description, notes=tuple(notes))


_PRECISION, _REDUCED = "trainer.plugins.precision", "trainer.plugins.grad_reduce_in_fp32"


def _assigned(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """Paths below the recipe with the values that are assigned to them, where those are plain; and what a plugin is
    made with."""
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        path = ast.unparse(node.targets[0]).partition(".")[2]
        if isinstance(node.value, ast.Call):
            for keyword in node.value.keywords:
                if keyword.arg in ("precision", "grad_reduce_in_fp32") and isinstance(keyword.value, ast.Constant):
                    yield f"{path}.{keyword.arg}", keyword.value.value
            continue
        try:
            yield path, literal(node.value)
        except ForeignTextError:
            continue  # made by a call, or not a number that we read


def _options(given: Mapping[str, object]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The arguments of Megatron-LM that say the same."""
    for path, value in given.items():
        name = _ARGUMENTS.get(path)
        if name is None or value is None or value is False:
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        yield name, tuple(f"{one:g}" if isinstance(one, float) else str(one) for one in values)
    precision = str(given.get(_PRECISION, "bf16-mixed"))
    wide = bool(given.get(_REDUCED, True))
    known = {theirs: ours for ours, theirs in _PRECISIONS.items()}
    if precision not in known:
        raise ExportError(f"precision {precision}: plans are read with {', '.join(known)}")
    if known[precision] != "fp32":
        yield known[precision], ()
        if wide and known[precision] == "fp16":
            yield "accumulate-allreduce-grads-in-fp32", ()
        if not wide and known[precision] == "bf16":
            yield "grad-reduce-in-bf16", ()


NEMO = Target(
    name="nemo",
    about="NeMo 2.5: recipe.py",
    main="recipe.py",
    nearest=nearest,
    write=write,
    read=read,
    needs_architecture=True,
)
