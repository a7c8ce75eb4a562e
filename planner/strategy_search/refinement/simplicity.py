"""The simplest plan among those that are nearly the fastest.

    the fastest plan ──┬─ its configuration, and others that are close, under the conventional pattern of operators
                       │        (one purpose for each axis, one stage of ZeRO)      ─▶ evaluated, priced as plans
                       └─ all blocks run like one of them                           ─▶ priced as plans
    of all that take at most a share longer: the plan with the fewest decisions (`planner.plan.layout.decisions`)

A plan that wins by a tenth of a percent may split one operator unlike its twins and recompute blocks in three ways.
People have to read the plan, run it on other software and defend it. So a plan that is nearly as fast and takes fewer
words is preferred. Every candidate is a whole plan, priced as the fastest plan is, within the same
memory and its margin. The bound stays the same: it covers all plans, and the gap of the returned plan includes the time
that it takes longer.

Not everything is tried: at most `EVALUATED` configurations with conventional axes, each a tenth of a second of work. At
most `PRICED` of these become plans, those first that would be the simplest.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hardware_profiles import Cluster
from planner.errors import InfeasibleError, LimitError, RequestError, StrategyError
from planner.graph.fp8 import leaving_out
from planner.limits import ended_by
from planner.plan.binding.bind import bind_prepared
from planner.plan.layout.decisions import decisions
from planner.plan.layout.roles import AxisRole, Roles, call_word, roles
from planner.plan.plan import INTERLEAVED, Group, Plan
from planner.plan.prediction.predict import predict
from planner.sharding.rescale import rescale_batch
from planner.sharding.rules import rule_of
from planner.strategy_search.engine.contenders import Contender
from planner.strategy_search.engine.families import Shared, engine_of
from planner.strategy_search.engine.scheduling import all_fit
from planner.strategy_search.finalists.finalists import Finalists
from planner.strategy_search.finalists.plan_maker import PlanMaker
from planner.strategy_search.finalists.proofs import Ranked, with_proof
from planner.strategy_search.refinement.around import axes_of, bound_of_like
from planner.strategy_search.refinement.narrower import WIDE
from planner.strategy_search.request.constraints import NothingAgreesError
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration, Pattern, Role
from planner.strategy_search.result import Progress, SearchResult, Simpler

EVALUATED = 3
"""Maximum number of configurations with conventional axes that are evaluated."""

PRICED = 2
"""Maximum number of these that are priced as plans; the pricing stops at the first that is simpler and fast enough."""

_ORDER: tuple[Role, ...] = ("replica", "data", "nodes", "expert", "ring", "context", "tensor")


def with_simplicity(
    request: SearchRequest,
    result: SearchResult,
    shared: Shared,
    on_progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> SearchResult:
    """The result with the simplest plan that takes at most `request.simplicity` longer than the fastest in first place.
    The result is unchanged if the fastest is the simplest, or if no simpler plan is asked for. A simple plan may even
    be faster, because objectives assume more overlap than there is: then it is just the fastest plan. Where the gap is
    wide, such plans are looked for in any case."""
    if not _looked_for(request, result) or ended_by(cancelled):
        return result
    best = result.plans[0]
    on_progress(_told(result))
    with contextlib.suppress(LimitError, MemoryError):
        found = _Simplifier(request, result, shared, cancelled).simplest()
        if found is not None:
            simple, fewer, more = found
            bound = bound_of_like(simple, result, request, shared)
            covered = result.covered and (axes_of(simple) <= 2 or axes_of(best) > 2)
            simple = with_proof(simple, bound, covered=covered)
            plans = (simple, *result.plans)[: max(request.top, 1)]
            slower = Simpler(fastest=best, decisions=fewer, fastest_decisions=more)
            simpler = None if simple.seconds < best.seconds else slower
            return replace(result, plans=plans, bound_seconds=bound, covered=covered, simpler=simpler)
    return result


def _looked_for(request: SearchRequest, result: SearchResult) -> bool:
    """Simpler plans are looked for on one kind of devices, after an exact search for time, and not for engines, whose
    plans are conventional already."""
    exact = request.algorithm == "dynamic_programming" and request.objective == "time" and request.space is None
    done = not result.statistics.stopped and not request.certify
    wanted = request.simplicity > 0 or result.objective_gap >= WIDE
    return wanted and exact and done and isinstance(request.cluster, Cluster)


def _told(result: SearchResult) -> Progress:
    statistics = result.statistics
    return Progress(
        total=statistics.configurations,
        done=statistics.evaluated,
        best_seconds=result.plans[0].seconds,
        bound_seconds=result.bound_seconds,
        phase="looking for a simpler plan",
    )


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A plan with its decisions."""

    ranked: Ranked
    decisions: tuple[str, ...]

    @property
    def order(self) -> tuple[int, float]:
        """The simplest first; among equally simple plans the fastest."""
        return len(self.decisions), self.ranked.seconds


class _Simplifier:
    """Looks for simpler plans of one result."""

    def __init__(
        self, request: SearchRequest, result: SearchResult, shared: Shared, cancelled: Callable[[], bool]
    ) -> None:
        self.request, self.result, self.cancelled = replace(request, top=1), result, cancelled
        self.engine, self.prepared = engine_of(self.request, shared)
        group = self.engine.groups[0]
        self.node = group.levels[0].fan_out or group.devices
        best = result.plans[0]
        self.longest = best.seconds * (1 + request.simplicity)
        self.cutoff = best.bounded * (1 + request.simplicity)  # on objectives, which may exceed steps

    def simplest(self) -> tuple[Ranked, tuple[str, ...], tuple[str, ...]] | None:
        """The simplest plan that is not the fastest, its decisions, and those of the fastest; None if no plan is
        simpler than the fastest. If the request does not want a slower plan, the fastest of the conventional plans,
        however simple, if it is faster."""
        fastest, wanted = self._candidate(self.result.plans[0]), self.request.simplicity > 0
        least, found = len(fastest.decisions) if wanted else math.inf, list[_Candidate]()
        contenders = [(self._estimated(one), one.objective, one.order, one) for one in self._contenders()]
        for estimated, _, _, contender in sorted(contenders, key=lambda one: one[:3])[:PRICED]:
            if estimated >= least or self._over():
                break
            with contextlib.suppress(StrategyError, RequestError, InfeasibleError):
                own = self._simpler_than(least, contender)
                least = min([least, *(len(one.decisions) for one in own)]) if wanted else least
                found += own
        if not wanted:
            found = [one for one in found if one.ranked.seconds < fastest.ranked.seconds]
        if not found:
            return None
        best = min(found, key=lambda one: one.order if wanted else one.ranked.seconds)
        return best.ranked, best.decisions, fastest.decisions

    def _over(self) -> bool:
        return ended_by(self.cancelled) is not None

    def _candidate(self, ranked: Ranked) -> _Candidate:
        return _Candidate(ranked=ranked, decisions=decisions(ranked.bound, roles(ranked.bound)))

    def _contenders(self) -> Iterator[Contender]:
        """Conventional configurations whose objectives are low enough."""
        for configuration in self._configurations():
            if self._over():
                return
            with contextlib.suppress(NothingAgreesError, InfeasibleError):
                outcome = self.engine.evaluate(configuration, cutoff=self.cutoff)
                if outcome.ranks and outcome.seconds < self.cutoff:
                    yield self.engine.contender(configuration, outcome)

    def _estimated(self, contender: Contender) -> int:
        """A rough lower estimate of the number of decisions in the plan of a contender, which is not made yet."""
        c, graph = contender.configuration, self.engine.template.graph
        own = c.under(self.request.pinned)
        ways = set[tuple[str, ...] | None]()
        for filling in contender.outcome.ranks:
            for column in filling.inner:
                operators = (graph.operators[at] for at in sorted(column.kept))
                words = dict.fromkeys(call_word(op.name, rule_of(graph, op).op_class) for op in operators)
                ways.add(tuple(words) if column.recompute else None)
        degrees = len(c.roles) + (c.pipeline > 1) + (c.virtual_stages > 1) + bool(own.zero)
        norms = bool(own.sequence_parallel) and "tensor" in c.roles
        return degrees + norms + (len(ways) > 1) + sum(max(1, len(way)) for way in ways if way is not None)

    def _simpler_than(self, least: float, contender: Contender) -> list[_Candidate]:
        """The plan of a contender, and the same plan with all blocks run like the leanest of them. Plans that do not
        fit, take longer than allowed, or have no fewer than `least` decisions are left out."""
        maker = PlanMaker(
            request=self.request,
            engine=self.engine,
            prepared=self.prepared,
            bound=self.result.bound_seconds,
            limits=self.result.limits,
            covered=self.result.covered,
        )
        finalists = Finalists(maker=maker, found=[contender])
        plain = finalists.plain(contender)
        if plain is None or plain.seconds > self.longest:
            return []
        found = [self._candidate(plain)]
        if contender.objective + _leaner_by(contender) <= self.cutoff:
            alike = self._alike(plain, finalists)
            found += [] if alike is None or alike.seconds > self.longest else [self._candidate(alike)]
        return [one for one in found if len(one.decisions) < least]

    def _configurations(self) -> list[Configuration]:
        """Conventional configurations like that of the fastest plan, then like those that were close to it; each
        once."""
        best = self.result.plans[0]
        found = roles(best.bound)
        made = list(self._like(best.configuration, *_purposes(found, best.configuration), found))
        for other in self.result.close:
            if other.family != best.configuration.family:
                made += self._like(other, *_guessed(other, self.node), found)
        return list(dict.fromkeys(made))[:EVALUATED]

    def _like(
        self, configuration: Configuration, mesh: tuple[int, ...], purposes: tuple[Role, ...], found: Roles
    ) -> Iterator[Configuration]:
        """The configuration with a purpose for each of its axes, and one stage of ZeRO for all parameters."""
        pinned = self.request.pinned
        if len(purposes) != len(mesh) or (pinned.mesh is not None and mesh != configuration.mesh):
            return
        shares = any(role not in ("tensor", "replica") for role in purposes)
        zero, parallel = pinned.zero, pinned.sequence_parallel
        decided = replace(
            pinned,
            zero=(_stage(found) if shares else 0) if zero is None else zero,
            sequence_parallel=(found.tensor == 1 or found.sequence_parallel) if parallel is None else parallel,
            replicas=math.prod(n for n, role in zip(mesh, purposes, strict=True) if role == "replica"),
            pattern=pinned.pattern or Pattern(selective=True),
        )
        plain = INTERLEAVED if configuration.virtual_stages > 1 else pinned.searched_schedule  # others come later
        yield replace(configuration, mesh=mesh, roles=purposes, decided=decided, schedule=plain)

    def _alike(self, like: Ranked, finalists: Finalists) -> Ranked | None:
        """The plan with all blocks run like the leanest of them; None if they already are, or if that does not fit."""
        plan = like.plan
        sample = _leanest(plan)
        if sample is None:
            return None
        changed = _all_like(
            replace(plan, training=replace(plan.training, tensor_overlap=(), expert_overlap=())), sample
        )
        whole = rescale_batch(self.prepared, self.request.prepared_batch, plan.training.part)
        whole = leaving_out(whole, plan.training.fp8)
        bound = bind_prepared(changed, whole, self.engine.template.blocks)
        machine = self.engine.machine(like.configuration)
        prediction = predict(bound, machine)
        if not all_fit(prediction, (self.result.limits[0],) * plan.pipeline, machine):
            return None
        ranked = replace(like, bound=replace(bound, plan=replace(changed, prediction=prediction)), certificate=None)
        return with_proof(
            finalists.overlapping.overlapped(ranked), self.result.bound_seconds, covered=self.result.covered
        )


def _leaner_by(contender: Contender) -> float:
    """A rough estimate of the seconds that a step takes longer with all blocks between the ends of a stage run like the
    leanest; infinite if the blocks are of several kinds, or all run alike."""
    every = [column for filling in contender.outcome.ranks for column in filling.inner]
    if len({column.kind for column in every}) != 1 or len({id(column) for column in every}) < 2:
        return math.inf
    lean = min(every, key=lambda column: (column.amounts.live, column.amounts.part)).amounts.part
    longer = (sum(lean - column.amounts.part for column in filling.inner) for filling in contender.outcome.ranks)
    return contender.configuration.micro_batches * max(longer)


def _purposes(found: Roles, configuration: Configuration) -> tuple[tuple[int, ...], tuple[Role, ...]]:
    """The mesh of a plan with a purpose for each axis, in the usual order. Axes with the same purpose become one
    axis."""
    if configuration.roles:
        return configuration.mesh, configuration.roles
    sizes: dict[Role, int] = {}
    sharing = any(axis.shared for axis in found.axes if axis.role == "data")
    for axis in found.axes:
        role = _purpose(axis, sharing)
        if role is None:
            return configuration.mesh, ()
        sizes[role] = sizes.get(role, 1) * axis.size
    named = tuple(role for role in _ORDER if sizes.get(role, 1) > 1)
    return tuple(sizes[role] for role in named), named


def _purpose(axis: AxisRole, sharing: bool) -> Role | None:
    """The purpose of an axis; None if its purpose has no name."""
    if axis.role == "data":
        return "data" if axis.shared or not sharing else "replica"
    if axis.role == "context" and "pixels" not in axis.detail:
        return "ring" if "ring" in axis.detail else "context"
    return "tensor" if axis.role == "tensor" else None


def _guessed(configuration: Configuration, node: int) -> tuple[tuple[int, ...], tuple[Role, ...]]:
    """The purposes that an expert would give the axes of a configuration: tensor parallelism on the inner axis if that
    lies within a node."""
    mesh = configuration.mesh
    if configuration.roles:
        return mesh, configuration.roles
    if len(mesh) == 1:
        return mesh, ("data",)
    if len(mesh) == 2 and mesh[1] <= node:
        return mesh, ("data", "tensor")
    return mesh, ()


def _stage(found: Roles) -> int:
    """The stage of ZeRO that covers most of a plan."""
    word = found.zero.partition(" ")[0]
    return int(word) if word.isdigit() else 0


def _leanest(plan: Plan) -> Group | None:
    """The group of blocks that keeps least; None if blocks are of several kinds, or there is only one group."""
    groups = [group for group in plan.groups if group.blocks]
    if len(groups) < 2 or len({len(group.operators) for group in groups}) != 1:
        return None
    return min(groups, key=lambda group: (group.recomputation == "none", len(group.kept)))


def _all_like(plan: Plan, sample: Group) -> Plan:
    """The plan with every block run like those of `sample`, a group of the plan."""
    places = {name: place for place, (name, _) in enumerate(sample.operators)}
    kept = sorted(places[name] for name in sample.kept)
    changed = [_like(group, sample, kept) if group.blocks else group for group in plan.groups]
    joined = list[Group]()
    for _, alike in groupby(changed, key=lambda group: group.blocks > 0):
        groups = list(alike)
        if groups[0].blocks:
            first, count = groups[0].first_block, sum(group.blocks for group in groups)
            name = f"blocks {first} to {first + count - 1}"
            groups = [replace(groups[0], name=name, blocks=count)]
        joined += groups
    return replace(plan, groups=tuple(joined))


def _like(group: Group, sample: Group, kept: Sequence[int]) -> Group:
    """The group with the strategies, stored layouts and recomputation of another group, under its own names."""
    operators = zip(group.operators, sample.operators, strict=True)
    parameters = zip(group.parameters, sample.parameters, strict=True)
    return replace(
        group,
        recomputation=sample.recomputation,
        kept=tuple(group.operators[place][0] for place in kept),
        activations_home=sample.activations_home,
        operators=tuple((name, strategy) for (name, _), (_, strategy) in operators),
        parameters=tuple((name, stored) for (name, _), (_, stored) in parameters),
    )
