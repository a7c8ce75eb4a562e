"""Prints a plan on a terminal: job, decisions, time and memory, with the interval."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.graph.blocks import Blocks
from planner.plan.binding.bind import BoundOperator, BoundPlan
from planner.plan.binding.discovered import discovered
from planner.plan.compare.explanation import shown_parts
from planner.plan.layout.group_runs import group_runs
from planner.plan.layout.patterns import Patterns
from planner.plan.layout.roles import Roles
from planner.plan.plan import Plan, Prediction
from planner.plan.prediction.step import (
    AHEAD,
    BESIDE,
    BETWEEN_STAGES,
    COVERED,
    GATHERED_AHEAD,
    REDUCED_AHEAD,
    UNCOVERED,
    UNDER_EXCHANGE,
    UNDER_PRODUCTS,
)
from planner.report.discovered import discovered_table
from planner.report.rows import degree_rows, figure_rows, job_text
from planner.report.table import table_of
from planner.report.units import bytes_text, percent_text, seconds_text, turn_text
from planner.report.words import SHOWN, short_names, strategy_words
from planner.sharding.labels import factor_labels
from planner.sharding.layout import format_layout

_Row = tuple[str, ...]

_OVERLAPPED = {
    AHEAD: "overlapped kernel launches",
    BESIDE: "overlapped offload",
    BETWEEN_STAGES: "overlapped stage transfer",
    COVERED: "overlapped by other micro-batches",
    GATHERED_AHEAD: "overlapped gathers and reductions",
    REDUCED_AHEAD: "overlapped gradient reduction",
    UNCOVERED: "exposed rest of overlaps",
    UNDER_EXCHANGE: "overlapped expert exchange",
    UNDER_PRODUCTS: "overlapped tensor parallelism",
}
"""Parts of a step whose terminal names differ from those in plan files."""

_CYCLE = 12
"""Maximum number of rows that may repeat together."""


def print_plan(
    console: Console,
    bound: BoundPlan,
    roles: Roles,
    prediction: Prediction,
    *,
    details: bool = True,
    layouts: bool = False,
) -> None:
    """Print a bound plan: degrees, sharding, time and memory. With `layouts` the sharding is shown as factors and
    layouts instead of names of patterns."""
    console.print(_headline(bound.plan))
    console.print(_degrees(bound.plan, roles))
    if details:
        console.print(_layers(bound) if layouts else _patterns(bound, roles))
    console.print(_costs(bound.plan, prediction))
    if found := discovered(bound):
        console.print(discovered_table(found))


def _headline(plan: Plan) -> RenderableType:
    model = plan.model.reference
    job, details = job_text(plan)
    text = Text(f"\n{job}\n{details}")
    text.stylize("bold", 1, 1 + len(model))
    text.stylize("bold", 1 + job.index(" on ") + len(" on "), 1 + len(job))
    return text


def _degrees(plan: Plan, roles: Roles) -> RenderableType:
    table = table_of("\nParallelism", "", "")
    table.show_header = False
    for row in degree_rows(plan, roles):
        table.add_row(*row)
    return table


def _patterns(bound: BoundPlan, roles: Roles) -> RenderableType:
    """The sharding of the main operators by mesh axis and how their parameters are stored, by names of patterns; equal
    neighbors share a row."""
    if not bound.plan.mesh.axes:
        return Text("")
    found = Patterns(bound=bound, roles=tuple(axis.role for axis in roles.axes))
    table = table_of("\nSharding" + _stand_in(bound.blocks), "operator", *bound.plan.mesh.names, "parameters")
    rows = list[tuple[int, _Row]]()
    for at, operator, name in _shown(bound):
        stored = bound.graph.parameters_of(operator.operator)
        kept = found.of_parameter(stored[0]) if stored else ""
        rows.append((at, (name, *found.of_operator(at), kept)))
    for heading, section in sections(bound.blocks, rows):
        if heading:
            table.add_row(heading, *("" for _ in table.columns[1:]))
        grouped = groupby(section, key=lambda row: row[1:])
        told = [(", ".join(dict.fromkeys(row[0] for row in alike)), *words) for words, alike in grouped]
        for row in counted(told):
            table.add_row(*row)
    return table


def _shown(bound: BoundPlan) -> list[tuple[int, BoundOperator, str]]:
    """The operators that do the work, before the blocks, in the first block of each kind and after the blocks; with
    their short names."""
    shown = [
        (at, operator)
        for at, operator in enumerate(bound.operators)
        if operator.rule.op_class in SHOWN and bound.blocks.template(at) == at
    ]
    names = short_names([operator.operator for _, operator in shown])
    return [(*found, name) for found, name in zip(shown, names, strict=True)]


def sections(blocks: Blocks, rows: Sequence[tuple[int, _Row]]) -> Iterator[tuple[str, Sequence[_Row]]]:
    """Rows of operators with the heading that says whose they are: before the blocks, in the first block of each kind,
    after the blocks. Kinds with equal rows share a heading; with one kind of block there is none."""
    if len(blocks.firsts) < 2:
        yield "", [row for _, row in rows]
        return
    kinds: dict[tuple[_Row, ...], list[int]] = {}
    for block in blocks.firsts:
        kinds.setdefault(tuple(row for at, row in rows if blocks.block_of(at) == block), []).append(block)
    yield "", [row for at, row in rows if at < blocks.start]
    for told, firsts in kinds.items():
        yield _heading(blocks, firsts), told
    if after := [row for at, row in rows if at >= blocks.stop]:
        yield "after the blocks:", after


def _heading(blocks: Blocks, firsts: Sequence[int]) -> str:
    """`block 0 (and 11 more like it):`, `blocks 0, 1 (and 22 more like them):`."""
    several = len(firsts) > 1
    like = sum(blocks.kinds.count(blocks.kinds[block]) for block in firsts) - len(firsts)
    others = f" (and {like} more like {'them' if several else 'it'})" if like else ""
    return f"block{'s' if several else ''} {', '.join(map(str, firsts))}{others}:"


def counted(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Rows of a table; repeated rows are shown once, with the number of repetitions."""
    at = 0
    while at < len(rows):
        length, again = max(
            ((length, _again(rows, at, length)) for length in range(1, _CYCLE + 1)),
            key=lambda found: (found[0] * found[1], -found[0]),
        )
        if length * again < 2:  # the counting row would save nothing
            length, again = 1, 0
        yield from rows[at : at + length]
        if again:
            above = "the row" if length == 1 else f"the {length} rows"
            times = "once more" if again == 1 else f"{again} times more"
            yield (f"({above} above {times})", *("" for _ in rows[at][1:]))
        at += length * (again + 1)


def _again(rows: Sequence[tuple[str, ...]], at: int, length: int) -> int:
    """How often a number of rows at a place repeats directly after itself."""
    again = 0
    while (start := at + length * (again + 1)) + length <= len(rows):
        if rows[start : start + length] != rows[at : at + length]:
            break
        again += 1
    return again


def _layers(bound: BoundPlan) -> RenderableType:
    """The sharding of the main operators: before the blocks, in the first block of each kind, and after them."""
    if not bound.plan.mesh.axes:
        return Text("")
    labels = factor_labels(bound.graph)
    title = "\nSharding" + (_stand_in(bound.blocks))
    table = table_of(title, "operator", *bound.plan.mesh.names, "result", "weight", "state")
    rows = list[tuple[int, _Row]]()
    for at, operator, name in _shown(bound):
        words = strategy_words(operator, labels[at])
        stored = [bound.parameters[kept] for kept in bound.graph.parameters_of(operator.operator)]
        weight = stored[0].weight_words if stored else ""
        state = stored[0].state_words if stored else ""
        result = format_layout(operator.layouts.results[0].forward)
        rows.append((at, (name, *words, result, weight, state)))
    for heading, section in sections(bound.blocks, rows):
        for row in [(heading,)] * bool(heading) + [*section]:
            table.add_row(*row)
    return table


def _stand_in(blocks: Blocks) -> str:
    if not blocks.count:
        return ""
    return " (first block for all)" if len(blocks.firsts) == 1 else " (first block of each kind)"


def _costs(plan: Plan, prediction: Prediction) -> RenderableType:
    table = table_of("\nPrediction", "", "")
    table.show_header = False
    for row in figure_rows(plan, prediction):
        table.add_row(*row)
    return Group(
        table,
        *_stages(plan, prediction),
        _parts("\nTime of a step", _told(prediction), prediction.step_seconds, seconds_text),
        _memory(prediction),
    )


def _told(prediction: Prediction) -> tuple[tuple[str, float], ...]:
    """The parts of a step; overlapped parts are negative and named so."""
    return tuple((_OVERLAPPED.get(name, name), seconds) for name, seconds in shown_parts(prediction.time))


def _memory(prediction: Prediction) -> Table:
    """The parts of the peak memory, and below them the memory margin."""
    table = _parts("\nMemory of the fullest device", prediction.memory, prediction.peak_bytes, bytes_text)
    kept = 0.0 if prediction.high_peak_bytes is None else prediction.high_peak_bytes - prediction.peak_bytes
    if kept > 0:
        share = percent_text(kept / prediction.peak_bytes)
        table.add_row("memory margin, on top of the peak", bytes_text(kept), share)
    return table


def _stages(plan: Plan, prediction: Prediction) -> tuple[Table, ...]:
    """The pipeline ranks, with equal neighbours in one row; nothing for a single rank."""
    if len(prediction.stages) < 2:
        return ()
    groups = [run.group for run in group_runs(plan) for _ in range(run.stages)]
    table = table_of("\nPipeline stages", "stage", turn_text(plan.slices), "once per step", "peak memory")
    for column in table.columns[1:]:
        column.justify = "right"
    if groups:
        table.add_column("devices")
    rows = [
        (
            *(seconds_text(stage.micro_batch_seconds), seconds_text(stage.once_seconds), bytes_text(stage.peak_bytes)),
            *groups[rank : rank + 1],
        )
        for rank, stage in enumerate(prediction.stages)
    ]
    first = 0
    for after in range(1, len(rows) + 1):
        if after == len(rows) or rows[after] != rows[first]:
            table.add_row(f"{first}" if after - first == 1 else f"{first} to {after - 1}", *rows[first])
            first = after
    return (table,)


def _parts(title: str, parts: tuple[tuple[str, float], ...], whole: float, text: Callable[[float], str]) -> Table:
    table = table_of(title, "", "", "")
    table.show_header = False
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, value in parts:
        if value:
            sign = "-" if value < 0 else ""
            table.add_row(name, f"{sign}{text(abs(value))}", f"{sign}{percent_text(abs(value) / whole)}")
    return table
