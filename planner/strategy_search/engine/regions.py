"""Lower bounds for many families of configurations before their tables are built. They need spaces in which every axis
has one purpose and operators have one pattern, as those of training engines.

    memory    weights, gradients and states alone, as far as ZeRO, tensor and expert parallelism shard them
    tensor    seconds of everything but attention, experts and parameters, at a degree of tensor parallelism
    region    the same with attention, at degrees of ring attention, Ulysses and tensor parallelism
    experts   with the experts of one configuration
    family    with the collectives of expert weights for every micro-batch, where ZeRO shards them

Data parallel devices give an operator the same piece of a sample, whatever else they shard. So a region is priced once
for all of its families: as one stage on all devices, in which experts and parameters take no time, with as many samples
as any device of its families has at most. This is a bound since k times the batch takes at most k times as long. The
seconds of head, blocks and tail are divided over the ranks of a pipeline in whole blocks (`block_times`). If all blocks
are recomputed in one way, the region runs them that way.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from costmodels import parameter_bytes
from planner.graph.operator_graph import OperatorGraph
from planner.plan.layout.kept import Kept
from planner.pricing.parameter_price import precision_of
from planner.sharding.rules import rule_of
from planner.sharding.update import EACH
from planner.strategy_search.decomposition.cutting import cut
from planner.strategy_search.decomposition.lagrangian import Multipliers
from planner.strategy_search.engine.block_times import BlockTimes, ExpertTimes, block_times
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.family import scaling_of
from planner.strategy_search.engine.piece_store import MOST_STATES
from planner.strategy_search.request.constraints import decided_of
from planner.strategy_search.request.space import EXPERTS, PLAIN_PATTERN, Configuration, Pattern, Pinned, Role, Running
from planner.strategy_search.tables.cost_table import CostTables, OperatorTable, ParameterTable, UseTable

MANY = 100
"""From this many families on, families are bounded together: fewer are opened as quickly."""

_KEPT = 16  # tables of one stage, the latest: families that recompute otherwise need them again
_Run = tuple[Running, Kept | None]
"""How all blocks are run, and what those keep that are selectively recomputed."""

_AS_IT_COMES: _Run = ("none", None)

_WHOLE = frozenset({"tensor", "replica"})  # roles of axes over which ZeRO shards nothing
_MODULE = "moe"  # the module of experts, where modules are recomputed
_CUT: tuple[Role, ...] = ("ring", "context", "tensor")  # roles of axes that cut a sample


@dataclass(kw_only=True, eq=False)
class Regions:
    """Lower bounds of the families of a space. Whatever several of them share is computed once."""

    engine: Engine
    families: Sequence[tuple[Configuration, ...]]
    _looked: dict[int, int] = field(default_factory=dict)  # levels tried for a family, by id
    _built: dict[object, CostTables] = field(default_factory=dict)
    _parts: dict[BlockTimes, BlockTimes] = field(default_factory=dict)  # of one batch, by those of several

    def __post_init__(self) -> None:
        graph, template = self.engine.template.graph, self.engine.template
        self._experts = _of_class(graph, EXPERTS)
        self._attention = _of_class(graph, "attention")
        self._weights = frozenset(name for at in self._experts for name in graph.operators[at].operands)
        self._numel: Counter[tuple[bool, str]] = Counter()  # of experts or not, by precision
        for one in graph.parameters:
            if one.name in graph.differentiable:
                tensor = graph.types[one.name]
                kind = one.name in self._weights, precision_of(tensor, self.engine.request.precision)
                self._numel[kind] += tensor.numel * template.parameter_times(one.name)
        self._ranks: dict[object, int] = defaultdict(lambda: 1)
        for members in self.families:
            degrees, ranks = _degrees(members[0]), members[0].pipeline
            self._ranks[degrees] = math.lcm(self._ranks[degrees], ranks)
            whole = ranks * math.prod(degrees[:-1])  # axes that cut a sequence cut samples if a stage has all devices
            self._ranks[degrees[-1]] = math.lcm(self._ranks[degrees[-1]], whole)

    def fits(self, c: Configuration) -> bool:
        """Whether the parameters of a device fit at all."""
        return self.least_bytes(c) <= self.engine.capacities[0]

    def least_bytes(self, c: Configuration) -> float:
        """A lower bound on the bytes of weights, gradients and optimizer states on the fullest device."""
        decided, request = c.under(self.engine.request.pinned), self.engine.request
        zero, tensor = decided.zero or 0, _degrees(c)[-1]
        update = self.engine.store.update_of(c)
        shards = tensor * math.prod(n for role, n in zip(c.roles, c.mesh, strict=True) if role not in _WHOLE)
        held = 0.0
        for (of_experts, precision), numel in self._numel.items():
            per = parameter_bytes(precision, request.optimizer, request.cluster.software, update.variant)
            cuts = tensor
            if of_experts and decided.expert:
                cuts = decided.expert * (1 if decided.whole_experts else tensor)
            for nbytes, stage in ((per.weight, 3), (per.gradient, 2), (per.state, 1)):
                held += numel * nbytes / (shards if zero >= stage else cuts)
        return held / c.pipeline

    def better(self, members: tuple[Configuration, ...], bound: float) -> float | None:
        """A better bound of a family than the known `bound`; None if only its tables can give one."""
        levels = (self._by_tensor, self._by_region, self._by_experts, self._by_family, self._by_memory)
        while (level := self._looked.get(id(members), 0)) < len(levels):
            self._looked[id(members)] = level + 1
            found = levels[level](members)
            if found > bound:
                return found
        return None

    def with_its_micro_batch(self, c: Configuration) -> float:
        """A lower bound on the step time of a configuration with the pieces that its own micro-batch leaves: with as
        many samples on each device of one stage, except for the work of other ranks."""
        degrees, part = _degrees(c), self.engine.request.padded_batch // c.micro_batches
        pieces = self._of_stage(c, degrees, self._experts, part * c.pipeline, _AS_IT_COMES)
        pieces = pieces.times(c.micro_batches / c.pipeline)
        experts = self._of_experts(c, part, parameters=False)
        work = {at: _work(one, _run(c)) * c.micro_batches for at, one in experts.items()}
        return pieces.with_experts(work).step_seconds([c])

    def _by_tensor(self, members: tuple[Configuration, ...]) -> float:
        tensor = _degrees(members[0])[-1]
        but = (*self._experts, *self._attention)
        first = members[0]
        return self._of_all(first, (1, 1, tensor), but, self._ranks[tensor], _run(first)).step_seconds(members)

    def _by_region(self, members: tuple[Configuration, ...]) -> float:
        return self._region(members[0]).step_seconds(members)

    def _by_experts(self, members: tuple[Configuration, ...]) -> float:
        """The bound of the region, with the work of experts."""
        if not self._experts:
            return 0.0
        first = members[0]
        experts = self._of_experts(first, self.engine.request.padded_batch, parameters=False)
        work = {at: _work(one, _run(first)) for at, one in experts.items()}
        return self._region(first).with_experts(work).step_seconds(members)

    def _by_family(self, members: tuple[Configuration, ...]) -> float:
        """The bound with experts, and with the collectives of their weights for every micro-batch."""
        first, zero = members[0], members[0].under(self.engine.request.pinned).zero or 0
        if not self._experts or zero <= 1:
            return 0.0
        return min(self._moving(c, _run(first)).step_seconds([c]) for c in members)

    def _by_memory(self, members: tuple[Configuration, ...]) -> float:
        """The bound with experts and their collectives, and with the recomputation of blocks where all blocks together
        keep more than the memory allows."""
        return min(self._in_memory(c).step_seconds([c]) for c in members)

    def _in_memory(self, c: Configuration) -> BlockTimes:
        """The block times of all m micro-batches of a configuration within its memory: rank r of p holds f(r)
        micro-batches at a time and P(r) bytes of parameters, in C bytes. Its blocks keep l bytes of the batch on each
        device of one stage, so that

            f(r) p/m sum l + P(r) <= C      on each rank,
            sum l <= m/p (C sum 1/f - sum P / max f)      on all.
        """
        pinned, setting = c.under(self.engine.request.pinned), self.engine.setting(c)
        others = [way for way in pinned.recomputation if way != "none"] if pinned.recompute is None else []
        once = self._moving(c, _run(c))
        if c.virtual_stages > 1 or len(others) > 1:
            return once
        flights = [setting.flights(rank) for rank in range(c.pipeline)]
        room = self.engine.capacities[0] * sum(1 / number for number in flights)
        room -= c.pipeline * self.least_bytes(c) / max(flights)
        again = [self._moving(c, (way, pinned.kept)) for way in others]
        return once.within(max(room, 0.0) * c.micro_batches / c.pipeline, again[0] if again else None)

    def _moving(self, c: Configuration, run: _Run) -> BlockTimes:
        """The region of a configuration with blocks run this way, with its experts, and with the collectives of their
        weights for every micro-batch."""
        region, zero = self._region(c, run), c.under(self.engine.request.pinned).zero or 0
        if not self._experts:
            return region
        experts = self._of_experts(c, self.engine.request.padded_batch, parameters=zero > 1)
        moved = c.micro_batches / c.pipeline
        return region.with_experts({at: _work(one, run) + one.moved * moved for at, one in experts.items()})

    def _region(self, c: Configuration, run: _Run | None = None) -> BlockTimes:
        degrees = _degrees(c)
        return self._of_all(c, degrees, self._experts, self._ranks[degrees], run or _run(c))

    def _of_experts(self, c: Configuration, part: int, *, parameters: bool) -> dict[int, ExpertTimes]:
        known, zero = self.engine.built.experts, c.under(self.engine.request.pinned).zero
        key = (c.computed_alike, part, zero if parameters else None)
        if key not in known:
            known[key] = self._with_experts(c, part, parameters=parameters)
        return known[key]

    def _with_experts(self, c: Configuration, part: int, *, parameters: bool) -> dict[int, ExpertTimes]:
        """Seconds of the experts of a block for `part` samples, by operator."""
        engine = self.engine
        template = engine.store.scaled_to(part)
        builder, restriction = engine.store.builder(c, engine.groups[0]), decided_of(engine.request, c, template)
        found = {}
        for at in self._experts:
            table, weights = builder.alone(template, at, restriction, parameters=parameters)
            prices = table.prices
            waits = prices.late[0] + prices.late[1]
            forward = prices.forward + prices.inner_forward
            each = forward + prices.backward - waits + prices.inner_backward
            moves = engine.gathers == (EACH,)  # other ways may overlap
            found[at] = ExpertTimes(
                once=float(each.min()) / c.pipeline,
                again=float((each + forward - prices.late[0]).min()) / c.pipeline,
                moved=sum(map(_least_moved, weights)) if moves else 0.0,
            )
        return found

    def _of_all(
        self, c: Configuration, degrees: tuple[int, int, int], but: tuple[int, ...], ranks: int, run: _Run
    ) -> BlockTimes:
        """Seconds of the batch in one stage on all devices: a share of what `ranks` times the batch takes."""
        whole = self._of_stage(c, degrees, but, self.engine.request.padded_batch * ranks, run)
        if whole not in self._parts:
            self._parts[whole] = whole.times(1 / ranks)
        return self._parts[whole]

    def _of_stage(
        self, c: Configuration, degrees: tuple[int, int, int], but: tuple[int, ...], part: int, run: _Run
    ) -> BlockTimes:
        """Seconds of `part` samples in one stage on all devices, which cut samples by these degrees, without the
        operators in `but` and without parameters."""
        decided = c.decided
        assert decided is not None
        cuts = None if decided.pattern is None else decided.pattern.vocabulary
        key = (degrees, but, part, c.zigzag and degrees[0] > 1, decided.sequence_parallel, cuts, run)
        known = self.engine.built.regions
        if key not in known:
            known[key] = self._stage_times(_one_stage(c, degrees), but, part, run)
        return known[key]

    def _tables(self, c: Configuration, but: tuple[int, ...], part: int) -> CostTables:
        """The tables of one stage; the latest are kept."""
        key = (c, but, part)
        if key not in self._built:
            while len(self._built) >= _KEPT:
                del self._built[next(iter(self._built))]
            template = self.engine.store.scaled_to(part)
            restriction = decided_of(self.engine.request, c, template)
            self._built[key] = _without(
                self.engine.store.builder(c, self.engine.groups[0]).build(template, restriction), but
            )
        return self._built[key]

    def _stage_times(self, c: Configuration, but: tuple[int, ...], part: int, run: _Run) -> BlockTimes:
        engine, group = self.engine, self.engine.groups[0]
        offload = engine.request.offload_under(engine.gathers[0])
        tables = self._tables(c, but, part)
        scaling = scaling_of(tables, engine.store.scaled_to(2 * part))
        chain = cut(
            tables, group, recomputation=(run[0],), stages=1, free=scaling.hindered, gathers=engine.gathers[0],
            activations=offload.activations, saved=offload.saved, kept=run[1], machine=engine.machine(c),
            most_states=MOST_STATES,
        )  # fmt: skip
        multipliers = Multipliers(chain, 1.0, allowed=scaling.allowed(1), columns=False)
        multipliers.solve(0.0, 0.0)
        live = multipliers.least_live() if but == self._experts else None
        return block_times(chain, multipliers.value(multipliers.priced[0]), multipliers.priced[0].values, live)


def _degrees(c: Configuration) -> tuple[int, int, int]:
    """Degrees of ring attention, of Ulysses, and of tensor parallelism."""
    named = dict(zip(c.roles, c.mesh, strict=True))
    return named.get("ring", 1), named.get("context", 1), named.get("tensor", 1)


def _run(c: Configuration) -> _Run:
    """The fastest way in which a configuration may run its blocks."""
    decided = c.decided
    assert decided is not None
    kept = None if decided.pattern is None else decided.pattern.kept
    return _AS_IT_COMES if decided.recompute is None else (decided.recompute, kept)


def _work(experts: ExpertTimes, run: _Run) -> float:
    """Seconds of the experts of a block that is run this way."""
    way, kept = run
    again = way == "full" or (way == "selective" and kept is not None and _MODULE in kept.but)
    return experts.again if again else experts.once


def _one_stage(c: Configuration, degrees: tuple[int, int, int]) -> Configuration:
    """One stage on all devices of a configuration, which cut a sample by these degrees, with one micro-batch and
    without separate experts."""
    devices = c.pipeline * math.prod(c.mesh)
    named = {"data": devices // math.prod(degrees), **dict(zip(_CUT, degrees, strict=True))}
    real = [(role, size) for role, size in named.items() if size > 1]
    decided = c.decided
    assert decided is not None
    pattern, apart = decided.pattern or PLAIN_PATTERN, decided.expert is not None
    return Configuration(
        pipeline=1,
        mesh=tuple(size for _, size in real),
        roles=tuple(role for role, _ in real),
        micro_batches=1,
        zigzag=c.zigzag and degrees[0] > 1,
        decided=Pinned(
            zero=0,
            sequence_parallel=decided.sequence_parallel and degrees[-1] > 1,
            expert=1 if apart else None,
            whole_experts=False if apart else None,
            pattern=Pattern(vocabulary=pattern.vocabulary),
        ),
    )


def _of_class(graph: OperatorGraph, op_class: str) -> tuple[int, ...]:
    return tuple(at for at, op in enumerate(graph.operators) if rule_of(graph, op).op_class == op_class)


def _least_moved(parameter: ParameterTable) -> float:
    """A lower bound on the seconds of a weight's all-gather and its gradient's reduction, once for every
    micro-batch."""
    each = parameter.prices.accumulation
    for use in parameter.uses:
        ways = [use] if use.together is None else [use, use.together]
        each = each + np.minimum.reduce([(way.gather + way.reduce).min(axis=1) for way in ways])
    return float(each.min())


def _without(tables: CostTables, but: Collection[int]) -> CostTables:
    """Tables in which parameters take no time, and the operators in `but` take neither time nor memory. The
    redistributions to and from these operators take none either."""
    return replace(
        tables,
        operators=tuple(_timeless(one) if at in but else one for at, one in enumerate(tables.operators)),
        edges=tuple(
            replace(
                one,
                **_zeros(one, ("forward", "backward", "kept", "own")),
                under=None,
                beneath=None,
                later=None,
                confined=None,
            )
            if {one.edge.producer, one.edge.consumer} & set(but)
            else one
            for one in tables.edges
        ),
        parameters=tuple(_parameter_of_no_time(one) for one in tables.parameters),
    )


def _timeless(table: OperatorTable) -> OperatorTable:
    prices = table.prices
    none = np.zeros_like(prices.forward)
    names = ("forward", "backward", "inner_forward", "inner_backward")
    prices = replace(prices, **_zeros(prices, names), late=(none, none), host=(none, none))
    return replace(table, prices=prices, kept=np.zeros_like(table.kept), own=np.zeros_like(table.own))


def _parameter_of_no_time(table: ParameterTable) -> ParameterTable:
    prices = table.prices
    return replace(
        table,
        prices=replace(prices, **_zeros(prices, [one.name for one in fields(prices)])),
        uses=tuple(_use_of_no_time(use) for use in table.uses),
    )


def _use_of_no_time(use: UseTable) -> UseTable:
    names = [name for name in ("gather", "reduce", "first_gather", "first_reduce") if getattr(use, name) is not None]
    together = None if use.together is None else _use_of_no_time(use.together)
    return replace(use, **_zeros(use, names), together=together)


def _zeros(one: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: np.zeros_like(getattr(one, name)) for name in names}
