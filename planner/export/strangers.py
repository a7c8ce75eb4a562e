"""Files that are no configuration of an engine here: those of other frameworks, and of work that trains nothing.

Each kind is recognised by a pattern that no file of the engines has, and refused by its name, so that nobody looks for
an error in a correct file. Source of the patterns: the example folders of the named projects.
"""

import re

_NO_TRAINING = "it trains nothing; give the file that starts a training"
_RL = "it trains with rewards and generates text between steps, which no plan covers"
_TORCH = "without Megatron-LM, plan import reads torchtitan, Accelerate, DeepSpeed and transformers' Trainer"
_MODALITIES = "models with image or audio encoders or decoders cannot be planned"

_MARKS: tuple[tuple[str, str, str], ...] = (
    (r"^[ \t]*(ici|dcn)_\w+_parallelism\s*:|\bMaxText\b|maxtext\.|framework:\s*max(text|diffusion)",
     "MaxText (JAX)", _TORCH),
    (r"\blevanter\.|\baxis_resources:|^[ \t]*mp:\s*['\"]?p=f32,c=", "Levanter (JAX)", _TORCH),
    (r"\bpaddle(\.distributed|nlp|formers|fleetx)|\b[mp]p_degree\b|\bsharding_parallel_degree\b",
     "PaddlePaddle", _TORCH),
    (r"\bverl\.trainer\.main_\w*|\bactor_rollout_ref\b", "verl", _RL),
    (r"\bverl\.trainer\.\w*sft\w*|^[ \t]*ulysses_sequence_parallel_size:", "verl", _TORCH),
    (r"\bopen_instruct/(grpo|ppo)\w*\.py|\bopenrlhf\b|\btrlx\b|\bareal\.|\brl_grpo_\w+|\bchatlearn_|InferenceParallelismConfig",
     "a trainer by rewards", _RL),
    (r"^[ \t]*tp_mode:|^[ \t]*pp_engine:|\bnanotron\b", "nanotron", _TORCH),
    (r"\bolmo_core\b|\bscripts/train\.py configs/|--fsdp\.sharding_strategy|^fsdp:\n\s+wrapping_strategy",
     "OLMo", _TORCH),
    (r"\blitgpt[. ](data|pretrain|finetune)|^checkpoint_dir: checkpoints/", "LitGPT", _TORCH),
    (r"^[ \t]*device_train_microbatch_size:|^[ \t]*global_train_batch_size:|\bllmfoundry\b",
     "LLM Foundry (Composer)", _TORCH),
    (r"^model:[ \t]*\n(?:[ \t]*#.*\n){0,80}[ \t]+class_path:|^seed_everything:", "LightningCLI", _TORCH),
    (r"\bnemo_automodel\b", "NeMo Automodel", _TORCH),
    (r"^[ \t]*dyn_bsz\w*:|\bveomni\b", "VeOmni", _TORCH),
    (r"\b_component_: torchtune|\btune run\b", "torchtune", _TORCH),
    (r"\bcolossalai\b", "ColossalAI", _TORCH),
    (r"\bxtuner (train|pretrain)|\bXTUNER_", "XTuner", _TORCH),
    (r"\binternlm/|\binternevo\b", "InternEvo", _TORCH),
    (r"\barctic_training\b|^type: (swiftkv|mlp_variant_\w+)", "ArcticTraining", _TORCH),
    (r"\bmetaseq\b", "metaseq", _TORCH),
    (r"\bapps\.main\.train\b", "Meta Lingua", _TORCH),
    (r"\bllava/|\binternvl_chat\b|--vision_tower\b|^[ \t]*mm_cfg:|^[ \t]*(perception|modality_adapter|vision_encoder):"
     r"|\bpretrain_mm_mlp_adapter\b|--mm_tunable_parts", "a model of images or audio", _MODALITIES),
    (r"\bFluxModel|\bflux_(12b|535m)|^name\s*=\s*['\"]flux['\"]|\bflux_\w+\(\) -> FluxTrainer"
     r"|stable_diffusion|maxdiffusion|\bwan2\.\d_",
     "a diffusion model", _MODALITIES),
    (r"(?i)\brwkv\b", "RWKV", "models with linear attention cannot be planned"),
    (r"^[ \t]*model_size_in_b:|^search_config:", "a search over configurations", "give one that it makes"),
    (r"^[ \t]*-\s+serve_id:|^[ \t]*-\s+(serve|inference):|^[ \t]*engine:\s*vllm\b|^llm:\s*$", "serving", _NO_TRAINING),
    (r"^[ \t]*-\s+train:\s", "an experiment of FlagScale", "give the file of conf/train that it names"),
    (r"^[ \t]*draft_vocab_size:|\beagle[123]\b", "a draft model", "plans have one model that is trained"),
    (r"\$\{(conversion\w*|evaluation|export|fw_inference)\.|\bhf2nemo\b", "a conversion, an evaluation or an export",
     _NO_TRAINING),
    (r"^(import|from) pytest\b", "a test", "give the recipe that it tests"),
)  # fmt: skip
"""A pattern for the files of each kind, its name, and what else the user should know."""

_SERVES = re.compile(
    r"^run_mode:\s*['\"]?(predict|eval|export|chat)|\bvllm serve\b|\bsglang\.launch_server\b"
    r"|^[ \t]*(swift|megatron) (infer|deploy|export|eval|sample|app|rollout)\b"
    r"|\bllamafactory-cli (chat|export|webchat|api)\b",
    re.MULTILINE,
)


_TRAINS = re.compile(r"\b(swift|megatron) (sft|pt|rlhf)\b")
_IDLE = re.compile(
    r"\b\w{0,80}(?:convert|reshap|preprocess|evaluat|generat|infer|analy[sz]e|quantiz|serve)\w{0,80}\.py\b"
)


def idle_program(text: str) -> str | None:
    """Why an otherwise unknown script is no training: the program that it starts; else None."""
    found = _IDLE.search(text)
    return None if found is None else f"{found[0]}: {_NO_TRAINING}"


_PROGRAM = re.compile(
    r"^(?:import|from)[ \t]+(?:torch|lightning|pytorch_lightning|transformers|accelerate)\b", re.MULTILINE
)


def own_program(text: str) -> str | None:
    """Why a program with a loop of its own is not read; None for other files."""
    if _PROGRAM.search(text) is None:
        return None
    return (
        "it is a program, which is not run; give the script that starts it or a file of its settings, or price its"
        " degrees: plan estimate --model NAME --devices N --zero 3"
    )


def foreign(text: str) -> str | None:
    """Why a file is no configuration of an engine here, in one line; None if nothing indicates that."""
    found = _SERVES.search(text)
    if found is not None and _TRAINS.search(text) is None:
        return f"{found[0].strip():.60}: {_NO_TRAINING}"
    for mark, name, why in _MARKS:
        if re.search(mark, text, re.MULTILINE):
            return f"it is a configuration of {name}, which is not read: {why}"
    return None
