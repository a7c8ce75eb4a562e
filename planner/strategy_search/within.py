"""A search within the space of a training engine: the best plan that the engine's settings can express.

    settings of the engine ─▶ alternatives, all in one search with its bound ─▶ the best few, as the engine runs them

An engine has one sharding pattern for all operators (`planner.sharding.usual_pattern`). So little is left to search in
a configuration: which blocks are recomputed, as the engine counts them, and how the blocks are divided over stages. The
pattern leaves operators between matrix products open. The search decides them by memory and time together, the plan of
the engine by time alone (`planner.strategy_search.fixed.megatron_layout`). The result is the plan of the engine, priced
anew. Its objective is compared with the bound of the search, which covers more plans, so the gap holds. If the plan
needs more memory than there is, the search runs again with a lower memory limit.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from hardware_profiles import Cluster
from planner.engines.space import NARROW, EngineSpace, Recomputed, Settings
from planner.errors import InfeasibleError, RequestError
from planner.graph.expert_load import EXPERTS_OPERATOR
from planner.graph.fp8 import ALL_LAYERS
from planner.models.overrides import split_reference
from planner.nearest import divisors
from planner.plan.binding.bind import BoundPlan, prepare
from planner.plan.layout.kept import NOTHING_KEPT, Kept, block_words
from planner.sharding.rule import FactorKind
from planner.sharding.rules import rule_of
from planner.sharding.update import DEFAULT, PLAIN
from planner.strategy_search.engine.families import Shared
from planner.strategy_search.engine.proofs import Ranked, with_proof
from planner.strategy_search.fixed.megatron_layout import Usual, usual_plan
from planner.strategy_search.fp8_ends import with_fp8_ends
from planner.strategy_search.request.offload import NOTHING
from planner.strategy_search.request.padded_batch import nearest_batches
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import FREE, Configuration, Pattern, Pinned
from planner.strategy_search.result import Progress, SearchResult
from planner.strategy_search.search import find_fitting, search

_ROUNDS = 6  # attempts, each with less memory, if the plan as the engine runs it needs more than the search assumed
_FITS = 1e-9
_OWN = (
    "context_by",
    "interleave",
    "tensor_overlap",
    "expert_overlap",
    "pattern",
    "zigzag",
    "even",
)  # always taken from the settings


def within(space: EngineSpace, request: SearchRequest) -> SearchRequest:
    """The request for plans that an engine can run. Raises RequestError for whatever the engine has no setting for."""
    _check(space, request)
    experts, devices = _expert_degrees(request), request.cluster.devices
    kinds, asked, turns = _kinds(request), _of_model(space, request), _has_causal_ring(request)
    every = (_alternatives(settings, asked, experts, devices, kinds, turns=turns) for settings in space.settings)
    found = list(dict.fromkeys(itertools.chain.from_iterable(every)))  # some rows of settings differ in experts only
    if request.update.moment_dtype != PLAIN.moment_dtype:
        found = [one for one in found if one.zero in space.narrow_moments]
    if not found:
        raise RequestError(
            f"--for {space.name}: {space.title} has no settings with all that was decided by hand; leave out some of"
            " it, or --for"
        )
    narrow = next(zero for zero in (0, 1, 2, 3, None) if zero not in space.wide)
    in_fp8 = request.fp8.gathered
    update = space.update(
        request.update, narrow or 0, request.precision, in_fp8=in_fp8
    )  # each plan is priced with its own
    pinned = replace(request.pinned, interleave=1, tensor_overlap=1, expert_overlap=False, pattern=Pattern())
    return replace(
        request, space=space, alternatives=tuple(dict.fromkeys(found)), pinned=pinned, update=update, placing="given"
    )


def _of_model(space: EngineSpace, request: SearchRequest) -> Pinned:
    """The degrees decided by the user and by the engine for this model. Raises RequestError if they contradict each
    other."""
    model, pinned = split_reference(request.model.reference)[0], request.pinned
    for name, degree in dict(space.models).get(model, ()):
        if getattr(pinned, name) not in (None, degree):
            raise RequestError(
                f"--for {space.name}: {name} = {getattr(pinned, name)}: {space.title} has no {name} parallelism for"
                f" {model}; leave it out, or take another engine"
            )
        pinned = replace(pinned, **{name: degree})  # type: ignore[arg-type]  # a degree, by its name
    return pinned


def _check(space: EngineSpace, request: SearchRequest) -> None:
    """Raise RequestError if the request asks for something that the engine has no setting for."""
    asked, pinned, where = request.update, request.pinned, f"--for {space.name}"
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
    if request.fp8 and request.fp8.recipe not in space.fp8:
        has = f"it has {', '.join(space.fp8)}" if space.fp8 else "none is searched for it; leave it out"
        raise RequestError(f"{where}: fp8 = {request.fp8.recipe}: {has}")
    if request.fp8 and not (space.leaves_out or request.fp8.experts) and _expert_degrees(request):
        raise RequestError(f"{where}: {space.title} computes experts in fp8, too; take fp8_experts with it, or no fp8")
    if request.fp8.left_out and not space.leaves_out:
        raise RequestError(f"{where}: {space.title} leaves no linear layer out of fp8; leave out fp8_left_out")
    if request.fp8.gathered and request.fp8.recipe not in space.gathers:
        has = f"goes with fp8 = {', '.join(space.gathers)}" if space.gathers else "is not told of that here"
        raise RequestError(f"{where}: fp8_gathered: {space.title} {has}; leave it out, or --for")
    if request.fp8.dispatch or (request.fp8.experts and space.leaves_out):
        option = "fp8_dispatch" if request.fp8.dispatch else "fp8_experts"
        raise RequestError(f"{where}: {option}: no engine is told of that here; leave it out, or --for")
    narrow = request.optimizer == "adamw" and request.precision in NARROW and space.narrow_moments
    if asked.moment_dtype != PLAIN.moment_dtype and not narrow:
        stages = ", ".join(map(str, space.narrow_moments))
        has = f"goes with AdamW in 16 bits, under ZeRO {stages}" if stages else f"is what {space.title} makes of it"
        raise RequestError(f"{where}: moment_dtype = {asked.moment_dtype}: it {has}; leave it out, or --for")
    if request.tokens_once:
        raise RequestError(f"{where}: tokens_once is what {space.title} makes of it; leave it out")
    if not space.experts and _expert_degrees(request):
        raise RequestError(f"{where}: {space.title} is told nothing of experts here; take --for megatron")
    if request.shards or request.stores:
        raise RequestError(f"{where}: an engine takes no strategies of operators; leave out --shard, or --for")
    for name in ("mesh", "offload", "slices", "interleave", "tensor_overlap", "never_kept", "ulysses", "zigzag"):
        if getattr(pinned, name) not in (getattr(FREE, name), 1, NOTHING):
            raise RequestError(f"{where}: {name} is no part of what is searched for {space.title}; leave it out")
    if pinned.expert_overlap:
        raise RequestError(f"{where}: expert_overlap is no part of what is searched for {space.title}; leave it out")
    if pinned.replicas not in (None, 1) and not any(settings.replicated for settings in space.settings):
        raise RequestError(f"{where}: replicas is no part of what is searched for {space.title}; leave it out")
    selective = any(settings.selective for settings in space.settings)
    if pinned.schedule not in (None, "1f1b", "interleaved_1f1b") or (pinned.recompute == "selective" and not selective):
        given = pinned.schedule if pinned.recompute != "selective" else "selective recomputation"
        raise RequestError(f"{where}: {given} is no part of what is searched for {space.title}; leave it out")
    for name in (
        "gradients",
        "gradient_dtype",
        "master_weights",
        "broadcast",
        "zero_by",
        "local_parameters",
        "placed",
        "padded",
    ):
        if getattr(asked, name) != getattr(DEFAULT, name):
            raise RequestError(f"{where}: {name} is what {space.title} makes of it; leave it out")
    if asked.buckets not in (DEFAULT.buckets, "none") or asked.gathers not in (DEFAULT.gathers, "each"):
        raise RequestError(f"{where}: buckets and gathers are those of {space.title}; leave them out")


def _expert_degrees(request: SearchRequest) -> tuple[int, ...]:
    """The possible expert-parallel degrees of a model; empty if it has no experts."""
    rules = [rule_of(request.graph, op) for op in request.graph.operators if op.op == EXPERTS_OPERATOR]
    if not rules:
        return ()
    count = math.gcd(*(rule.factors[rule.index["e"]].extent for rule in rules))
    return tuple(degree for degree in divisors(count) if request.cluster.devices % degree == 0)


def _has_causal_ring(request: SearchRequest) -> bool:
    """Whether the model has causal attention that a ring can split: zigzag order balances only that."""
    rules = (rule_of(request.graph, op) for op in request.graph.operators)
    return any(rule.causal and any(f.kind is FactorKind.RING for f in rule.factors) for rule in rules)


def _kinds(request: SearchRequest) -> tuple[frozenset[str], ...]:
    """For each kind of block, the names of its operators that can keep their results."""
    graph, blocks = prepare(request.graph, request.imbalance, request.update.placed, request.fp8)
    each = (block_words(graph, blocks.operators(first)).values() for first in blocks.firsts)
    return tuple(frozenset(name for word in words for name in (*word.names, word.call)) for words in each)


def _ways(
    settings: Settings, asked: Pinned, kinds: Sequence[frozenset[str]], experts: bool
) -> list[tuple[Recomputed, Kept | None]]:
    """The ways to recompute blocks: how many are recomputed, and what these keep. They keep nothing, or the results of
    some operators; selective recomputation needs a named operator in every kind of block."""
    found: list[tuple[Recomputed, Kept | None]] = []
    if asked.recompute != "selective":
        found += [(count, None) for count in settings.recomputed]
    if asked.recompute in (None, "selective") and (settings.selective_experts or not experts):
        for count, kept in settings.selective:
            calls, but = (
                tuple(w for w in words if any(w in kind for kind in kinds)) for words in (kept.calls, kept.but)
            )
            if kinds and all(not kind.isdisjoint((*calls, *but)) for kind in kinds):
                found.append((count, Kept(calls=calls, but=but)))
    return list(dict.fromkeys(found))


def _alternatives(
    settings: Settings,
    asked: Pinned,
    experts: tuple[int, ...],
    devices: int,
    kinds: Sequence[frozenset[str]],
    *,
    turns: bool,
) -> Iterator[Pinned]:
    """The alternatives that a row of settings allows, as far as they agree with what the user decided; `turns` says
    whether rings may be in zigzag order."""
    if settings.piped and asked.pipeline == 1:
        return
    ways: tuple[str | None, ...] = settings.context or (None,)
    if asked.context_by not in (FREE.context_by, "auto"):
        ways = tuple(way for way in ways if way == asked.context_by)
    elif {"heads", "ring", "hybrid"} <= set(ways):
        ways = ("auto",)
    beside = dict(settings.beside_experts) if experts else {}
    if beside.get("context") == 1:
        ways = (None,)
    cut = [] if settings.whole_experts == (True,) else [(1, None)]
    spread = [(None, None)] if not experts else [*cut, *itertools.product(experts, settings.whole_experts)]
    running = _ways(settings, asked, kinds, bool(experts))
    each = itertools.product(settings.zero, running, ways, spread, _copies(settings, devices))
    for zero, (recomputed, kept), way, (expert, whole), replicas in each:
        wanted: dict[str, Any] = {
            **dict(settings.fixed),
            **beside,
            **({} if way else {"context": 1}),
            "zero": zero,
            "replicas": replicas,
            "sequence_parallel": settings.sequence_parallel,
            "expert": expert,
            "whole_experts": whole,
            "context_by": way or "heads",
            "zigzag": settings.zigzag if turns and way not in (None, "heads") else None,
            "recompute": {"none": "none", "all": "selective" if kept else "full"}.get(recomputed),
            "even": settings.even,
            "interleave": 1,
            "tensor_overlap": 1,
            "expert_overlap": False,
            "pattern": Pattern(
                vocabulary=settings.vocabulary,
                counts="equal" if recomputed == "equal" else "any",
                shards=settings.shards,
                interleaved=settings.interleaved,
                piped=settings.piped,
                filled=settings.filled,
                divided=settings.even,
                kept=kept,
                over_context=settings.over_context,
            ),
        }
        for name in (field.name for field in fields(Pinned) if field.name not in _OWN):
            given, open_value = getattr(asked, name), getattr(FREE, name)
            if given != open_value and wanted.setdefault(name, given) != given:
                if wanted[name] is not None:
                    break
                wanted[name] = given
        else:
            yield Pinned(**wanted)


def _copies(settings: Settings, devices: int) -> tuple[int | None, ...]:
    """Possible numbers of replica groups, each of which shards everything within itself; None stands for one group of
    all devices. Each group has at least two devices."""
    if not settings.replicated:
        return (None,)
    return (None, *(count for count in divisors(devices) if 1 < count <= devices // 2))


def best_plans(
    request: SearchRequest,
    on_progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
    cutoff: float = math.inf,
    shared: Shared | None = None,
) -> SearchResult:
    """`search`, within the space of an engine if the request names one, and with layers in fp8 where that is faster."""

    def solve(one: SearchRequest, cutoff: float, known: Ranked | None) -> SearchResult:
        if one.space is None:
            return search(one, on_progress, cancelled, cutoff, shared if one is request else None, known)
        assert known is None, "plans of engines are searched one space after the other"
        return search_within(one.space, one, on_progress, cancelled, cutoff)

    return with_fp8_ends(request, solve, cutoff, cancelled)


def anything_fits(request: SearchRequest, cancelled: Callable[[], bool] = lambda: False) -> bool:
    """`find_fitting`, within the space of an engine if the request names one."""
    return find_fitting(request if request.space is None else within(request.space, request), cancelled)


def search_within(
    space: EngineSpace,
    asked: SearchRequest,
    on_progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
    cutoff: float = math.inf,
) -> SearchResult:
    """The fastest plans that an engine can run, priced as it runs them, with the bound of the search over its space.

    Raises as `search` does.
    """
    request = within(space, asked)
    stated, bound, shared = 0.0, math.inf, Shared()
    for turn in range(_ROUNDS):
        found = search(request, on_progress, cancelled, cutoff, shared)
        if turn == 0:  # with all memory; a bound proved with less does not hold
            stated, bound = max(found.limits), found.bound_seconds
        made = [_as_run(space, asked, ranked) for ranked in found.plans]
        fitting = [one for one in made if one.plan.prediction.peak_bytes <= stated * (1 + _FITS)]
        if fitting:
            plans = tuple(sorted((with_proof(one, bound, covered=True) for one in fitting), key=lambda r: r.seconds))
            return replace(found, plans=plans)
        least = min(one.plan.prediction.peak_bytes for one in made)
        memory = min(found.limits) - (least - stated)
        request = replace(request, memory_limit=memory)
    raise InfeasibleError(
        f"--for {space.name}: plans that were found need {least / 2**30:.1f} GiB per device as {space.title} runs them,"
        f" and there are {stated / 2**30:.1f} GiB; decide degrees by hand, such as --tensor 8"
    )


def _as_run(space: EngineSpace, request: SearchRequest, ranked: Ranked) -> Ranked:
    """A plan of the search as the engine runs it."""
    stages = tuple(stage.blocks for stage in ranked.plan.stages)
    request = replace(request, fp8=ranked.plan.training.fp8, fp8_layers=ALL_LAYERS)
    made = plan_within(space, request, ranked.configuration, stages, _recomputed(ranked.bound))
    return replace(ranked, bound=made, certificate=None)


def plan_within(
    space: EngineSpace,
    request: SearchRequest,
    configuration: Configuration,
    stages: tuple[int, ...],
    recomputed: tuple[int, ...],
) -> BoundPlan:
    """The plan of a configuration of a request `within` the space of an engine, as the engine runs it, priced. `stages`
    gives the blocks of every stage, `recomputed` how many of them are recomputed; the engine's way to count may
    recompute more. The plan may not fit."""
    decided = configuration.decided
    assert decided is not None
    assert decided.pattern is not None
    degrees = dict(zip(configuration.roles, configuration.mesh, strict=True))
    ring, heads = configuration.context
    by = "heads" if ring == 1 else "ring" if heads == 1 else "hybrid"
    tensor = degrees.get("tensor", 1)
    pinned = Pinned(
        pipeline=configuration.pipeline,
        data=degrees.get("replica", 1) * degrees.get("data", 1) * degrees.get("expert", 1),
        context=ring * heads,
        context_by=by,  # type: ignore[arg-type]  # one of three words
        ulysses=heads if by == "hybrid" else None,
        zigzag=configuration.zigzag if ring > 1 else None,
        tensor=tensor,
        expert=decided.expert,
        whole_experts=bool(decided.whole_experts) if decided.expert is not None and tensor > 1 else None,
        zero=decided.zero,
        replicas=decided.replicas,
        sequence_parallel=decided.sequence_parallel,
        micro_batches=configuration.micro_batches,
    )
    kept = decided.pattern.kept
    if decided.pattern.counts == "equal":
        recomputed = tuple(min(max(recomputed), blocks) for blocks in stages)
    none = (0,) * len(stages)
    usual = Usual(
        pinned=pinned,
        stages=stages,
        virtual_stages=configuration.virtual_stages,
        schedule=configuration.schedule,
        vocabulary=decided.pattern.vocabulary,
        full=recomputed if kept is None else none,
        selective=none if kept is None else recomputed,
        kept=kept or NOTHING_KEPT,
    )
    in_fp8 = request.fp8.gathered
    update = space.update(request.update, decided.zero or 0, request.precision, in_fp8=in_fp8)
    plain = replace(request, update=update, pinned=FREE, placing="given", space=None, alternatives=())
    made = usual_plan(plain, usual)
    provenance = replace(made.plan.provenance, search=request.algorithm)
    return replace(made, plan=replace(made.plan, provenance=provenance))


def _recomputed(found: BoundPlan) -> tuple[int, ...]:
    """The number of recomputed blocks in every stage."""
    held = (range(stage.first_block, stage.first_block + stage.blocks) for stage in found.plan.stages)
    return tuple(sum(found.recompute_of(block) is not None for block in blocks) for blocks in held)
