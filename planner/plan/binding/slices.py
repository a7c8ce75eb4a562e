"""The graph of one slice of the sequence, which a stage computes at a time.

A slice is a micro-batch of a shorter sequence, except for two operators: causal attention also reads the keys and
values of the slices before it, and the mean of the cross entropy is over all slices. All other operators must treat
every position by itself. An operator that does not is refused by name. So is whatever needs a whole micro-batch: random
numbers, and buffers that change.
"""

import math
from dataclasses import replace
from functools import lru_cache

from planner.errors import PlanFileError, RequestError
from planner.graph.operator_graph import Operator, OperatorGraph
from planner.graph.random_ops import CHANCES
from planner.nearest import divisors, nearest_words
from planner.sharding.padded_batch import MEAN_WEIGHT
from planner.sharding.rescale import rescale_sequence
from planner.sharding.rule import FactorKind, Rule
from planner.sharding.rules import rule_of
from planner.sharding.window import Window

LOSS = "aten.cross_entropy_loss.default"
"""The operator that may sum over the sequence."""

_MIXING = (FactorKind.REDUCTION, FactorKind.COMBINED, FactorKind.BLOCKED)
"""Kinds of factors whose pieces do not compute independently."""

_LINEAR = ("aten.mul.Tensor", "aten.div.Tensor", "aten.neg.default", "aten.to.dtype", "planner.identity")
"""Operators on the loss that keep the loss of the whole equal to the mean over the slices."""


def one_slice(whole: OperatorGraph, length: int | None, slices: int) -> OperatorGraph:
    """The graph of one of `slices` slices of a sequence of this length; `whole` where it is not cut.

    Raises PlanFileError, naming the numbers or the operator, for a sequence that cannot be cut into these slices.
    """
    if slices == 1:
        return whole
    if length is None:
        raise PlanFileError(f"slices: {slices} parts of a sequence, but this model has none; set slices to 1")
    if length % slices:
        near = nearest_words(slices, divisors(length))
        raise PlanFileError(f"slices: {slices} do not divide a sequence of {length}; {near}")
    try:
        graph = rescale_sequence(whole, length, length // slices)
    except RequestError as error:
        raise PlanFileError(f"slices: {slices} slices of the sequence, but {error}; set slices to 1") from error
    if all(graph.types[name] == whole.types[name] for name in graph.inputs):
        raise PlanFileError(
            f"slices: {slices} slices of the sequence, but no input has a second dim of {length}; set slices to 1"
        )
    for before, after in zip(whole.operators, graph.operators, strict=True):
        fault = _fault(graph, before, rule_of(whole, before), rule_of(graph, after))
        if fault is not None:
            raise PlanFileError(f"slices: {before.name}{before.at} {fault}; set slices to 1 for this model")
    _check_loss(graph)
    if graph.updates:
        raise PlanFileError(
            f"slices: buffer '{graph.updates[0][0]}' changes with every micro-batch, not with every slice; set slices"
            " to 1 for this model"
        )
    return graph


@lru_cache(maxsize=1024)
def earlier_keys(rule: Rule, slices: int) -> Rule:
    """The rule of attention between one slice and the keys of an earlier slice: to all of them (of its own keys it
    reads half), or to the mean share of them that a window shows."""
    seen = 1.0
    if rule.window is not None:
        length, whole, own = _shown(rule, rule.window, slices)
        seen = (whole - slices * own) / (math.comb(slices, 2) * length**2)
    work = tuple(replace(term, coefficient=2.0 * seen / rule.seen * term.coefficient) for term in rule.work)
    return replace(rule, work=work, causal=False, window=None, seen=seen)


def work_of_slices(rule: Rule, slices: int) -> float:
    """Mean work of attention of one of `slices` slices, over the work for the slice's own keys."""
    if rule.window is None:
        return float(slices)  # all keys of, on average, half the sequence before it, and half of its own
    _, whole, own = _shown(rule, rule.window, slices)
    return whole / (slices * own)


def _shown(rule: Rule, window: Window, slices: int) -> tuple[int, int, int]:
    """Queries of a slice; pairs that a window shows in the whole sequence, and between a slice and its own keys."""
    length = rule.whole_extent(dict(rule.roles)["queries"])
    return length, window.pairs(0, slices * length, slices * length), window.pairs(0, length, length)


def positional(whole: OperatorGraph, part: OperatorGraph) -> frozenset[str]:
    """Constants and buffers of which every slice has its own part; the graph `part` has the part of the first slice."""
    if part is whole:
        return frozenset()
    constant = (name for name in part.types if name not in part.data_dependent)
    return frozenset(name for name in constant if part.types[name].shape != whole.types[name].shape)


def _fault(graph: OperatorGraph, op: Operator, whole: Rule, rule: Rule) -> str | None:
    """Why an operator does not treat slices as it would the whole; None where it does."""
    if not any(name in graph.data_dependent for name in op.results if name is not None):
        return None
    chance = CHANCES.get(op.op)
    if chance is not None and chance.of(op.arguments, dict(op.keywords)) > 0:
        return "drops elements at random, which a slice would draw as if it were the first"
    if rule.window is not None and rule.window.prefix:
        return (
            f"shows the first {rule.window.prefix} keys to all queries, and those of the first slice would need keys of"
            " later ones; cut the sequence by --context (a ring or Ulysses), which takes a prefix"
        )
    if rule.op_class == "attention" or op.op == LOSS:
        return None
    extents = {factor.name: factor.extent for factor in rule.factors}
    cut = [factor for factor in whole.factors if extents.get(factor.name, 1) != factor.extent]
    mixed = next((factor for factor in cut if factor.kind in _MIXING), None)
    if mixed is None:
        return None
    does = "wants the whole of" if mixed.kind is FactorKind.BLOCKED else "sums over"
    return f"{does} the sequence (factor '{mixed.name}')"


def _check_loss(graph: OperatorGraph) -> None:
    """Check that the loss of the whole is the mean over the slices: a cross entropy, or a multiple of one."""
    name = graph.loss
    while True:
        op = graph.operators[graph.producer[name]] if name in graph.producer else None
        if op is not None and op.op == LOSS:
            return
        sources = (
            [one for one in op.operands if one in graph.data_dependent and one != MEAN_WEIGHT] if op is not None else []
        )
        if op is None or op.op not in _LINEAR or len(sources) != 1:
            what = f"of {op.name}{op.at}" if op is not None else "of an input"
            raise PlanFileError(
                f"slices: the loss is the result {what}, and only a cross entropy is known to be the mean over slices;"
                " set slices to 1 for this model"
            )
        (name,) = sources
