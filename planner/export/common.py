"""What several engines cannot express, each written once; and what no engine can approximate."""

from dataclasses import replace

from planner.export.description import Description, ExportError, schedule_of
from planner.export.target import Facts, Giving
from planner.graph.fp8 import NO_FP8
from planner.plan.plan import SLICED, products_in
from planner.plan.words import replica_words, table_words
from planner.sharding.update import PLAIN, Update

SGD_MOMENTUM = 0.9
"""The momentum of SGD in plans, as in `runtime.OptimizerSettings`; torch.optim.SGD has none unless it is told."""

UPDATED_ON_HOSTS = (
    "the engine updates offloaded states on the host's processors; priced as copied to the device for the update"
)
"""Note on offload in engines."""


def refuse_other_training(description: Description, engine: str, optimizers: tuple[str, ...]) -> None:
    """Raise ExportError if the engine would train something else; that is no approximation of a plan."""
    update = description.update
    if description.optimizer not in optimizers:
        raise ExportError(
            f"{engine} has no optimizer {description.optimizer}; it has {', '.join(optimizers)}: plan again with one"
        )
    if products_in(description.precision):
        raise ExportError(
            f"{engine} has no setting for the dtype of fp32 products, and the plan computes them in"
            f" {description.precision}; plan again with --precision fp32"
        )
    if update.gradients != "mean":
        raise ExportError(f"{engine} takes the mean of gradients, the plan their sum; plan again with --gradients mean")
    if update.placed:
        raise ExportError(
            f"{engine} keeps all tables on the devices, and the plan has {table_words(update)}; plan again with"
            " --place none"
        )
    if update.padded:
        raise ExportError(
            f"{engine} has no setting for padded weights, and the plan pads"
            f" {', '.join(name for name, _ in update.padded)}; plan again without --pad"
        )
    if update.padding_samples:
        raise ExportError(
            f"{engine} cannot add samples of weight zero, and the plan adds {update.padding_samples} to the global"
            f" batch of {description.global_batch - update.padding_samples}; plan again without --pad batch=N"
        )
    if update.per_replica:
        raise ExportError(
            f"{engine} has no setting for operators that each replica computes by itself, and the plan has"
            f" {replica_words(update)}; plan again without --per-replica"
        )
    if update.served:
        raise ExportError(f"{engine} has no parameter servers for dense weights; plan again with --zero-by slices")
    if update.owned:
        raise ExportError(
            f"{engine} does not shard optimizer states by whole parameters; plan again with --zero-by slices"
        )
    if update.local_parameters:
        raise ExportError(
            f"{engine} has no parameters that differ between devices, and the plan has"
            f" {', '.join(update.local_parameters)}; plan again without --local-parameters"
        )


def give_up_offload(
    giving: Giving, states: tuple[str, ...] = (), weights: tuple[str, ...] = (), why: str = "on the device"
) -> None:
    """Give up offload to targets that the engine does not have; `states` and `weights` are those that it has."""
    d = giving.description
    if d.weights_at not in ("device", *weights):
        giving.up(
            "weights of blocks between their forward and backward pass",
            f"on the {d.weights_at}",
            why,
            weights_at="device",
        )
    if d.states_at not in ("device", *states):
        giving.up("optimizer states", f"on the {d.states_at}", why, states_at="device")


def give_up_interleave(giving: Giving) -> None:
    """Give up interleaved micro-batches."""
    if giving.description.interleave > 1:
        giving.up("interleaved micro-batches", giving.description.interleave, 1, interleave=1)


def give_up_fp8(
    giving: Giving,
    recipes: tuple[str, ...] = (),
    *,
    leaves_out: bool = True,
    takes_experts: bool = False,
    gathers: tuple[str, ...] = (),
) -> None:
    """Give up linear layers in fp8 under other recipes than the engine's, or the layers that a plan leaves out of fp8.

    Args:
        giving: what is given up so far.
        recipes: recipes of the engine.
        leaves_out: whether the engine can leave layers out of fp8.
        takes_experts: whether the engine always computes experts in fp8 too; then a model with other experts gives up
            fp8.
        gathers: recipes under which the engine gathers weights in fp8.
    """
    fp8 = giving.description.fp8
    along = takes_experts and giving.description.expert is not None
    if fp8 and (fp8.recipe not in recipes or (along and not fp8.experts)):
        giving.up("linear layers in fp8", fp8.text(), "none", fp8=NO_FP8)
    elif fp8.left_out and not leaves_out:
        giving.up("linear layers in fp8", fp8.text(), f"{fp8.recipe}, all", fp8=replace(fp8, left_out=()))
    fp8 = giving.description.fp8
    if fp8.gathered and fp8.recipe not in gathers:
        fp8 = replace(fp8, gathered=False)
        giving.up("weights gathered in fp8", "yes", "no", fp8=fp8)
    kept = replace(fp8, experts=fp8.experts and along, dispatch=False)
    if kept != fp8:
        giving.up("experts in fp8", fp8.text(), kept.text(), fp8=kept)


def give_up_cut_hidden(giving: Giving) -> None:
    """Give up an embedding that tensor-parallel devices shard along the hidden size, and not along the vocabulary."""
    d = giving.description
    if d.tensor > 1 and not d.vocabulary_parallel:
        giving.up("embedding over tensor-parallel devices", "hidden", "vocabulary", vocabulary_parallel=True)


def give_up_other_rings(giving: Giving) -> None:
    """Give up context parallelism other than a ring in zigzag order."""
    d = giving.description
    if d.heads > 1:
        here = f"Ulysses over {d.heads}" + (f" in a ring of {d.ring}" if d.ring > 1 else "")
        giving.up("context parallelism", here, f"ring of {d.context}", ring=d.context, heads=1, zigzag=True)
    elif d.ring > 1 and not d.zigzag:
        giving.up("order of the ring", "contiguous", "zigzag", zigzag=True)


def give_up_replicas(giving: Giving) -> None:
    """Give up replicas of groups that shard states (HSDP)."""
    d = giving.description
    if d.replicas > 1:
        here = f"over {d.shards} devices, in {d.replicas} replicas"
        giving.up(f"ZeRO {d.zero}", here, f"over {d.data * d.context}", replicas=1)


def give_up_schedules(giving: Giving, known: tuple[str, ...]) -> None:
    """Give up schedules that the engine does not know, and slices."""
    d = giving.description
    if d.schedule not in known:
        other = schedule_of(d.pipeline, d.virtual_stages)
        here = f"{d.schedule}, {d.slices} slices" if d.slices > 1 else d.schedule
        giving.up("schedule of the pipeline", here, other, schedule=other, slices=1)


def give_up_few_micro_batches(giving: Giving) -> None:
    """Give up schedules for which there are too few micro-batches.

    PyTorch's 1F1B and DualPipeV need at least as many micro-batches as stages. With fewer, GPipe has the same schedule
    steps as 1F1B, and ZB-V the same stages as DualPipeV.
    """
    d = giving.description
    if d.schedule == "dualpipe_v" and d.micro_batches < len(d.layers):
        here = f"dualpipe_v, {d.micro_batches} micro-batches in {len(d.layers)} stages"
        giving.up("schedule of the pipeline", here, "zb_v", schedule="zb_v")
    if d.schedule == "1f1b" and d.micro_batches < d.pipeline:
        here = f"1f1b, {d.micro_batches} micro-batches in {d.pipeline} stages"
        giving.up("schedule of the pipeline", here, "gpipe", schedule="gpipe")


def give_up_virtual_stages(giving: Giving) -> None:
    """Give up several stages per pipeline rank: one stage with all its layers remains."""
    d = giving.description
    if d.virtual_stages == 1:
        return

    def together(counts: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sum(counts[rank :: d.pipeline]) for rank in range(d.pipeline))

    giving.up(
        "stages on each pipeline rank", d.virtual_stages, 1, virtual_stages=1,
        schedule=SLICED if d.slices > 1 else "1f1b",
        layers=together(d.layers), full=together(d.full), selective=together(d.selective),
    )  # fmt: skip


def give_up_uneven_stages(giving: Giving) -> None:
    """Give up uneven stages. They become as equal as possible; if they do not divide, the later ones have more layers,
    because the first one holds more micro-batches in flight."""
    d = giving.description
    if d.even:
        return
    count, blocks = len(d.layers), sum(d.layers)
    if blocks < count:
        raise ExportError(
            f"the plan has {count} stages for {blocks} layers, and this engine needs a layer in every stage; plan again"
            " with fewer stages (--pipeline, --virtual-stages)"
        )
    layers = tuple(blocks // count + (at >= count - blocks % count) for at in range(count))
    giving.up("layers of the stages", _counts(d.layers), _counts(layers), layers=layers, **_within(d, layers))


def give_up_empty_stages(giving: Giving) -> None:
    """Give up a first stage with only the embedding, or a last one with only the head."""
    if 0 in giving.description.layers:
        give_up_uneven_stages(giving)


def _within(description: Description, layers: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Recomputed blocks of stages that have other layers."""
    full = tuple(min(a, b) for a, b in zip(description.full, layers, strict=True))
    rest = zip(description.selective, layers, full, strict=True)
    return {"full": full, "selective": tuple(min(s, have - f) for s, have, f in rest)}


def give_up_updates(
    giving: Giving, *, buckets: bool = False, master_weights: tuple[bool, ...] = (True,),
    gradient_dtypes: tuple[str, ...] = ("mixed",), moment_dtypes: tuple[str, ...] = ("fp32",), clips: bool = True,
) -> None:  # fmt: skip
    """Give up settings of the update that the engine does not have; `buckets` says whether it takes a bucket size."""
    update = giving.description.update
    if update.broadcast:
        _change(giving, "weights of rank 0 broadcast at the start", True, False, broadcast=False)
    if update.bucketed and not (buckets and update.bucket_size):
        _change(giving, "buckets of gradients", update.buckets, "its own", buckets=PLAIN.buckets)
    if update.master_weights not in master_weights:
        there = not update.master_weights
        _change(giving, "fp32 copies of the weights", update.master_weights, there, master_weights=there)
    if update.gradient_dtype not in gradient_dtypes:
        there_dtype = gradient_dtypes[0]
        _change(giving, "dtype of gradients", update.gradient_dtype, there_dtype, gradient_dtype=there_dtype)
    if update.moment_dtype not in moment_dtypes:
        _change(giving, "dtype of moments", update.moment_dtype, moment_dtypes[0], moment_dtype=moment_dtypes[0])
    if update.clip_norm is not None and not clips:
        _change(giving, "clipping of gradients", update.clip_norm, "none", clip_norm=None)


def _change(giving: Giving, what: str, here: object, there: object, **changes: object) -> None:
    update: Update = replace(giving.description.update, **changes)  # type: ignore[arg-type]  # of the types of the fields
    giving.up(what, here, there, update=update)


def give_up_selective(giving: Giving, why: str) -> None:
    """Give up selective recomputation for full recomputation, which certainly fits."""
    d = giving.description
    if any(d.selective):
        full = tuple(f + s for f, s in zip(d.full, d.selective, strict=True))
        giving.up(
            "selective recomputation", f"{sum(d.selective)} blocks, {kept_words(d)}", why, full=full,
            selective=(0,) * len(d.layers), kept=replace(d.kept, calls=(), but=()),
        )  # fmt: skip


def kept_words(description: Description) -> str:
    """What selectively recomputed blocks keep, in words."""
    kept = description.kept
    return f"keeping all but {', '.join(kept.but)}" if kept.but else f"keeping {', '.join(kept.calls)}"


def give_up_uneven_recomputation(giving: Giving, equal: str) -> None:
    """Give up different numbers of recomputed blocks: every stage gets the largest number."""
    d = giving.description
    most = max(d.full)
    full = tuple(min(most, layers) for layers in d.layers)
    if full != d.full:
        giving.up("blocks recomputed in each stage", _counts(d.full), f"{equal}: {_counts(full)}", full=full)


def give_up_partial_recomputation(giving: Giving) -> None:
    """Give up recomputing some blocks: all are recomputed if any is."""
    d = giving.description
    if any(d.full) and d.full != d.layers:
        giving.up("recomputed blocks", f"{sum(d.full)} of {sum(d.layers)}", "all", full=d.layers)


def _counts(numbers: tuple[int, ...]) -> str:
    """`10, 10, 9`, or `8 x 10` if all are equal."""
    return f"{len(numbers)} x {numbers[0]}" if len(set(numbers)) == 1 else ", ".join(map(str, numbers))


def batches_left_open(facts: Facts, micro_batches: int = 1) -> str:
    """A note on a file that states neither the samples of a micro-batch nor lengths."""
    of = f"{'one micro-batch' if micro_batches == 1 else f'{micro_batches} micro-batches'} of one sample"
    if facts.own_length is None:
        return f"the file leaves batches to the program: priced as {of} on each device"
    return (
        f"the file leaves batches and lengths to the program: priced as {of} of {facts.own_length} tokens on each"
        " device; --seq-len says another length"
    )


def normalised(description: Description) -> Description:
    """The description without settings that have no effect: ZeRO or replicas without sharding devices, sequence
    parallelism without tensor parallelism, the order of a ring without a ring, schedules without a pipeline."""
    d = description
    shared = d.shards > 1
    return replace(
        d,
        zero=d.zero if shared else 0,
        replicas=d.replicas if shared and d.zero else 1,
        sequence_parallel=d.sequence_parallel and d.tensor > 1,
        vocabulary_parallel=d.vocabulary_parallel or d.tensor == 1,
        zigzag=d.zigzag and d.ring > 1,
        schedule=d.schedule if d.pipeline > 1 else "1f1b",
        whole_experts=d.whole_experts and d.expert is not None and d.tensor > 1,
    )
