"""A plan on a terminal: what was decided, for whom, what it costs, and how sure that is."""

from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.graph.blocks import Blocks
from planner.graph.operator_graph import Operator
from planner.plan.bind import BoundPlan
from planner.plan.discovered import discovered
from planner.plan.plan import Plan, Prediction
from planner.plan.roles import Roles
from planner.plan.words import gradient_words, recomputation_words
from planner.report.discovered import discovered_table
from planner.report.table import table_of
from planner.report.units import bytes_text, count_text, percent_text, seconds_text
from planner.sharding.labels import factor_labels
from planner.sharding.layout import format_layout

_SHOWN = frozenset({"matmul", "attention", "experts", "normalisation", "embedding", "cross_entropy"})
_WORDS = {
    "o": "out",
    "i": "in",
    "g": "heads",
    "r": "query heads",
    "v": "vocabulary",
    "h": "hidden",
    "n": "tokens",
    "f": "width",
    "e@b": "experts",
    "e@s": "experts",
    "k@q": "ring",
}
"""Names of factors in rules, spelled out."""


_LONG = 100
"""Characters of a list of kept operators after which blocks are only counted."""


def print_plan(
    console: Console, bound: BoundPlan, roles: Roles, prediction: Prediction, *, details: bool = True
) -> None:
    """Print a bound plan: degrees, who is sharded how, time and memory."""
    console.print(_headline(bound.plan))
    console.print(_degrees(bound.plan, roles))
    if details:
        console.print(_layers(bound))
    console.print(_costs(bound.plan, prediction))
    if found := discovered(bound):
        console.print(discovered_table(found))


def _headline(plan: Plan) -> RenderableType:
    model, training = plan.model, plan.training
    length = f", {model.sequence_length} tokens each" if model.sequence_length else ""
    return Text.from_markup(
        f"\n[bold]{model.reference}[/bold] ({count_text(model.parameters)} parameters) on "
        f"[bold]{plan.cluster.devices} x"
        f" {plan.cluster.machine}[/bold]\nglobal batch {training.global_batch}{length}; {training.precision}, "
        f"{training.optimizer}{gradient_words(training.update)}"
    )


def _degrees(plan: Plan, roles: Roles) -> RenderableType:
    table = table_of("\nParallelism", "", "")
    table.show_header = False
    degrees = f"data {roles.data} x tensor {roles.tensor} x context {roles.context} x pipeline {roles.pipeline}"
    table.add_row("degrees", degrees + (f" x replicated {roles.replicated}" if roles.replicated > 1 else ""))
    if roles.expert > 1:
        table.add_row("", f"expert {roles.expert}, over devices that split tokens")
        table.add_row("routers", f"fullest device {plan.training.imbalance:g} times the average")
    if roles.replicated > 1:
        table.add_row("", f"{roles.replicated} devices each do the same work: as many fewer would be as fast")
    table.add_row("mesh of a stage", " x ".join(f"{axis.axis} {axis.size}" for axis in roles.axes) or "one device")
    for axis in roles.axes:
        table.add_row(f"  {axis.axis}", f"{axis.role}: splits {axis.detail}")
    if roles.tensor > 1:
        table.add_row("sequence parallel", "yes" if roles.sequence_parallel else "no")
    table.add_row("optimizer sharding", f"ZeRO {roles.zero}" if roles.zero != "off" else "off")
    together = f", {plan.training.copies} at a time" if plan.training.copies > 1 else ""
    table.add_row("micro-batches", f"{plan.training.micro_batches} of {plan.training.part} samples{together}")
    if roles.pipeline > 1:
        blocks = ", ".join(sorted({str(stage.blocks) for stage in plan.stages}))
        virtual = f", {plan.virtual_stages} stages a device" if plan.virtual_stages > 1 else ""
        slices = f", the sequence in {plan.slices} slices" if plan.slices > 1 else ""
        table.add_row("pipeline", f"{plan.schedule}, {blocks} blocks a stage{virtual}{slices}")
    long = len(roles.recomputation) > _LONG
    table.add_row("recomputation", recomputation_words(plan) if long else roles.recomputation)
    return table


def _layers(bound: BoundPlan) -> RenderableType:
    """Who is sharded how: operators that do the work, before the blocks, in the first block of each kind and after
    them."""
    if not bound.plan.mesh.axes:
        return Text("")
    labels = factor_labels(bound.graph)
    title = "\nWho is sharded how" + (_stand_in(bound.blocks))
    table = table_of(title, "operator", *bound.plan.mesh.names, "result", "weight", "state")
    for at, operator in enumerate(bound.operators):
        if operator.rule.op_class not in _SHOWN or bound.blocks.template(at) != at:
            continue
        words = [_WORDS.get(labels[at][c], labels[at][c]) if c is not None else "-" for c in operator.strategy]
        stored = [bound.parameters[name] for name in operator.operator.operands if name in bound.parameters]
        weight = format_layout(stored[0].weight) if stored else ""
        state = format_layout(stored[0].state) if stored else ""
        result = format_layout(operator.layouts.results[0].forward)
        table.add_row(_short(operator.operator), *words, result, weight, state)
    return table


def _stand_in(blocks: Blocks) -> str:
    if not blocks.count:
        return ""
    return " (first block for all)" if len(blocks.firsts) == 1 else " (first block of each kind)"


def _short(operator: Operator) -> str:
    """The last two names of the module's path (not numbers), or the operator where it stands in the model itself."""
    names = [part for part in operator.module.split(".") if not part.isdigit()]
    return ".".join(names[-2:]) or operator.op.split(".")[1]


def _costs(plan: Plan, prediction: Prediction) -> RenderableType:
    table = table_of("\nPrediction", "", "")
    table.show_header = False
    table.add_row("step time", seconds_text(prediction.step_seconds))
    if prediction.low_seconds is not None and prediction.high_seconds is not None:
        ends = f"{seconds_text(prediction.low_seconds)} to {seconds_text(prediction.high_seconds)}"
        table.add_row("4 of 5 measured steps", ends)
    devices = plan.cluster.devices
    if plan.model.sequence_length:
        tokens = prediction.samples_per_second * plan.model.sequence_length / devices
        table.add_row("tokens/s per device", f"{tokens:,.0f}")
    else:
        table.add_row("samples/s per device", f"{prediction.samples_per_second / devices:,.1f}")
    table.add_row("model FLOPs utilisation", percent_text(prediction.model_flops_utilisation))
    share = prediction.peak_bytes / prediction.capacity_bytes
    table.add_row(
        "peak memory",
        f"{bytes_text(prediction.peak_bytes)} of {bytes_text(prediction.capacity_bytes)} ({percent_text(share)})",
    )
    return Group(
        table,
        *_stages(prediction),
        _parts("\nTime of a step", prediction.time, prediction.step_seconds, seconds_text),
        _parts("\nMemory of the fullest device", prediction.memory, prediction.peak_bytes, bytes_text),
    )


def _stages(prediction: Prediction) -> tuple[Table, ...]:
    """Every pipeline rank, equal neighbours in one row; nothing where there is one."""
    if len(prediction.stages) < 2:
        return ()
    table = table_of("\nPipeline stages", "stage", "a micro-batch", "once a step", "peak memory")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = [
        (seconds_text(stage.micro_batch_seconds), seconds_text(stage.once_seconds), bytes_text(stage.peak_bytes))
        for stage in prediction.stages
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
        if value > 0:
            table.add_row(name, text(value), percent_text(value / whole))
    return table
