"""Arguments of Megatron-LM in the forms of several launchers.

    ms-swift          megatron sft --model Qwen/Qwen3-8B --tensor_model_parallel_size 2 --sequence_parallel true
    LLaMA-Factory     a YAML with per_device_train_batch_size beside tensor_model_parallel_size and the like
    slime             the arguments themselves, in arrays; the model is in a file that the script reads
    Primus            modules.pre_trainer.overrides of a YAML, over a model and defaults of its own
    FlagScale         system, model and data of a YAML
    GPT-NeoX          keys of a YAML: pipe_parallel_size, model_parallel_size, zero_optimization
    Megatron Bridge   run_script.py --model_recipe_name llama3_8b --tensor_model_parallel_size 2

Their defaults that differ from Megatron-LM's are added. Sources: modelscope/ms-swift
(swift/megatron/arguments/megatron_args.py), hiyouga/LLaMA-Factory (examples/megatron), THUDM/slime (scripts),
AMD-AGI/Primus (primus/configs/modules/megatron), FlagOpen/FlagScale (examples), EleutherAI/gpt-neox
(megatron/neox_arguments), NVIDIA-NeMo/Megatron-Bridge (scripts/performance/argument_parser.py), as of November 2026.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hardware_profiles.foreign import ForeignTextError
from planner.export.description import ExportError
from planner.export.files.arguments import Options, options_in
from planner.export.files.overrides import overrides_in
from planner.export.files.recipe_setters import SETTERS
from planner.export.files.yaml_files import parse_yaml

Found = dict[str, tuple[str, ...]]

_RENAMED: Mapping[str, str] = {
    "max-length": "seq-length",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "num-moe-experts": "num-experts",
    "fp8": "fp8-format",
}
_SWIFT = r"^[ \t]*(?:\w+=\S*[ \t]+){0,20}megatron[ \t]+"
"""A command of ms-swift, behind what it sets in the environment."""
_FLAGS = frozenset(
    {"sequence-parallel", "bf16", "fp16", "use-distributed-optimizer", "use-megatron-fsdp", "use-torch-fsdp2",
     "overlap-grad-reduce", "overlap-param-gather", "grad-reduce-in-bf16", "accumulate-allreduce-grads-in-fp32",
     "recompute-activations", "optimizer-cpu-offload", "use-precision-aware-optimizer", "fp8-param-gather"}
)  # fmt: skip
"""Switches, which a YAML file may turn off with 0."""
_OFF = ("false", "none", "null", "")
_ON = ("true",)


def launched(text: str) -> Options | None:
    """The arguments that a launcher gives Megatron-LM; None if the file is of none of these launchers.

    Raises ExportError if a launcher leaves open what must be known.
    """
    for mark, read in _LAUNCHERS:
        if re.search(mark, text, re.MULTILINE):
            return read(text)
    return None


def with_dashes(options: Options) -> Options:
    """The same options for a fork of Megatron-LM with underscores in their names."""
    return Options(
        dict(_spoken(options)), options.programs, options.scheduled, variables=options.variables,
        named=options.named, notes=options.notes,
    )  # fmt: skip


def _swift(text: str) -> Options:
    """Options of an ms-swift command, or of the YAML file that it is given."""
    given = options_in(text)
    command = re.search(rf"{_SWIFT}(\w+)", text, re.MULTILINE)
    if command is not None and command[1] not in ("pt", "sft"):
        raise ExportError(
            f"megatron {command[1]}: preferences or rewards are trained for, beside other models; plans are read of"
            " pt and sft"
        )
    found = _of_values(_yaml_of(text).items()) if command is None else dict(_spoken(given))
    found.setdefault("micro-batch-size", ("1",))
    found.setdefault("global-batch-size", ("16",))
    found.setdefault("recompute-granularity", ("selective",))
    found.setdefault("use-distributed-optimizer", ())
    found.setdefault("expert-tensor-parallel-size", ("1",))
    if "use-megatron-fsdp" in found:
        found.setdefault("data-parallel-sharding-strategy", ("optim_grads_params",))
    if "fp16" not in found:
        found["bf16"] = ()
    found.setdefault("fp8-amax-history-len", ("1024",))
    found.setdefault("fp8-amax-compute-algo", ("max",))
    if found["recompute-granularity"] == ("none",):
        del found["recompute-granularity"]
    kind = (found.pop("tuner-type", None) or found.pop("train-type", None) or ("full",))[0]
    if kind != "full":
        found["adapter"] = (kind,)
    packed = "packing" in found
    notes = [f"samples are {'packed: ' if packed else ''}priced with --max_length tokens each{'' if packed else _MOST}"]
    processes, nodes = (given.variables.get(name, "") for name in ("NPROC_PER_NODE", "NNODES"))
    for name, value in (("nproc-per-node", processes), ("nnodes", nodes)):
        if value.isdecimal():
            found[name] = (value,)
    named = " ".join(found.pop("model", ()) or found.pop("load", ()) or found.pop("mcore-model", ()))
    return Options(
        found, given.programs, given.scheduled, variables=given.variables, named=named, notes=(*given.notes, *notes)
    )


_MOST = ", the most that they may have"
"""Without packing samples of a micro-batch stand behind each other (padding_free), as long as they are."""


def _spoken(options: Options) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Options with underscores, and with true and false, in the form of Megatron-LM."""
    for name, values in options.all:
        plain = name.replace("_", "-")
        plain = _RENAMED.get(plain, plain)
        if len(values) == 1 and values[0].lower() in _OFF:
            continue
        yield plain, () if len(values) == 1 and values[0].lower() in _ON else values


def _mca(text: str) -> Options:
    """Options of a LLaMA-Factory file for its Megatron trainer, which counts batches as transformers does."""
    values = dict(_yaml_of(text))
    kind, named = str(values.pop("finetuning_type", "full")), str(values.pop("model_name_or_path", ""))
    found = _of_values(values.items())
    for theirs, ours in (("per-device-train-batch-size", "micro-batch-size"), ("cutoff-len", "seq-length")):
        if theirs in found:
            found[ours] = found.pop(theirs)
    found.setdefault("seq-length", ("2048",))  # cutoff_len (src/llamafactory/hparams/data_args.py)
    if kind != "full":
        found["adapter"] = (kind,)
    if found.get("stage", ("sft",)) not in (("sft",), ("pt",)):
        found["rl"] = ()
    return Options(found, named=named)


def _slime(text: str) -> Options:
    """Options of a slime script, which contains the arguments. Its actors are the training devices; it packs samples by
    tokens."""
    given = options_in(text)
    found = dict(given.all)
    if "megatron" not in (found.get("train-backend") or ("megatron",)):
        raise ExportError(f"--train-backend {' '.join(found['train-backend']):.40}: slime is read with megatron")
    if found.get("loss-type") != ("sft_loss",):
        found["rl"] = ()
    if "slime_plugins" in " ".join(found.get("spec", ())):
        raise ExportError(
            f"--spec {' '.join(found['spec']):.60}: layers of their own, with other attention, are in no model that can"
            " be planned"
        )
    nodes, each = found.pop("actor-num-nodes", ("1",)), found.pop("actor-num-gpus-per-node", None)
    if each is not None:
        found |= {"nnodes": nodes, "nproc-per-node": each}
    if "global-batch-size" not in found:
        found |= _batch_of_rollouts(given)
    found.setdefault("bf16", ())
    found.setdefault("use-distributed-optimizer", ())
    found.setdefault("micro-batch-size", ("1",))
    notes = []
    tokens = given.size("max-tokens-per-gpu") if "use-dynamic-batch-size" in found else None
    if tokens is not None:
        whole = tokens * given.degree("context-parallel-size")
        found["seq-length"] = (str(whole),)
        found["micro-batch-size"] = ("1",)
        notes.append(
            f"--use-dynamic-batch-size: samples are packed to {whole} tokens; priced as samples of so many tokens, one"
            " a micro-batch, so a step takes less than this where samples are shorter"
        )
    sourced = re.search(r"^[ \t]*(?:source|\.)\s+\S*?models/([\w.-]+)\.sh", text, re.MULTILINE)
    if sourced is not None:
        notes.append(f"models/{sourced[1]}.sh: the model is known by the name of this file, which was not read")
    return Options(
        found, given.programs, given.scheduled, variables=given.variables,
        named="" if sourced is None else sourced[1], notes=(*given.notes, *notes),
    )  # fmt: skip


def _batch_of_rollouts(given: Options) -> Found:
    """Samples of a step: the generated samples over the steps per rollout."""
    prompts, each = given.size("rollout-batch-size"), given.degree("n-samples-per-prompt")
    steps = given.degree("num-steps-per-rollout")
    if prompts is None or prompts * each % steps:
        return {}
    return {"global-batch-size": (str(prompts * each // steps),)}


def _primus(text: str) -> Options:
    """The settings of a Primus file over its defaults, which are those of Megatron-LM except for these."""
    modules = _section(_yaml_of(text), "modules")
    module = next((part for part in modules.values() if isinstance(part, dict) and "overrides" in part), None)
    if module is None:
        raise ExportError("modules: none of them has overrides; give a file of Primus that trains")
    given = _with_variables(module["overrides"] or {})
    base = str(_expanded(str(module.get("config", "")))).rpartition("/")[2]
    found: Found = {
        "micro-batch-size": ("2",), "global-batch-size": ("128",), "seq-length": ("4096",), "bf16": (),
        "use-distributed-optimizer": (), "fp8-amax-history-len": ("1024",), "fp8-amax-compute-algo": ("max",),
        **_PRIMUS.get(base, {}),
    }  # fmt: skip
    for name, value in given.items():
        plain = _RENAMED.get(name.replace("_", "-"), name.replace("_", "-"))
        found.pop(plain, None)
        found |= _of_values([(plain, value)])
    if "fp8-format" in found:
        found.setdefault("fp8-recipe", ("delayed",))
    if module.get("framework") == "megatron_bridge":
        if not any(name.endswith("_model_parallel_size") for name in given):
            raise ExportError(
                "framework: megatron_bridge: its degrees are those of a recipe of Megatron Bridge, which is another"
                " file; write tensor_model_parallel_size and its like into overrides"
            )
        if found.pop("peft", ("none",)) != ("none",):
            found["adapter"] = ("lora",)
    named = str(_expanded(str(module.get("model", "")))).removesuffix(".yaml")
    notes = [f"{named}: the model is known by the name of this file, which was not read"]
    if base and base not in _PRIMUS and module.get("framework") == "megatron":
        notes.append(f"config: {base:.60}: what this file says is not known")
    return Options(found, named=named, notes=notes)


_PRIMUS: Mapping[str, Found] = {
    "pre_trainer.yaml": {"global-batch-size": ("16",), "seq-length": ("1024",)},
    "sft_trainer.yaml": {"micro-batch-size": ("1",), "seq-length": ("2048",)},
    "trainer_base.yaml": {},
}
"""What configurations of Primus say of batches over trainer_base.yaml (primus/configs/modules/megatron, fd1eeabb)."""


def _flagscale(text: str) -> Options:
    """Keys of all sections as arguments."""
    content = _yaml_of(text)
    given = {**dict(_leaves(_section(content, "system"))), **dict(_leaves(_section(content, "model")))}
    if any("hetero" in name for name in given):
        raise ExportError("system.hetero: stages on unlike meshes are in no description of an engine here")
    found = _of_values(given.items())
    if "peft-type" in found:
        found["adapter"] = found.pop("peft-type")
    return Options(found)


def _neox(text: str) -> Options:
    """Keys of GPT-NeoX as arguments of Megatron-DeepSpeed, on which it is based."""
    content = _yaml_of(text)
    given = {str(key).replace("-", "_"): value for key, value in content.items()}
    micro = given.get("train_micro_batch_size_per_gpu")
    if micro is None and given.get("train_batch_size") is None:
        raise ExportError("train_micro_batch_size_per_gpu: it is not said; give the file that does")
    zero = given.get("zero_optimization") or {}
    names = {
        "pipe_parallel_size": "pipeline-model-parallel-size", "model_parallel_size": "tensor-model-parallel-size",
        "num_layers": "num-layers", "hidden_size": "hidden-size", "num_attention_heads": "num-attention-heads",
        "num_kv_heads": "num-query-groups", "intermediate_size": "ffn-hidden-size", "seq_length": "seq-length",
        "train_micro_batch_size_per_gpu": "micro-batch-size", "train_batch_size": "global-batch-size",
        "gradient_clipping": "clip-grad",
    }  # fmt: skip
    found: Found = {
        theirs: (str(given[name]),) for name, theirs in names.items() if given.get(name) not in (None, "auto")
    }
    for degree in ("pipeline-model-parallel-size", "tensor-model-parallel-size"):
        if found.get(degree) == ("0",):
            found[degree] = ("1",)
    found |= {"deepspeed": (), "zero-stage": (str(zero.get("stage", 0)) if isinstance(zero, dict) else "0",)}
    steps = given.get("gradient_accumulation_steps", given.get("gas"))
    if "global-batch-size" not in found and steps not in (None, "auto"):
        found["gradient-accumulation-steps"] = (str(steps),)
    precision = str(given.get("precision", ""))
    for word in ("bf16", "bfloat16", "fp16"):
        section = given.get(word)
        if precision == word or (isinstance(section, dict) and section.get("enabled")):
            found[word.replace("bfloat16", "bf16")] = ()
    if given.get("checkpoint_activations"):
        found["checkpoint-activations"] = ()
    if str(given.get("pos_emb", "learned")) in ("rotary", "rope"):
        found["position-embedding-type"] = ("rope",)
    elif given.get("pos_emb") not in (None, "learned"):
        found["position-embedding-type"] = (str(given["pos_emb"]),)
    if str(given.get("activation", "gelu")) == "swiglu" or str(given.get("mlp_type")) == "llama":
        found["swiglu"] = ()
    elif str(given.get("activation", "gelu")) not in ("gelu", "geglu"):
        found["squared-relu"] = ()
    if given.get("no_weight_tying"):
        found["untie-embeddings-and-output-weights"] = ()
    if "moe_num_experts" in given:
        found["num-experts"] = (str(given["moe_num_experts"]),)
    for kind in ("rwkv", "mamba"):
        if kind in str(given.get("attention_config", "")):
            found["is-hybrid-model"] = ()
    optimizer = given.get("optimizer")
    kind = str(optimizer.get("type", "Adam")).lower() if isinstance(optimizer, dict) else "adam"
    found["optimizer"] = ("adam" if kind in ("adam", "adamw", "cpu_adam") else kind,)
    found |= _of_neox_training(given, zero if isinstance(zero, dict) else {})
    notes = []
    method = str(given.get("pipe_partition_method", "type:transformer|mlp"))
    if "transformer" not in method and found.get("pipeline-model-parallel-size", ("1",)) != ("1",):
        notes.append(f"pipe_partition_method: {method:.40}: priced with equally many layers in each stage")
    if given.get("gpt_j_residual"):
        notes.append("gpt_j_residual: attention and MLP side by side; priced one after the other")
    return Options(found, notes=notes)


def _of_neox_training(given: Mapping[str, Any], zero: Mapping[str, Any]) -> Found:
    """Settings of GPT-NeoX that change time or memory, as arguments that say the same (megatron/neox_arguments/
    {neox,deepspeed}_args.py at ea7aefd8; its attention is unfused unless it is told)."""
    found: Found = {"sequence-parallel": ()} if given.get("sequence_parallel") else {}
    home = zero.get("offload_optimizer")
    if zero.get("cpu_offload") or (isinstance(home, dict) and home.get("device", "none") != "none"):
        found["optimizer-cpu-offload"] = ()
    recomputes = bool(given.get("checkpoint_activations"))
    same = {
        "attention-backend": "flash" not in str(given.get("attention_config", "")) and not given.get("te_mha"),
        "distribute-saved-activations": recomputes and given.get("partition_activations"),
        "cpu-offloading": recomputes and given.get("checkpoint_in_cpu"),
        "quant-states": given.get("use_bnb_optimizer"),
        "rl": given.get("train_impl", "normal") != "normal",
        "window-size": given.get("sliding_window_width"),
    }
    words: Found = {"attention-backend": ("unfused",)}
    return {**found, **{name: words.get(name, ()) for name, on in same.items() if on}}


def _bridge(text: str) -> Options:
    """Options for the performance scripts of Megatron Bridge, over a named recipe."""
    given = options_in(text)
    found = dict(_spoken(given))
    found = {name: values[:1] if name.endswith("-size") else values for name, values in found.items()}
    name = " ".join(found.pop("model-recipe-name", ()) or found.pop("model-size", ()))
    family = " ".join(found.pop("model-family-name", ()) or found.pop("model-name", ()))
    devices = found.pop("num-gpus", None)
    if devices is not None:
        found |= {"nnodes": ("1",), "nproc-per-node": devices}
    if not any(f"{degree}-parallel-size" in found for degree in ("tensor-model", "pipeline-model", "context")):
        raise ExportError(
            f"--model_recipe_name {name or family:.60}: its degrees are those of a recipe of Megatron Bridge, which is"
            " another file; give that file, or --tensor_model_parallel_size and its like in this one"
        )
    virtual = found.get("num-virtual-stages-per-pipeline-rank")
    if virtual in (("-1",), ("1",)):
        del found["num-virtual-stages-per-pipeline-rank"]
    dtype = (found.pop("compute-dtype", None) or ("bf16",))[0]
    found |= {"bf16": (), "use-distributed-optimizer": (), **_PRECISIONS.get(dtype, {})}
    if found.get("recompute-modules"):
        found["recompute-granularity"] = ("selective",)
    if found.get("recompute-num-layers"):
        found |= {"recompute-granularity": ("full",), "recompute-method": ("block",)}
    if "use-megatron-fsdp" in found:
        found.setdefault("data-parallel-sharding-strategy", ("optim_grads_params",))
    if (found.get("tensor-model-parallel-size") or ("1",)) != ("1",):
        found["sequence-parallel"] = ()
    if name.startswith(_ACCOUNTED):
        found |= {f"account-for-{end}-in-pipeline-split": () for end in ("embedding", "loss")}
    if name.startswith("deepseek_v3"):
        found |= _layout(found)
    notes = [f"{name}: what this recipe of Megatron Bridge decides beside these settings is not known"]
    return Options(
        found,
        given.programs,
        given.scheduled,
        variables=given.variables,
        named=f"{family} {name}",
        notes=(*given.notes, *notes),
    )


_ACCOUNTED = ("llama31_405b", "qwen3_235b")
"""Recipes that count embedding and head as layers: recipes/llama/h100/llama3.py, recipes/qwen/h100/qwen3_moe.py."""


def _recipe_run(text: str) -> Options:
    """A recipe of Megatron Bridge by its name, with some of its settings on the command line."""
    given, over = options_in(text), overrides_in(text)
    name = given.word("recipe")
    found = _of_values((path.rpartition(".")[2], value) for path, value in over.items() if path.startswith(_PARTS))
    if not any(f"{degree}-parallel-size" in found for degree in ("tensor-model", "pipeline-model", "context")):
        raise ExportError(
            f"--recipe {name:.60}: its degrees are those of a recipe of Megatron Bridge, which is another file; give"
            " that file, or model.tensor_model_parallel_size=... and its like in this one"
        )
    for launcher in ("nproc-per-node", "nproc_per_node", "nnodes"):
        if given.words(launcher):
            found[launcher] = given.words(launcher)
    found |= {"bf16": (), "use-distributed-optimizer": ()}
    if given.words("peft-scheme") or given.words("peft_scheme"):
        found["adapter"] = given.words("peft-scheme") or given.words("peft_scheme")
    notes = [f"{name}: what this recipe of Megatron Bridge decides beside these settings is not known"]
    return Options(found, (), given.scheduled, variables=given.variables, named=name, notes=(*given.notes, *notes))


_PARTS = ("model.", "train.", "ddp.", "optimizer.", "dataset.seq")


def _layout(found: Found) -> Found:
    """The stages of DeepSeek-V3, which its recipe takes from a table."""
    degrees = {
        theirs: int(found[name][0]) if name in found and found[name][0].isdecimal() else 1
        for name, theirs in (
            ("pipeline-model-parallel-size", "pipeline_model_parallel_size"),
            ("num-virtual-stages-per-pipeline-rank", "virtual_pipeline_model_parallel_size"),
        )
    }
    made = SETTERS["set_deepseek_v3_pipeline_model_parallel_layout"](degrees, ())
    return {} if made is None else {"pipeline-model-parallel-layout": (str(made[1]),)}


_PRECISIONS: Mapping[str, Found] = {
    "fp8_cs": {"fp8-format": ("hybrid",), "fp8-recipe": ("tensorwise",)},
    "fp8_ds": {"fp8-format": ("hybrid",), "fp8-recipe": ("delayed",)},
    "fp8_sc": {"fp8-format": ("e4m3",), "fp8-recipe": ("blockwise",)},
    "fp8_mx": {"fp8-format": ("e4m3",), "fp8-recipe": ("mxfp8",)},
    "nvfp4": {"fp4-format": ("nvfp4",)},
}
"""Arguments for --compute_dtype: current scaling, delayed scaling, blocks, and blocks of 32."""


def _of_values(values: Any) -> Found:
    """Keys and values of a YAML file as arguments, without those that are off or left open."""
    found: Found = {}
    for name, value in values:
        plain = str(name).replace("_", "-")
        plain = _RENAMED.get(plain, plain)
        if value is None or value is False or (isinstance(value, str) and value.strip().lower() in _OFF):
            continue
        if plain in _FLAGS and str(value).strip() == "0":
            continue
        if value is True:
            found[plain] = ()
        elif isinstance(value, list):
            found[plain] = tuple(str(one) for one in value)
        else:
            found[plain] = (str(value),)
    return found


def _with_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): _expanded(value) if isinstance(value, str) else value for name, value in given.items()}


def _expanded(text: str) -> Any:
    """A value with the defaults of its variables, `${PRIMUS_TP:8}`."""
    whole = re.fullmatch(r"\$\{\w+:([^{}]*)\}", text)
    if whole is None:
        return re.sub(r"\$\{\w+:([^{}]*)\}", r"\1", text)
    words = {"true": True, "false": False, "null": None}
    return words.get(whole[1].lower(), whole[1])


def _leaves(section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from ((f"{name}-on", True),) if name == "hetero" else ()
            yield from _leaves(value)
        else:
            yield str(name), value


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = content.get(name)
    return found if isinstance(found, dict) else {}


def _yaml_of(text: str) -> dict[str, Any]:
    try:
        content = parse_yaml(text)
    except ForeignTextError as error:
        raise ExportError(str(error)) from error
    if not isinstance(content, dict):
        raise ExportError("it has no keys; give a file of settings")
    return content


_LAUNCHERS: tuple[tuple[str, Callable[[str], Options]], ...] = (
    (rf"{_SWIFT}(pt|sft|rlhf)\b", _swift),
    (r"\A(?=[\s\S]*^(tuner_type|train_type|max_length):)(?=[\s\S]*^micro_batch_size:)(?=[\s\S]*^model:)", _swift),
    (r"\A(?=[\s\S]*^per_device_train_batch_size:)(?=[\s\S]*^(tensor|pipeline|expert)_model_parallel_size:)", _mca),
    (r"--actor-num-gpus-per-node\b", _slime),
    (r"^[ \t]+framework:\s*megatron(_bridge)?\s*$", _primus),
    (
        r"^system:[ \t]*\n(?:[ \t#].*\n|\n){0,80}?[ \t]+(tensor_model_parallel_size|pipeline_model_parallel_size):",
        _flagscale,
    ),
    (r"""^[ \t]*["']?pipe[-_]parallel[-_]size["']?\s*:""", _neox),
    (r"--model_recipe_name\b|scripts/performance/(custom_setup_experiment|run_script)\.py", _bridge),
    (r"\brun_recipe\.py\b", _recipe_run),
)
"""Launchers, each with a pattern that no file of another one has."""
