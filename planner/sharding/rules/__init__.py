"""Rules by operator name, and the rule of one call."""

from functools import lru_cache

from planner.errors import RuleError
from planner.graph.call import Call, typed_call
from planner.graph.operator_graph import Operator, OperatorGraph
from planner.sharding.rule import Rule
from planner.sharding.rules.table import RULES

__all__ = ["RULES", "rule_of"]


def rule_of(graph: OperatorGraph, operator: Operator) -> Rule:
    """The rule of one operator of a graph; equal calls share one rule object.

    Raises RuleError, naming the operator and the module it is called in, where there is no rule for it.
    """
    if operator.op not in RULES:
        raise RuleError(
            f"operator {operator.op}, called in module '{operator.module or '(root)'}', has no sharding rule;"
            " add a row to planner/sharding/rules/table.py"
        )
    try:
        return _build(typed_call(graph, operator))
    except RuleError as error:
        raise RuleError(f"{error} (called in module '{operator.module or '(root)'}')") from error


@lru_cache(maxsize=16384)
def _build(call: Call) -> Rule:
    return RULES[call.op].build(call)
