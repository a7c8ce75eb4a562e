"""A small plan that decides what a large one decides, for a small model of the same make.

    large plan ── bound to its graph ──┬── blocks kept (`kept_blocks`) ──────┐
                                       ├── numbers (`small_mesh`) ───────────┼──> small plan, bound to the graph of
                                       └── dims (`planner.models.smaller`) ──┘    the small model

A block of the small model takes over everything that is decided about the block of the large one that it stands for,
operator by operator in the order of the graph; what stands outside of the blocks takes over by name. That the small
plan is legal is checked like that of any plan. Nothing is claimed about what it covers: both plans are listed and
compared (`planner.plan.shrinking.coverage`).
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from hardware_profiles import Cluster, HardwareProfileError, Machine, parts_of
from planner.errors import LayoutError, RequestError, StrategyError
from planner.graph.blocks import Blocks, block_parameters
from planner.graph.in_float64 import InFloat64
from planner.graph.operator_graph import OperatorGraph
from planner.graph.rewriting.fused_weights import with_fused_weights_apart
from planner.graph.trace import trace
from planner.graph.tracing.on_meta import without_data
from planner.models.smaller import Depth, SmallerModel, depth_of, smaller_model
from planner.models.zoo import BuiltModel, build_model
from planner.plan.binding.bind import BoundPlan, bind, prepare
from planner.plan.binding.machine import cluster_reference
from planner.plan.layout.expert_overlap import expert_overlap_name, possible_expert_overlaps
from planner.plan.layout.overlapped_products import in_chunks, name_of, overlaps_of, possible_overlaps
from planner.plan.outline import model_reference
from planner.plan.plan import MOST_CHUNKS, PRECISIONS, Group, Plan, Prediction, Stage, Training
from planner.plan.shrinking.kept_blocks import kept_of_stages, signatures
from planner.plan.shrinking.limits import PROCESSES
from planner.plan.shrinking.small_mesh import SmallNumbers, small_numbers
from planner.plan.shrinking.small_replicas import small_replicas
from planner.plan.shrinking.twins import twins_by_name, twins_in_order
from planner.sharding.discover import discover, written_rules
from planner.sharding.layout import Layout
from planner.sharding.padded_batch import weighted_of
from planner.sharding.rule import strategy_names
from planner.sharding.update import Update, split_positions

EXACT = "fp64"
"""The precision in which nothing hides in rounding: float64, whatever the plan trains in."""

_UNITS = 3
"""How often dims are doubled until a small plan is legal."""


@dataclass(frozen=True, kw_only=True)
class SmallPlan:
    """A small plan bound to its graph. `stands_for` has for each of its blocks that of the large plan; `machine` has
    devices of the kind that the large plan is for, as many at least; `traced` is the graph of the small model, in
    float64 where the plan is `exact`, which no profile has a rate for: there it is bound and priced as in fp32."""

    bound: BoundPlan
    model: str
    stands_for: tuple[int, ...]
    machine: Cluster
    traced: OperatorGraph
    exact: bool

    @property
    def plan(self) -> Plan:
        """For the model as it is traced, whose operators have the rules that they have there."""
        plan = self.bound.plan
        model = replace(plan.model, fingerprint=self.traced.fingerprint())
        return replace(plan, model=model, rules=written_rules(self.traced))


def shrink(
    large: BoundPlan,
    *,
    precision: str,
    reference: str,
    machine: Machine,
    small: str | None = None,
    processes: int = PROCESSES,
    wide: int | None = None,
    both_between: bool = False,
) -> SmallPlan:
    """The smallest plan with the decisions of `large`, in a precision or `EXACT`, on at most so many processes.

    `reference` is the model of the large plan as a person names it, or one of the zoo, and `machine` what the plan is
    for; `small` is the small model, where a person has one: it has the same layers, and as many as are asked for;
    `wide` is an axis with four devices; `both_between`: see `small_numbers`. Raises RequestError where there is none.
    """
    plan = large.plan
    if not plan.schedule_kind.flushes:
        raise RequestError(
            f"schedule '{plan.schedule}' trains with stale weights, so no unsharded model has its losses; prove the"
            " plan with schedule '1f1b', which differs only in the updates"
        )
    if plan.training.update.local_parameters:
        raise RequestError(
            "the plan has parameters that each device trains for itself: no unsharded model has their values"
        )
    numbers, fault = small_numbers(plan, processes, wide, both_between=both_between), ""
    for doubled in range(_UNITS):
        sized = replace(numbers, unit=numbers.unit << doubled)
        try:
            return _shrunk(large, sized, precision, machine, reference, small)
        except (LayoutError, StrategyError) as error:
            fault = str(error)
    raise RequestError(f"no small plan has the same decisions: {fault}")


def _shrunk(
    large: BoundPlan, numbers: SmallNumbers, precision: str, machine: Machine, reference: str, small: str | None
) -> SmallPlan:
    plan = large.plan
    kept = kept_of_stages(plan, signatures(large), numbers.ranks, numbers.virtual)
    model = _small_model(large, kept, numbers.unit, reference, small)
    if model.whole:
        kept = _whole_stages(plan, numbers)
    blocks = [block for stage in kept for block in stage]
    own = _machine(machine, numbers.processes)
    built = _built(model.smaller, precision)
    with InFloat64() if precision == EXACT else nullcontext():
        traced = discover(trace(without_data(built.module, on_host=built.on_host), built.args, built.kwargs))
    traced = with_fused_weights_apart(traced) if large.whole.cuts else traced
    priced = _in_fp32(traced) if precision == EXACT else traced
    training = _training(large, numbers, "fp32" if precision == EXACT else precision)
    prepared, found = prepare(
        priced,
        training.imbalance,
        training.update.placed,
        training.fp8,
        training.update.padded,
        trains=plan.schedule_kind.trains,
        once=training.tokens_once,
        weighted=weighted_of(training.update, built.batch),
        replicated=training.update,
        batch=built.batch,
    )
    _check_blocks(large, found, blocks, model.smaller.reference)
    decided = replace(
        plan,
        model=model_reference(
            priced, name=model.smaller.reference, sequence_length=built.sequence_length, batch=built.batch
        ),
        training=training,
        cluster=replace(cluster_reference(own), devices=numbers.processes),
        mesh=numbers.mesh,
        stages=_stages(kept),
        virtual_stages=numbers.virtual,
        slices=numbers.slices,
        inputs=_inputs(large, prepared),
        groups=_groups(large, prepared, found, blocks),
        prediction=Prediction.unknown(),
        rules=written_rules(priced),
    )
    bound = _overlapped(bind(decided, priced, built.batch), large, blocks, priced)
    return SmallPlan(
        bound=bound,
        model=model.smaller.reference,
        stands_for=tuple(blocks),
        machine=own,
        traced=traced,
        exact=precision == EXACT,
    )


def _in_fp32(graph: OperatorGraph) -> OperatorGraph:
    """A graph in float64 as if it were in fp32."""
    types = {name: replace(t, dtype="float32") if t.dtype == "float64" else t for name, t in graph.types.items()}
    return replace(graph, types=types)


@dataclass(frozen=True, kw_only=True)
class _Model:
    """The small model, and whether it has every block of the large one."""

    smaller: SmallerModel
    whole: bool


def _small_model(
    large: BoundPlan, kept: Sequence[Sequence[int]], unit: int, reference: str, small: str | None
) -> _Model:
    length = large.plan.model.sequence_length
    if small is not None:
        return _Model(smaller=SmallerModel(reference=small, sequence_length=None), whole=False)
    depth, blocks = depth_of(reference, length), large.blocks.count
    if depth is None or not blocks:
        return _Model(smaller=smaller_model(reference, length, None, unit), whole=True)
    before = depth.layers - blocks  # layers that are none of the blocks
    layers = [*range(before), *(before + block for stage in kept for block in stage)]
    dense = sum(layer < depth.dense for layer in layers)
    return _Model(smaller=smaller_model(reference, length, Depth(layers=len(layers), dense=dense), unit), whole=False)


def _whole_stages(plan: Plan, numbers: SmallNumbers) -> list[list[int]]:
    """All blocks of a plan, on as many stages as the small one has."""
    stages = [[stage.first_block + k for k in range(stage.blocks)] for stage in plan.stages]
    few = numbers.ranks * numbers.virtual
    return [*stages[: few - 1], [block for stage in stages[few - 1 :] for block in stage]]


def _machine(machine: Machine, processes: int) -> Cluster:
    """The fewest devices of the first kind that are a machine, and as many as the processes."""
    one = parts_of(machine)[0]
    for devices in range(processes, one.devices):
        try:
            return one.with_devices(devices)
        except HardwareProfileError:  # they do not fill whole nodes
            continue
    return one


def _built(model: SmallerModel, precision: str) -> BuiltModel:
    dtype = "float64" if precision == EXACT else PRECISIONS[precision]
    built = build_model(model.reference, dtype=dtype, sequence_length=model.sequence_length)
    return replace(built, module=built.module.double()) if precision == EXACT else built


def _training(large: BoundPlan, numbers: SmallNumbers, precision: str) -> Training:
    training = large.plan.training
    replicas, part = small_replicas(large, numbers.mesh.sizes), numbers.unit
    if replicas:  # a replica of one sample joins none, and has one only where it does in the large plan
        part = math.lcm(part, min(2, training.part // training.update.replicas) * replicas)
    return replace(
        training,
        global_batch=part * numbers.micro_batches - min(training.update.padding_samples, 1),
        micro_batches=numbers.micro_batches,
        interleave=numbers.interleave,
        precision=precision,
        tensor_overlap=(),  # its operators and chunks are those of the large model (`_overlapped`)
        expert_overlap=(),
        update=replace(_update(training.update), replicas=replicas),
    )


def _overlapped(bound: BoundPlan, large: BoundPlan, blocks: Sequence[int], graph: OperatorGraph) -> BoundPlan:
    """The small plan, whose blocks stand for `blocks`, with the overlaps of the large one, in as many chunks, or in two
    or one where its rows are few."""
    training, batch = large.plan.training, bound.plan.model.batch or 1
    own = _own_names(bound, large, blocks)
    named = {own.get(name, name): ((there, back), first) for name, there, back, first in training.tensor_overlap}
    found = dict[str, tuple[int, int, int]]()
    for one in possible_overlaps(bound) if named else ():
        name = name_of(one, bound)
        if name in named and name not in found:
            (there, back), first = named[name]
            tried = ((min(there, most), min(back, most)) for most in (MOST_CHUNKS, 2, 1))
            chunks = next((chunks for chunks in tried if in_chunks(one, bound, chunks, first) is not None), None)
            found |= {} if chunks is None else {name: (*chunks, first)}
    if found:
        chosen = tuple((name, *chunks) for name, chunks in sorted(found.items()))
        plan = replace(bound.plan, training=replace(bound.plan.training, tensor_overlap=chosen))
        bound = bind(plan, graph, batch)
    return _exchanged(bound, {own.get(name, name): count for name, count in training.expert_overlap})


def _own_names(bound: BoundPlan, large: BoundPlan, blocks: Sequence[int]) -> dict[str, str]:
    """What the small plan calls operators of first blocks of the large one: its first experts may be in another
    layer."""
    found = dict[str, str]()
    for block, stands_for in enumerate(blocks):
        inside, theirs = bound.blocks.operators(block), large.blocks.operators(stands_for)
        operators = [large.graph.operators[at] for at in theirs]
        twins = twins_in_order([bound.graph.operators[at] for at in inside], operators) or ()
        for at, twin in zip(inside, twins, strict=False):
            name = large.graph.operators[large.blocks.template(theirs[twin])].name
            found[name] = bound.graph.operators[bound.blocks.template(at)].name
    return found


def _exchanged(bound: BoundPlan, named: Mapping[str, int]) -> BoundPlan:
    """The small plan with the exchanges of experts under other work that the large one has."""
    found = dict[str, int]()
    for at, beside in possible_expert_overlaps(bound, overlaps_of(bound)) if named else ():
        name = expert_overlap_name(at, bound)
        if name in named:
            found[name] = min(named[name], len(beside))
    training = replace(bound.plan.training, expert_overlap=tuple(sorted(found.items())))
    return replace(bound, plan=replace(bound.plan, training=training))


_BUCKET = 2**14
"""Bytes of a bucket in a small plan: some parameters of a small model share one, and there are several."""


def _update(update: Update) -> Update:
    update = replace(update, padding_samples=min(update.padding_samples, 1))
    if isinstance(update.buckets, int) or split_positions(update.buckets):
        return replace(update, buckets=_BUCKET)
    return update


def _check_blocks(large: BoundPlan, found: Blocks, blocks: Sequence[int], name: str) -> None:
    """Raise RequestError where the small model does not divide into blocks as is wanted."""
    wanted = [large.blocks.kinds[block] for block in blocks]
    if _pattern(found.kinds) != _pattern(wanted):
        raise RequestError(
            f"{name}: its blocks are of the kinds {_text(found.kinds)}, but the plan needs {_text(wanted)}; give"
            " another model with --small"
        )


def _pattern(kinds: Sequence[int]) -> list[int]:
    """Kinds by the order in which they come."""
    order = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    return [order[kind] for kind in kinds]


def _text(kinds: Sequence[int]) -> str:
    return " ".join(map(str, _pattern(kinds))) or "none"


def _stages(kept: Sequence[Sequence[int]]) -> tuple[Stage, ...]:
    found, first = list[Stage](), 0
    for blocks in kept:
        found.append(Stage(first_block=first, blocks=len(blocks)))
        first += len(blocks)
    return tuple(found)


def _inputs(large: BoundPlan, graph: OperatorGraph) -> tuple[tuple[str, Layout], ...]:
    if tuple(graph.inputs) != tuple(large.graph.inputs):
        raise RequestError(
            f"the small model has inputs {', '.join(graph.inputs)}, the plan's model {', '.join(large.graph.inputs)}"
        )
    return tuple((name, large.inputs[name]) for name in graph.inputs)


def _groups(large: BoundPlan, graph: OperatorGraph, found: Blocks, blocks: Sequence[int]) -> tuple[Group, ...]:
    """One group outside of the blocks, and one for each block, with what the large plan decides."""
    inside, held = list[Group](), set[str]()
    for number, block in enumerate(blocks):
        group = _block_group(large, graph, found, number, block)
        held.update(name for name, _ in group.parameters)
        inside.append(group)
    return (_outer_group(large, graph, found, held), *inside)


def _block_group(large: BoundPlan, graph: OperatorGraph, found: Blocks, number: int, block: int) -> Group:
    own, theirs = found.operators(number), large.blocks.operators(block)
    places = twins_in_order(graph.operators[own.start : own.stop], large.graph.operators[theirs.start : theirs.stop])
    if places is None:
        raise RequestError(
            f"block {number} of the small model has other operators than block {block} of the plan's model"
        )
    kept = large.recompute_of(block)
    names = block_parameters(graph, found, number), block_parameters(large.graph, large.blocks, block)
    held = [graph.operators[at].name for at, place in zip(own, places, strict=True) if place in (kept or ())]
    return Group(
        name=f"block {number}, as {block}",
        first_block=number,
        blocks=1,
        recomputation="none" if kept is None else "selective" if held else "full",
        kept=tuple(held),
        activations_home=large.offloaded_blocks.get(block, "device"),
        operators=_strategies(large, graph, own, [theirs[place] for place in places]),
        parameters=tuple((name, large.parameters[twin]) for name, twin in zip(*names, strict=True)),
    )


def _outer_group(large: BoundPlan, graph: OperatorGraph, found: Blocks, held: set[str]) -> Group:
    own = [at for at in range(len(graph.operators)) if found.block_of(at) is None]
    theirs = [at for at in range(len(large.operators)) if large.blocks.block_of(at) is None]
    calls = [graph.operators[at] for at in own], [large.graph.operators[at] for at in theirs]
    places = twins_in_order(*calls) or twins_by_name(*calls)
    if isinstance(places, str):
        raise RequestError(
            f"operator '{places}' of the small model: the plan's model has none like it outside of its blocks"
        )
    stored = []
    for parameter in graph.parameters:
        if parameter.name in held:
            continue
        if parameter.name not in large.parameters:
            raise RequestError(f"the plan's model has no parameter '{parameter.name}', as the small model has")
        stored.append((parameter.name, large.parameters[parameter.name]))
    return Group(
        name="outside of the blocks",
        operators=_strategies(large, graph, own, [theirs[place] for place in places]),
        parameters=tuple(stored),
    )


def _strategies(
    large: BoundPlan, graph: OperatorGraph, own: Sequence[int], twins: Sequence[int]
) -> tuple[tuple[str, tuple[str | None, ...]], ...]:
    """Operators of the small graph with the strategies of their twins."""
    return tuple((graph.operators[at].name, _names(large, twin)) for at, twin in zip(own, twins, strict=True))


def _names(large: BoundPlan, at: int) -> tuple[str | None, ...]:
    """The strategy of an operator of the large plan, in names of factors."""
    bound = large.operators[at]
    return strategy_names(bound.rule, bound.strategy)
