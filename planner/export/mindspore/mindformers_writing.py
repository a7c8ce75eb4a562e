"""Writes a description as the YAML of MindFormers, with the script that starts it: a whole configuration, in the
sections of published ones (research/llama3_1/llama3_1_70b/finetune_llama3_1_70b.yaml of MindFormers 1.5)."""

from collections.abc import Mapping, Sequence
from typing import Any

from hardware_profiles import engine_words
from planner.export.architecture import Architecture
from planner.export.description import Description
from planner.export.files.quoting import one_line
from planner.export.files.yaml_files import yaml_text
from planner.export.target import Asked, Job
from planner.plan.plan import INTERLEAVED

SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "seqpipe")
DTYPES = engine_words("mindformers")
SELECTED = {("elementwise",): False, ("elementwise", "normalisation"): True}  # with select_comm_recompute
RING, ULYSSES, HYBRID = "colossalai_cp", "ulysses_cp", "hybrid_cp"
_RATES = {
    "type": "CosineWithWarmUpLR", "learning_rate": 1e-5, "lr_end": 0.0, "warmup_ratio": 0.03, "total_steps": -1,
}  # fmt: skip
_CONTEXT = {
    "mode": 0, "device_target": "Ascend", "max_call_depth": 10000, "save_graphs": False, "device_id": 0,
    "jit_config": {"jit_level": "O1"}, "memory_optimize_level": "O0",
}  # fmt: skip
"""The MindSpore context of the published file of Llama 3.1 70B."""
_FUSION = 4  # default of gradient_aggregation_group


def write(job: Job) -> Mapping[str, str]:
    """`train.yaml`, and the script that starts MindFormers with it."""
    d = job.description
    content = {
        **_run(),
        "runner_config": {"epochs": 1, "sink_mode": True, "sink_size": 1, **_runner(d)},
        "optimizer": {"type": "AdamW", "betas": [0.9, 0.999], "eps": 1e-8},
        "lr_schedule": _RATES,
        **_data(d),
        "runner_wrapper": _wrapper(d),
        "use_parallel": True,
        "parallel_config": _parallel_config(d),
        "micro_batch_interleave_num": 1,
        "parallel": _parallel(d),
        "recompute_config": _recompute(d),
        **_moe(d, job.architecture),
        "callbacks": [
            {"type": "MFLossMonitor"},
            {"type": "CheckpointMonitor", "prefix": "plan", "save_checkpoint_steps": 10000, "integrated_save": False},
        ],
        "context": _CONTEXT,
        "model": _model(d, job.architecture),
    }
    return {"train.yaml": yaml_text(content), "launch.sh": _script(job)}


def fill_in(job: Job) -> Asked:
    """What the file leaves open."""
    a = job.architecture
    model = (
        "" if a is not None and _is_llama(a) else ", and the model (`model.arch`, `type` and sizes in `model_config`)"
    )
    folder = ("MINDFORMERS", "the folder of MindSpore Transformers, the same on every node")
    data = "your data (`--train_dataset_dir DIR` behind `launch.sh`: MindRecord files with `input_ids`)"
    rest = (
        "in `train.yaml` epochs, the learning rate (`lr_schedule`) and `context.max_device_memory`, 58GB unless given"
    )
    rest += model
    return folder, ("", f"{data}; {rest}")


def _run() -> dict[str, object]:
    return {
        "seed": 0,
        "output_dir": "./output",
        "load_checkpoint": "",
        "auto_trans_ckpt": False,
        "only_save_strategy": False,
        "resume_training": False,
        "run_mode": "train",
        "trainer": {"type": "CausalLanguageModelingTrainer"},
    }


def _data(d: Description) -> dict[str, object]:
    """The data set; the task repeats it by an alias, as in published files."""
    dataset = {
        "data_loader": {"type": "MindDataset", "dataset_dir": "", "shuffle": True},
        "input_columns": ["input_ids"],
        "num_parallel_workers": 8,
        "python_multiprocessing": False,
        "drop_remainder": True,
        "batch_size": d.micro_batch * d.interleave,
        "repeat": 1,
        "numa_enable": False,
        "prefetch_size": 1,
    }
    task = {"type": "CausalLanguageModelDataset", "dataset_config": dataset}
    return {"train_dataset": dataset, "train_dataset_task": task, "do_eval": False}


def _runner(d: Description) -> dict[str, object]:
    turns = d.micro_batches // d.interleave
    found: dict[str, object] = {"batch_size": d.micro_batch * d.interleave}
    return found if d.pipeline > 1 else {**found, "gradient_accumulation_steps": turns}


def _wrapper(d: Description) -> dict[str, object]:
    clip = d.update.clip_norm
    found: dict[str, object] = {"type": "MFTrainOneStepCell", "use_clip_grad": clip is not None}
    return found if clip is None else {**found, "max_grad_norm": clip}


def _parallel_config(d: Description) -> dict[str, object]:
    found: dict[str, object] = {
        "data_parallel": d.data,
        "model_parallel": d.tensor,
        "pipeline_stage": d.pipeline,
        "micro_batch_num": d.micro_batches // d.interleave if d.pipeline > 1 else 1,
        "use_seq_parallel": d.sequence_parallel,
        "vocab_emb_dp": d.tensor == 1 or not d.vocabulary_parallel,
        "gradient_aggregation_group": _FUSION,
        "context_parallel": d.context,
    }
    if d.heads > 1:
        found["context_parallel_algo"] = HYBRID if d.ring > 1 else ULYSSES
    if d.heads > 1 and d.ring > 1:
        found["ulysses_degree_in_cp"] = d.heads
    if d.slices > 1:
        found["seq_split_num"] = d.slices
    if d.expert is not None:
        found["expert_parallel"] = d.expert
    return found


def _parallel(d: Description) -> dict[str, object]:
    found: dict[str, object] = {
        "parallel_mode": 1,
        "full_batch": True,
        "enable_alltoall": d.heads > 1 or (d.expert or 1) > 1,
        "enable_parallel_optimizer": d.zero > 0,
    }
    if d.zero > 0:
        size = {"optimizer_weight_shard_size": d.shards} if d.replicas > 1 else {}
        found["parallel_optimizer_config"] = {"gradient_accumulation_shard": d.zero > 1, **size}
    if d.schedule != "1f1b":
        scheduler = "1f1b" if d.schedule == INTERLEAVED else d.schedule
        found["pipeline_config"] = {"pipeline_interleave": True, "pipeline_scheduler": scheduler}
    return found


def _recompute(d: Description) -> dict[str, object]:
    whole = d.full == d.layers
    found: dict[str, object] = {"recompute": True if whole else _rows(d, d.full) if any(d.full) else False}
    if any(d.selective):
        counts = _rows(d, tuple(f + s for f, s in zip(d.full, d.selective, strict=True)))
        found["select_recompute"] = counts
        if SELECTED[d.kept.but]:
            found["select_comm_recompute"] = counts
    found["parallel_optimizer_comm_recompute"] = d.zero == 3
    return found


def _rows(d: Description, counts: Sequence[int]) -> list[Any]:
    """A number for each stage, or a row of them for each of the stages on a rank."""
    rows = [list(counts[at : at + d.pipeline]) for at in range(0, len(counts), d.pipeline)]
    return rows if d.virtual_stages > 1 else rows[0]


def grouped(d: Description) -> bool:
    """Whether experts are computed by grouped products.

    These hold each expert whole on the innermost devices, and drop no tokens (modules/transformer/moev3.py). Otherwise
    tensor-parallel devices shard each expert.
    """
    return d.context == 1 and (d.whole_experts or d.tensor == 1)


def _moe(d: Description, a: Architecture | None) -> dict[str, object]:
    if d.expert is None:
        return {}
    found: dict[str, object] = {"use_gmm": grouped(d)}
    if a is not None and a.experts is not None:
        found |= {"expert_num": a.experts.count, "num_experts_chosen": a.experts.chosen}
        found |= {"moe_intermediate_size": a.experts.width, "norm_topk_prob": a.normalised}
    return {"moe_config": found}


def _model(d: Description, a: Architecture | None) -> dict[str, object]:
    found: dict[str, object] = {}
    if a is not None and _is_llama(a):
        found |= {
            "type": "LlamaConfig",
            "num_layers": a.layers,
            "hidden_size": a.hidden,
            "num_heads": a.heads,
            "n_kv_heads": a.kv_heads,
            "intermediate_size": a.ffn,
            "vocab_size": a.vocabulary,
            "rms_norm_eps": a.epsilon,
            "theta": a.rope_theta,
            "tie_word_embeddings": a.tied,
            "use_flash_attention": True,
        }
    if d.sequence_length is not None:
        found["seq_length"] = d.sequence_length
    found["compute_dtype"] = DTYPES[d.precision]
    found["param_init_type"] = "float32"
    found["offset"] = _offset(d)
    found["pp_interleave_num"] = d.virtual_stages
    found["fine_grain_interleave"] = d.interleave
    if d.ring > 1:
        found["use_ring_attention"] = True
    if d.slices > 1:  # keys and values of a sequence are kept in parameters of this size (models/llama/llama.py)
        found["batch_size"] = d.micro_batch * d.interleave
    architecture = {"arch": {"type": "LlamaForCausalLM"}} if "type" in found else {}
    return {"model_config": found, **architecture}


def _is_llama(a: Architecture) -> bool:
    """Whether the file describes the model."""
    return a.family == "llama" and a.usual_heads and not a.qk_norm


def _offset(d: Description) -> Any:
    """Layers of each stage beyond an equal part; 0 if all stages have that."""
    each, rest = divmod(sum(d.layers), len(d.layers))
    return 0 if d.even and not rest else _rows(d, [count - each for count in d.layers])


def _script(job: Job) -> str:
    words = "run_mindformer.py --config ${HERE@Q}/train.yaml --use_parallel True --run_mode train ${*@Q}"
    command = f'"{words}"'  # msrun_launcher.sh evaluates it
    joined = "output/msrun_log True 300"  # without `join` msrun ends at once, and with it a job of Slurm, or a pod
    if job.nodes > 1:
        devices = f"{job.description.devices} {job.processes}"
        rest = f' {devices} "${{MASTER_ADDR:?}}" "${{MASTER_PORT:-8118}}" "${{NODE_RANK:?}}" {joined}'
        how = f"Run it on each of {job.nodes} nodes: NODE_RANK=0..{job.nodes - 1} MASTER_ADDR=first-node bash launch.sh"
    else:
        rest = f' {job.processes} "${{MASTER_PORT:-8118}}" {joined}'
        how = f"Runs on one node with {job.processes} devices: bash launch.sh"
    return (
        "#!/usr/bin/env bash\n"
        f"# {one_line(job.model)} with MindSpore Transformers 2.1; MINDFORMERS is its folder.\n# {how}\n"
        'set -euo pipefail\n\nHERE=$(cd "$(dirname "$0")" && pwd)\ncd "${MINDFORMERS:?}"\n'
        f"bash scripts/msrun_launcher.sh {command}{rest}\n"
    )
