"""Reads files for NeMo and Megatron Bridge as arguments of Megatron-LM, and those as a description.

    recipe.py             settings that are assigned, or that functions of the file make (`recipes.py`)
    model_configs_*.csv   NeMo's table of performance runs: a row for each model, with the degrees as columns
    *.yaml                NeMo 1 and its Framework Launcher: keys below `trainer` and `model`

Decisions of a recipe in another file are unknown, and reported so. Source of names: NeMo 2.5.3, nemo/collections/llm/
recipes and scripts/performance; NeMo-Framework-Launcher, launcher_scripts/conf/training; Megatron Bridge, recipes and
perf_recipes.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hardware_profiles import engine_words
from hardware_profiles.foreign import ForeignTextError, parse_csv
from planner.export.description import ExportError
from planner.export.files.arguments import Options, options_in
from planner.export.files.overrides import choice_in, overrides_in
from planner.export.files.recipes import Recipe, Unknown, plain_settings, recipe_in
from planner.export.files.settings import size_of
from planner.export.files.yaml_files import settings_of
from planner.export.megatron.launchers import launched
from planner.export.megatron.megatron_reading import options_of, reading_of
from planner.export.megatron.nemo_paths import ARGUMENTS, PATHS, TORCH_DTYPES
from planner.export.model_names import zoo_name
from planner.export.target import Facts, Reading
from planner.export.unmodelled import unmodelled
from planner.sharding.update import PLAIN

_PRECISIONS = engine_words("nemo")
_LAST = {path.rpartition(".")[2]: name for name, path in PATHS.items()}
_ALSO_CALLED: Mapping[str, str] = {
    "tensor_parallelism": "tensor-model-parallel-size",
    "pipeline_parallelism": "pipeline-model-parallel-size",
    "virtual_pipeline_parallelism": "num-virtual-stages-per-pipeline-rank",
    "context_parallelism": "context-parallel-size",
    "expert_parallelism": "expert-model-parallel-size",
    "sequence_parallelism": "sequence-parallel",
    "num_gpus_per_node": "nproc-per-node",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "account_for_embedding_in_pipeline_split": "account-for-embedding-in-pipeline-split",
    "account_for_loss_in_pipeline_split": "account-for-loss-in-pipeline-split",
    "encoder_seq_length": "seq-length",
    "gradient_clip_val": "clip-grad",
    "activations_checkpoint_granularity": "recompute-granularity",
    "activations_checkpoint_method": "recompute-method",
    "activations_checkpoint_num_layers": "recompute-num-layers",
    "megatron_fsdp_main_grads_dtype": "megatron-fsdp-main-grads-dtype",
}
"""Settings outside recipes, by the last word of their path."""
_COLUMNS: Mapping[str, str] = {
    "tp_size": "tensor-model-parallel-size",
    "pp_size": "pipeline-model-parallel-size",
    "cp_size": "context-parallel-size",
    "ep_size": "expert-model-parallel-size",
    "vp_size": "num-virtual-stages-per-pipeline-rank",
    "etp_size": "expert-tensor-parallel-size",
    "mbs": "micro-batch-size",
    "gbs": "global-batch-size",
    "seq_len": "seq-length",
}
_PASSED_OVER = frozenset(
    {"use_distributed_optimizer", "fsdp", "average_in_collective", "overlap_param_gather", "max_steps", "precision",
     "grad_reduce_in_fp32", "vocab_size", "share_embeddings_and_output_weights", "gradient_accumulation_fusion", "name",
     "dir", "seq_length", "num_nodes", "autocast_enabled", "gated_linear_unit", "add_bias_linear", "normalization",
     "position_embedding_type", "should_pad_vocab", "multi_latent_attention",
     "use_transformer_engine", "apply_rope_fusion", "ckpt_format", "train_iters", "eval_iters", "bf16", "fp16", "fp32",
     "overlap_p2p_comm", "batch_p2p_comm", "moe_enable_deepep", "moe_flex_dispatcher_backend", "main_params_dtype",
     "rotary_scaling_factor", "mscale", "mscale_all_dim", "megatron_amp_O2"}
)  # fmt: skip
_O2 = "model.megatron_amp_O2"
_AUTOCAST = (
    "false, so weights are in fp32 and rounded for each use: priced as 16-bit weights with fp32 masters, so a step"
    " takes longer than this"
)


def read(text: str, facts: Facts) -> Reading:
    """A recipe, a table or a YAML file as a reading."""
    if text.startswith("task,model,size,"):
        return _read_table(text, facts)
    if launched(text) is not None:
        return reading_of(options_of(text), facts, "nemo")
    if re.search(r"^(trainer|model):", text, re.MULTILINE):
        return _read_yaml(text, facts)
    if is_overridden(text):
        return _read_overrides(text, facts)
    return _read_recipe(recipe_in(text, facts.recipe), facts)


def _read_recipe(recipe: Recipe, facts: Facts) -> Reading:
    given = {**dict(plain_settings(recipe)), **_dtypes_of_states(recipe)}
    options = {**_launched(facts.beside), **dict(_options(given, recipe))}
    notes = [*recipe.notes, *_unknown_notes(recipe, options)]
    below = [name for name in recipe.names if name.endswith(("_recipe", "_config", "_common")) or ".trainer" in name]
    other = below[0].partition(" ")[0] if below and not below[0].startswith(_PLAIN) else ""
    if other and options.keys().isdisjoint(_TELLING):
        raise ExportError(
            f"{recipe.made_by or 'the recipe'}: degrees and batches are those of {other}, which is another file's; give"
            " that file, or write them into this one"
        )
    ends = {path.rpartition(".")[2] for path in given}
    options.update((name, ()) for name, path in _BELOW.get(other, {}).items() if path not in ends)
    if other:
        notes.append(f"{other} is another file's: what it decides beside these settings is not known")
    if facts.devices is None and "nproc-per-node" not in options and (counted := _COUNTED.search(recipe.made_by)):
        facts = replace(facts, devices=size_of(counted[1]))
        notes.append(f"{recipe.made_by}: on {counted[1]} devices, by its name")
    try:
        reading = reading_of(Options(options), facts, "nemo")
    except ExportError as error:
        if not other:
            raise
        raise ExportError(f"{error} (what {other} of another file decides of it is not known)") from error
    fp8 = any(("fp8" in name and "mixed" in name) or ("fp8" in name and "precision" in name) for name in recipe.names)
    priced = bool(reading.description.fp8)  # from settings of the recipe
    told = {".fp8"} if priced else set()
    told |= {"mtp_num_layers"} if "predicted_tokens" in facts.model else set()
    told |= _PRICED_STATES if reading.description.update.moment_dtype != PLAIN.moment_dtype else set()
    mattering = [(path, value) for path, value in given.items() if not path.endswith(tuple(told))]
    mattering.append(("fp8", fp8 and not priced))
    off = {path for path, value in given.items() if not value and path.rpartition(".")[2] in _OFF}
    unread = [path for path in given if path not in ARGUMENTS and path.rpartition(".")[2] not in _KNOWN]
    unread = [path for path in unread if path not in off]
    said = "num-virtual-stages-per-pipeline-rank"  # a layout says the same
    unread += [PATHS[name[2:]] for name in reading.unread if name[2:] in PATHS and name[2:] != said]
    return Reading(
        description=reading.description,
        unmodelled=unmodelled(mattering),
        notes=(*notes, *reading.notes),
        unread=tuple(sorted(unread)),
        stack="nemo",
    )


def _unknown_notes(recipe: Recipe, options: Mapping[str, tuple[str, ...]]) -> list[str]:
    """A note on settings whose values the file does not state. Raises ExportError for degrees, batches and lengths:
    they would be read as if they were not given."""
    lacking = {}
    for path, text in recipe.unknown.items():
        last = path.rpartition(".")[2]
        name = ARGUMENTS.get(path, _LAST.get(last, _ALSO_CALLED.get(last)))
        if name is not None and name not in options and name not in _OF_STATES:
            lacking[name] = f"{path} = {text:.60}"
    needed = next((said for name, said in lacking.items() if name.endswith(("-size", "-length", "-layers"))), None)
    if needed is not None:
        raise ExportError(f"{needed}: its value is not known without running the file; write the number")
    return [f"{', '.join(list(lacking.values())[:3])}: not known, and read as not given"] if lacking else []


def _dtypes_of_states(recipe: Recipe) -> dict[str, str]:
    """The dtypes of moments and gradients that the optimizer is told, `torch.bfloat16`, in the words of Megatron-LM."""
    words = {theirs: ours for ours, theirs in TORCH_DTYPES.items()}
    return {
        path: words[value.text]
        for path, value in recipe.settings.items()
        if isinstance(value, Unknown) and value.text in words and _NAMES.get(path.rpartition(".")[2]) in _OF_STATES
    }


_NAMES = {**_ALSO_CALLED, **_LAST}
_OF_STATES = ("main-grads-dtype", "exp-avg-dtype", "exp-avg-sq-dtype", "megatron-fsdp-main-grads-dtype")
_PRICED_STATES = {"use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"}
_TELLING = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
            "expert-model-parallel-size", "micro-batch-size")  # fmt: skip
_ENDS = {
    "account-for-embedding-in-pipeline-split": "account_for_embedding_in_pipeline_split",
    "account-for-loss-in-pipeline-split": "account_for_loss_in_pipeline_split",
}
_BELOW = {"llama31_405b_pretrain_config": _ENDS, "qwen3_235b_a22b_pretrain_config": _ENDS}
"""Switches that are on in recipes of Megatron Bridge on which other recipes are based: recipes/llama/h100/llama3.py and
recipes/qwen/h100/qwen3_moe.py at 067f987d."""
_COUNTED = re.compile(r"_(\d+)gpus?_")
"""The number of devices in the name of a Megatron Bridge recipe."""
_PLAIN = "vanilla_gpt_pretrain"
"""The recipe of Megatron Bridge with the defaults of Megatron-LM."""
_OFF = ("moe_enable_deepep", "moe_shared_expert_overlap", "mtp_num_layers")  # plans are priced without them
_KNOWN = _PASSED_OVER | _ALSO_CALLED.keys() | _LAST.keys()


def _launched(script: str) -> dict[str, tuple[str, ...]]:
    """The numbers of processes that the script beside a recipe starts."""
    found = options_in(script)
    return {name: words for name in ("nnodes", "nproc-per-node") if (words := found.words(name))}


def _options(given: Mapping[str, Any], recipe: Recipe) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The equivalent arguments of Megatron-LM; a whole path has priority over its last word alone."""
    found: dict[str, Any] = {}
    for exact in (False, True):
        for path, value in given.items():
            last = path.rpartition(".")[2]
            name = ARGUMENTS.get(path) if exact else _LAST.get(last, _ALSO_CALLED.get(last))
            if name is not None and (exact or path not in ARGUMENTS):
                found[name] = value
    sharded = given.get("trainer.strategy.fsdp") == "megatron"
    if sharded:
        found["use-megatron-fsdp"] = True
    elif given.get("trainer.strategy.fsdp") == "pytorch":
        found["use-torch-fsdp2"] = True
    if found.get("use-megatron-fsdp"):
        found.setdefault("data-parallel-sharding-strategy", "no_shard")  # of DistributedDataParallelConfig
    cut = any(("distributed" in name and "adam" in name) or name.endswith("_common") for name in recipe.names)
    ends = {path.rpartition(".")[2]: value for path, value in given.items()}
    below = any(name.endswith(("pretrain_recipe", "pretrain_config")) for name in recipe.names)
    if ends.get("use_distributed_optimizer", cut or below):
        found.setdefault("use-distributed-optimizer", True)
    for name, value in found.items():
        if value is not None and value is not False:
            values = value if isinstance(value, list) else [] if value is True else [value]
            yield name, tuple(f"{one:g}" if isinstance(one, float) else str(one) for one in values)
    yield from _precision(given, recipe)


def _precision(given: Mapping[str, Any], recipe: Recipe) -> Iterator[tuple[str, tuple[str, ...]]]:
    said = [value for path, value in given.items() if path.endswith("precision") and isinstance(value, str)]
    said += [word for word in ("bf16", "fp16", "fp32") if given.get(f"mixed_precision.{word}") is True]
    made = [name for name in recipe.names if "mixed" in name.lower()]
    if not said and made:
        said = ["16-mixed" if "fp16" in made[0] and "bf16" not in made[0] else "bf16-mixed"]
    precision = said[-1] if said else "bf16-mixed"
    plugin = given.get("trainer.plugins.grad_reduce_in_fp32", True)
    plugin = given.get("mixed_precision.grad_reduce_in_fp32", plugin)
    made_here = "mixed_precision.grad_reduce_in_fp32" in given
    wide = (
        plugin if made_here or "trainer.plugins" in recipe.settings or "ddp.grad_reduce_in_fp32" not in given else True
    )
    yield from _precision_options(precision, bool(wide))


def _precision_options(precision: str, wide: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    known = {theirs: ours for ours, theirs in _PRECISIONS.items()} | {"bf16": "bf16", "16": "fp16", "32": "fp32"}
    known |= {"bf16_mixed": "bf16", "fp16_mixed": "fp16", "fp16": "fp16", "fp32": "fp32"}
    if precision not in known and not precision.startswith("bf16"):
        raise ExportError(f"precision {precision}: plans are read with {', '.join(_PRECISIONS.values())}")
    found = known.get(precision, "bf16")
    if found == "fp32":
        return
    yield found, ()
    if wide and found == "fp16":
        yield "accumulate-allreduce-grads-in-fp32", ()
    if not wide and found == "bf16":
        yield "grad-reduce-in-bf16", ()


def _read_table(text: str, facts: Facts) -> Reading:
    """The row of a table for the model: pre-training, bf16, the given devices; or the row that a recipe name selects by
    its words."""
    try:
        lines = [cells for _, cells in parse_csv(text)]
    except ForeignTextError as error:
        raise ExportError(str(error)) from error
    rows = [dict(zip(lines[0], cells, strict=False)) for cells in lines[1:]]
    row = _row(rows, facts)
    options: dict[str, tuple[str, ...]] = {}
    for column, name in _COLUMNS.items():
        value = row.get(column, "")
        if value and not (name == "num-virtual-stages-per-pipeline-rank" and float(value) <= 1):
            options[name] = (_whole(value, column),)
    degrees = [float(row.get(name) or 1) for name in ("tp_size", "pp_size", "cp_size")]
    if degrees[0] > 1:
        options["sequence-parallel"] = ()
    if float(row.get("recompute_layers") or 0):
        options |= {"recompute-granularity": ("full",), "recompute-method": ("block",),
                    "recompute-num-layers": (_whole(row["recompute_layers"], "recompute_layers"),)}  # fmt: skip
    if row.get("recompute_modules"):
        modules = tuple(re.split(r"[/ ]", row["recompute_modules"]))
        options |= {"recompute-granularity": ("selective",), "recompute-modules": modules}
    if float(row.get("use_mcore_fsdp") or 0):
        options |= {"use-megatron-fsdp": (), "data-parallel-sharding-strategy": ("optim_grads_params",)}
    stages = degrees[1] * float(row.get("vp_size") or 1)
    if stages > 1 and facts.layers % stages and (facts.layers + 2) % stages == 0:
        options |= {f"account-for-{end}-in-pipeline-split": () for end in ("embedding", "loss")}
    options |= {"use-distributed-optimizer": (), "bf16": (), "grad-reduce-in-bf16": ()}
    options |= {"nnodes": ("1",), "nproc-per-node": (_whole(row.get("num_gpus", ""), "num_gpus"),)}
    reading = reading_of(Options(options), facts, "nemo")
    words: list[tuple[str, object]] = [
        (name, row.get(name, "")) for name in ("cuda_graphs", "activation_offload_layers")
    ]
    words += [("fp8", row.get("dtype", "").startswith("fp8"))]
    named = " ".join(row.get(name, "") for name in ("task", "model", "size", "dtype"))
    return Reading(
        description=reading.description,
        unmodelled=unmodelled(words),
        notes=(f"the row of {named} on {float(row['num_gpus']):g} devices", *reading.notes),
        unread=(),
        stack="nemo",
    )


def _row(rows: list[dict[str, str]], facts: Facts) -> dict[str, str]:
    if facts.recipe:
        words = set(facts.recipe.split())
        left = [row for row in rows if words <= {*row.values(), _count(row)}]
    else:
        left = [row for row in rows if zoo_name(f"{row.get('model')}-{row.get('size')}") == facts.model]
        for column, value in (("task", "pre_train"), ("dtype", "bf16")):
            left = [row for row in left if row.get(column) == value] or left
        if facts.devices is not None:
            left = [row for row in left if _count(row) == str(facts.devices)] or left
    if len(left) == 1:
        return left[0]
    said = [
        " ".join((*(row.get(n, "") for n in ("task", "model", "size", "dtype")), _count(row))) for row in left or rows
    ]
    raise ExportError(
        f"{len(left) or 'none'} of the {len(rows)} rows are meant; name one with --recipe '{said[0] if said else ''}'"
    )


def _count(row: Mapping[str, str]) -> str:
    return row.get("num_gpus", "").partition(".")[0]


def _whole(value: str, column: str) -> str:
    try:
        return str(int(float(value)))
    except (ValueError, OverflowError):
        raise ExportError(f"{column}: {value!r:.80} is no whole number") from None


def _read_overrides(text: str, facts: Facts) -> Reading:
    """The settings that a command gives NeMo 1 or its launcher over a named configuration, which was not read."""
    given = {path.removeprefix("training.").removeprefix("peft."): v for path, v in overrides_in(text).items()}
    chosen = choice_in(text, "training")
    if not any(path.endswith(("model_parallel_size", ".micro_batch_size")) for path in given):
        raise ExportError(
            f"training={chosen or '...'}: degrees and batches are those of this configuration, which is another file;"
            " give that file, or model.tensor_model_parallel_size=... and its like in this one"
        )
    given.setdefault("trainer.num_nodes", 1)
    reading = _read_given(given, facts)
    named = chosen or "the configuration that the program reads"
    return replace(reading, notes=(f"{named}: what it decides beside these settings is not known", *reading.notes))


def is_overridden(text: str) -> bool:
    """Whether a script starts NeMo 1 with settings on its command line."""
    return re.search(r"megatron_\w*(pretraining|finetuning|sft)\w*\.py|launcher_scripts/main\.py", text) is not None


def _read_yaml(text: str, facts: Facts) -> Reading:
    given = {path.removeprefix("training."): value for path, value in settings_of(text).all}
    if not any(path.endswith(("model_parallel_size", "micro_batch_size", "global_batch_size")) for path in given):
        raise ExportError(
            "trainer, model: neither degrees nor batches of Megatron-LM are below them (model.micro_batch_size and the"
            " like); give the file of a language model"
        )
    return _read_given({_O2: False, **given}, facts)  # the default of NeMo 1


def _read_given(given: Mapping[str, Any], facts: Facts) -> Reading:
    options: dict[str, tuple[str, ...]] = {}
    for path, value in given.items():
        last = path.rpartition(".")[2]
        name = _LAST.get(last, _ALSO_CALLED.get(last))
        if name is None or path.partition(".")[0] not in ("trainer", "model") or path.count(".") > 2:
            continue
        if "$" in str(value) and name.endswith(("-parallel-size", "-batch-size", "-per-rank")):
            raise ExportError(f"{path}: {value!s:.60}: its value is another's; write the number")
        odd = value is None or value is False or isinstance(value, list | dict) or "$" in str(value) or value == 0
        if not odd:
            options[name] = () if value is True else (str(value),)
    if "position_embedding_type" in (ends := {path.rpartition(".")[2]: value for path, value in given.items()}):
        options["position-embedding-type"] = (str(ends["position_embedding_type"]),)
    length = given.get("model.data.train_ds.max_seq_length")
    if type(length) is int:
        options.setdefault("seq-length", (str(length),))
    options |= _fp8_of_yaml(given)
    if given.get("model.activations_checkpoint_granularity") is None:
        for name in ("recompute-method", "recompute-num-layers"):
            options.pop(name, None)
    options.setdefault("clip-grad", ("0",))  # Lightning clips where gradient_clip_val says so
    optimizer = str(given.get("model.optim.name", "fused_adam"))
    if "distributed" in optimizer:
        options["use-distributed-optimizer"] = ()
    for optim in ("attention-dropout", "hidden-dropout"):
        options.pop(optim, None)
    options["optimizer"] = ("adam" if "adam" in optimizer or optimizer == "mcore_distributed_optim" else optimizer,)
    options |= _fsdp_of_yaml(given)
    wide = str(given.get("model.optim.grad_sync_dtype", "fp32")) in ("fp32", "32")
    options |= dict(_precision_options(str(given.get("trainer.precision", "bf16")), wide))
    reading = reading_of(Options(options), facts, "nemo")
    unread = tuple(path for path in given if path.rpartition(".")[2] not in _KNOWN)
    mattering = unmodelled((path, value) for path, value in given.items() if path != "model.fp8")
    narrow = reading.description.precision != "fp32" and given.get("model.fsdp") is not True
    if narrow and given.get(_O2, True) is False:
        mattering = (*mattering, f"{_O2}: {_AUTOCAST}")
    return Reading(
        description=reading.description,
        unmodelled=mattering,
        notes=reading.notes,
        unread=unread,
        stack="nemo",
    )


def _fsdp_of_yaml(given: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Options for PyTorch's FSDP in NeMo 1 (megatron_gpt_config.yaml: fsdp, fsdp_sharding_strategy)."""
    if given.get("model.fsdp") is not True:
        return {}
    strategy = str(given.get("model.fsdp_sharding_strategy", "full"))
    if strategy not in ("full", "grad"):
        raise ExportError(f"model.fsdp_sharding_strategy: {strategy:.40}; read are full and grad")
    names = ("use-torch-fsdp2", *(["torch-fsdp2-no-reshard-after-forward"] if strategy == "grad" else []))
    return dict.fromkeys(names, ())


def _fp8_of_yaml(given: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Options for fp8 in NeMo 1.

    There fp8 is a switch; its base configuration (megatron_gpt_config.yaml) has the hybrid format, and scales delayed
    by the largest of 1024 steps.
    """
    if given.get("model.fp8") is not True:
        return {}
    own = {"fp8-format": "e4m3" if given.get("model.fp8_e4m3") is True else "hybrid"}
    own["fp8-amax-history-len"] = str(given.get("model.fp8_amax_history_len", 1024))
    own["fp8-amax-compute-algo"] = str(given.get("model.fp8_amax_compute_algo", "max"))
    return {name: (value,) for name, value in own.items()}
