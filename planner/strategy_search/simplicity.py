"""Among plans that are nearly the fastest, the simplest.

    the fastest plan ──┬─ its configuration, and others that are close, under the conventional pattern of operators
                       │        (one purpose for each axis, one stage of ZeRO)      ─▶ evaluated, priced as plans
                       └─ all blocks run like one of them                           ─▶ priced as plans
    of all that take at most a share longer: the one with the fewest decisions (`planner.plan.layout.decisions`)

A plan that wins by a tenth of a percent may split one operator unlike its twins and recompute blocks in three ways.
People have to read it, run it on other software and defend it: what is nearly as fast and shorter to say is preferred.
Every candidate is a whole plan, priced by the judge that priced the fastest one, within the same memory and its margin.
What was proved stays as it is: it is about all plans, and the gap of the plan that is returned counts what it takes
longer.

Not everything is tried: `EVALUATED` configurations with conventional axes at most, each a tenth of a second of work,
and `ALIKE` plans of which blocks are made alike.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hardware_profiles import Cluster
from planner.errors import InfeasibleError, LimitError, RequestError, StrategyError
from planner.limits import reached
from planner.plan.binding.bind import bind_prepared
from planner.plan.layout.decisions import decisions
from planner.plan.layout.roles import AxisRole, Roles, roles
from planner.plan.plan import Group, Plan
from planner.plan.prediction.predict import predict
from planner.sharding.rescale import rescale_batch
from planner.strategy_search.engine.contenders import Contender
from planner.strategy_search.engine.families import Shared, engine_of
from planner.strategy_search.engine.finalists import Finalists, OverfullError, Ranked, with_proof
from planner.strategy_search.engine.scheduling import all_fit
from planner.strategy_search.request.constraints import NothingAgreesError
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration, Pattern, Role
from planner.strategy_search.result import Progress, SearchResult, Simpler

EVALUATED = 6
"""Configurations with conventional axes that are evaluated, at most."""

PRICED = 4
"""Of these, those that are priced as plans, the least objective first."""

ALIKE = 2
"""Plans of which all blocks are made alike, the simplest first."""

_ORDER: tuple[Role, ...] = ("replica", "data", "expert", "ring", "context", "tensor")


def with_simplicity(
    request: SearchRequest,
    result: SearchResult,
    shared: Shared,
    on_progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> SearchResult:
    """The result of a request with the simplest plan that takes at most `request.simplicity` longer than the fastest,
    in the first place; as it is where that is the fastest itself, or where none is looked for."""
    if not _looked_for(request, result) or cancelled() or reached():
        return result
    best = result.plans[0]
    on_progress(_told(result))
    with contextlib.suppress(LimitError):
        found = _Simplifier(request, result, shared, cancelled).simplest()
        if found is not None:
            simple, fewer, more = found
            plans = (simple, *result.plans)[: max(request.top, 1)]
            return replace(result, plans=plans, simpler=Simpler(fastest=best, decisions=fewer, fastest_decisions=more))
    return result


def _looked_for(request: SearchRequest, result: SearchResult) -> bool:
    """Plans of one kind of devices, searched exactly for time, not those of an engine, which are conventional."""
    exact = request.algorithm == "dynamic_programming" and request.objective == "time" and request.space is None
    done = not result.statistics.stopped and not request.certify
    return request.simplicity > 0 and exact and done and isinstance(request.cluster, Cluster)


def _told(result: SearchResult) -> Progress:
    statistics = result.statistics
    return Progress(
        total=statistics.configurations,
        done=statistics.evaluated,
        best_seconds=result.plans[0].objective,
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
        """The simplest first, of those that are as simple the fastest."""
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
        self.longest = result.plans[0].seconds * (1 + request.simplicity)

    def simplest(self) -> tuple[Ranked, tuple[str, ...], tuple[str, ...]] | None:
        """The simplest plan that is not the fastest, with its decisions and those of the fastest; None where the
        fastest is as simple as any."""
        fastest = self._candidate(self.result.plans[0])
        found = [fastest, *self._conventional()]
        for one in sorted(found, key=lambda one: one.order)[:ALIKE]:
            found += self._alike(one)
        best = min(found, key=lambda one: one.order)
        if len(best.decisions) >= len(fastest.decisions):
            return None
        return best.ranked, best.decisions, fastest.decisions

    def _candidate(self, ranked: Ranked) -> _Candidate:
        return _Candidate(ranked=ranked, decisions=decisions(ranked.bound, roles(ranked.bound)))

    def _conventional(self) -> Iterator[_Candidate]:
        """Plans of conventional axes that take no longer than is allowed."""
        contenders = list[Contender]()
        for configuration in self._configurations():
            if self.cancelled() or reached():
                break
            with contextlib.suppress(NothingAgreesError, InfeasibleError):
                outcome = self.engine.evaluate(configuration, cutoff=self.longest)
                if outcome.ranks and outcome.seconds < self.longest:
                    pieces = self.engine.pipeline_of_kinds(configuration, outcome.gathers)
                    contenders.append(Contender(configuration=configuration, outcome=outcome, pipeline_of_kinds=pieces))
        for contender in sorted(contenders, key=lambda one: (one.objective, one.order))[:PRICED]:
            if self.cancelled() or reached():
                break
            with contextlib.suppress(OverfullError, InfeasibleError):
                ranked = self._finalists([contender]).plans()[0]
                if ranked.seconds <= self.longest:
                    yield self._candidate(ranked)

    def _finalists(self, found: Sequence[Contender]) -> Finalists:
        return Finalists(
            request=self.request,
            engine=self.engine,
            prepared=self.prepared,
            found=found,
            bound=self.result.bound_seconds,
            limits=self.result.limits,
            covered=self.result.covered,
        )

    def _configurations(self) -> list[Configuration]:
        """Conventional ones like the fastest plan, then like those that were close to it; each once."""
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
        """A configuration with purposes for its axes, and one stage of ZeRO for all parameters."""
        pinned = self.request.pinned
        if len(purposes) != len(mesh) or (pinned.mesh is not None and mesh != configuration.mesh):
            return
        shares = any(role not in ("tensor", "replica") for role in purposes)
        stages = dict.fromkeys((_stage(found), 3, 1)) if shares else (0,)
        for zero in list(stages)[:2] if pinned.zero is None else (pinned.zero,):
            parallel = pinned.sequence_parallel
            decided = replace(
                pinned,
                zero=zero,
                sequence_parallel=(found.tensor == 1 or found.sequence_parallel) if parallel is None else parallel,
                replicas=math.prod(n for n, role in zip(mesh, purposes, strict=True) if role == "replica"),
                pattern=pinned.pattern or Pattern(selective=True),
            )
            yield replace(configuration, mesh=mesh, roles=purposes, decided=decided)

    def _alike(self, one: _Candidate) -> Iterator[_Candidate]:
        """Plans of which all blocks are run like one of them, that fit and take no longer than is allowed."""
        plan = one.ranked.plan
        for group in dict.fromkeys(_samples(plan)):
            if self.cancelled() or reached():
                return
            with contextlib.suppress(StrategyError, RequestError):
                ranked = self._priced(one.ranked, _all_like(plan, group))
                if ranked is not None and ranked.seconds <= self.longest:
                    yield self._candidate(ranked)

    def _priced(self, like: Ranked, plan: Plan) -> Ranked | None:
        """A changed plan, bound and priced; None where it does not fit."""
        whole = rescale_batch(self.prepared, self.request.batch, plan.training.part)
        bound = bind_prepared(plan, whole, self.engine.template.blocks)
        machine = self.engine.machine(like.configuration)
        prediction = predict(bound, machine)
        limits = tuple(self.result.limits[0] for _ in range(plan.pipeline))
        if not all_fit(prediction, limits):
            return None
        ranked = replace(like, bound=replace(bound, plan=replace(plan, prediction=prediction)), certificate=None)
        return with_proof(ranked, self.result.bound_seconds, covered=self.result.covered)


def _purposes(found: Roles, configuration: Configuration) -> tuple[tuple[int, ...], tuple[Role, ...]]:
    """The mesh of a plan with a purpose for each axis, in the usual order; axes of one purpose are one axis."""
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
    """What an axis is for; None where that is nothing that has a name."""
    if axis.role == "data":
        return "data" if axis.shared or not sharing else "replica"
    if axis.role == "context":
        return "ring" if "ring" in axis.detail else "context"
    return "tensor" if axis.role == "tensor" else None


def _guessed(configuration: Configuration, node: int) -> tuple[tuple[int, ...], tuple[Role, ...]]:
    """The purposes that an expert would give the axes of a configuration: the inner one for tensor parallelism where it
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


def _samples(plan: Plan) -> list[Group]:
    """Groups of blocks that run unlike each other; nothing where blocks are of several kinds, or all run alike."""
    groups = [group for group in plan.groups if group.blocks]
    if len({len(group.operators) for group in groups}) != 1 or len(groups) < 2:
        return []
    known = {_running(group): group for group in reversed(groups)}
    return [] if len(known) < 2 else list(reversed(known.values()))


def _running(group: Group) -> tuple[object, ...]:
    """Equal for groups whose blocks run alike."""
    places = {name: place for place, (name, _) in enumerate(group.operators)}
    return (
        group.recomputation,
        tuple(sorted(places[name] for name in group.kept)),
        group.activations_home,
        tuple(strategy for _, strategy in group.operators),
        tuple(stored for _, stored in group.parameters),
    )


def _all_like(plan: Plan, sample: Group) -> Plan:
    """The plan with every block run like those of a group of it."""
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
    """A group with the strategies, stored layouts and recomputation of another, under its own names."""
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
