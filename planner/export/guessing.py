"""The engine whose settings a file has, guessed from its content."""

import re
from collections.abc import Mapping

from planner.export.description import ExportError
from planner.export.pytorch.trainer_reading import engine_of
from planner.export.strangers import foreign, idle_program, own_program

_MARKS: tuple[tuple[str, str], ...] = (
    ("nemo", r"\Atask,model,size,|--model_recipe_name\b|scripts/performance/\w+\.py|launcher_scripts/main\.py"),
    ("nemo", r"^[ \t]+framework:\s*megatron_bridge\s*$"),
    ("nemo", r"\bmegatron_\w*(pretraining|finetuning|sft)\w*\.py\b|\brun_recipe\.py\b"),
    ("megatron", r"^[ \t]*megatron[ \t]+(pt|sft|rlhf)\b|--actor-num-gpus-per-node\b|^[ \t]+framework:\s*megatron\s*$"),
    ("megatron", r"\A(?=[\s\S]*^tuner_type:)(?=[\s\S]*^micro_batch_size:)"),
    ("megatron", r"^(tensor|pipeline|expert)_model_parallel_size:"),
    ("megatron", r"""^[ \t]*["']?pipe[-_]parallel[-_]size["']?\s*:"""),
    ("megatron", r"^system:[ \t]*\n(?:[ \t#].*\n|\n){0,80}?[ \t]+\w+_model_parallel_size:"),
    ("megatron-bridge", r"^(from|import) megatron\.bridge\b"),
    ("megatron", r"^MODEL_ARGS:"),
    ("torchtitan", r"^[ \t]+framework:\s*torchtitan\s*$"),
    ("torchtitan", r"^\[(parallelism|activation_checkpoint|training)\]|\bTrainer\.Config\("),
    ("accelerate", r"""\A\s*\{(?=[\s\S]*"(distributed_type|fsdp_config)"\s*:)"""),
    ("deepspeed", r"""\A\s*\{(?=.*"(zero_optimization|train_micro_batch_size_per_gpu|train_batch_size)")"""),
    ("mindformers", r"^(parallel_config|recompute_config|runner_config):"),
    ("accelerate", r"^(distributed_type|fsdp_config|base_model|deepspeed_config):"),
    ("nemo", r"^(trainer|model):[ \t]*$|\brun\.(Partial|Config)\(|^recipe\.|^[ \t]+cfg\.(model|train)\."),
    ("nemo", r"ConfigContainer|_trainer\("),
    ("torch", r"^LAYERS = "),
    ("mindspeed", r"NPUS?_PER_NODE|mindspeed|--context-parallel-algo|--use-fused-rmsnorm|--reuse-fp32-param|\bHCCL_"),
    ("megatron", r"--(tensor|pipeline)_model_parallel_size\b"),
    ("megatron", r"--(tensor-model-parallel-size|num-layers|micro-batch-size|pipeline-model-parallel-size)\b"),
)  # fmt: skip
"""Engines, each with a pattern that no file of the engines below it has."""


def guessed_engine(text: str, known: Mapping[str, object]) -> str:
    """The engine whose settings a file has. Raises ExportError if the file does not tell, or is of no engine."""
    stranger = foreign(text)
    if stranger is not None:
        raise ExportError(stranger)
    trainers = engine_of(text)
    if trainers is not None:
        return trainers
    for engine, mark in _MARKS:
        if re.search(mark, text, re.MULTILINE | (re.DOTALL if engine == "deepspeed" else re.NOFLAG)):
            return engine
    idle = idle_program(text) or own_program(text)
    if idle is not None:
        raise ExportError(idle)
    raise ExportError(f"the file does not tell whose settings it has; name the engine with --from: {', '.join(known)}")
