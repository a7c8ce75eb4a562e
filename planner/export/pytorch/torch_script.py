"""A script on plain PyTorch: device mesh, parallelize_module, fully_shard, torch.distributed.pipelining.

    ZeRO 0           fully_shard over a mesh whose outer axis has replicas: gradients are summed once a step
    ZeRO 1           fully_shard that gathers weights, and reduces gradients, once a step
    ZeRO 2, 3        fully_shard that reduces gradients with every micro-batch, and keeps gathered weights until the
                     backward pass, or regathers them; beside a pipeline it is ZeRO 1 (`planner.engines.fsdp`)
    HSDP             fully_shard over a mesh of replicas and shards
    tensor           ColwiseParallel, RowwiseParallel, SequenceParallel; the loss along the vocabulary
    context          all_to_all_single between cuts of the sequence and of the heads, around attention; or PyTorch's
                     ring in zigzag order, with the kernels of the device
    experts          Shard(0) of their stacked weights; all_to_all_single around F.grouped_mm; DeepSeek's routers
                     balance loads by a loss over each sample, and by biases after each step
    pipeline         Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble,
                     ScheduleDualPipeV, over any layers of each stage
    recomputation    torch.utils.checkpoint: whole layers, or all but attention

The settings are at the top of `train.py`, one constant each, and are read back from there; nothing is executed. The
model is written out in `model.py`, so the folder needs only PyTorch. `context_parallel` of PyTorch 2.13 has rings only
for CUDA (`_scaled_dot_product_flash_attention_for_cpu` has no sharding strategy there), as a context manager around a
whole step. So the script calls the ring below it, `_templated_ring_attention`.
"""

import ast
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hardware_profiles.foreign import ForeignTextError, form_fault, literal, parse_python
from planner.export import common
from planner.export.architecture import Architecture
from planner.export.description import LARGEST, Description, ExportError
from planner.export.files.quoting import in_docstring
from planner.export.pytorch.torch_model import filled, model_of, routers_of
from planner.export.shell import torchrun_script
from planner.export.target import Asked, Facts, Giving, Job, Loss, Reading, Target
from planner.plan.layout.kept import Kept
from planner.sharding.update import PLAIN

_Schedule = Literal["1f1b", "gpipe", "interleaved_1f1b", "zb_v", "dualpipe_v"]
_SCHEDULES = get_args(_Schedule)
_OPTIMIZERS = {"adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}
_ATTENTION = Kept(calls=("attention",))
_REGATHERED = (
    "ZERO 3 beside a pipeline: gradients are whole until a step ends, as with 1; priced without gathering weights again"
)
_WIDTH = 50  # of a setting, before its meaning


def nearest(description: Description) -> tuple[Loss, ...]:
    """What the script does not do."""
    common.refuse_other_training(description, "the script", tuple(_OPTIMIZERS))
    d = description
    if d.expert is not None and d.tensor > 1:
        raise ExportError(
            f"the script cuts no experts beside tensor parallelism, the plan has tensor {d.tensor}; plan again with"
            " --tensor 1, or export to megatron or torchtitan"
        )
    if d.precision == "fp16":
        raise ExportError("the script scales no losses, as fp16 needs; plan again with --precision bf16")
    giving = Giving(d)
    if d.ring > 1 and d.heads > 1:
        common.give_up_other_rings(giving)
    elif d.ring > 1 and not d.zigzag:
        giving.up("order of the ring", "contiguous", "zigzag", zigzag=True)
    common.give_up_offload(giving)
    common.give_up_schedules(giving, _SCHEDULES)
    common.give_up_empty_stages(giving)
    common.give_up_few_micro_batches(giving)
    common.give_up_interleave(giving)
    common.give_up_fp8(giving)
    if d.zero > 1 and d.pipeline > 1:
        giving.up("ZeRO", d.zero, "1: a pipeline adds gradients up whole", zero=1)
    common.give_up_cut_hidden(giving)
    if any(d.selective) and d.kept != _ATTENTION:
        common.give_up_selective(giving, "whole blocks")
    common.give_up_updates(giving, gradient_dtypes=_dtypes(giving.description))
    return tuple(giving.losses)


def _dtypes(d: Description) -> tuple[str, ...]:
    return ("mixed", "fp32") if d.zero > 1 and d.precision != "fp32" else ("mixed",)


def write(job: Job) -> Mapping[str, str]:
    """`train.py`, `model.py` and the script that starts them."""
    a, d = job.architecture, job.description
    if a is None:
        raise ExportError(
            "the script is written for the decoders of the families llama, gpt and deepseek that predict one token,"
            f" which {job.model} is not; export to megatron"
        )
    _check(a, d)
    length = d.sequence_length or a.sequence
    degrees = {"data": d.data, "context": d.context, "tensor": d.tensor, "pipeline": d.pipeline, "experts": d.expert}
    words = (f"{name} {degree}" for name, degree in degrees.items() if degree and (degree > 1 or name == "data"))
    title = f"{job.model} on {d.devices} devices: {' x '.join(words)}."
    launch = torchrun_script(job, title, '"$(dirname "$0")/train.py"', ())
    start = "bash launch.sh --steps 10"
    texts = {
        "TITLE": in_docstring(title), "SETTINGS": _settings(d, a, length), "LAUNCH": start,
        "MOMENTUM": f", momentum={common.SGD_MOMENTUM}" if d.optimizer == "sgd" else "",
    }  # fmt: skip
    return {
        "train.py": filled("train.py", **texts, **routers_of(a)),
        "model.py": model_of(job.model, a, d, length),
        "launch.sh": launch,
    }


def _check(a: Architecture, d: Description) -> None:
    """Raise ExportError if degrees do not divide what they cut, or if the model trains something that the script does
    not."""
    split, length = d.tensor * d.context, d.sequence_length or a.sequence
    by_heads = d.tensor * d.heads
    if a.heads % by_heads or a.kv_heads % by_heads:
        raise ExportError(
            f"tensor {d.tensor} x context {d.heads} by heads does not divide {a.heads} heads and {a.kv_heads} key"
            " heads; plan again with degrees that do"
        )
    if length % split or (d.ring > 1 and length % (2 * d.ring)):
        parts = f"two parts for each of {d.ring} devices in a ring" if d.ring > 1 else f"context {d.context}"
        raise ExportError(
            f"tensor {d.tensor} x {parts} does not divide {length} tokens; plan again with degrees that do"
        )
    if a.tied and d.in_a_v:
        raise ExportError(
            f"the script has no {d.schedule} for one weight of embedding and head, which stand on one rank there; plan"
            " again with --schedule interleaved_1f1b"
        )
    if a.latent and d.tensor > 1:
        raise ExportError(
            f"the script cuts no latent attention, the plan has tensor {d.tensor}; plan again with --tensor 1, or"
            " export to megatron"
        )
    if a.balance_loss and not a.routing:
        raise ExportError(f"the script has no balance loss, the model {a.balance_loss:g}; export to megatron")
    if a.experts is None:
        return
    shards = d.data * d.context if d.zero else 1
    shards = shards // d.replicas // (d.expert or 1) if shards % (d.replicas * (d.expert or 1)) == 0 else 1
    if a.experts.width % shards or a.hidden % shards:
        raise ExportError(
            f"{shards} devices that share out an expert do not divide its {a.experts.width} columns and {a.hidden}"
            " rows; plan again with another --replicas"
        )


def fill_in(_: Job) -> Asked:
    """What the script leaves open."""
    return (("", "your samples in `train.py`, which draws them at random now, and the learning rate"),)


def _settings(d: Description, a: Architecture, length: int) -> str:
    """The constants of a plan, each with its meaning."""
    rows: list[tuple[str, object, str]] = [
        ("DATA", d.data, "devices that share out the samples"),
        ("CONTEXT", d.context, "devices that share out the sequence, and attention"),
        ("RING", d.ring > 1, "whether keys and values go round these devices, in place of heads"),
        ("TENSOR", d.tensor, "devices that share out each layer"),
        ("EXPERT", d.expert, "of these, devices with other experts; None: no experts"),
        ("PIPELINE", d.pipeline, "ranks that share out the layers"),
        ("LAYERS", d.layers, "of each stage, in the order of the model"),
        ("SCHEDULE", d.schedule, "the order in which ranks take micro-batches"),
        ("REPLICAS", d.replicas, "groups of these devices, each with shards of everything"),
        ("ZERO", d.zero, "0: copies of all weights; 1, 2, 3: see shard_weights"),
        ("SEQUENCE_PARALLEL", d.sequence_parallel, "whether norms cut the sequence"),
        ("MICRO_BATCH", d.micro_batch, "samples on each device"),
        ("MICRO_BATCHES", d.micro_batches, "a step"),
        ("RECOMPUTED", d.full, "first layers of each stage, computed again as a whole"),
        ("KEEPING_ATTENTION", d.selective, "the layers after them, but for attention"),
        ("PRECISION", d.precision, "of what is computed; weights are in fp32"),
        ("REDUCED_IN", _reduced_in(d), "gradients over devices"),
        ("CLIP_NORM", d.update.clip_norm, "of all gradients"),
        ("SEQUENCE", length, "tokens of a sample"),
        ("VOCABULARY", a.vocabulary, "words"),
    ]
    lines = [f"{f'{name} = {value!r}':<{_WIDTH}}  # {what}" for name, value, what in rows]
    optimizer = f"OPTIMIZER = {_OPTIMIZERS[d.optimizer]}"
    return "\n".join([*lines, optimizer])


def _reduced_in(d: Description) -> str:
    return d.precision if d.zero > 1 and d.update.gradient_dtype == "mixed" else "fp32"


def read(text: str, facts: Facts) -> Reading:
    """The constants of a script as a reading."""
    try:
        found = _Constants.model_validate(_constants(text))
        description = _description(found)
    except ForeignTextError as error:
        raise ExportError(str(error)) from error
    except ValidationError as error:
        raise ExportError(f"not a script of plan export: the constant {form_fault(error)}") from error
    if sum(description.layers) != facts.layers:
        raise ExportError(f"LAYERS: {sum(description.layers)} in all, the model has {facts.layers}")
    notes = (_REGATHERED,) if found.ZERO == 3 and found.PIPELINE > 1 else ()
    return Reading(description=common.normalised(description), notes=notes)


def _constants(text: str) -> dict[str, Any]:
    """The plain values that are assigned to names at the top of a script."""
    found: dict[str, Any] = {}
    for node in parse_python(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name == "OPTIMIZER":
                found[name] = ast.unparse(node.value)
            elif isinstance(node.value, ast.Constant | ast.Tuple):
                found[name] = literal(node.value)
    return found


_Count = Annotated[int, Field(ge=0, le=LARGEST)]
_Degree = Annotated[int, Field(ge=1, le=LARGEST)]
_Layers = Annotated[tuple[_Count, ...], Field(min_length=1)]


class _Constants(BaseModel):
    """The constants of a script from which a description is made."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    LAYERS: Annotated[tuple[_Degree, ...], Field(min_length=1)]
    PIPELINE: _Degree
    SCHEDULE: _Schedule
    DATA: _Degree
    CONTEXT: _Degree = 1
    RING: bool = False
    TENSOR: _Degree
    EXPERT: _Degree | None = None
    ZERO: Annotated[int, Field(ge=0, le=3)]
    REPLICAS: _Degree
    SEQUENCE_PARALLEL: bool
    MICRO_BATCH: _Degree
    MICRO_BATCHES: _Degree
    RECOMPUTED: _Layers
    KEEPING_ATTENTION: _Layers
    PRECISION: Literal["bf16", "fp32"]
    OPTIMIZER: Literal["torch.optim.AdamW", "torch.optim.SGD"]
    SEQUENCE: _Degree
    REDUCED_IN: str
    CLIP_NORM: Annotated[float, Field(gt=0)] | None

    @model_validator(mode="after")
    def _fit_together(self) -> "_Constants":
        stages = len(self.LAYERS)
        if stages % self.PIPELINE or {len(self.RECOMPUTED), len(self.KEEPING_ATTENTION)} != {stages}:
            raise ValueError(
                f"LAYERS has {stages} stages, RECOMPUTED {len(self.RECOMPUTED)} and KEEPING_ATTENTION"
                f" {len(self.KEEPING_ATTENTION)}, on {self.PIPELINE} pipeline ranks; they need equally many, a multiple"
                " of the ranks"
            )
        if self.EXPERT is not None and self.DATA * self.CONTEXT % self.EXPERT:
            raise ValueError(f"EXPERT {self.EXPERT} does not divide DATA x CONTEXT = {self.DATA * self.CONTEXT}")
        if self.DATA % self.REPLICAS:
            raise ValueError(f"REPLICAS {self.REPLICAS} does not divide DATA {self.DATA}")
        return self


def _description(found: _Constants) -> Description:
    optimizers = {theirs: ours for ours, theirs in _OPTIMIZERS.items()}
    description = Description(
        layers=found.LAYERS,
        virtual_stages=len(found.LAYERS) // found.PIPELINE,
        schedule=found.SCHEDULE,
        data=found.DATA,
        heads=1 if found.RING else found.CONTEXT,
        ring=found.CONTEXT if found.RING else 1,
        zigzag=found.RING and found.CONTEXT > 1,
        tensor=found.TENSOR,
        expert=found.EXPERT,
        zero=min(found.ZERO, 1) if found.PIPELINE > 1 else found.ZERO,
        replicas=found.REPLICAS,
        sequence_parallel=found.SEQUENCE_PARALLEL,
        micro_batch=found.MICRO_BATCH,
        micro_batches=found.MICRO_BATCHES,
        full=found.RECOMPUTED,
        selective=found.KEEPING_ATTENTION,
        kept=_ATTENTION if any(found.KEEPING_ATTENTION) else Kept(),
        precision=found.PRECISION,
        optimizer=optimizers[found.OPTIMIZER],
        sequence_length=found.SEQUENCE,
    )
    wide = description.zero > 1 and description.precision != "fp32" and found.REDUCED_IN == "fp32"
    return replace(
        description,
        update=replace(PLAIN, clip_norm=found.CLIP_NORM, gradient_dtype="fp32" if wide else "mixed"),
    )


TORCH = Target(
    name="torch",
    about="a script on PyTorch 2.13: train.py",
    main="train.py",
    nearest=nearest,
    write=write,
    read=read,
    fill_in=fill_in,
    writes_model=True,
    latent=True,
)
