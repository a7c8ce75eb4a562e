"""docs/operators.md says what the table of rules and the contracts of rules say today."""

from planner.sharding.rules import RULES
from tests.contract import operator_table


def test_the_page_is_what_the_command_writes() -> None:
    written = operator_table.PATH.read_text(encoding="utf-8")
    assert written == operator_table.content(), f"docs/operators.md is out of date; run {operator_table.COMMAND}"


def test_the_page_has_every_operator_and_every_difference() -> None:
    written = operator_table.PATH.read_text(encoding="utf-8")
    assert all(f"| `{op}` |" in written for op in RULES)
    assert all(why in written for why in operator_table.test_rules_against_dtensor.DIFFERENCES)
