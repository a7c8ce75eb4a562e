"""Rules by operator name, and the rule of one call."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from planner.errors import RuleError
from planner.graph.call import Call, call_with
from planner.graph.cast_losses import cast_losses
from planner.graph.gates import folded_activations
from planner.graph.operator_graph import Operator, OperatorGraph, TensorType, WrittenRule
from planner.graph.per_replica import PER_REPLICA, called
from planner.sharding.rule import Rule
from planner.sharding.rules.per_replica import call_of_one, rule_of_replicas
from planner.sharding.rules.table import RULES
from planner.sharding.rules.written import build_written

__all__ = ["RULES", "rule_of", "rule_of_call"]


def rule_of(graph: OperatorGraph, operator: Operator) -> Rule:
    """The rule of one operator of a graph; equal calls share one rule object.

    The operator's own rule, where one was found by trial; else that of the table. Raises RuleError, naming the
    operator and the module it is called in, where there is no rule for it.
    """
    known = graph.derived.get(operator.name)
    if known is not None and known[0] is operator:
        rule: Rule = known[1]
        return rule
    rule = rule_of_call(operator, graph.types, drops_fused=graph.drops_fused)
    if operator.name in folded_activations(graph):
        rule = _folded(rule)
    if operator.name in cast_losses(graph):
        rule = _of_loss(rule)
    graph.derived[operator.name] = (operator, rule)
    return rule


def rule_of_call(operator: Operator, types: Mapping[str, TensorType], *, drops_fused: bool = False) -> Rule:
    """The rule of an operator whose values have these types; raises RuleError as `rule_of` does."""
    if called(operator) not in RULES and operator.rule is None:
        raise RuleError(
            f"operator {operator.op}, called in {operator.place}, has no sharding rule; add a row"
            " to planner/sharding/rules/table.py, or have one found by trial: planner.discover(graph)"
        )
    try:
        return _build(call_with(operator, types, drops_fused=drops_fused), operator.rule)
    except RuleError as error:
        raise RuleError(f"{error} (called in {operator.place})") from error


@lru_cache(maxsize=16384)
def _folded(rule: Rule) -> Rule:
    """The rule of an activation that is computed within the product behind it."""
    return replace(rule, joins_product=True)


@lru_cache(maxsize=16384)
def _of_loss(rule: Rule) -> Rule:
    """The rule of a loss of cast logits, or of their cast."""
    return replace(rule, joins_loss=True)


@lru_cache(maxsize=16384)
def _build(call: Call, written: WrittenRule | None) -> Rule:
    if call.op == PER_REPLICA:
        return rule_of_replicas(call, _build(call_of_one(call), written))
    return RULES[call.op].build(call) if written is None else build_written(call, written)
