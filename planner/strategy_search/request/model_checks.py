"""Degrees by which a model cannot be split: experts, heads, and the length of the sequence."""

import math

from planner.errors import PlanFileError
from planner.faults import Fault
from planner.plan.binding.slices import one_slice
from planner.sharding.labels import factor_labels
from planner.sharding.rule import Rule
from planner.sharding.rules import rule_of
from planner.strategy_search.request.attention_degrees import attention_fault, heads_of
from planner.strategy_search.request.configurations import context_splits
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import EXPERTS, Pinned
from planner.strategy_search.request.template import Template

Attention = list[tuple[str, Rule]]
"""Attention operators: names and rules."""


def model_fault(request: SearchRequest, template: Template) -> Fault | None:
    """Why a model cannot be split as decided; None if it can."""
    rules = [(op.name, rule_of(template.graph, op)) for op in template.graph.operators]
    attention = [(name, rule) for name, rule in rules if rule.op_class == "attention"]
    return (
        _experts(template, request.pinned)
        or _slices(request)
        or _zigzag(template, request.pinned)
        or _context(attention, request.pinned)
        or _heads(attention, request.pinned)
        or _sequence_parallel(template, request.pinned)
    )


def expert_counts(template: Template) -> tuple[int, ...]:
    """The numbers of experts of the operators that route to experts."""
    rules = [rule_of(template.graph, op) for op in template.graph.operators]
    return tuple(rule.factors[rule.index["e"]].extent for rule in rules if rule.op_class == EXPERTS)


def _experts(template: Template, pinned: Pinned) -> Fault | None:
    if pinned.expert in (None, 1):
        return None
    counts = expert_counts(template)
    if not counts:
        return Fault(
            option="expert",
            value=f"{pinned.expert}",
            reason=": no operator of this model routes to experts",
            hint="leave it at 1",
        )
    undivided = next((count for count in counts if count % pinned.expert), None)
    if undivided is None:
        return None
    return Fault(
        option="expert",
        value=f"{pinned.expert}",
        reason=f"does not divide the {undivided} experts of the model",
        numbers=("expert",),
    )


def _slices(request: SearchRequest) -> Fault | None:
    if request.pinned.slices in (None, 0, 1):
        return None
    try:
        one_slice(request.graph, request.model.sequence_length, request.pinned.slices)
    except PlanFileError as error:
        return Fault(reason=str(error))
    return None


def _zigzag(template: Template, pinned: Pinned) -> Fault | None:
    if not pinned.zigzag or template.causal_ring:
        return None
    return Fault(
        option="zigzag",
        value="yes",
        reason="balances causal attention by a ring, and no operator of this model is that",
        hint="leave zigzag out",
    )


def _context(attention: Attention, pinned: Pinned) -> Fault | None:
    """Checks a given context, by a ring, by heads, or by both: some way to split it must suit every operator."""
    if pinned.context in (None, 1):
        return None
    splits, turns = list(context_splits(pinned, pinned.context)), pinned.zigzag is not False
    for name, rule in attention:
        faults = [attention_fault(rule, ring, heads, turns, pinned.slices or 1) for ring, heads in splits]
        if faults and None not in faults:
            return Fault(reason=f"operator '{name}': {faults[0]}", numbers=("context",))
    return None


def _heads(attention: Attention, pinned: Pinned) -> Fault | None:
    """Tensor-parallel devices divide the heads that each device of a Ulysses context has."""
    tensor = pinned.tensor or 1
    if tensor == 1:
        return None
    by_heads = 1 if pinned.context in (None, 1) else min(heads for _, heads in context_splits(pinned, pinned.context))
    for name, rule in attention:
        if (count := heads_of(rule)) % (tensor * by_heads):
            shared = f" x {by_heads} devices of a context by heads" if by_heads > 1 else ""
            return Fault(
                option="tensor",
                value=f"{tensor}{shared}",
                reason=f"does not divide the {count} heads of operator '{name}'",
                numbers=("tensor", "context") if by_heads > 1 else ("tensor",),
            )
    return None


def _sequence_parallel(template: Template, pinned: Pinned) -> Fault | None:
    """Norms that split the sequence over tensor-parallel devices need a length that divides."""
    tensor = pinned.tensor or 1
    if not pinned.sequence_parallel or tensor == 1:
        return None
    lengths = _lengths_of_norms(template)
    parts = {"context": pinned.context or 1, "slices": pinned.slices or 1, "tensor": tensor}
    length = next((length for length in lengths if length % math.prod(parts.values())), None)
    if length is None:
        return None
    words = " x ".join(f"{name} = {value}" for name, value in parts.items() if value > 1)
    return Fault(
        option="sequence_parallel",
        value="yes",
        reason=f": {words} does not divide a sequence of {length}",
        hint="set sequence_parallel to no",
        numbers=tuple(parts),
    )


def _lengths_of_norms(template: Template) -> list[int]:
    """Lengths of the sequences that normalisations with weights see."""
    graph, found = template.graph, set[int]()
    for op, labels in zip(graph.operators, factor_labels(graph), strict=True):
        rule = rule_of(graph, op)
        if rule.op_class == "normalisation" and not graph.parameter_names.isdisjoint(op.operands):
            along = [f.extent for f, label in zip(rule.factors, labels, strict=True) if label == "sequence"]
            found |= {math.prod(along)} if along else set()
    return sorted(found)
