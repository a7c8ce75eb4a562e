"""Writes a description as a configuration in Python, which torchtitan reads after 0.2.2.

    --module plan_config --config plan_config        imports plan_config.py, calls its function plan_config()

The function takes the configuration of the same model from torchtitan's own registry and assigns over it what a plan
says; batches are counted in tokens there. Source: pytorch/torchtitan, main of 21 August 2026 (b5bcd76c),
torchtitan/config/{manager,configs}.py, distributed/{activation_checkpoint,pipeline_parallel}.py, trainer.py,
models/llama3/config_registry.py, models/qwen3/config_registry.py.
"""

import math
from collections.abc import Mapping

from planner.export.description import Description
from planner.export.quoting import in_docstring
from planner.export.shell import torchrun_script
from planner.export.target import Job

FILE = "plan_config.py"
LAUNCH = "launch_registry.sh"
_REGISTRY = {
    "llama8b": ("llama3", "llama3_8b"), "llama70b": ("llama3", "llama3_70b"), "llama405b": ("llama3", "llama3_405b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
}  # fmt: skip
"""Modules and functions of the registry that make our models."""
_RENAMED = {"output": "lm_head"}  # modules of stages


def no_place(d: Description) -> str:
    """What of a description has no setting there, in words; "" where all has."""
    if d.fp8:
        return "linear layers in fp8 of its recipe"
    if any(d.full) and d.full != d.layers:
        return "recomputation of every nth layer"
    if d.expert is not None and d.tensor > 1 and not d.whole_experts:
        return "experts that tensor parallel devices cut"
    return ""


def registry_files(job: Job, parallelism: Mapping[str, object], training: Mapping[str, object]) -> dict[str, str]:
    """The configuration and the script that starts torchtitan with it, from the settings of the TOML file; nothing
    where the description has no place there."""
    if job.architecture is None or no_place(job.description):
        return {}
    start = torchrun_script(
        job,
        f"{job.model} with torchtitan after 0.2.2, which reads no TOML; the tokenizer is in HF_ASSETS.",
        "-m torchtitan.train",
        (),
        also=("--module plan_config --config plan_config", '--hf_assets_path "${HF_ASSETS:?}"'),
        exports=('PYTHONPATH="$(cd "$(dirname "$0")" && pwd)${PYTHONPATH:+:$PYTHONPATH}"',),
    )
    return {FILE: _configuration(job, parallelism, training), LAUNCH: start.replace("bash launch.sh", f"bash {LAUNCH}")}


def known(job: Job) -> bool:
    """Whether its registry has the model."""
    return job.model in _REGISTRY


def _configuration(job: Job, parallelism: Mapping[str, object], training: Mapping[str, object]) -> str:
    d = job.description
    module, function = _REGISTRY.get(job.model, ("", ""))
    imports, base = f"from torchtitan.models.{module}.config_registry import {function}", f"{function}()"
    if not module:
        imports = "import importlib\nimport os\n"
        base = 'getattr(importlib.import_module(os.environ["MODEL"] + ".config_registry"), os.environ["FLAVOR"])()'
    mode = "SelectiveAC.Config()" if any(d.selective) else "FullAC.Config()" if any(d.full) else "None"
    values = {**_training(d, job, training), **_parallelism(d, parallelism)}
    lines = [f"    config.{path} = {_python(value)}" for path, value in values.items()]
    policies = "" if mode == "None" else f"from torchtitan.distributed.activation_checkpoint import {mode[:-9]}\n"
    split = sorted([f"{imports}\n", policies]) if module else [f"{imports}\n", policies]
    return f'''"""{in_docstring(job.model)} with torchtitan after 0.2.2: a plan over a configuration of its registry.

`bash {LAUNCH}` starts it. Data, steps and learning rate are those of the configuration.
"""

{"".join(split)}from torchtitan.trainer import Trainer


def plan_config() -> Trainer.Config:
    config = {base}
{chr(10).join(lines)}
    config.activation_checkpoint = {mode}
    return config
'''


def _python(value: object) -> str:
    return "1e400  # never clipped" if value == math.inf else repr(value)


def _training(d: Description, job: Job, training: Mapping[str, object]) -> dict[str, object]:
    """Batches in tokens, norms and dtypes."""
    length = d.sequence_length or (job.architecture.sequence if job.architecture else 0)
    found: dict[str, object] = {
        "training.max_context_length": length,
        "training.num_tokens_per_microbatch_per_dp_rank": d.micro_batch * length,
        "training.num_tokens_per_train_step": d.global_batch * length,
        "training.disable_cuda_graphs": True,  # pipelines have none there, and no price counts on them
    }
    kept = ("max_norm", "dtype", "mixed_precision_param")
    return {**found, **{f"training.{name}": training[name] for name in kept}}


def _parallelism(d: Description, parallelism: Mapping[str, object]) -> dict[str, object]:
    """Degrees as the TOML file has them, but for what has gone or is called otherwise."""
    gone = ("pipeline_parallel_microbatch_size", "context_parallel_rotate_method", "expert_tensor_parallel_degree")
    found = {name: value for name, value in parallelism.items() if name not in gone}
    if d.pipeline > 1:
        found["num_pp_microbatches"] = d.micro_batches
        parts = parallelism["module_fqns_per_model_part"]
        assert isinstance(parts, list)
        found["module_fqns_per_model_part"] = [[_RENAMED.get(name, name) for name in part] for part in parts]
    return {f"parallelism.{name}": value for name, value in found.items()}
