"""Deferred weight gradients, under schedules that split the backward pass (zero bubble).

    input_gradient     gradient of a result ─> gradients of activations, norms, embeddings     the stage before waits
    weight_gradient    what was kept of it  ─> gradients of the weights of products            nobody waits

Deferred are the products that compute weight gradients, where the rule of the operator says that they can be computed
by themselves (`Rule.deferred_weight_gradients`): about half of the work of a backward pass. Every other gradient of
parameters is a pass over elements, computed in one kernel with the gradient of the input, and is not deferred. Until
its schedule step, a deferred product keeps the input of the operator and the gradient of its result.
"""

from collections import Counter

from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.stage_cut import StageCut
from planner.sharding.rule import Rule


def deferred_weight_gradients(bound: BoundPlan, at: int) -> tuple[int, ...]:
    """Places of the operands of an operator whose gradients are deferred; none where a plan's schedule defers
    nothing."""
    return _places(bound.graph, at, bound.operators[at].rule) if bound.plan.schedule_kind.splits_backward else ()


def _places(graph: OperatorGraph, at: int, rule: Rule) -> tuple[int, ...]:
    operands = graph.operators[at].operands
    graded = [place for place, name in enumerate(operands) if name in graph.differentiable]
    found = tuple(place for place in rule.deferred_weight_gradients if place in graded)
    activations = set(graded) - set(found)
    return found if activations and all(operands[place] in graph.parameter_names for place in found) else ()


def arrivals(bound: BoundPlan, cut: StageCut) -> Counter[str]:
    """How often a micro-batch makes a gradient of each parameter that a stage reads: once for every use whose gradient
    is deferred, and once for all other uses."""
    found: Counter[str] = Counter()
    others: set[str] = set()
    for at in cut.operators:
        later = deferred_weight_gradients(bound, at)
        for place, name in enumerate(bound.graph.operators[at].operands):
            if place in later:
                found[name] += 1
            elif name in bound.graph.parameter_names:
                others.add(name)
    found.update(others)
    return found
