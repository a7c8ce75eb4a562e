"""MindSpeed: Megatron-LM on Ascend, core 0.12 with the arguments that MindSpeed adds.

    ring, heads, both    --context-parallel-algo megatron_cp_algo, ulysses_cp_algo, hybrid_cp_algo with
                         --ulysses-degree-in-cp
    dualpipe_v           --schedules-method dualpipev, two equal stages on each rank, without a context and without
                         overlapped reductions of gradients
    uneven stages        --decoder-first-pipeline-num-layers and -last-: those between them are equal
    recomputation        as Megatron-LM; --recompute-activation-function, the elementwise operators of the MLP, and
                         --recompute-norm beside it
    ZeRO                 no more than the distributed optimizer

Everything else is as in `planner.export.megatron.megatron`. `pretrain_gpt.py` must import `mindspeed.megatron_adaptor`
first. Source: Ascend/MindSpeed, mindspeed/features_manager (context_parallel, recompute); NVIDIA/Megatron-LM,
core_r0.12.0.
"""

from collections.abc import Mapping
from dataclasses import replace

from planner.export import common
from planner.export.description import Description, ExportError
from planner.export.files.arguments import Option, Options, option
from planner.export.megatron import megatron
from planner.export.megatron.megatron_reading import check_trains, options_of, read_options, read_run, said_of
from planner.export.megatron.megatron_writing import (
    OPTIMIZERS,
    degree_options,
    dispatch_options,
    model_options,
    overlap_options,
    recompute_options,
    run_options,
    stage_options,
    training_options,
    zero_options,
)
from planner.export.megatron.megatron_writing import (
    fill_in as fill_in_megatron,
)
from planner.export.shell import torchrun_script
from planner.export.target import Asked, Facts, Giving, Job, Loss, Reading, Target
from planner.plan.layout.kept import Kept

_RING, _HEADS, _BOTH = "megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo"
_PARTLY = (Kept(but=("elementwise",)), Kept(but=("elementwise", "normalisation")))
"""What blocks keep under --recompute-activation-function, alone and with --recompute-norm."""
_FUSED = ("use-flash-attn", "use-fused-rmsnorm", "use-fused-swiglu", "use-fused-rotary-pos-emb")
_SCHEDULES = (*megatron.SCHEDULES, "dualpipe_v")


def nearest(description: Description) -> tuple[Loss, ...]:
    """What MindSpeed cannot be told."""
    common.refuse_other_training(description, "MindSpeed", tuple(OPTIMIZERS))
    giving = Giving(description)
    common.give_up_fp8(giving)
    common.give_up_offload(giving)
    _give_up_dualpipe(giving)
    if description.zero > 1:
        giving.up("ZeRO", description.zero, "1: the distributed optimizer", zero=1)
    if not _says_stages(giving.description):
        common.give_up_uneven_stages(giving)
    if not _says_stages(giving.description):
        raise ExportError(
            f"MindSpeed cannot run {sum(description.layers)} layers on {len(description.layers)} stages: but for the"
            " first and the last one they hold equally many; plan again with another --pipeline"
        )
    d = giving.description
    if d.selective == d.layers and d.kept in _PARTLY:
        rest = replace(d, selective=(0,) * len(d.layers), kept=Kept())
        for loss in megatron.nearest_of(rest, _SCHEDULES, aware=False):
            changed = replace(loss.description, selective=d.selective, kept=d.kept)
            giving.losses.append(replace(loss, description=changed))
    else:
        giving.losses += megatron.nearest_of(d, _SCHEDULES, aware=False)
    return tuple(giving.losses)


def _give_up_dualpipe(giving: Giving) -> None:
    """Give up DualPipeV without equal stages, with a context, or with fewer micro-batches than stages less one."""
    d = giving.description
    if d.schedule != "dualpipe_v" or (d.even and d.context == 1 and d.micro_batches >= len(d.layers) - 1):
        return
    stages = "equal stages" if d.even else "uneven stages"
    here = f"dualpipe_v, context {d.context}, {d.micro_batches} micro-batches in {len(d.layers)} {stages}"
    giving.up("schedule of the pipeline", here, "interleaved_1f1b", schedule="interleaved_1f1b")


def _says_stages(d: Description) -> bool:
    between = d.layers[1:-1]
    return d.even or (d.virtual_stages == 1 and len(set(between)) <= 1 and 0 not in d.layers)


def write(job: Job) -> Mapping[str, str]:
    """`launch.sh`, with every argument."""
    d = job.description
    title = f"{job.model} with MindSpeed on Megatron-LM core 0.12; MEGATRON is the folder of its pretrain_gpt.py."
    if d.in_a_v and job.architecture is not None and job.architecture.tied:
        raise ExportError(
            f"MindSpeed has no dualpipev for one weight of embedding and head, as {job.model} has; plan again with"
            " --schedule interleaved_1f1b"
        )
    model = dispatch_options(replace(job, dispatcher=""))
    if job.architecture is not None:
        model = [*model_options(job.architecture, d), *model]
    shared = [*degree_options(d), *_context(d), *_stages(d), *zero_options(d), *_recompute(d)]
    overlaps = [] if d.in_a_v else overlap_options(_without_exchange(job))  # DualPipeV refuses them
    rest = [*_kernels(job), *training_options(d), *overlaps, *run_options(job)]
    script = torchrun_script(
        job,
        title,
        '"${MEGATRON:-.}/pretrain_gpt.py"',
        [*model, *shared, *rest],
        exports=("CUDA_DEVICE_MAX_CONNECTIONS=1",),
    )
    return {"launch.sh": script}


def _without_exchange(job: Job) -> Job:
    """Core 0.12 has no overlap of the exchange of experts."""
    return replace(job, overlapped=tuple(name for name in job.overlapped if name != "exchange"))


def _kernels(job: Job) -> list[Option]:
    """Switches the fused operators on that are priced, and off what needs a CUDA kernel."""
    a = job.architecture
    attention, *others = _FUSED
    names = (attention, *others) if a is not None and a.family != "gpt" else (attention,)
    return [*(option(name) for name in names), option("no-gradient-accumulation-fusion")]


def fill_in(job: Job) -> Asked:
    """What the arguments leave open, and the line that activates MindSpeed's."""
    imported = "`import mindspeed.megatron_adaptor` below `import torch` in `pretrain_gpt.py`"
    return (*fill_in_megatron(job), ("", imported))


def _context(d: Description) -> list[Option]:
    if d.context == 1:
        return []
    algorithm = _BOTH if d.ring > 1 and d.heads > 1 else _RING if d.ring > 1 else _HEADS
    found = [option("context-parallel-algo", algorithm)]
    return [*found, option("ulysses-degree-in-cp", d.heads)] if algorithm == _BOTH else found


def _stages(d: Description) -> list[Option]:
    if d.in_a_v:
        return [option("schedules-method", "dualpipev")]
    if d.even:
        return stage_options(d, 0)
    return [
        option("decoder-first-pipeline-num-layers", d.layers[0]),
        option("decoder-last-pipeline-num-layers", d.layers[-1]),
    ]


def _recompute(d: Description) -> list[Option]:
    if d.kept not in _PARTLY:
        return recompute_options(d)
    return [option(name) for name, part in _PARTS.items() if part in d.kept.but]


def read(text: str, facts: Facts) -> Reading:
    """A script, or a list of arguments, as a reading."""
    options = options_of(text)
    check_trains(options)
    algorithm = options.word("context-parallel-algo", _RING)
    heads = options.degree("ulysses-degree-in-cp")
    description, notes = read_options(options, facts)
    description = _with_context(description, algorithm, heads, notes)
    description = _with_ranks(description, options)
    parts = tuple(part for name, part in _PARTS.items() if options.flag(name))
    if parts and description.recomputes:
        notes.append(f"{', '.join(f'--{name}' for name in _PARTS)} beside other recomputation are not priced")
    elif parts:
        description = replace(description, selective=description.layers, kept=Kept(but=parts))
        some = [name for name in _PARTS if options.size(f"{name}-num-layers") is not None]
        notes += [f"--{name}-num-layers: priced in all layers, so memory is more than this" for name in some]
    read_run(options)
    for name in _FUSED:
        options.flag(name)
    return Reading(
        description=description,
        unmodelled=said_of(options, facts),
        notes=tuple(notes),
        unread=tuple(f"--{name}" for name in options.unread),
        stack="mindspeed",
    )


_PARTS = {"recompute-activation-function": "elementwise", "recompute-norm": "normalisation"}
"""What is recomputed of every block (mindspeed/features_manager/recompute)."""


def _with_ranks(d: Description, options: Options) -> Description:
    """The description with --recompute-num-layers of a rank, over its stages in turn, if
    --enable-recompute-layers-per-pp-rank says so (mindspeed/core/transformer/transformer_block.py)."""
    if not options.flag("enable-recompute-layers-per-pp-rank") or options.word("recompute-method") != "block":
        return d
    if options.word("recompute-granularity") != "full" or d.virtual_stages == 1:
        return d
    count = options.integer("recompute-num-layers", 1) or 0
    chunks = [at // d.pipeline for at in range(len(d.layers))]
    wanted = [max(0, -(-(count - chunk) // d.virtual_stages)) for chunk in chunks]
    return replace(d, full=tuple(min(one, have) for one, have in zip(wanted, d.layers, strict=True)))


def _with_context(d: Description, algorithm: str, heads: int, notes: list[str]) -> Description:
    """The description with the context as MindSpeed is told."""
    context = d.context
    if context == 1 or algorithm == _RING:
        return d
    if algorithm == _HEADS:
        return replace(d, ring=1, heads=context, zigzag=False)
    if algorithm == _BOTH:
        if context % heads:
            raise ExportError(f"--ulysses-degree-in-cp {heads} does not divide --context-parallel-size {context}")
        return replace(d, ring=context // heads, heads=heads, zigzag=context > heads)
    notes.append(f"--context-parallel-algo {algorithm}: priced as a ring")
    return d


MINDSPEED = Target(
    name="mindspeed",
    about="MindSpeed on Megatron-LM core 0.12: arguments of pretrain_gpt.py in launch.sh",
    main="launch.sh",
    nearest=nearest,
    write=write,
    read=read,
    fill_in=fill_in,
)
