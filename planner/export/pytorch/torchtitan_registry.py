"""Writes a description as a configuration in Python, which torchtitan reads after 0.2.2.

    --module plan_config --config plan_config        imports plan_config.py, calls its function plan_config()

The function takes the configuration of the same model from torchtitan's own registry and assigns the settings of a plan
over it. 0.3.0 counts batches in samples, as 0.2.2 does, later versions in tokens: the function checks which one it is.
Source: pytorch/torchtitan, 0.3.0 and main of 21 August 2026 (b5bcd76c), torchtitan/config/{manager,configs}.py,
distributed/{activation_checkpoint,pipeline_parallel}.py, trainer.py, models/llama3/config_registry.py,
models/{qwen3,deepseek_v3}/config_registry.py.
"""

import math
from collections.abc import Mapping

from planner.export.description import Description
from planner.export.files.quoting import in_docstring
from planner.export.shell import torchrun_script
from planner.export.target import Job

FILE = "plan_config.py"
LAUNCH = "launch_registry.sh"
AMONG_OURS = 'PYTHONPATH="$(cd "$(dirname "$0")" && pwd)${PYTHONPATH:+:$PYTHONPATH}"'
"""Lets Python import modules of the exported folder."""
_REGISTRY = {
    "llama8b": ("llama3", "llama3_8b"), "llama70b": ("llama3", "llama3_70b"), "llama405b": ("llama3", "llama3_405b"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b"), "qwen3-1.7b": ("qwen3", "qwen3_1_7b"),
    "qwen3-14b": ("qwen3", "qwen3_14b"), "qwen3-32b": ("qwen3", "qwen3_32b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"), "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
    "deepseek-v2-lite": ("deepseek_v3", "deepseek_v3_16b"),
}  # fmt: skip
"""Modules and functions of the registry that make our models."""
_CONVERTED = {"llama405b": "405B"}
"""Flavors of models whose registry configuration trains in fp8 and compiles, which no plan asks for."""
_RENAMED = {"output": "lm_head"}  # modules of stages
_PARTS = "module_fqns_per_model_part"
_GONE = (
    "pipeline_parallel_microbatch_size", "context_parallel_rotate_method", "expert_tensor_parallel_degree",
    "pipeline_parallel_expert_parallel_overlap",
)  # fmt: skip
"""Settings of 0.2.2 that later versions lack, or count differently."""


def no_place(d: Description) -> str:
    """What of a description cannot be set there, in words; empty if everything can."""
    if d.fp8:
        return "linear layers in fp8 of its recipe"
    if any(d.full) and d.full != d.layers:
        return "recomputation of every nth layer"
    if d.expert is not None and d.tensor > 1 and not d.whole_experts:
        return "experts that tensor parallel devices cut"
    return ""


def registry_files(job: Job, parallelism: Mapping[str, object], training: Mapping[str, object]) -> dict[str, str]:
    """The configuration, and the script that starts torchtitan with it, from the settings of the TOML file.

    Empty if the description cannot be set there.
    """
    if job.architecture is None or no_place(job.description):
        return {}
    start = torchrun_script(
        job,
        f"{job.model} with torchtitan after 0.2.2, which reads no TOML; the tokenizer is in HF_ASSETS.",
        "-m torchtitan.train",
        (),
        also=("--module plan_config --config plan_config", '--hf_assets_path "${HF_ASSETS:?}"'),
        exports=(AMONG_OURS,),
    )
    return {FILE: _configuration(job, parallelism, training), LAUNCH: start.replace("bash launch.sh", f"bash {LAUNCH}")}


def known(job: Job) -> bool:
    """Whether torchtitan's registry has the model."""
    return job.model in _REGISTRY


def _configuration(job: Job, parallelism: Mapping[str, object], training: Mapping[str, object]) -> str:
    d = job.description
    module, function = _REGISTRY.get(job.model, ("", ""))
    imports, base = f"from torchtitan.models.{module}.config_registry import {function}", f"{function}()"
    if not module:
        imports = "import importlib\nimport os\n"
        base = 'getattr(importlib.import_module(os.environ["MODEL"] + ".config_registry"), os.environ["FLAVOR"])()'
    mode = "SelectiveAC.Config()" if any(d.selective) else "FullAC.Config()" if any(d.full) else "None"
    needed, lines = [f"{imports}\n"], []
    if converted := _CONVERTED.get(job.model):
        needed += [
            f"from torchtitan.models.{module} import model_registry\n",
            "from torchtitan.config import CompileConfig\n",
        ]
        lines += [
            f'    config.model_spec = model_registry("{converted}")  # the configuration has it in fp8',
            "    config.compile = CompileConfig()",
        ]
    lines += _assigned({**_training(training), **_parallelism(parallelism)}, 4)
    lines += ['    if hasattr(config.training, "seq_len"):  # 0.3.0', *_assigned(_in_samples(d, job, training), 8)]
    lines += ["    else:", *_assigned(_in_tokens(d, job), 8)]
    if mode != "None":
        needed.append(f"from torchtitan.distributed.activation_checkpoint import {mode[:-9]}\n")
    if module:
        needed.sort()
    return f'''"""{in_docstring(job.model)} with torchtitan after 0.2.2: a plan over a configuration of its registry.

`bash {LAUNCH}` starts it. Data, steps and learning rate are those of the configuration.
"""

{"".join(needed)}from torchtitan.trainer import Trainer


def plan_config() -> Trainer.Config:
    config = {base}
{chr(10).join(lines)}
    config.activation_checkpoint = {mode}
    return config
'''


def _python(value: object) -> str:
    return "1e400  # never clipped" if value == math.inf else repr(value)


def _assigned(values: Mapping[str, object], indent: int) -> list[str]:
    return [f"{' ' * indent}config.{path} = {_python(value)}" for path, value in values.items()]


def _training(training: Mapping[str, object]) -> dict[str, object]:
    """Norms and dtypes."""
    graphs = {"training.disable_cuda_graphs": True}  # pipelines have none there, and no price includes them
    return {**graphs, **{f"training.{name}": training[name] for name in ("max_norm", "dtype", "mixed_precision_param")}}


def _length(d: Description, job: Job) -> int:
    return d.sequence_length or (job.architecture.sequence if job.architecture else 0)


def _in_samples(d: Description, job: Job, training: Mapping[str, object]) -> dict[str, object]:
    """Batches in the form of 0.3.0."""
    found: dict[str, object] = {"training.seq_len": _length(d, job)}
    found |= {f"training.{name}": training[name] for name in ("local_batch_size", "global_batch_size")}
    return {**found, "parallelism.pipeline_parallel_microbatch_size": d.micro_batch} if d.pipeline > 1 else found


def _in_tokens(d: Description, job: Job) -> dict[str, object]:
    """Batches in the form of later versions."""
    length = _length(d, job)
    found: dict[str, object] = {
        "training.max_context_length": length,
        "training.num_tokens_per_microbatch_per_dp_rank": d.micro_batch * length,
        "training.num_tokens_per_train_step": d.global_batch * length,
    }
    return {**found, "parallelism.num_pp_microbatches": d.micro_batches} if d.pipeline > 1 else found


def _parallelism(parallelism: Mapping[str, object]) -> dict[str, object]:
    """Degrees of the TOML file, without settings that are gone, and with new names."""
    found = {name: value for name, value in parallelism.items() if name not in _GONE}
    parts = parallelism.get(_PARTS)
    if isinstance(parts, list):
        found[_PARTS] = [[_RENAMED.get(name, name) for name in part] for part in parts]
    return {f"parallelism.{name}": value for name, value in found.items()}
