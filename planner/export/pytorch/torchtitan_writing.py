"""Writes a description as the TOML of torchtitan, with the script that starts it."""

import math
from collections.abc import Mapping, Sequence

from hardware_profiles import engine_words
from planner.export.description import Description, ExportError
from planner.export.files.quoting import one_line
from planner.export.files.toml import toml_text
from planner.export.pytorch.torchtitan_registry import AMONG_OURS, LAUNCH, known, no_place, registry_files
from planner.export.shell import torchrun_script
from planner.export.target import Asked, Job
from planner.graph.fp8 import Fp8
from planner.plan.layout.kept import EVERY_SECOND_PRODUCT

SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B", "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}  # fmt: skip
DTYPES = engine_words("torchtitan")
FLAVORS = {"llama8b": ("llama3", "8B"), "llama70b": ("llama3", "70B"), "llama405b": ("llama3", "405B"),
           "qwen3-0.6b": ("qwen3", "0.6B"), "qwen3-1.7b": ("qwen3", "1.7B"), "qwen3-4b": ("qwen3", "4B"),
           "qwen3-8b": ("qwen3", "8B"), "qwen3-14b": ("qwen3", "14B"), "qwen3-32b": ("qwen3", "32B"),
           "qwen3-30b-a3b": ("qwen3", "30B-A3B"), "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
           "deepseek-v3": ("deepseek_v3", "671B"), "deepseek-v2-lite": ("deepseek_v3", "16B")}  # fmt: skip
FP8 = "quantize.linear.float8"
MX = "quantize.linear.mx"
"""The converters of linear layers, and the sections that they read."""
FP8_RECIPES = {
    "tensorwise": (FP8, ""), "rowwise": (FP8, "rowwise"), "rowwise_with_gw_hp": (FP8, "rowwise_with_gw_hp"),
    "mxfp8": (MX, "mxfp8_cublas"),
}  # fmt: skip
"""The converter, and its `recipe_name`; empty for per-tensor scales."""
GATHERED = ("tensorwise",)
"""Recipes under which FSDP gathers weights in fp8 (torchao's float8 tensors; row-wise scales have none)."""
GATHERS, AGREES = "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"
"""Settings: whether weights are gathered in fp8, and whether all of their scales are computed at once after the
optimizer."""
HEAD = "output"
"""The layer that is never in fp8 here, as part of the names of modules."""
MODULES = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}  # fmt: skip
"""Linear layers of a Llama block, in the names of Hugging Face and of torchtitan."""
_EVERY = "model.layers.*.{}.weight"
OPERATORS = ("elementwise", EVERY_SECOND_PRODUCT, "normalisation")  # what "op" recomputes
Sections = dict[str, dict[str, object]]


def write(job: Job) -> Mapping[str, str]:
    """`train.toml`, and the script that starts torchtitan 0.2 with it; and what later versions read instead."""
    sections = _sections(job)
    title = f"{job.model} with torchtitan 0.2; the tokenizer is in HF_ASSETS."
    files: tuple[str, ...] = (
        '--job.config_file "$(dirname "$0")/train.toml"',
        '--model.hf_assets_path "${HF_ASSETS:?}"',
    )
    if "name" not in sections["model"]:
        title += " It has no flavor of this model: say which one of yours it is in MODEL and FLAVOR."
        files += ('--model.name "${MODEL:?}"', '--model.flavor "${FLAVOR:?}"')
    ring = {f"{RING}.py": _RING} if job.description.context > 1 else {}
    exports = (AMONG_OURS,) if ring else ()
    files += (f"--experimental.custom_import {RING}",) if ring else ()
    script = torchrun_script(job, title, "-m torchtitan.train", (), also=files, exports=exports)
    later = registry_files(job, sections["parallelism"], sections["training"])
    return {"train.toml": toml_text(sections), "launch.sh": script, **ring, **later}


RING = "plan_ring"
_RING = '''"""torchtitan 0.2.2 imports this first; its trainer reads no `context_parallel_rotate_method`."""

from torch.distributed.tensor.experimental._attention import set_rotate_method

set_rotate_method("alltoall")
'''
"""Keys go round the ring of a context, as plans are priced. Without it they are gathered: 0.2.1 set the method in each
step, 0.2.2 sets it in its validator alone (torchtitan/distributed/utils.py: create_context_parallel_ctx)."""


def fill_in(job: Job) -> Asked:
    """What the file leaves open."""
    assets = ("HF_ASSETS", "the folder of the tokenizer, as `scripts/download_hf_assets.py` makes it")
    data = ("", "your data set (`training.dataset`), steps and learning rate")
    wrong = no_place(job.description)
    later = f"`{LAUNCH}` in the place of `launch.sh` where torchtitan is later than 0.2.2 and reads no TOML"
    if job.description.context > 1:
        later += "; it gathers the keys of a context there (FlexAttention), where 0.2.2 sends them round a ring"
    if wrong or job.architecture is None:
        later = f"torchtitan 0.2.2, as later ones have no setting for {wrong or 'a model that is known by its graph'}"
    version = ("", later)
    if _flavor(job) is not None and (wrong or known(job)):
        return assets, data, version
    return (
        assets,
        ("MODEL", f"the model of torchtitan that this one is, which has no flavor of it (for `{LAUNCH}` the module)"),
        ("FLAVOR", f"your flavor of it; without one torchtitan trains its debug model (for `{LAUNCH}` the function)"),
        data,
        version,
    )


def _flavor(job: Job) -> tuple[str, str] | None:
    return None if job.architecture is None else FLAVORS.get(job.model)


def _sections(job: Job) -> Sections:
    d = job.description
    flavor = _flavor(job)
    if flavor is not None and flavor[0] == "qwen3" and d.pipeline > 1:
        raise ExportError(
            f"torchtitan 0.2 has no pipeline for {job.model}; plan again with --pipeline 1, or take another engine"
        )
    if flavor is not None and flavor[0] == "deepseek_v3" and d.context > 1:
        raise ExportError(
            f"torchtitan has no context parallelism for {job.model}, whose attention is FlexAttention there; plan again"
            " with --context 1, or take another engine"
        )
    model: dict[str, object] = {} if flavor is None else {"name": flavor[0], "flavor": flavor[1]}
    if d.fp8:
        model["converters"] = [FP8_RECIPES[d.fp8.recipe][0]]
    fp8: Sections = {"quantize": {"linear": _fp8(d.fp8)}} if d.fp8 else {}
    return {
        "job": {"description": f"{one_line(job.model)} on {d.devices} devices"},
        "model": model,
        "optimizer": {"name": "AdamW"},
        "training": _training(d),
        "parallelism": _parallelism(d),
        "activation_checkpoint": _checkpoint(d),
        **fp8,
    }


def says_left_out(fp8: Fp8) -> bool:
    """Whether torchtitan has names for all layers that are left out of fp8."""
    return {*fp8.left_out} <= {_EVERY.format(ours) for ours in MODULES}


def _fp8(fp8: Fp8) -> dict[str, object]:
    converter, name = FP8_RECIPES[fp8.recipe]
    found: dict[str, object] = {"recipe_name": name} if name else {}
    left_out = [theirs for ours, theirs in MODULES.items() if _EVERY.format(ours) in fp8.left_out]
    found |= {GATHERS: True, AGREES: True} if fp8.gathered else {}
    return {converter.rpartition(".")[2]: {**found, "filter_fqns": [HEAD, *left_out]}}


def read_left_out(names: Sequence[str]) -> tuple[str, ...] | None:
    """The patterns of layers that are left out of fp8, from `filter_fqns`; None if one of them is something else."""
    known = {theirs: _EVERY.format(ours) for ours, theirs in MODULES.items()}
    known |= {theirs.rpartition(".")[2]: pattern for theirs, pattern in known.items()}
    others = [name for name in names if name != HEAD]
    return tuple(known[name] for name in others) if all(name in known for name in others) else None


def _training(d: Description) -> dict[str, object]:
    local = d.micro_batch * (d.micro_batches if d.pipeline > 1 else 1)
    found: dict[str, object] = {"local_batch_size": local, "global_batch_size": d.global_batch}
    if d.sequence_length is not None:
        found["seq_len"] = d.sequence_length
    found["max_norm"] = math.inf if d.update.clip_norm is None else d.update.clip_norm
    found["dtype"] = "bfloat16" if purely_bf16(d) else "float32"
    found["mixed_precision_param"] = DTYPES[d.precision]
    found["mixed_precision_reduce"] = "float32"
    return found


def _parallelism(d: Description) -> dict[str, object]:
    replicated = d.zero == 0 and d.context == 1
    found: dict[str, object] = {
        "data_parallel_replicate_degree": d.data if replicated else d.replicas,
        "data_parallel_shard_degree": 1 if replicated else d.data // d.replicas,
    }
    if d.zero:
        found["fsdp_reshard_after_forward"] = "always" if d.zero == 3 else "never"
    found["tensor_parallel_degree"] = d.tensor
    found["pipeline_parallel_degree"] = d.pipeline
    if d.pipeline > 1:
        found["pipeline_parallel_schedule"] = SCHEDULES[d.schedule]
        found["pipeline_parallel_microbatch_size"] = d.micro_batch
        found["module_fqns_per_model_part"] = _parts(d.layers)
        if d.schedule == "dualpipe_v" and d.recomputes and (d.expert or 1) > 1:  # refused beside the overlap
            found["pipeline_parallel_expert_parallel_overlap"] = False
    found["context_parallel_degree"] = d.context
    if d.context > 1:
        found |= {"context_parallel_rotate_method": "alltoall", "context_parallel_load_balancer": "headtail"}
    if d.expert is not None:
        found["expert_parallel_degree"] = d.expert
        found["expert_tensor_parallel_degree"] = 1 if d.whole_experts else d.tensor
    return found


def _parts(layers: tuple[int, ...]) -> list[list[str]]:
    """Names of the modules of every stage."""
    parts, first = [], 0
    for count in layers:
        parts.append([f"layers.{at}" for at in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _checkpoint(d: Description) -> dict[str, object]:
    if any(d.selective):
        return {"mode": "selective", "selective_ac_option": "op"}
    if not any(d.full):
        return {"mode": "none"}
    if d.full == d.layers:
        return {"mode": "full"}
    return {"mode": "selective", "selective_ac_option": str(recomputed_every(d))}


def recomputed_every(d: Description) -> int | None:
    """The n of which every nth layer is recomputed; None if there is none."""
    return next((n for n in range(1, max(d.layers) + 1) if recomputed_layers(d, n) == d.full), None)


def recomputed_layers(d: Description, every: int) -> tuple[int, ...]:
    """Recomputed layers of every stage, if each rank counts the layers of its stages consecutively."""
    full = [0] * len(d.layers)
    for rank in range(d.pipeline):
        before = 0
        for stage in d.stages_on(rank):
            full[stage] = (before + d.layers[stage]) // every - before // every
            before += d.layers[stage]
    return tuple(full)


def plainly_bf16(d: Description) -> bool:
    """Whether weights are bf16, because there is neither FSDP nor DDP, which would compute in bf16 on fp32 weights."""
    return d.precision == "bf16" and d.data * d.context == 1 and d.tensor * d.pipeline > 1


def purely_bf16(d: Description) -> bool:
    """Whether weights are bf16 without masters, and so are gradients and moments, as in PyTorch's optimizers."""
    return plainly_bf16(d) or (d.precision == "bf16" and not d.update.master_weights)


def gradient_dtype(d: Description, plain: bool) -> str:
    if plain:
        return "parameter"
    return "fp32" if d.zero > 1 and d.precision == "bf16" else "mixed"
