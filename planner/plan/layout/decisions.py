"""The decisions that someone has to be told to write a plan down, one entry each: they show how simple a plan is.

A conventional pattern is one decision, however many operators follow it: "tensor parallel 8" cuts every product as
Megatron-LM does. A departure from the pattern of its axis is a decision of its own, once for all blocks that depart
alike. Nobody decides about elementwise operators, buckets, or the way of messages: they are no entries.
"""

from collections import Counter
from collections.abc import Iterator

from planner.plan.binding.bind import BoundOperator, BoundPlan, stage_of_operators
from planner.plan.layout.patterns import Patterns
from planner.plan.layout.roles import Roles, call_word
from planner.plan.words import table_words, tensor_overlap_words
from planner.sharding.layout import REPLICATE, shard_length
from planner.sharding.usual_pattern import usual_factors

COUNTED = frozenset(
    {
        "matmul",
        "attention",
        "experts",
        "normalisation",
        "embedding",
        "cross_entropy",
        "recurrent",
        "delta_rule",
        "state_space",
        "selective_scan",
        "index_scores",
    }
)
"""Classes of the operators that do the work; people decide how these are split."""

_USUAL_SCHEDULES = ("1f1b", "interleaved_1f1b")
_NOTHING = (False, False, False)
_ZERO = {(False, False, True): "ZeRO-1", (False, True, True): "ZeRO-2", (True, True, True): "ZeRO-3"}


def decisions(bound: BoundPlan, found: Roles) -> tuple[str, ...]:
    """The decisions of a plan; `found` are its roles (`planner.plan.layout.roles`)."""
    return (
        *_degrees(bound, found),
        *_operators(bound, found),
        *_storage(bound, found),
        *_recomputation(bound),
        *_elsewhere(bound, found),
    )


def _degrees(bound: BoundPlan, found: Roles) -> Iterator[str]:
    plan = bound.plan
    for axis in found.axes:
        if axis.size > 1:
            yield f"{axis.role} {axis.size} ({axis.axis})"
            if axis.experts:
                yield f"expert parallel over {axis.axis}"
    if found.sequence_parallel:
        yield "sequence parallel"
    if plan.pipeline > 1:
        yield f"pipeline {plan.pipeline}"
        if plan.schedule not in _USUAL_SCHEDULES:
            yield f"schedule {plan.schedule}"
    if plan.virtual_stages > 1:
        yield f"{plan.virtual_stages} virtual stages"
    sizes = sorted({stage.blocks for stage in plan.stages})
    yield from (f"stages of {blocks} blocks" for blocks in sizes[1:])
    if plan.slices > 1:
        yield f"{plan.slices} slices"
    if plan.training.interleave > 1:
        yield f"{plan.training.interleave} micro-batches interleaved"
    if plan.training.tokens_once:
        yield "tokens once to a node"
    if plan.training.tensor_overlap:
        yield f"tensor parallelism under its products ({tensor_overlap_words(plan.training.tensor_overlap)})"
    if plan.training.expert_overlap:
        yield "experts exchanged under other work"


def _operators(bound: BoundPlan, found: Roles) -> Iterator[str]:
    """Operators that depart from the pattern of an axis, once for all that are alike."""
    if not found.axes:
        return
    patterns = Patterns(bound=bound, roles=tuple(axis.role for axis in found.axes))
    first = [bound.blocks.template(at) == at for at in range(len(bound.operators))]
    usual = usual_factors(bound.graph, vocabulary=True, among=first)
    seen = set[tuple[int, object]]()
    for at, operator in enumerate(bound.operators):
        key = bound.blocks.template(at), operator.strategy
        if operator.rule.op_class not in COUNTED or key in seen:
            continue
        seen.add(key)
        for place, axis in enumerate(found.axes):
            if axis.size > 1 and not _is_usual(patterns, found, at, place, usual[key[0]]):
                word = patterns.of_operator(at)[place]
                yield f"{call_word(operator.operator.name, operator.rule.op_class)} {word} on {axis.axis}"


def _is_usual(patterns: Patterns, found: Roles, at: int, place: int, usual: int | None) -> bool:
    """Whether an operator is split as the role of an axis suggests."""
    operator, labels, axis = patterns.bound.operators[at], patterns.labels[at], found.axes[place]
    choice, rule = operator.strategy[place], operator.rule
    word = patterns.of_operator(at)[place]
    if word == "expert parallel" or axis.role == "replicated":
        return axis.role != "replicated" or choice is None
    if axis.role == "data":
        return word == "data parallel" or (choice is None and not _divisible(operator, labels, "batch", axis.size))
    if axis.role == "context":
        if rule.op_class == "attention":
            return word in ("Ulysses", "ring attention", "context parallel")
        return word == "context parallel" or (
            choice is None and not _divisible(operator, labels, "sequence", axis.size)
        )
    if rule.op_class == "normalisation":
        return (word == "sequence parallel") == found.sequence_parallel and word in ("sequence parallel", "replicated")
    if rule.op_class == "attention":
        return word == "head parallel"
    if usual is None:
        return word != "data parallel"
    return choice == usual or (choice is None and rule.factors[usual].extent % axis.size != 0)


def _divisible(operator: BoundOperator, labels: tuple[str, ...], label: str, size: int) -> bool:
    """Whether an operator has a loop with this label that an axis of `size` devices can cut."""
    factors = zip(operator.rule.factors, labels, strict=True)
    return any(one == label and factor.extent % size == 0 for factor, one in factors)


def _storage(bound: BoundPlan, found: Roles) -> Iterator[str]:
    """What each axis shards of weights, gradients and states, beyond the cuts of tensor and expert parallelism."""
    reading = (o.operator for o in bound.operators if o.rule.op_class == "experts")
    experts = {name for op in reading for name in bound.graph.parameters_of(op)}
    for place, axis in enumerate(found.axes):
        if axis.size == 1:
            continue
        kinds: Counter[tuple[bool, bool, bool]] = Counter()
        for name, stored in bound.parameters.items():
            cut = stored.on(place)
            shares = (cut[0].is_shard, cut[1].is_shard, cut[2].is_shard)
            divides = any(shard_length(extent, [axis.size]) for extent in bound.graph.types[name].shape)
            by_use = shares[0] and not _gathered(bound, name, place)
            if name in experts or by_use or (shares == _NOTHING and not divides):
                continue
            kinds[shares] += bound.graph.types[name].numel
        for shares, _ in kinds.most_common():
            others = shares != kinds.most_common(1)[0][0]
            if shares != _NOTHING or (others and axis.role != "tensor"):
                yield f"{_ZERO.get(shares, 'no ZeRO')} over {axis.axis}{' for some parameters' if others else ''}"


def _gathered(bound: BoundPlan, name: str, place: int) -> bool:
    """Whether a weight is gathered on an axis for its first use."""
    for at in bound.graph.consumers.get(name, ())[:1]:
        operator = bound.operators[at]
        used = operator.layouts.operands[operator.operator.operands.index(name)].forward
        return used[place] == REPLICATE
    return False


def _recomputation(bound: BoundPlan) -> Iterator[str]:
    """The ways in which blocks are recomputed, what they keep, and how stages differ in that."""
    ways: dict[tuple[str, ...] | None, int] = {}
    stages = stage_of_operators(bound) if bound.blocks.count else ()
    counts: dict[int, Counter[tuple[str, ...] | None]] = {}
    for block in range(bound.blocks.count):
        kept = bound.recompute_of(block)
        way = None
        if kept is not None:
            inside = bound.blocks.operators(block)
            operators = (bound.operators[inside[place]] for place in sorted(kept))
            way = tuple(dict.fromkeys(call_word(o.operator.name, o.rule.op_class) for o in operators))
        ways[way] = ways.get(way, 0) + 1
        counts.setdefault(stages[bound.blocks.borders[block]], Counter())[way] += 1
    for way in ways:
        if way is not None:
            yield "recomputation" + (f" keeps {way[0]}" if way else "")
            yield from (f"recomputation keeps {name}" for name in way[1:])
    if len(ways) > 1:
        per_stage = {tuple(sorted(one.items(), key=str)) for one in counts.values()}
        yield from (f"blocks recomputed in {len(ways)} ways" for _ in per_stage)


def _elsewhere(bound: BoundPlan, found: Roles) -> Iterator[str]:
    """What is kept outside of the devices."""
    if found.offload != "none":
        yield from (f"offload: {what}" for what in found.offload.split(", "))
    if tables := table_words(bound.plan.training.update):
        yield from (f"tables: {where}" for where in tables.split(", "))
