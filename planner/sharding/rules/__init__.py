"""Rules by operator name, and the rule of one call."""

from functools import lru_cache
from typing import cast

from planner.errors import RuleError
from planner.graph.call import Call, typed_call
from planner.graph.operator_graph import Operator, OperatorGraph, WrittenRule
from planner.sharding.rule import Rule
from planner.sharding.rules.table import RULES
from planner.sharding.rules.written import build_written

__all__ = ["RULES", "rule_of"]


def rule_of(graph: OperatorGraph, operator: Operator) -> Rule:
    """The rule of one operator of a graph; equal calls share one rule object.

    That which the operator carries, where one was found by trial; else that of the table. Raises RuleError, naming the
    operator and the module it is called in, where there is no rule for it.
    """
    known = graph.derived.get(operator.name)
    if known is not None and known[0] is operator:
        return cast("Rule", known[1])
    rule = _rule_of(graph, operator)
    graph.derived[operator.name] = (operator, rule)
    return rule


def _rule_of(graph: OperatorGraph, operator: Operator) -> Rule:
    if operator.op not in RULES and operator.rule is None:
        raise RuleError(
            f"operator {operator.op}, called in module '{operator.module or '(root)'}', has no sharding rule; add a row"
            " to planner/sharding/rules/table.py, or have one found by trial: planner.discover(graph)"
        )
    try:
        return _build(typed_call(graph, operator), operator.rule)
    except RuleError as error:
        raise RuleError(f"{error} (called in module '{operator.module or '(root)'}')") from error


@lru_cache(maxsize=16384)
def _build(call: Call, written: WrittenRule | None) -> Rule:
    return RULES[call.op].build(call) if written is None else build_written(call, written)
