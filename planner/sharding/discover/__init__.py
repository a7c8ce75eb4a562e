"""Rules by discovery: an operator that the table of rules lacks is run on small shards to see how it can be split.

    graph ─ operators without a rule ─ each call once ─> [cache] ─> rule by trial ─> the operators carry it

`discover` is called once, after a model is traced. From then on the rule is data, which the operators and the plan
carry; nothing is tried again while plans are searched. What cannot be split runs whole on every device.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from planner.errors import RuleError
from planner.graph.call import Call, typed_call
from planner.graph.operator_graph import Operator, OperatorGraph, WrittenRule
from planner.graph.written import call_text
from planner.limits import interrupting
from planner.sharding.rules import RULES

__all__ = ["discover", "prove", "with_rules", "written_rules"]


def discover(
    graph: OperatorGraph, cache: Path | None = None, on_note: Callable[[str], None] = lambda _: None
) -> OperatorGraph:
    """The graph with a rule for each operator that the table of rules lacks. The same graph gives the same rules.

    Args:
        cache: a folder that keeps rules between runs. What is read from it is proved again by execution.
        on_note: told what a person should know: which operators cannot be split, and what was wrong in the cache.

    Raises RuleError, naming operator and module, for an operator that draws random numbers or changes its operands.
    """
    missing = [op for op in graph.operators if op.op not in RULES and op.rule is None]
    found: dict[str, WrittenRule] = {}
    said: set[str] = set()
    for op in missing:
        call = typed_call(graph, op)
        text = call_text(call)  # calls with 2 and with 2.0 are equal; the operators of both find their rule by its text
        if text not in found:
            with interrupting(f"finding the rule of {op.op}"):
                found[text] = _rule(call, op, cache, on_note)
            note = f"{op.op}, called in {op.place}, is not split: {found[text].reason}"
            if found[text].reason and note not in said:  # one line of code may make several calls
                said.add(note)
                on_note(note)
    if not missing:
        return graph
    return _carrying(graph, found)


def _rule(call: Call, op: Operator, cache: Path | None, on_note: Callable[[str], None]) -> WrittenRule:
    from planner.sharding.discover.cache import cached
    from planner.sharding.discover.find import rule_by_trial

    try:
        return rule_by_trial(call) if cache is None else cached(call, cache, on_note)
    except RuleError as error:
        raise RuleError(f"{error} (called in {op.place})") from error


def written_rules(graph: OperatorGraph) -> tuple[tuple[str, WrittenRule], ...]:
    """The rules that operators of a graph carry, by the text of their calls."""
    return tuple({call_text(typed_call(graph, op)): op.rule for op in graph.operators if op.rule is not None}.items())


def with_rules(graph: OperatorGraph, rules: tuple[tuple[str, WrittenRule], ...]) -> OperatorGraph:
    """The graph with these rules, by the text of calls. Raises RuleError for a call that the graph does not have."""
    if not rules:
        return graph
    known = {call_text(typed_call(graph, op)) for op in graph.operators}
    for text, _ in rules:
        if text not in known:
            raise RuleError(f"a rule is given for {text}, which the model does not call")
    return _carrying(graph, dict(rules))


def _carrying(graph: OperatorGraph, rules: dict[str, WrittenRule]) -> OperatorGraph:
    names = {text.partition("(")[0] for text in rules}
    return replace(
        graph,
        operators=tuple(
            replace(op, rule=rules.get(call_text(typed_call(graph, op)), op.rule)) if op.op in names else op
            for op in graph.operators
        ),
    )


def prove(graph: OperatorGraph) -> None:
    """Prove the rules that the operators of a graph carry, by execution. Raises RuleError for one that is wrong."""
    from planner.sharding.discover.find import check_rule

    for call, rule in {typed_call(graph, op): op.rule for op in graph.operators if op.rule is not None}.items():
        why = check_rule(call, rule)
        if why:
            raise RuleError(f"the rule '{rule.text}' does not hold for {call_text(call)}: {why}; plan again")
