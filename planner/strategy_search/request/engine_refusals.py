"""Requests for a plan of a training engine that are refused: they ask for what the engine has no setting for."""

from hardware_profiles import Cluster
from planner.engines.space import NARROW, EngineSpace, sample_step
from planner.errors import RequestError
from planner.nearest import multiples, nearest_words
from planner.sharding.update import DEFAULT, PLAIN
from planner.strategy_search.request.offload import NOTHING
from planner.strategy_search.request.padded_batch import nearest_batches
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import FREE

_MADE = (
    "gradients", "gradient_dtype", "master_weights", "broadcast", "zero_by", "local_parameters", "placed", "padded",
)  # fmt: skip
"""Decisions about the update that an engine makes itself."""


def check_engine(space: EngineSpace, request: SearchRequest, *, has_experts: bool) -> None:
    """Raise RequestError if the request asks for something that the engine has no setting for. `has_experts`: whether
    the model has any."""
    _check_training(space, request)
    _check_fp8(space, request, has_experts=has_experts)
    _check_state(space, request, has_experts=has_experts)
    _check_decisions(space, request)
    _check_update(space, request)


def _check_training(space: EngineSpace, request: SearchRequest) -> None:
    """Raise RequestError for machines, batches, optimizers, precisions and algorithms that the engine does not take."""
    asked, where = request.update, f"--for {space.name}"
    if not isinstance(request.cluster, Cluster):
        raise RequestError(f"{where}: plans for an engine are searched on one kind of devices; leave out --for")
    if asked.per_replica:
        raise RequestError(
            f"{where}: {space.title} is not told which operators replicas compute by themselves, and"
            f" {', '.join(asked.per_replica)} were to do so; plan for our own runtime, or without --per-replica"
        )
    if asked.padding_samples:
        raise RequestError(
            f"{where}: {space.title} trains no samples of weight zero, and {asked.padding_samples} were to pad the"
            f" global batch {request.global_batch}: {nearest_batches(request)}; take one of them and leave out the"
            " padding, or the engine"
        )
    if request.padding == "auto":
        raise RequestError(f"{where}: pad auto: {space.title} is told of no padding; leave it out, or the engine")
    words = (("optimizer", space.optimizers), ("precision", space.precisions), ("algorithm", ("dynamic_programming",)))
    for name, known in words:
        if getattr(request, name) not in known:
            raise RequestError(f"{where}: {name} = {getattr(request, name)}; it takes {', '.join(known)}")


def _check_fp8(space: EngineSpace, request: SearchRequest, *, has_experts: bool) -> None:
    """Raise RequestError for layers in fp8 that the engine does not run."""
    where = f"--for {space.name}"
    if request.fp8 and request.fp8.recipe not in space.fp8:
        has = f"it has {', '.join(space.fp8)}" if space.fp8 else "none is searched for it; leave it out"
        raise RequestError(f"{where}: fp8 = {request.fp8.recipe}: {has}")
    if request.fp8 and not (space.leaves_out or request.fp8.experts) and has_experts:
        raise RequestError(f"{where}: {space.title} computes experts in fp8, too; take fp8_experts with it, or no fp8")
    if request.fp8.left_out and not space.leaves_out:
        raise RequestError(f"{where}: {space.title} leaves no linear layer out of fp8; leave out fp8_left_out")
    if request.fp8.gathered and request.fp8.recipe not in space.gathers:
        has = f"goes with fp8 = {', '.join(space.gathers)}" if space.gathers else "is not told of that here"
        raise RequestError(f"{where}: fp8_gathered: {space.title} {has}; leave it out, or --for")
    if request.fp8.dispatch or (request.fp8.experts and space.leaves_out):
        option = "fp8_dispatch" if request.fp8.dispatch else "fp8_experts"
        raise RequestError(f"{where}: {option}: no engine is told of that here; leave it out, or --for")


def _check_state(space: EngineSpace, request: SearchRequest, *, has_experts: bool) -> None:
    """Raise RequestError for moments, experts and layouts of weights that the engine does not have."""
    update, where = request.update, f"--for {space.name}"
    narrow = request.optimizer == "adamw" and request.precision in NARROW and space.narrow_moments
    if update.moment_dtype != PLAIN.moment_dtype and not narrow:
        stages = ", ".join(map(str, space.narrow_moments))
        has = f"goes with AdamW in 16 bits, under ZeRO {stages}" if stages else f"is what {space.title} makes of it"
        raise RequestError(f"{where}: moment_dtype = {update.moment_dtype}: it {has}; leave it out, or --for")
    if request.tokens_once:
        raise RequestError(f"{where}: tokens_once is what {space.title} makes of it; leave it out")
    if not space.experts and has_experts:
        raise RequestError(f"{where}: {space.title} is told nothing of experts here; take --for megatron")
    if request.shards or request.stores:
        raise RequestError(f"{where}: an engine takes no strategies of operators; leave out --shard, or --for")


def _check_decisions(space: EngineSpace, request: SearchRequest) -> None:
    """Raise RequestError for decisions that are not searched for the engine."""
    pinned, where = request.pinned, f"--for {space.name}"
    for name in ("mesh", "offload", "slices", "interleave", "tensor_overlap", "never_kept", "ulysses", "zigzag"):
        if getattr(pinned, name) not in (getattr(FREE, name), 1, NOTHING):
            raise RequestError(f"{where}: {name} is no part of what is searched for {space.title}; leave it out")
    _check_samples(space, request)
    if pinned.expert_overlap:
        raise RequestError(f"{where}: expert_overlap is no part of what is searched for {space.title}; leave it out")
    if pinned.replicas not in (None, 1) and not any(settings.replicated for settings in space.settings):
        raise RequestError(f"{where}: replicas is no part of what is searched for {space.title}; leave it out")
    selective = any(settings.selective for settings in space.settings)
    if pinned.schedule not in (None, "1f1b", "interleaved_1f1b") or (pinned.recompute == "selective" and not selective):
        given = pinned.schedule if pinned.recompute != "selective" else "selective recomputation"
        raise RequestError(f"{where}: {given} is no part of what is searched for {space.title}; leave it out")


def _check_samples(space: EngineSpace, request: SearchRequest) -> None:
    """Raise RequestError for samples that do not divide over the degrees that were decided as the engine cuts them."""
    degrees = {"context": request.pinned.context or 1, "tensor": request.pinned.tensor or 1}
    step = min(sample_step(settings.samples_by, **degrees) for settings in space.settings)
    length = request.model.sequence_length
    if length is not None and length % step:
        words = "".join(f" x {name} {degree}" for name, degree in degrees.items() if degree > 1)
        near = nearest_words(length, multiples(length, step))
        raise RequestError(
            f"--for {space.name}: {space.title} cuts samples into {step} equal pieces (2{words}), and {length} tokens"
            f" do not divide; of the length {near}"
        )


def _check_update(space: EngineSpace, request: SearchRequest) -> None:
    """Raise RequestError for decisions about the update, which the engine makes itself."""
    asked, where = request.update, f"--for {space.name}"
    for name in _MADE:
        if getattr(asked, name) != getattr(DEFAULT, name):
            raise RequestError(f"{where}: {name} is what {space.title} makes of it; leave it out")
    if asked.buckets not in (DEFAULT.buckets, "none") or asked.gathers not in (DEFAULT.gathers, "each"):
        raise RequestError(f"{where}: buckets and gathers are those of {space.title}; leave them out")
