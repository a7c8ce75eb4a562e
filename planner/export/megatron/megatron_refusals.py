"""Training that Megatron-LM itself refuses, though each of its arguments is known."""

from planner.engines.space import sample_step
from planner.export.description import Description, ExportError
from planner.export.files.arguments import Options

GROUP = "microbatch-group-size-per-virtual-pipeline-stage"
"""The argument for micro-batches that virtual stages take in turn."""


def check_samples(d: Description) -> None:
    """Raise ExportError for samples that do not divide over twice the devices of a context: each takes two pieces of a
    sample, also with Ulysses (megatron/training/arguments.py: validate_args, core 0.12 to 0.20)."""
    step = sample_step("context", d.context, d.tensor)
    if d.sequence_length is not None and d.sequence_length % step:
        raise ExportError(
            f"Megatron-LM takes samples of a multiple of 2 x context = {step} tokens, and these have"
            f" {d.sequence_length}; take another --seq-len, or another context"
        )


def check_taken(options: Options, d: Description) -> None:
    """Raise ExportError for arguments with which training stops before its first step."""
    if options.degree("context-parallel-size") > 1:
        check_samples(d)
    if d.optimizer == "sgd" and not options.flag("deepspeed"):
        _check_sgd(options)
    if d.virtual_stages > 1 and d.pipeline > 1 and not d.in_a_v:
        _check_rounds(options, d)


def _check_sgd(options: Options) -> None:
    """The distributed optimizer takes Adam alone (megatron/core/optimizer/distrib_optimizer.py, core 0.12 to 0.20), and
    Megatron-FSDP is built on it."""
    for name in ("use-distributed-optimizer", "use-megatron-fsdp"):
        if options.flag(name):
            raise ExportError(
                f"--optimizer sgd with --{name}: Megatron-LM's distributed optimizer takes Adam alone; leave one of"
                " them out"
            )


def _check_rounds(options: Options, d: Description) -> None:
    """Virtual stages take groups of micro-batches in turn, by default as many as there are pipeline ranks; the last
    group may have fewer, but not fewer than ranks (megatron/core/pipeline_parallel/schedules.py:
    forward_backward_pipelining_with_interleaving). Plans have the default groups."""
    count, ranks = d.micro_batches, d.pipeline
    group = options.degree(GROUP, ranks)
    if not ranks <= group <= count or 0 < count % group < ranks:
        said = f"--{GROUP} {group}: " if options.flag(GROUP) else ""
        raise ExportError(
            f"{said}micro-batches: {count}; virtual stages take them in groups of {group}, and in each there must be as"
            f" many as pipeline ranks ({ranks}) or more; change --global-batch-size"
        )
    if count % ranks:
        raise ExportError(
            f"--{GROUP} {group}: plans take groups of {ranks}, of which {count} micro-batches are no multiple; leave it"
            " out, and change --global-batch-size"
        )
