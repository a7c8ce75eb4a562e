"""DeepSpeed: the JSON that `deepspeed.initialize` takes.

    ZeRO                  zero_optimization.stage; with a pipeline no more than 1
    tensor                tensor_parallel.autotp_size: norms and the embedding are whole, no pipeline; with ZeRO 3 from
                          0.19.4 on
    context               sequence_parallel_size (Ulysses), by heads
    pipeline              pipeline.stages, equal ones, 1F1B. They are made in code: PipelineModule(num_stages=...)
    recomputation         all layers or none: pipeline.activation_checkpoint_interval; without a pipeline the model's
                          own, of which activation_checkpointing.number_checkpoints says how many there are
    micro-batches         train_micro_batch_size_per_gpu, gradient_accumulation_steps, train_batch_size; the last not
                          beside tensor parallelism, whose devices it counts as if each had samples of its own
    experts               expert_parallel.autoep_size (AutoEP, for models of transformers): whole ones, over tensor
                          parallel devices first; not beside a pipeline, nor with ZeRO 3 beside a context, nor with
                          tensor parallelism beside offload. Tensor parallelism beside experts is there with AutoEP
                          alone, and takes tensor_parallel.partition_config: AutoTP refuses transformers' own plan
    optimizer             AdamW, SGD (zero_allow_untested_optimizer); Lamb without ZeRO alone, which would take its
                          norms over shards
    offload               zero_optimization.offload_optimizer and, with ZeRO 3, offload_param: cpu; nvme with ZeRO 3
    gradients             data_types.grad_accum_dtype for sums, communication_data_type for what is reduced

Experts of models written with `deepspeed.moe.layer.MoE` are set in code. Tensor, context and pipeline parallelism
cannot be combined. Source: deepspeed 0.19.8, deepspeed/runtime/{config,constants,engine}.py, runtime/zero/{config,
utils}.py, runtime/tensor_parallel/config.py, runtime/pipe/{engine,module}.py, module_inject/auto_ep_{config,
folding}.py, module_inject/{autotp_config,tp_plan_converter}.py.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardware_profiles import Home
from hardware_profiles.foreign import SETTINGS, ForeignTextError, parse_json
from planner.export import common
from planner.export.architecture import Architecture
from planner.export.description import Description, ExportError, data_of, gradient_bytes, stages_of
from planner.export.files.arguments import options_in
from planner.export.files.settings import Settings
from planner.export.pytorch.autotp import tensor_section
from planner.export.shell import torchrun_script
from planner.export.target import Asked, Facts, Giving, Job, Loss, Reading, Target
from planner.export.unmodelled import unmodelled
from planner.sharding.update import PLAIN, Update

_OPTIMIZERS = {"adamw": "AdamW", "lamb": "Lamb", "sgd": "SGD"}
_PARAMETERS = {"sgd": {"momentum": common.SGD_MOMENTUM}}
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OFFLOADED: dict[Home, str] = {"host": "cpu", "disk": "nvme"}
_PRICED = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
_PURE = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
_NVME = "/local_nvme"
_WEIGHTS = 3  # the ZeRO stage that shards weights
_SECTIONS = ("zero_optimization", "tensor_parallel", "pipeline", "data_types", "expert_parallel")
_AUTO_EP = "Mixtral, Qwen3 with experts, DeepSeek-V2 and V3"
"""Models of transformers with experts that AutoEP knows, among those that can be planned."""
_CLIPPED = 1.0
"""Norm to which gradients are clipped unless a file says otherwise: from 0.19.3 on, up to then to none (runtime/
constants.py: GRADIENT_CLIPPING_DEFAULT). Accelerate and transformers' Trainer put it in the place of "auto"."""
_BUFFER = 100_000_000
"""Default of `offload_param.buffer_size`: the most elements of a weight that a device reads from its disk."""


def nearest(description: Description) -> tuple[Loss, ...]:
    """What DeepSpeed cannot be told."""
    common.refuse_other_training(description, "DeepSpeed", tuple(_OPTIMIZERS))
    _refuse_together(description)
    giving = Giving(description)
    common.give_up_virtual_stages(giving)
    common.give_up_schedules(giving, ("1f1b",))
    common.give_up_uneven_stages(giving)
    if not giving.description.even:
        raise ExportError(
            f"DeepSpeed's pipeline holds equally many layers in every stage; {sum(description.layers)} do not divide"
            f" over {description.pipeline}: plan again with another --pipeline"
        )
    common.give_up_interleave(giving)
    common.give_up_fp8(giving)
    common.give_up_replicas(giving)
    _give_up_splits(giving)
    _give_up_cut_experts(giving)
    _give_up_zero(giving)
    _give_up_offload(giving)
    _give_up_experts(giving)
    common.give_up_selective(giving, "whole blocks")
    common.give_up_partial_recomputation(giving)
    d = giving.description
    pure = _can_be_pure(d) and not d.update.master_weights
    if d.optimizer == "lamb" and not _takes_lamb(d):
        raise ExportError(
            "DeepSpeed's LAMB takes norms of whole weights without ZeRO alone, which sums gradients in the dtype of the"
            " model and, in bf16, has no pipeline; plan again with --optimizer adamw, or with --zero 0"
            " --gradient-dtype parameter"
        )
    common.give_up_updates(
        giving,
        buckets=True,
        master_weights=(not pure,),
        gradient_dtypes=("parameter",) if pure else _dtypes(d),
        moment_dtypes=("bf16" if pure else "fp32",),
    )
    return tuple(giving.losses)


def _can_be_pure(d: Description) -> bool:
    """Whether weights, gradients and states can be bf16; all of them are together, under ZeRO, on the device
    (deepspeed/runtime/config.py: bf16_optimizer_states requires bf16_master_weights_and_grads)."""
    return d.precision == "bf16" and d.zero > 0 and d.states_at == "device"


def _refuse_together(d: Description) -> None:
    """Raise ExportError for a combination of parallelisms that DeepSpeed only supports one by one."""
    used = {"tensor": d.tensor, "context": d.context, "pipeline": d.pipeline}
    together = [f"{name} {degree}" for name, degree in used.items() if degree > 1]
    if len(together) > 1:
        raise ExportError(
            "DeepSpeed by itself has tensor, context and pipeline parallelism one at a time, the plan has"
            f" {' x '.join(together)}; plan again with one of them, or export to megatron"
        )


def _give_up_splits(giving: Giving) -> None:
    d = giving.description
    if d.ring > 1:
        here = f"ring of {d.ring}" + (f", Ulysses over {d.heads}" if d.heads > 1 else "")
        giving.up("context parallelism", here, f"Ulysses over {d.context}", ring=1, heads=d.context, zigzag=False)
    if d.sequence_parallel:
        giving.up("norms", "along the sequence", "whole", sequence_parallel=False)
    if d.tensor > 1 and d.vocabulary_parallel:
        giving.up("embedding over tensor-parallel devices", "vocabulary", "replicated", vocabulary_parallel=False)


def _takes_lamb(d: Description) -> bool:
    """Whether every device updates whole weights.

    The optimizers of ZeRO give FusedLamb a flat shard of all weights of a group, of which it takes one norm
    (runtime/zero/stage_1_and_2.py, ops/lamb/fused_lamb.py); so does the BF16_Optimizer of a pipeline.
    """
    return d.zero == 0 and not _sums_in_16_bits(d) and not (d.pipeline > 1 and d.precision == "bf16")


def _give_up_cut_experts(giving: Giving) -> None:
    """Give up experts that tensor-parallel devices shard: AutoTP leaves experts alone, AutoEP puts them over tensor
    parallel devices first."""
    d = giving.description
    if d.tensor == 1 or d.expert is None or (d.whole_experts and d.expert > 1):
        return
    over = d.expert if d.expert % d.tensor == 0 else d.tensor
    giving.up(
        "experts beside tensor parallelism", f"each cut by {d.tensor}", f"whole, over {over}", whole_experts=True,
        expert=over,
    )  # fmt: skip


def _give_up_experts(giving: Giving) -> None:
    d = giving.description
    if d.expert is not None and (d.expert > 1 or d.whole_experts) and not _spreads_experts(d):
        giving.up("expert parallelism", d.expert, 1, expert=1, whole_experts=False)


def _spreads_experts(d: Description) -> bool:
    """Whether AutoEP supports these experts together with the rest."""
    if d.expert is None or d.expert == 1 or d.pipeline > 1:
        return False
    return d.tensor > 1 or d.zero < _WEIGHTS or d.context == 1


def _give_up_zero(giving: Giving) -> None:
    d = giving.description
    if d.pipeline > 1 and d.zero > 1:
        giving.up("ZeRO beside the pipeline", d.zero, 1, zero=1)
    elif d.tensor > 1 and d.zero == _WEIGHTS and d.expert is not None:
        giving.up("ZeRO beside tensor and expert parallelism", d.zero, 2, zero=2)
    if _sums_in_16_bits(d) and d.shards > 1 and d.optimizer != "lamb":
        giving.up("ZeRO", 0, "1: without ZeRO it sums gradients in 16 bits", zero=1)


def _sums_in_16_bits(d: Description) -> bool:
    """Whether gradients in fp32 are asked for without ZeRO.

    There DeepSpeed refuses `grad_accum_dtype` other than the dtype of the model (deepspeed/runtime/engine.py:
    _do_optimizer_sanity_check). On one device ZeRO 1 is the same training, and takes it.
    """
    return d.zero == 0 and d.precision != "fp32" and d.update.gradient_dtype != "parameter"


def _reduces_at_once(d: Description) -> bool:
    """Whether gradients are reduced once a step, after the backward pass: with a pipeline, and by the BF16_Optimizer
    that ZeRO 1 is with gradients in fp32 (engine.py: _do_optimizer_sanity_check, allreduce_gradients)."""
    plain = d.zero == 1 and d.precision == "bf16" and d.update.gradient_dtype != "parameter"
    return d.pipeline > 1 or (plain and d.states_at == "device")


def _ignores(job: Job) -> tuple[str, ...]:
    """What is priced as overlapped and DeepSpeed does not overlap."""
    d = job.description
    alone = d.shards == 1 or "reductions" not in job.overlapped
    return () if alone or not _reduces_at_once(d) else ("reductions of gradients overlapped with the backward pass",)


def _give_up_offload(giving: Giving) -> None:
    """Give up offload that DeepSpeed does not have: ZeRO 1 and 2 offload states to the host, ZeRO 3 states and weights,
    also to disks."""
    zero, folded = giving.description.zero, giving.description.tensor > 1 and giving.description.expert is not None
    states = ("host", "disk") if zero == _WEIGHTS else ("host",) if zero and not folded else ()
    weights = ("host", "disk") if zero == _WEIGHTS else ()
    common.give_up_offload(giving, states, weights, f"on the device, as ZeRO {zero} has it")


def _dtypes(d: Description) -> tuple[str, ...]:
    """Possible dtypes of gradients."""
    if d.precision == "fp32":
        return ("mixed",)
    return ("mixed", "fp32", "parameter") if d.zero > 1 else ("mixed", "parameter")


def write(job: Job) -> Mapping[str, str]:
    """`ds_config.json`, and the script that starts a training program with it.

    Raises ExportError for tensor parallelism of latent attention: AutoTP refuses the plan that transformers has for
    DeepSeek, and has no setting for the gradient of the part of keys that all heads share.
    """
    if job.description.tensor > 1 and job.architecture is not None and job.architecture.latent is not None:
        raise ExportError(
            f"DeepSpeed has no tensor parallelism for latent attention, the plan of {job.model} has"
            f" {job.description.tensor}; plan again with --tensor 1"
        )
    content = json.dumps(_content(job.description, bool(job.overlapped), job.architecture), indent=2) + "\n"
    return {"ds_config.json": content, "launch.sh": _script(job)}


def _content(d: Description, overlapped: bool, a: Architecture | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        **({} if d.tensor > 1 else {"train_batch_size": d.global_batch}),
        "train_micro_batch_size_per_gpu": d.micro_batch,
        "gradient_accumulation_steps": d.micro_batches,
        "gradient_clipping": 0.0 if d.update.clip_norm is None else d.update.clip_norm,
        "optimizer": {"type": _OPTIMIZERS[d.optimizer], "params": {"lr": 1e-4, **_PARAMETERS.get(d.optimizer, {})}},
        "zero_optimization": _zero(d, overlapped, a),
    }
    if d.optimizer == "sgd" and found["zero_optimization"]["stage"]:
        found["zero_allow_untested_optimizer"] = True  # refused otherwise; an update of each element may be sharded
    if d.precision != "fp32":
        pure = {} if d.update.master_weights else dict.fromkeys(_PURE, True)
        found[d.precision] = {"enabled": True, **pure}
        sums, messages = _words(d)
        found["data_types"] = {"grad_accum_dtype": sums}
        found["communication_data_type"] = messages
    if d.tensor > 1:
        found["tensor_parallel"] = tensor_section(d, a)
    if d.context > 1:
        found |= {"sequence_parallel_size": d.context, "data_parallel_size": d.data}
    if (d.expert or 1) > 1:
        found["expert_parallel"] = {"enabled": True, "autoep_size": d.expert}
    if d.pipeline > 1:
        interval = 1 if any(d.full) else 0
        found["pipeline"] = {"stages": d.pipeline, "activation_checkpoint_interval": interval}
    elif any(d.full):
        found["activation_checkpointing"] = {"number_checkpoints": sum(d.layers)}
    return found


def _words(d: Description) -> tuple[str, str]:
    """Dtypes of accumulated gradients, and of reduced ones."""
    if d.update.gradient_dtype == "parameter":
        return d.precision, d.precision
    return "fp32", d.precision if d.zero > 1 and d.update.gradient_dtype == "mixed" else "fp32"


def _zero(d: Description, overlapped: bool, a: Architecture | None) -> dict[str, Any]:
    """The ZeRO section. Below stage 3 no reduction overlaps the backward pass by default; some can never."""
    found: dict[str, Any] = {"stage": 1 if _sums_in_16_bits(d) else d.zero}
    if overlapped and d.zero and not _reduces_at_once(d):
        found["overlap_comm"] = True
    for key, home in (("offload_optimizer", d.states_at), ("offload_param", d.weights_at)):
        if home != "device":
            path = {"nvme_path": _NVME} if home == "disk" else {"pin_memory": True}
            found[key] = {"device": _OFFLOADED[home], **path}
    if d.weights_at == "disk" and a is not None and (share := -(-_largest(a) // (d.data * d.context))) > _BUFFER:
        found["offload_param"]["buffer_size"] = share
    if d.update.bucket_size:
        found["reduce_bucket_size"] = d.update.bucket_size // gradient_bytes(d)
    return found


def _largest(a: Architecture) -> int:
    """Elements of the largest weight of a model of transformers, which keeps all experts of a layer in one."""
    experts = 0 if a.experts is None else 2 * a.experts.count * a.experts.width
    return a.hidden * max(a.vocabulary, a.ffn, experts)


def _script(job: Job) -> str:
    """The launch script. DeepSpeed's own launcher needs hosts that reach each other by ssh; torchrun sets the same
    variables."""
    title = f"{job.model} with DeepSpeed 0.19; TRAIN is your training program, see README.md."
    also = ("--deepspeed", '--deepspeed_config "$(dirname "$0")/ds_config.json"')
    return torchrun_script(job, title, '"${TRAIN:?}"', (), also=also)


def fill_in(job: Job) -> Asked:
    """What the user's program has to do."""
    d = job.description
    asked = ["your training program, with the arguments of `deepspeed.add_config_arguments`"]
    if d.pipeline > 1:
        asked.append(
            f"its model is a `deepspeed.pipe.PipelineModule(layers, num_stages={d.pipeline},"
            ' partition_method="type:NAME")`'
            f" with the class of its blocks, {d.layers[0]} of them in each stage, and it calls `engine.train_batch()`"
        )
    elif any(d.full):
        asked.append("it recomputes every block (`model.gradient_checkpointing_enable()` of Hugging Face)")
    if d.context > 1:
        asked.append(
            f"it gives every process one of {d.context} parts of each sequence, and attends with `DistributedAttention`"
        )
    if d.tensor > 1:
        asked.append(
            f"it gives the {d.tensor} devices of a tensor-parallel group, which are neighbours, the same samples"
        )
        if job.architecture is not None and job.architecture.family == "gpt":
            asked.append("its model is not GPT-2 of transformers, which AutoTP refuses, but one of `nn.Linear`s")
    if (d.expert or 1) > 1:
        asked.append(
            f"its model is one of transformers, up to 5.22, whose experts AutoEP knows: {_AUTO_EP}; with 5.23 and 5.24"
            " AutoEP of 0.19.8 stops (`_CanRecordRegistry`)"
        )
    if d.states_at != "device":
        asked.append("it leaves the optimizer to DeepSpeed, which updates offloaded states on the host's processors")
    if _OFFLOADED.get("disk") in (_OFFLOADED.get(d.states_at), _OFFLOADED.get(d.weights_at)):
        asked.append(f"there is a disk at `{_NVME}`, or `nvme_path` names another")
    if d.weights_at == "disk" and job.architecture is None:
        asked.append(f"a device has no more than {_BUFFER:,} elements of any weight, or `buffer_size` is given")
    length = f" of {d.sequence_length} tokens" if d.sequence_length else ""
    asked.append(f"samples{length}: {d.micro_batch} per device and micro-batch, {d.global_batch} per step")
    return tuple(("" if at else "TRAIN", what) for at, what in enumerate(asked))


def read(text: str, facts: Facts) -> Reading:
    """A JSON file, or the arguments of a program that is started with DeepSpeed, as a reading."""
    from planner.export.pytorch import trainer_reading

    if trainer_reading.is_trainers(text):
        return trainer_reading.read(text, facts)
    try:
        settings = Settings(parse_json(text, SETTINGS), "JSON")
    except ForeignTextError as error:
        raise ExportError(str(error)) from error
    return reading_of(settings, facts)


def offloaded(stage: int, places: Mapping[str, str]) -> dict[str, Any]:
    """The keys of offload in the ZeRO section, of what ("optimizer", "param") is where. Only ZeRO 3 has that of
    weights, and no ZeRO has none."""
    having = ("optimizer", "param")[: 2 if stage == _WEIGHTS else min(stage, 1)]
    return {f"offload_{what}": {"device": places[what]} for what in having if what in places}


def reading_of(settings: Settings, facts: Facts) -> Reading:
    """Settings of DeepSpeed from any source, as a reading."""
    description = common.normalised(_read(settings, facts))
    description = replace(description, update=_read_update(settings, description))
    notes = []
    if all(_given(settings, name) is None for name in _BATCHES[:2]):
        notes.append(common.batches_left_open(facts, description.micro_batches))
    if description.states_at != "device":
        notes.append(common.UPDATED_ON_HOSTS)
    overlaps = settings.value("zero_optimization.overlap_comm")
    if description.zero in (1, 2) and description.pipeline == 1 and not overlaps:
        notes.append("overlap_comm is off: reductions are priced as overlapped in part, so a step may take longer")
    if _autocast(settings):
        notes.append(_CAST)
    word = _narrow(settings)
    if word and _switch(settings, word) == "auto":
        notes.append(f"{word}.enabled is auto: the program decides, and it is priced in {word}")
    if settings.value("zero_optimization.reduce_scatter") is False and description.zero in (1, 2):
        notes.append("reduce_scatter is off: gradients are priced as scattered, so a step takes longer than this")
    share = settings.number("zero_optimization.offload_optimizer.ratio", 1.0)
    if share < 1 and description.zero == _WEIGHTS and description.states_at != "device":
        notes.append(
            f"offload_optimizer.ratio: {share:g}: all states are priced on the host, so memory is more than this"
        )
    refused = [key for key in _REMOVED if settings.value(key) is not None or settings.below(key)]
    if refused:
        notes.append(f"DeepSpeed 0.19.8 refuses {', '.join(refused)}: older versions take them")
    settings.below("tensor_parallel.partition_config")
    settings.below("zero_optimization.offload_optimizer")
    settings.below("zero_optimization.offload_param")
    priced = (*_PRICED, *(() if description.update.master_weights else (f"bf16.{key}" for key in _PURE)))
    return Reading(
        description=description,
        unmodelled=unmodelled(one for one in settings.all if not one[0].startswith(priced) and one != _NO_SECOND),
        notes=tuple(notes),
        unread=settings.unread(*_SECTIONS),
        stack="deepspeed-zero3",
    )


_CAST = (
    "torch_autocast: weights in fp32 are cast for each product; priced as weights in 16 bits with fp32 masters, so"
    " memory is more than this"
)
_REMOVED = (
    "amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "progressive_layer_drop",
    "quantize_training", "sparse_attention", "sparse_gradients", "zero_optimization.mics_shard_size",
)  # fmt: skip
"""Source: deepspeed 0.19.8, runtime/config.py (_REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS)."""
_NO_SECOND = ("zero_optimization.zero_hpz_partition_size", 1)


def _read(settings: Settings, facts: Facts) -> Description:
    pipeline = settings.degree("pipeline.stages") if settings.value("pipeline.stages") != "auto" else 1
    tensor = max(1, settings.integer("tensor_parallel.autotp_size", 1))
    context = settings.degree("sequence_parallel_size")
    data, micro_batch, steps = _read_batches(settings, facts, tensor, pipeline * context)
    layers = stages_of(facts.layers, pipeline)
    interval = settings.integer("pipeline.activation_checkpoint_interval", 0)
    recomputed = interval > 0 or settings.integer("activation_checkpointing.number_checkpoints", 0) > 0
    precision = _narrow(settings) or _autocast(settings) or "fp32"
    zero = _stage(settings)
    expert = _read_experts(settings)
    none = (0,) * pipeline
    return Description(
        layers=layers,
        data=data,
        tensor=tensor,
        heads=context,
        expert=expert if facts.has_experts or expert > 1 else None,
        whole_experts=expert > 1 and tensor > 1,
        zero=zero,
        replicas=_read_replicas(settings, data) if zero == _WEIGHTS else 1,
        vocabulary_parallel=tensor == 1 or settings.truth("tensor_parallel.vocab_parallel_lm_head"),
        micro_batch=micro_batch,
        micro_batches=steps,
        full=layers if recomputed else none,
        selective=none,
        precision=precision,
        optimizer=_read_optimizer(settings),
        states_at=_read_home(settings, "optimizer"),
        weights_at=_read_home(settings, "param") if zero == _WEIGHTS else "device",  # other stages ignore it
        sequence_length=facts.own_length,
    )


def _read_experts(settings: Settings) -> int:
    """The expert-parallel degree of AutoEP, which leaves experts whole."""
    where = "expert_parallel"
    if not settings.truth(f"{where}.enabled"):
        return 1
    cut = settings.degree(f"{where}.expert_tensor_parallel_size")
    if cut > 1:
        raise ExportError(f"{where}.expert_tensor_parallel_size: {cut}; DeepSpeed leaves experts whole, write 1")
    return settings.degree(f"{where}.autoep_size")


def _narrow(settings: Settings) -> str:
    """The dtype of 16 bits that is switched on; if none is, the first one that is left to the program; else empty."""
    switches = {word: _switch(settings, word) for word in ("bf16", "fp16")}
    return next((word for wanted in (True, "auto") for word, said in switches.items() if said == wanted), "")


def _switch(settings: Settings, word: str) -> bool | str:
    """Whether a dtype is on, or "auto". bf16 has an older name (runtime/precision_config.py: get_bfloat16_config)."""
    old = word == "bf16" and not settings.below("bf16") and settings.below("bfloat16")
    where = f"{'bfloat16' if old else word}.enabled"
    return "auto" if settings.value(where) == "auto" else settings.truth(where)


def _autocast(settings: Settings) -> str:
    """The dtype of `torch_autocast` (that of PyTorch where none is said); empty if it is off."""
    if not settings.truth("torch_autocast.enabled"):
        return ""
    return "bf16" if settings.word("torch_autocast.dtype", "float16").endswith(("bfloat16", "bf16")) else "fp16"


def _read_replicas(settings: Settings, data: int) -> int:
    """Groups that each hold all weights (MiCS: runtime/zero/config.py, mics_shard_size; -1 is off)."""
    where = "zero_optimization.mics_shard_size"
    if settings.integer(where, -1) < 1:
        return 1
    size = settings.degree(where)
    if data % size:
        raise ExportError(f"{where}: {size} does not divide {data} data parallel devices; give --devices")
    return data // size


def _stage(settings: Settings) -> int:
    """The stage of ZeRO; an older form of the section is true, for stage 1, or false (runtime/zero/config.py:
    get_zero_config)."""
    old = settings.value("zero_optimization")
    if isinstance(old, bool):
        return int(old)
    if old not in (None, {}):
        raise ExportError(f'zero_optimization: {old!r:.80} is no section; write {{"stage": 1}}, for example')
    stage = settings.integer("zero_optimization.stage", 0)
    if not 0 <= stage <= 3:
        raise ExportError(f"zero_optimization.stage: {stage}; there are 0 to 3")
    return stage


def _read_home(settings: Settings, what: str) -> Home:
    """Where states or weights are; keys of older versions mean the host."""
    where = f"zero_optimization.offload_{what}.device"
    old = {"optimizer": "cpu_offload", "param": "cpu_offload_param"}[what]
    given = settings.word(where, "none", ("none", *_OFFLOADED.values()))
    if given == "none":
        return "host" if settings.truth(f"zero_optimization.{old}") else "device"
    return next(home for home, word in _OFFLOADED.items() if word == given)


def _read_batches(settings: Settings, facts: Facts, tensor: int, rest: int) -> tuple[int, int, int]:
    """Data-parallel degree, samples of a micro-batch, and micro-batches; two of three numbers determine the third.

    train_batch_size counts the devices of AutoTP as if each had samples of its own, unless the program passes a model
    parallelism unit (deepspeed/runtime/config.py: DeepSpeedConfig.world_size, _batch_assertion).
    """
    whole, micro, steps = (_given(settings, name) for name in _BATCHES)
    devices = _given(settings, "data_parallel_size")
    everywhere = facts.devices or _launched(facts.beside)
    if devices is None and everywhere is not None:
        devices = data_of(everywhere, tensor=tensor * rest, pipeline=1, context=1)
    if devices is None and whole and micro:
        devices = whole // (micro * (steps or 1))
        devices = devices // tensor if devices % tensor == 0 else devices
    if not devices and whole and micro:
        raise ExportError(
            f"train_batch_size: {whole} is less than the {micro * (steps or 1)} samples of one device (micro-batches of"
            f" {micro}, {steps or 1} a step); write more, or fewer samples in a micro-batch"
        )
    if devices is None:
        raise ExportError(f"{', '.join(_BATCHES)}: they leave open how many devices there are; give --devices")
    if whole is not None and whole % tensor == 0 and whole != (micro or 0) * (steps or 0) * devices:
        whole //= tensor
    if whole is None:
        whole = (micro or 1) * (steps or 1) * devices
    micro = micro or max(1, whole // ((steps or 1) * devices))
    steps = steps or max(1, whole // (micro * devices))
    if whole != micro * steps * devices:
        raise ExportError(
            f"train_batch_size: {whole} is not {micro} samples x {steps} steps x {devices} data parallel devices"
        )
    return devices, micro, steps


def _launched(script: str) -> int | None:
    """The devices that the exported script starts."""
    options = options_in(script)
    each = options.size("nproc-per-node")
    return None if each is None else each * options.degree("nnodes")


def _given(settings: Settings, name: str) -> int | None:
    """A whole number of 1 or more; None if it is left to DeepSpeed."""
    return settings.degree(name) if settings.value(name) not in (None, "auto") else None


def _read_optimizer(settings: Settings) -> str:
    known = {theirs.lower(): ours for ours, theirs in _OPTIMIZERS.items()} | {"adam": "adamw", "auto": "adamw"}
    word = settings.word("optimizer.type", "AdamW")
    if word.lower() not in known:
        raise ExportError(f"optimizer.type: {word}; plans have {', '.join(_OPTIMIZERS.values())}")
    return known[word.lower()]


def _read_update(settings: Settings, d: Description) -> Update:
    auto = settings.value("gradient_clipping") == "auto"
    clip = _CLIPPED if auto else settings.number("gradient_clipping", _CLIPPED)
    own = "fp32" if _autocast(settings) and not _narrow(settings) else d.precision
    sums = settings.word("data_types.grad_accum_dtype", own)
    messages = settings.word("communication_data_type", d.precision)
    if d.precision == "fp32":
        dtype = "mixed"
    elif sums != "fp32":
        dtype = "parameter"
    else:
        dtype = "fp32" if d.zero > 1 and messages == "fp32" else "mixed"
    update = replace(PLAIN, clip_norm=clip if clip > 0 else None, gradient_dtype=dtype)
    if {settings.truth(f"bf16.{key}") for key in _PURE} == {True} and _can_be_pure(d):
        update = replace(update, master_weights=False, gradient_dtype="parameter", moment_dtype="bf16")
    elements = settings.value("zero_optimization.reduce_bucket_size")
    if type(elements) is not int:
        return update
    elements = settings.degree("zero_optimization.reduce_bucket_size")
    return replace(update, buckets=elements * gradient_bytes(replace(d, update=update)))


DEEPSPEED = Target(
    name="deepspeed",
    about="DeepSpeed 0.19: ds_config.json",
    main="ds_config.json",
    beside="launch.sh",
    nearest=nearest,
    write=write,
    read=read,
    fill_in=fill_in,
    latent=True,
    ignores=_ignores,
)
