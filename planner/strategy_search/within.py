"""A search within the space of a training engine: the best plan that the engine's settings can express.

    settings of the engine ─▶ alternatives, all in one search with its bound ─▶ the best few, as the engine runs them

An engine has one sharding pattern for all operators (`planner.sharding.usual_pattern`). So little is left to search in
a configuration: which blocks are recomputed, as the engine counts them, and how the blocks are divided over stages. The
pattern leaves operators between matrix products open. The search decides them by memory and time together, the plan of
the engine by time alone (`planner.strategy_search.fixed.megatron_layout`). The result is the plan of the engine, priced
anew. Its objective is compared with the bound of the search, which covers more plans, so the gap holds. If the plan
needs more memory than there is, the search runs again with a lower memory limit.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from hardware_profiles.units import bytes_text
from planner.engines.space import EngineSpace
from planner.errors import InfeasibleError, RequestError
from planner.graph.fp8 import ALL_LAYERS
from planner.models.overrides import split_reference
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.kept import NOTHING_KEPT
from planner.sharding.update import PLAIN
from planner.strategy_search.engine.families import Shared
from planner.strategy_search.finalists.proofs import Ranked, with_proof
from planner.strategy_search.fixed.megatron_layout import Usual, usual_plan
from planner.strategy_search.refinement.fp8_ends import with_fp8_ends
from planner.strategy_search.request.engine_alternatives import alternatives, expert_degrees
from planner.strategy_search.request.engine_refusals import check_engine
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import FREE, Configuration, Pattern, Pinned
from planner.strategy_search.result import Progress, SearchResult
from planner.strategy_search.search import find_fitting, search

_ROUNDS = 6  # attempts, each with less memory, if the plan as the engine runs it needs more than the search assumed
_FITS = 1e-9


def within(space: EngineSpace, request: SearchRequest) -> SearchRequest:
    """The request for plans that an engine can run. Raises RequestError for whatever the engine has no setting for."""
    experts = expert_degrees(request)
    check_engine(space, request, has_experts=bool(experts))
    found = alternatives(space, request, _of_model(space, request), experts)
    if request.update.moment_dtype != PLAIN.moment_dtype:
        found = [one for one in found if one.zero in space.narrow_moments]
    if not found:
        raise RequestError(
            f"--for {space.name}: {space.title} has no settings with all that was decided by hand; leave out some of"
            " it, or --for"
        )
    narrow = next(zero for zero in (0, 1, 2, 3, None) if zero not in space.wide)
    # each plan is priced with its own update
    update = space.update(request.update, narrow or 0, request.precision, in_fp8=request.fp8.gathered)
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


def best_plans(
    request: SearchRequest,
    on_progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
    cutoff: float = math.inf,
    shared: Shared | None = None,
    bounds: Mapping[Configuration, float] = MappingProxyType({}),
    rival: Ranked | None = None,
) -> SearchResult:
    """`search`, within the space of an engine if the request names one, and with layers in fp8 where that is faster.
    `bounds`: as for `search`, of this request itself. `rival`: a plan of another request, which plans have to beat."""

    def solve(one: SearchRequest, cutoff: float, known: Ranked | None) -> SearchResult:
        if one.space is None:
            if one is not request:
                return search(one, on_progress, cancelled, cutoff, known=known)
            return search(one, on_progress, cancelled, cutoff, shared, known or rival, bounds=bounds)
        assert known is None, "plans of engines are searched one space after the other"
        return search_within(one.space, one, on_progress, cancelled, cutoff)

    return with_fp8_ends(request, solve, cutoff, cancelled)


def anything_fits(
    request: SearchRequest, cancelled: Callable[[], bool] = lambda: False, shared: Shared | None = None
) -> bool:
    """`find_fitting`, within the space of an engine if the request names one."""
    return find_fitting(request if request.space is None else within(request.space, request), cancelled, shared)


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
    first, shared = None, Shared()
    for _ in range(_ROUNDS):
        found = search(request, on_progress, cancelled, cutoff, shared)
        first = first or found  # with all memory; a bound proved with less does not hold
        stated, bound = max(first.limits), first.bound_seconds
        made = [_as_run(space, asked, ranked) for ranked in found.plans]
        fitting = [one for one in made if one.plan.prediction.peak_bytes <= stated * (1 + _FITS)]
        if fitting:
            plans = tuple(sorted((with_proof(one, bound, covered=True) for one in fitting), key=lambda r: r.seconds))
            return replace(
                found,
                plans=plans,
                bound_seconds=bound,
                usual_seconds=first.usual_seconds,
                limits=first.limits,
                bounds=first.bounds,
            )
        least = min(one.plan.prediction.peak_bytes for one in made)
        memory = min(found.limits) - (least - stated)
        request = replace(request, memory_limit=memory)
    raise InfeasibleError(
        f"--for {space.name}: plans that were found need {bytes_text(least)} per device as {space.title} runs them,"
        f" and there are {bytes_text(stated)}; decide degrees by hand, such as --tensor 8"
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
