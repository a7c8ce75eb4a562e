"""Megatron Bridge, the successor of NeMo: a Python recipe with the settings of a plan assigned over it.

    cfg = vanilla_gpt_pretrain_config()
    cfg.model.tensor_model_parallel_size = 8

It is based on Megatron-LM, so everything is as in `megatron.py`; `PATHS` has the place of each argument in the
`ConfigContainer`. The recipe below has the defaults of Megatron-LM and nothing else. So all dimensions of a model are
assigned, and so are settings with other defaults in the container. A context is a ring or Ulysses, not both: process
groups are not made from `hierarchical_context_parallel_sizes` everywhere.

Source: NVIDIA-NeMo/Megatron-Bridge 0.7 (067f987d), recipes/gpt/vanilla_gpt.py, models/gpt_provider.py, training/
{config,mixed_precision,pretrain,initialize}.py, docs/megatron-lm-to-megatron-bridge.md.
"""

from collections.abc import Mapping

from planner.export.architecture import Architecture
from planner.export.description import Description
from planner.export.files.arguments import Option, option
from planner.export.files.quoting import in_docstring
from planner.export.megatron.megatron_writing import (
    degree_options,
    dispatch_options,
    fsdp_options,
    model_options,
    overlap_options,
    overlaps_exchange,
    recompute_options,
    stage_options,
    tells,
    training_options,
    zero_options,
)
from planner.export.megatron.nemo import comm_overlap, nearest_of_recipes, recipe_files, value_of
from planner.export.megatron.nemo_paths import PATHS as NEMO_PATHS
from planner.export.megatron.nemo_paths import PLUGIN
from planner.export.megatron.nemo_reading import read
from planner.export.target import Asked, Job, Target

_STRATEGY, _DDP, _MODEL, _OPTIMIZER = "trainer.strategy.", "trainer.strategy.ddp.", "model.config.", "optim.config."
_OWN: Mapping[str, str] = {
    "micro-batch-size": "train.micro_batch_size",
    "global-batch-size": "train.global_batch_size",
    "seq-length": "model.seq_length",
    "ckpt-format": "checkpoint.ckpt_format",
    "num-distributed-optimizer-instances": "ddp.num_distributed_optimizer_instances",
    "megatron-fsdp-main-grads-dtype": "ddp.megatron_fsdp_main_grads_dtype",
    "moe-flex-dispatcher-backend": "model.moe_flex_dispatcher_backend",
}
"""Settings that are not at the same place as in NeMo's recipe."""
_ELSEWHERE = frozenset({"nnodes", "nproc-per-node"})  # these are options of torchrun
_GRANTED: Mapping[str, str] = {
    "model.gradient_accumulation_fusion": "True",
    "ddp.average_in_collective": "False",
    "ddp.use_megatron_fsdp": "False",
    "ddp.data_parallel_sharding_strategy": "'no_shard'",
    "ddp.use_distributed_optimizer": "False",
    "ddp.overlap_grad_reduce": "False",
    "ddp.overlap_param_gather": "False",
    "model.should_pad_vocab": "True",
    "validation.eval_iters": "0",
}
"""Defaults of Megatron-LM that the recipe changes, or might change one day."""
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}


def _place(name: str, nemo: str) -> str:
    if name in _OWN:
        return _OWN[name]
    places = ((_DDP, "ddp."), (_STRATEGY, "model."), (_MODEL, "model."), (_OPTIMIZER, "optimizer."))
    for theirs, ours in (*places, (PLUGIN, "mixed_precision.")):
        if nemo.startswith(theirs):
            return ours + nemo.removeprefix(theirs)
    raise AssertionError(name)


PATHS: Mapping[str, str] = {
    **{name: _place(name, nemo) for name, nemo in NEMO_PATHS.items() if name not in _ELSEWHERE},
    **_OWN,
}
"""Places of the arguments of Megatron-LM in a `ConfigContainer`."""


def write(job: Job) -> Mapping[str, str]:
    """`recipe.py`, and the script that starts it. Raises ExportError for a model with unknown dimensions."""
    return recipe_files(job, "Megatron Bridge", "Megatron Bridge 0.7", _recipe)


def fill_in(_: Job) -> Asked:
    """What the recipe leaves open."""
    return (("", "your data (`cfg.dataset.blend`), which is made up now, iterations, learning rate, checkpoints"),)


def _recipe(job: Job, a: Architecture) -> str:
    lines = [f"cfg.{path} = {value}" for path, value in sorted(_assignments(job, a).items())]
    return f'''"""{in_docstring(job.model)} with Megatron Bridge 0.7: what a plan says.

`bash launch.sh` runs it. Data is made up (`cfg.dataset`) until you put in your own.
"""

{"from functools import partial" + chr(10) * 2 if a.latent else ""}import torch
{_LATENT_IMPORTS if a.latent else ""}from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config
{_OVERLAPS if overlap_options(job) else ""}from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
from megatron.bridge.training.pretrain import pretrain
{_LATENT_LAYERS if a.latent else ""}
cfg = vanilla_gpt_pretrain_config()
{_LATENT_MODEL if a.latent else ""}{_precision(job.description)}
{_overlaps(job)}{chr(10).join(lines)}

if __name__ == "__main__":
    pretrain(config=cfg, forward_step_func=forward_step)
'''


_LATENT_IMPORTS = "from megatron.bridge.models.mla_provider import MLAModelProvider\n"
_LATENT_LAYERS = "from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec\n"
_LATENT_MODEL = """cfg.model = MLAModelProvider()
cfg.model.transformer_layer_spec = partial(get_gpt_decoder_block_spec, use_transformer_engine=True)
"""
"""The model with latent attention, whose first layers have an MLP (models/deepseek/deepseek_v3_bridge.py)."""


_OVERLAPS = "from megatron.bridge.training.comm_overlap import CommOverlapConfig\n"


def _overlaps(job: Job) -> str:
    """What overlaps. It also sets the stack's buckets."""
    if not overlap_options(job):
        return ""
    exchange = ", overlap_moe_expert_parallel_comm=True" if overlaps_exchange(job) else ""
    return f"cfg.comm_overlap = CommOverlapConfig({comm_overlap(job)}{exchange})\n"


def _precision(d: Description) -> str:
    dtype = _DTYPES[d.precision]
    wide = d.precision == "fp32" or d.update.gradient_dtype != "parameter"
    return f"""cfg.mixed_precision = MixedPrecisionConfig(
    {d.precision}=True,
    params_dtype={dtype},
    pipeline_dtype={dtype},
    grad_reduce_in_fp32={wide},
)"""


def _assignments(job: Job, a: Architecture) -> dict[str, str]:
    """Every setting by its path, in Python form."""
    d = job.description
    options: list[Option] = [
        *model_options(a, d),
        *dispatch_options(job),
        *degree_options(d),
        *stage_options(d, a.predicted),
        *zero_options(d),
        *fsdp_options(d),
        *recompute_options(d),
        *training_options(d),
        *overlap_options(job),
        option("num-distributed-optimizer-instances", d.replicas),
    ]
    found = {**_GRANTED, **_shape(a, d)}
    for name, values in options:
        path = PATHS.get(name.removeprefix("--"))
        if path is not None:
            found[path] = repr(value_of(name, values))
    if d.context > 1:
        found["model.cp_comm_type"] = repr("p2p" if d.ring > 1 else "a2a")
    if d.virtual_stages > 1:  # Megatron-LM overlaps transfers of virtual stages by default, its configuration does not
        found |= {"model.overlap_p2p_comm": "True", "model.batch_p2p_comm": "False"}
        found["model.virtual_pipeline_model_parallel_size"] = repr(d.virtual_stages)
    found["optimizer.use_distributed_optimizer"] = repr(d.zero > 0)
    if d.zero > 1:
        found["model.gradient_accumulation_fusion"] = "False"
    return found


def _shape(a: Architecture, d: Description) -> dict[str, str]:
    """Dimensions that are flags of Megatron-LM."""
    llama, length = a.family != "gpt", d.sequence_length or a.sequence
    found: dict[str, object] = {
        "model.add_bias_linear": not llama,
        "model.gated_linear_unit": llama,
        "model.normalization": "RMSNorm" if llama else "LayerNorm",
        "model.position_embedding_type": "rope" if llama else "learned_absolute",
        "model.share_embeddings_and_output_weights": a.tied,
        "model.vocab_size": a.vocabulary,
        "tokenizer.vocab_size": a.vocabulary - 1,  # the NullTokenizer adds one word
        "dataset.seq_length": length,
        "model.seq_length": length,
        "train.train_iters": 100,
    }
    if a.latent is not None:
        found["model.multi_latent_attention"] = True
        found["model.apply_rope_fusion"] = False
        found["model.q_lora_rank"] = a.latent.q_rank or None
    written = {path: repr(value) for path, value in found.items()}
    return {**written, "model.activation_func": "torch.nn.functional.silu" if llama else "torch.nn.functional.gelu"}


MEGATRON_BRIDGE = Target(
    name="megatron-bridge",
    about="Megatron Bridge 0.7: recipe.py",
    main="recipe.py",
    beside="launch.sh",
    nearest=lambda description: nearest_of_recipes(description, "Megatron Bridge"),
    write=write,
    read=read,
    needs_architecture=True,
    latent=True,
    fill_in=fill_in,
    tells=tells,
)
