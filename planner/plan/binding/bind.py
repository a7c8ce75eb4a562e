"""A plan bound to its graph: the strategy, the rule and the layouts of every single operator and parameter.

Binding is where a plan is checked against the model: the fingerprint, every name, every factor, every layout. The
bound plan is legal and complete, and is all that the runtime and the pricing need.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import TypeAlias, TypeVar, cast

from hardware_profiles import Home, load_software
from planner.errors import PlanFileError, StrategyError, unknown_name
from planner.faults import said
from planner.graph.blocks import SHARED, Blocks, block_parameters, share_values
from planner.graph.expert_load import EVEN, with_imbalance
from planner.graph.forward_only import frozen, without_updates
from planner.graph.fp8 import NO_FP8, Fp8, with_fp8
from planner.graph.fused_dropout import with_fused_dropout
from planner.graph.kinds import find_blocks
from planner.graph.operator_graph import Operator, OperatorGraph
from planner.graph.placed import Placed, with_places
from planner.graph.random_ops import drops_probabilities
from planner.plan.binding.apart import graph_of
from planner.plan.binding.legality import (
    check_forward_only,
    check_inputs,
    check_interleave,
    check_kept,
    check_kinds,
    check_look_ups,
    check_offloaded_group,
    check_operator,
    check_order_of_slices,
    check_parameters,
    check_recomputation,
    check_stages,
    check_stored_parameter,
)
from planner.plan.binding.slices import one_slice
from planner.plan.binding.uniform import uniform_blocks
from planner.plan.outline import difference
from planner.plan.plan import Group, Plan
from planner.plan.refusing import plan_key, refuse_plan
from planner.plan.samples import replicas_fault, samples_fault
from planner.plan.schedule import check_stale
from planner.plan.schedule_checks import check_schedule
from planner.sharding.discover import with_rules
from planner.sharding.layout import Layout, replicated
from planner.sharding.legality import check_strategy
from planner.sharding.mesh import Mesh
from planner.sharding.padded_batch import weighted_of, with_sample_weights
from planner.sharding.padding import Padded, with_padded_shards, with_padding
from planner.sharding.per_replica import prepared_batch, with_replicas
from planner.sharding.rescale import rescale_batch
from planner.sharding.rule import Duplex, OperatorLayouts, Rule, Strategy, derive_layouts, named_strategy
from planner.sharding.rules import rule_of
from planner.sharding.stored import StoredParameter
from planner.sharding.update import PLAIN, Update
from planner.sharding.zigzag import Sequences, sequences_on

_Known: TypeAlias = dict[tuple[int, tuple[str | None, ...]], tuple[Strategy, OperatorLayouts, Rule]]
"""Strategies and layouts of calls, by the identity of their rule, which is kept, and the names of factors."""

_BATCHES = 4
"""Number of micro-batch sizes for which a graph is cached: plans that are compared have two sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundOperator:
    """One operator with its rule, its strategy and the layouts of its tensors."""

    operator: Operator
    rule: Rule
    strategy: Strategy
    layouts: OperatorLayouts


_T = TypeVar("_T")


class Derived:
    """What was derived from the operators and parameters of a bound plan, by name and by what else of the plan it
    depends on. Plans that differ only in schedule, buckets or overlaps have the same operators and parameters, and
    share it."""

    __slots__ = ("known", "of")

    def __init__(self, of: Sequence[object]) -> None:
        self.of, self.known = of, dict[object, object]()

    def is_of(self, parts: Sequence[object]) -> bool:
        """Whether it was derived from these very objects."""
        return len(self.of) == len(parts) and all(map(is_, self.of, parts))


@dataclass(frozen=True, kw_only=True)
class BoundPlan:
    """A legal plan on the graph of one micro-batch (shared values have their identity operators), or of one slice of
    its sequence where the plan cuts it; `whole` is the graph of the micro-batch. `sequences` are the dims that axes cut
    in an order of their own."""

    plan: Plan
    graph: OperatorGraph
    whole: OperatorGraph
    blocks: Blocks
    operators: tuple[BoundOperator, ...]
    parameters: Mapping[str, StoredParameter]
    inputs: Mapping[str, Layout]
    recomputed: Mapping[int, frozenset[int]]
    offloaded_blocks: Mapping[int, Home]
    sequences: Sequences
    derived: Derived = field(default_factory=lambda: Derived(()), compare=False)

    def __post_init__(self) -> None:
        parts = (
            self.graph, self.blocks, self.operators, self.parameters, self.inputs, self.recomputed,
            self.offloaded_blocks, self.sequences,
        )  # fmt: skip
        if not self.derived.is_of(parts):
            object.__setattr__(self, "derived", Derived(parts))

    def once(self, key: object, derive: Callable[[], _T]) -> _T:
        """The result of `derive`, computed once for these operators and parameters and this `key`, which holds what
        else of the plan it depends on."""
        known = self.derived.known
        if key not in known:
            known[key] = derive()
        return cast("_T", known[key])

    def __repr__(self) -> str:
        return f"BoundPlan({self.plan!r})"

    @cached_property
    def offloads_weights(self) -> bool:
        """Whether any weight of the plan is offloaded."""
        return self.once("offloads", lambda: any(one.weight_offloaded for one in self.parameters.values()))

    @cached_property
    def promised(self) -> Mapping[str, Duplex]:
        """Layout of every value before it is redistributed: parameters as stored, buffers whole, inputs as the plan
        loads them, results as their operators make them."""
        return self.once("promised", self._promised)

    def _promised(self) -> Mapping[str, Duplex]:
        whole = replicated(len(self.plan.mesh.axes))
        found = dict[str | None, Duplex]()
        found.update((name, Duplex(forward=layout, gradient=whole)) for name, layout in self.inputs.items())
        found.update((name, Duplex(forward=whole, gradient=whole)) for name in self.graph.buffers)
        found.update((name, Duplex(forward=p.weight, gradient=p.gradient)) for name, p in self.parameters.items())
        for op in self.operators:
            named = op.operator.results
            if None in named:
                named = tuple([result for result in named if result is not None])
            found.update(zip(named, op.layouts.results, strict=True))
        return cast("Mapping[str, Duplex]", found)

    def recompute_of(self, block: int | None) -> frozenset[int] | None:
        """How a block is recomputed: the places in it of the operators whose results are kept all the same (none under
        "full"). None where nothing is recomputed: outside of the blocks, and in a block that keeps everything."""
        return None if block is None else self.recomputed.get(block)

    def place_of(self, at: int) -> int:
        """Place of an operator in its block; outside of the blocks, its index."""
        block = self.blocks.block_of(at)
        return at if block is None else at - self.blocks.borders[block]

    def is_kept(self, at: int) -> bool:
        """Whether the operator stands in a recomputed block and its results are kept all the same."""
        kept = self.recompute_of(self.blocks.block_of(at))
        return bool(kept) and self.place_of(at) in (kept or ())


def prepare(
    traced: OperatorGraph,
    imbalance: float = EVEN,
    placed: Placed = (),
    fp8: Fp8 = NO_FP8,
    padded: Padded = (),
    *,
    trains: bool = True,
    once: bool = False,
    weighted: int = 0,
    replicated: Update = PLAIN,
    batch: int = 0,
) -> tuple[OperatorGraph, Blocks]:
    """The graph that plans speak about. Shared values have an identity, and repeated blocks are known. Routers give the
    fullest device `imbalance` times the average. Tables that are `placed` elsewhere are no parameters, linear layers
    are in `fp8`, and weights are `padded`; tokens are sent `once` to each part of an axis. `weighted` is the number of
    samples of the example if the global batch has samples of weight zero, else 0. Every replica computes the operators
    that `replicated` names; then the example has `batch` samples, and the graph those of `prepared_batch`. If a plan
    never `trains`, it is the graph of the model as it is evaluated, without gradients. Raises RequestError for what
    cannot be placed or padded, be in fp8, or be computed by replicas."""
    key = ("prepared", imbalance, placed, fp8, padded, trains, once, weighted, _replicas(replicated, batch))
    if key not in traced.derived:
        source = with_sample_weights(traced, weighted) if weighted else traced
        changed = with_places(source if trains else without_updates(source), placed)
        changed = with_padding(with_imbalance(changed, imbalance, once=once), padded)
        traced.derived[key] = _prepared(with_replicas(changed, replicated, batch), fp8, trains=trains)
    return cast("tuple[OperatorGraph, Blocks]", traced.derived[key])


def _replicas(update: Update, batch: int) -> tuple[object, ...]:
    """The settings of an update that decide which graph is prepared."""
    return (update.per_replica, update.replicas, batch) if update.per_replica else ()


def _prepared(changed: OperatorGraph, fp8: Fp8, *, trains: bool) -> tuple[OperatorGraph, Blocks]:
    blocks = find_blocks(changed)
    if fp8:
        changed = with_fp8(changed, tuple(blocks.numbers), fp8)
        blocks = find_blocks(changed)
    graph, blocks = share_values(with_padded_shards(changed), blocks)
    blocks = uniform_blocks(graph, blocks)
    return (graph if trains else frozen(graph)), blocks


def bind(plan: Plan, traced: OperatorGraph, batch: int) -> BoundPlan:
    """Bind a plan to the traced graph of its model, whose example inputs have `batch` samples.

    Operators without a row in the table of rules get the rules that the plan carries. Raises PlanFileError where the
    plan is for another graph or misses something, StrategyError where a choice is illegal, RuleError where a rule of
    the plan does not fit its call.
    """
    traced = graph_of(plan, traced)
    found = traced.fingerprint()
    if plan.model.fingerprint != found:
        raise PlanFileError(
            f"the plan is for another graph of {plan.model.reference}: it has the fingerprint "
            f"{plan.model.fingerprint[:19]}..., this model has"
            f" {found[:19]}...: {difference(plan, traced)}; the model changed since the plan was made, so plan it again"
        )
    training = plan.training
    ruled, trains = with_rules(_as_computed(traced, plan), plan.rules), plan.schedule_kind.trains
    update, once = training.update, training.tokens_once
    refuse_plan(replicas_fault(update, training.part))
    prepared, blocks = prepare(
        ruled,
        training.imbalance,
        update.placed,
        training.fp8,
        update.padded,
        trains=trains,
        once=once,
        weighted=weighted_of(update, batch),
        replicated=update,
        batch=batch,
    )
    return bind_prepared(plan, _of_batch(prepared, prepared_batch(update, batch), training.part), blocks)


def _as_computed(traced: OperatorGraph, plan: Plan) -> OperatorGraph:
    """The graph as the software of the plan drops probabilities."""
    if not drops_probabilities(traced):
        return traced
    return with_fused_dropout(traced, fused=load_software(plan.cluster.software).drops_fused)


def _of_batch(prepared: OperatorGraph, batch: int, part: int) -> OperatorGraph:
    """The graph for micro-batches of `part` samples; the last few of a prepared graph are cached."""
    known = cast("dict[tuple[int, int], OperatorGraph]", prepared.derived.setdefault(("batches",), {}))
    found = known.pop((batch, part), None) or rescale_batch(prepared, batch, part)
    known[batch, part] = found
    if len(known) > _BATCHES:
        del known[next(iter(known))]
    return found


def bind_prepared(plan: Plan, whole: OperatorGraph, blocks: Blocks) -> BoundPlan:
    """`bind` to a graph of the plan's model that is prepared already, and has the batch of one micro-batch."""
    graph = one_slice(whole, plan.model.sequence_length, plan.slices)
    check_stages(plan, blocks)
    check_look_ups(plan, whole, blocks)
    check_interleave(plan, graph)
    check_schedule(plan)
    check_forward_only(plan)
    check_order_of_slices(plan)
    strategies, stored = _spread(plan, graph, blocks)
    known = cast("_Known", graph.derived.setdefault(("bound", plan.mesh), {}))
    try:
        operators = _all_bound(plan.mesh, graph, strategies, known)
    except StrategyError as error:
        fault = samples_fault(plan)
        raise error if fault is None else PlanFileError(said(fault, plan_key)) from error
    sequences = sequences_on(plan.mesh, graph)
    seen = set[tuple[int, Strategy]]()
    for bound in operators:
        kind = id(bound.rule), bound.strategy  # without zigzag order, these decide it
        if kind not in seen or plan.mesh.zigzag:
            check_operator(plan, bound.operator, bound.rule, bound.strategy, sequences)
            seen.add(kind)
    check_parameters(plan, graph, blocks, sequences, stored)
    check_inputs(plan, graph)
    whole_plan = BoundPlan(
        plan=plan,
        graph=graph,
        whole=whole,
        blocks=blocks,
        operators=operators,
        parameters=stored,
        inputs=dict(plan.inputs),
        recomputed=_recomputed(plan, graph, blocks),
        offloaded_blocks=_offloaded_blocks(plan),
        sequences=sequences,
    )
    stages = stage_of_operators(whole_plan)
    uses = {name: {stages[at] for at in graph.consumers.get(name, ())} for name in sorted(graph.parameter_names)}
    check_stale(plan, graph, [name for name, readers in uses.items() if len(readers) > 1])
    return whole_plan


def bind_operator(bound: BoundPlan, at: int, names: tuple[str | None, ...]) -> BoundOperator:
    """An operator of a bound plan under another strategy, checked like every other; raises StrategyError."""
    plan, op = bound.plan, bound.operators[at].operator
    found = _bound(plan.mesh, bound.graph, op, {op.name: names}, {})
    check_operator(plan, op, found.rule, found.strategy, bound.sequences)
    return found


def check_stored(bound: BoundPlan, name: str, stored: StoredParameter) -> None:
    """Raise LayoutError or StrategyError where a parameter of a bound plan cannot be stored like that."""
    check_stored_parameter(bound.plan.mesh, bound.graph, bound.sequences, name, stored)


def _recomputed(plan: Plan, graph: OperatorGraph, blocks: Blocks) -> dict[int, frozenset[int]]:
    """For each recomputed block the places of the operators whose results are kept."""
    known = {op.name: at for at, op in enumerate(graph.operators)}
    found: dict[int, frozenset[int]] = {}
    for group in plan.groups:
        place = f"group '{group.name}'"
        check_recomputation(group, place)
        places = frozenset(_kept_place(graph, blocks, group, name, known, place) for name in group.kept)
        if group.recomputation != "none":
            found.update((group.first_block + k, places) for k in range(group.blocks))
    return found


def _offloaded_blocks(plan: Plan) -> dict[int, Home]:
    """The blocks that offload their inputs, or what they save, and where."""
    found: dict[int, Home] = {}
    for group in plan.groups:
        if group.activations_home == "device":
            continue
        check_offloaded_group(plan, group)
        found.update((group.first_block + k, group.activations_home) for k in range(group.blocks))
    return found


def _kept_place(
    graph: OperatorGraph, blocks: Blocks, group: Group, name: str, known: Mapping[str, int], place: str
) -> int:
    """Place in its block of an operator that a group keeps."""
    block = blocks.operators(group.first_block) if group.first_block < blocks.count else range(0)
    inside = [graph.operators[at].name for at in block]
    if name in known and name not in inside:
        raise PlanFileError(
            f"{place}: kept operator '{name}' is not in block {group.first_block}; a group lists the names of its"
            " first block"
        )
    if name not in known:
        raise PlanFileError(f"{place}: kept: {unknown_name('operator', name, inside)}")
    check_kept(rule_of(graph, graph.operators[known[name]]), name, place)
    return known[name] - block.start


def stage_of_operators(bound: BoundPlan) -> Mapping[int, int]:
    """Stage of each operator, virtual or not: that of its block. Operators before the blocks are in the first stage,
    operators behind them in the last."""
    ends = stage_ends(bound)
    if ("stages", ends) not in bound.graph.derived:
        found, begin = dict[int, int](), 0
        for stage, end in enumerate(ends):
            found.update(dict.fromkeys(range(begin, end), stage))
            begin = end
        bound.graph.derived["stages", ends] = found
    return cast("Mapping[int, int]", bound.graph.derived["stages", ends])


def stage_ends(bound: BoundPlan) -> tuple[int, ...]:
    """For each stage the first operator behind it."""
    borders = bound.blocks.borders
    ends = (borders[stage.first_block + stage.blocks] for stage in bound.plan.stages[:-1])
    return (*ends, len(bound.operators))


def _all_bound(
    mesh: Mesh, graph: OperatorGraph, strategies: Mapping[str, tuple[str | None, ...]], known: _Known
) -> tuple[BoundOperator, ...]:
    """All operators under the strategies of a plan. `known` has results for equal rules."""
    bound = list[BoundOperator]()
    for op in graph.operators:
        rule, names = rule_of(graph, op), strategies.get(op.name)
        found = None if names is None else known.get((id(rule), names))
        if found is None:
            bound.append(_bound(mesh, graph, op, strategies, known))
        else:
            bound.append(BoundOperator(operator=op, rule=rule, strategy=found[0], layouts=found[1]))
    return tuple(bound)


def _bound(
    mesh: Mesh,
    graph: OperatorGraph,
    op: Operator,
    strategies: Mapping[str, tuple[str | None, ...]],
    known: _Known,
) -> BoundOperator:
    """One operator bound. `known` keeps what was checked for equal calls, which share one rule, also in other plans for
    the graph and the mesh."""
    where = f"operator '{op.name}'"
    if op.name not in strategies:
        raise PlanFileError(f"{where} of the model has no strategy in the plan; add it to its group, or plan again")
    names = strategies[op.name]
    if len(names) != len(mesh.axes):
        raise StrategyError(
            f"{where}: the strategy has {len(names)} entries, the mesh has {len(mesh.axes)} axes "
            f"({', '.join(mesh.names)})"
        )
    rule = rule_of(graph, op)
    if (id(rule), names) not in known:
        strategy = named_strategy(rule, names, where)
        check_strategy(rule, strategy, mesh, where)
        known[id(rule), names] = (strategy, derive_layouts(rule, strategy), rule)
    strategy, layouts, _ = known[id(rule), names]
    return BoundOperator(operator=op, rule=rule, strategy=strategy, layouts=layouts)


def _spread(
    plan: Plan, graph: OperatorGraph, blocks: Blocks
) -> tuple[dict[str, tuple[str | None, ...]], dict[str, StoredParameter]]:
    """Strategies and stored layouts by name for every block, from those of the first block of each group."""
    strategies: dict[str, tuple[str | None, ...]] = {}
    stored: dict[str, StoredParameter] = {}
    known = {op.name: i for i, op in enumerate(graph.operators)}
    covered: list[int] = []
    for group in plan.groups:
        place = f"group '{group.name}'"
        for name, strategy in group.operators:
            if name not in known and _was_shared(graph, name):
                continue
            if name not in known:
                raise PlanFileError(f"{place}: {unknown_name('operator', name, known)}")
            for twin in _twins(graph, blocks, group, known[name], place):
                if twin in strategies:
                    raise PlanFileError(f"{place}: operator '{twin}' has a strategy in another group; keep one of them")
                strategies[twin] = strategy
        parameters = _parameter_twins(graph, blocks, group, place)
        for name, parameter in group.parameters:
            if name not in graph.parameter_names:
                raise PlanFileError(f"{place}: {unknown_name('parameter', name, graph.parameter_names)}")
            for twin in parameters.get(name, (name,)):
                if twin in stored:
                    raise PlanFileError(f"{place}: parameter '{twin}' is stored in another group; keep one of them")
                stored[twin] = parameter
        covered += range(group.first_block, group.first_block + group.blocks)
    if sorted(covered) != list(range(blocks.count)):
        raise PlanFileError(
            f"groups: the groups of blocks must cover the blocks 0 to {blocks.count - 1} once each; they cover "
            f"{_ranges(plan)}"
        )
    missing = [parameter.name for parameter in graph.parameters if parameter.name not in stored]
    if missing:
        raise PlanFileError(
            f"parameter '{missing[0]}' of the model has no stored layouts in the plan; add it to its group, or "
            "plan again"
        )
    return strategies, stored


def _was_shared(graph: OperatorGraph, name: str) -> bool:
    """Whether an older plan names the identity of a value that has none now. Older versions gave zeros in the shape of
    a tensor an identity, though no gradient flows through them."""
    value = name.removesuffix(SHARED)
    return value != name and value in graph.producer and value not in graph.differentiable


def _ranges(plan: Plan) -> str:
    return ", ".join(f"{g.first_block} to {g.first_block + g.blocks - 1}" for g in plan.groups if g.blocks) or "none"


def _twins(graph: OperatorGraph, blocks: Blocks, group: Group, index: int, place: str) -> list[str]:
    """Names of an operator of a group in all blocks of the group."""
    if not group.blocks:
        return [graph.operators[index].name]
    if blocks.block_of(index) != group.first_block or group.first_block + group.blocks > blocks.count:
        raise PlanFileError(
            f"{place}: operator '{graph.operators[index].name}' is not in block {group.first_block}; a group lists "
            "the names of its first block"
        )
    check_kinds(blocks, group, place)
    shift = index - blocks.borders[group.first_block]
    return [graph.operators[blocks.borders[group.first_block + k] + shift].name for k in range(group.blocks)]


def _parameter_twins(graph: OperatorGraph, blocks: Blocks, group: Group, place: str) -> dict[str, tuple[str, ...]]:
    if not group.blocks:
        return {}
    if group.first_block + group.blocks > blocks.count:
        raise PlanFileError(
            f"{place}: the model has {blocks.count} blocks, the group ends at block "
            f"{group.first_block + group.blocks - 1}"
        )
    check_kinds(blocks, group, place)
    rows = [block_parameters(graph, blocks, group.first_block + k) for k in range(group.blocks)]
    return {names[0]: names for names in zip(*rows, strict=True)}


__all__ = [
    "BoundOperator",
    "BoundPlan",
    "bind",
    "bind_operator",
    "check_stored",
    "prepare",
    "stage_ends",
    "stage_of_operators",
]
