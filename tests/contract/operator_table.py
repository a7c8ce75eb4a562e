"""Writes docs/operators.md from the table of rules and from what the contracts of rules check.

    python -m tests.contract.operator_table          after a row, an example or a difference has changed

Nothing in the table is written by hand: rules are those of the first call of each operator in `rule_calls`, what
DTensor does is what test_rules_against_dtensor.py demands of it, what is found by trial what test_discovery.py demands.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from planner.sharding.legality import legal_strategies
from planner.sharding.rule import FactorKind, Rule, strategy_names
from planner.sharding.rules import RULES
from tests.contract import test_discovery, test_rules_against_dtensor, test_rules_by_execution
from tests.contract.rule_calls import Example, examples

PATH = Path(__file__).resolve().parents[2] / "docs" / "operators.md"
COMMAND = "python -m tests.contract.operator_table"
KINDS = {
    FactorKind.PARALLEL: "independent",
    FactorKind.REDUCTION: "sum",
    FactorKind.COMBINED: "combined inside",
    FactorKind.BROADCAST: "copies",
    FactorKind.EXCHANGE: "exchange",
    FactorKind.ALIGNED: "aligned",
    FactorKind.RING: "ring",
    FactorKind.HALO: "halo",
    FactorKind.BLOCKED: "whole",
}

HEAD = """# Operators

Which operators have a sharding rule, what can be split, and how each rule is checked. Made by `{command}`; a test
compares this file with what that command writes.

A rule names the loops of an operator and the dims of operands and results that each loop indexes; `1` is a dim
without a loop. The table has the rule of one typical call; other ranks and broadcasts follow the same pattern. A loop
is one of these:

| loop | when it is split |
|---|---|
| independent | each rank computes its piece of the result |
| sum, mean | each rank computes a partial sum, which a reduction completes |
| combined inside | the implementation combines the pieces |
| copies | every rank computes the result; only the gradient is partial |
| exchange, aligned, ring, halo | two loops are split on one axis |
| whole | it is never split |

**Execution**: a test runs the operator on the pieces of simulated ranks, with this many calls and splits, and
recombines results and gradients to those of the unsplit call. **DTensor**: a test compares the layouts with those that
PyTorch's own propagation derives without a collective, forward and backward. A number refers to the differences below;
"no" marks operators that are not compared.

| operator | rule | loops | execution | DTensor |
|---|---|---|---|---|
"""

TRIAL = """
## Operators without a row

When a model is planned, they get a rule by trial (`planner.discover`): the planner runs the operator on small tensors
and on pieces of them, forward and backward. The plan carries the rule, and every rank proves it again before it runs.
Tests check these by execution:

| operator | rule that is found | loops |
|---|---|---|
"""

LIMITS = """
What is not found, and stays whole on every device: splits that take more than pieces of the operands (lookups with an
offset, stencils that read the neighbour's piece, sorting, scans), a loop that one result has and another sums
over, products of two loops in one dim. Operators that draw random numbers or change their operands in place are
refused. Time is assumed to be one pass over the tensors. An operator that behaves differently for values or extents
that were not tried is misjudged; see `planner/sharding/discover/find.py`.
"""


def content() -> str:
    """The text of docs/operators.md."""
    by_op: dict[str, list[Example]] = {op: [] for op in RULES}
    for example in examples():
        by_op[example.op].append(example)
    notes: dict[str, int] = {}
    rows = [_row(op, by_op[op], notes) for op in RULES]
    numbered = [f"{number}. {why}." for why, number in notes.items()]
    found = [_found(example) for op, (example, _) in test_discovery.EXAMPLES.items() if op not in RULES]
    return "\n".join([HEAD.format(command=COMMAND) + "\n".join(rows), "", "## Where DTensor differs", "", *numbered,
                      TRIAL + "\n".join(found), LIMITS])  # fmt: skip


def _row(op: str, calls: list[Example], notes: dict[str, int]) -> str:
    if op in test_rules_by_execution.AGREEING:
        linear = next(example for example in examples() if example.op == "aten.linear.default")
        rule = RULES[op].build(replace(linear.call(), op=op))
        return f"| `{op}` | `{rule.format()}` | {_loops(rule)} | on processes, tests/distributed/test_fp8.py | no |"
    rules = [example.rule() for example in calls]
    ways = sum(len(legal_strategies(rule, test_rules_by_execution.mesh_of((2,)))) - 1 for rule in rules)
    form = ", in a form of its own" if op in test_rules_by_execution.SPECIAL else ""
    checked = f"{_count(len(calls), 'call')}, {_count(ways, 'split')}{form}" if ways else "nothing to split"
    cells = (f"`{op}`", f"`{rules[0].format()}`", _loops(rules[0]), checked, _dtensor(calls, notes) if ways else "–")
    return f"| {' | '.join(cells)} |"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _loops(rule: Rule) -> str:
    names: dict[str, list[str]] = {}
    for index, factor in enumerate(rule.factors):
        word = "mean" if index in rule.mean_over else KINDS[factor.kind]
        names.setdefault(word, []).append(factor.name)
    return "; ".join(f"{', '.join(found)}: {word}" for word, found in names.items()) or "none"


def _dtensor(calls: list[Example], notes: dict[str, int]) -> str:
    compared = [example for example in calls if test_rules_against_dtensor.comparable(example)]
    keys = [key for example in compared for key in _keys(example)]
    reasons = dict.fromkeys(why for key in keys for why in test_rules_against_dtensor.reasons(key))
    numbers = [str(notes.setdefault(why, len(notes) + 1)) for why in reasons]
    if calls[0].op == test_rules_against_dtensor.ATTENTION:
        factors = ", ".join(test_rules_against_dtensor.ATTENTION_FACTORS)
        return f"agrees on {factors} as GPUs compute it; {', '.join(numbers)}"
    if not keys:
        return "no"
    return f"differs: {', '.join(numbers)}" if numbers else "agrees"


def _keys(example: Example) -> Iterator[str]:
    rule = example.rule()
    for strategy in legal_strategies(rule, test_rules_against_dtensor.AXIS)[1:]:
        for direction in ("forward", "backward"):
            yield f"{example} {strategy_names(rule, strategy)[0]} {direction}"


def _found(example: Example) -> str:
    rule = test_discovery.expected_rule(example.op)
    return f"| `{example.op}` | `{rule.format()}` | {_loops(rule)} |"


if __name__ == "__main__":
    PATH.write_text(content(), encoding="utf-8")
