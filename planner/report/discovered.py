"""Operators whose rules were found by trial, as a table."""

from collections.abc import Sequence

from rich.table import Table

from planner.plan.binding.discovered import Discovered
from planner.report.table import table_of


def discovered_table(found: Sequence[Discovered]) -> Table:
    """One row per operator: its rule, the splittable factors, and where it is called."""
    title = "\nRules found by trial (times are assumed: one pass over the tensors)"
    table = table_of(title, "operator", "rule", "can be split", "called in")
    for each in found:
        first, *others = each.modules
        where = f"{first} and {len(others)} more" if others else first
        table.add_row(each.op, each.rule, ", ".join(each.factors) or f"not: {each.reason}", where)
    return table
