"""A script on plain PyTorch: device mesh, parallelize_module, fully_shard, torch.distributed.pipelining.

    ZeRO 0           fully_shard over a mesh whose outer axis has copies: gradients are summed once a step
    ZeRO 2, 3        fully_shard that keeps gathered weights until the backward pass, or gathers them again
    HSDP             fully_shard over a mesh of copies and shards
    tensor           ColwiseParallel, RowwiseParallel, SequenceParallel; the loss along the vocabulary
    pipeline         Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B over any layers of each stage
    recomputation    torch.utils.checkpoint: whole layers, or all but attention

The settings stand at the top of `train.py`, one constant each, and are read back from there; nothing is executed. The
model is written out in `model.py`, so that the folder needs nothing but PyTorch. No ring is written: PyTorch 2.13 has
one for CUDA only, as a context manager that does not go with a pipeline.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hardware_profiles.foreign import ForeignTextError, form_fault, literal, parse_python
from planner.export import common
from planner.export.architecture import Architecture
from planner.export.description import LARGEST, Description, ExportError
from planner.export.quoting import in_docstring
from planner.export.shell import torchrun_script
from planner.export.target import Asked, Facts, Giving, Job, Loss, Reading, Target
from planner.plan.layout.kept import Kept
from planner.sharding.update import PLAIN

_Schedule = Literal["1f1b", "gpipe", "interleaved_1f1b"]
_SCHEDULES = get_args(_Schedule)
_OPTIMIZERS = {"adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}
_ATTENTION = Kept(calls=("attention",))
_WIDTH = 50  # of a setting, before what it means


def nearest(description: Description) -> tuple[Loss, ...]:
    """What the script does not do."""
    common.refuse_other_training(description, "the script", tuple(_OPTIMIZERS))
    d = description
    if d.context > 1:
        raise ExportError(
            f"the script has no context parallelism, the plan {d.context}; plan again with --context 1, or export to"
            " megatron"
        )
    if d.expert is not None:
        raise ExportError("the script has no experts; export to megatron or torchtitan")
    if d.precision == "fp16":
        raise ExportError("the script scales no losses, as fp16 needs; plan again with --precision bf16")
    giving = Giving(d)
    common.give_up_offload(giving)
    common.give_up_schedules(giving, _SCHEDULES)
    common.give_up_few_micro_batches(giving)
    common.give_up_interleave(giving)
    common.give_up_fp8(giving)
    if d.zero == 1:
        giving.up("ZeRO", 1, "2: fully_shard cuts weights, gradients and states", zero=2)
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
    if a is None or a.family != "llama" or a.experts is not None or a.qk_norm or a.tied:
        raise ExportError(f"the script is written for models like Llama, which {job.model} is not; export to megatron")
    if a.heads % d.tensor or a.kv_heads % d.tensor or a.vocabulary % d.tensor:
        raise ExportError(
            f"tensor {d.tensor} does not divide {a.kv_heads} key heads and {a.vocabulary} words; plan again with a"
            " degree that does"
        )
    length = d.sequence_length or a.sequence
    title = f"{job.model} on {d.devices} devices: data {d.data} x tensor {d.tensor} x pipeline {d.pipeline}."
    launch = torchrun_script(job, title, '"$(dirname "$0")/train.py"', ())
    start = "bash launch.sh --steps 10"
    settings = _settings(d, a, length)
    return {
        "train.py": _filled("train.py", TITLE=in_docstring(title), SETTINGS=settings, LAUNCH=start),
        "model.py": _filled("model.py", TITLE=in_docstring(job.model), DIMENSIONS=_dimensions(a, length)),
        "launch.sh": launch,
    }


def fill_in(_: Job) -> Asked:
    """What the script leaves open."""
    return (("", "your samples in `train.py`, which draws them at random now, and the learning rate"),)


def _filled(name: str, **texts: str) -> str:
    """A template with its places filled at once, so that no text fills places of another."""
    template = files("planner.export").joinpath("templates", f"{name}.txt").read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda place: texts[place[1]], template)


def _settings(d: Description, a: Architecture, length: int) -> str:
    """The constants of a plan, each with what it means."""
    rows: list[tuple[str, object, str]] = [
        ("DATA", d.data, "devices that share out the samples"),
        ("TENSOR", d.tensor, "devices that share out each layer"),
        ("PIPELINE", d.pipeline, "ranks that share out the layers"),
        ("LAYERS", d.layers, "of each stage, in the order of the model"),
        ("SCHEDULE", d.schedule, "the order in which ranks take micro-batches"),
        ("REPLICAS", d.replicas, "groups of data parallel devices, each with shards of everything"),
        ("ZERO", d.zero, "0: copies of all weights; 2, 3: see shard_weights"),
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


def _dimensions(a: Architecture, length: int) -> str:
    known = {
        "HIDDEN": a.hidden, "WIDTH": a.ffn, "HEADS": a.heads, "KEY_HEADS": a.kv_heads, "HEAD_SIZE": a.head_size,
        "VOCABULARY": a.vocabulary, "SEQUENCE": length, "ROTARY_BASE": a.rope_theta, "EPSILON": a.epsilon,
    }  # fmt: skip
    return "\n".join(f"{name} = {value!r}" for name, value in known.items())


def read(text: str, facts: Facts) -> Reading:
    """The constants of a script as a description."""
    try:
        description = _description(_Constants.model_validate(_constants(text)))
    except ForeignTextError as error:
        raise ExportError(str(error)) from error
    except ValidationError as error:
        raise ExportError(f"not a script of plan export: the constant {form_fault(error)}") from error
    if sum(description.layers) != facts.layers:
        raise ExportError(f"LAYERS: {sum(description.layers)} in all, the model has {facts.layers}")
    return Reading(description=common.normalised(description))


def _constants(text: str) -> dict[str, Any]:
    """What is assigned to names at the top of a script, where it is plain."""
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
    """The constants of a script that a description is made of."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    LAYERS: Annotated[tuple[_Degree, ...], Field(min_length=1)]
    PIPELINE: _Degree
    SCHEDULE: _Schedule
    DATA: _Degree
    TENSOR: _Degree
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
        tensor=found.TENSOR,
        zero=found.ZERO,
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
)
