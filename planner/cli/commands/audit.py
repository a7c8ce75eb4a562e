"""`plan audit`: compares a plan's prediction with what the runtime executes, at the plan's full size, without
devices."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.commands.show import ExecutedModel, Hardware, built_again, naming
from planner.cli.errors import OUTPUT_SCHEMA_VERSION, reporting
from planner.cli.output import write_json
from planner.cli.printing import console_of
from planner.cli.texts import say

if TYPE_CHECKING:
    from rich.table import Table

    from planner.report.console import PlainConsole
    from runtime.auditing.audit import Collectives, Products, StageAudit

_FLOPS = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))
_NAMED = 10
"""Maximum number of differences listed per stage; the others are counted."""


def audit(
    plan_file: Annotated[Path, typer.Argument(help="A plan file.")],
    model: ExecutedModel = None,
    hardware: Hardware = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with the rows of all operators.")
    ] = False,
) -> None:
    """Run one rank of every stage on fake tensors, and compare it with the prediction.

    Compares collectives (kind, bytes, axis, count), floating point operations and live memory, at the full size of the
    plan, on this machine. Exit code 1 if anything differs.

        plan audit llama70b-64.json
    """
    with reporting(as_json):
        found = []
        for stage in _stages(plan_file, hardware, model):
            found.append(stage)
            if not as_json:
                _print(stage)
        agrees = all(stage.agrees for stage in found)
        if as_json:
            write_json("plan audit", _content(found, agrees))
        else:
            _print_verdict(found)
        raise typer.Exit(0 if agrees else 1)


def _stages(plan_file: Path, hardware: str | None, given: str | None) -> "Iterator[StageAudit]":
    from planner.plan.binding.machine import machine_of
    from planner.plan.file import load_plan
    from runtime.auditing.audit import audit as audited

    plan = load_plan(plan_file)
    with naming(plan_file):
        cluster = machine_of(plan.cluster, hardware)
        model = built_again(plan, given, ", and an audit runs its operators")
        yield from audited(plan, model.graph, model.batch, cluster)


def _print(stage: "StageAudit") -> None:
    from planner.report.console import styled

    console = console_of()
    console.print(styled((f"\nStage {stage.stage}", "bold"), f", checked on rank {stage.rank}"))
    console.print(_collectives(stage))
    console.print(_products(stage))
    console.print(_memory(stage))
    _print_differences(console, stage)


def _collectives(stage: "StageAudit") -> "Table":
    from planner.report.table import table_of
    from planner.report.units import bytes_text
    from runtime.auditing.audit import HOST_LINK

    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0] * 4)
    for row in stage.collectives:
        axis = "host" if row.kind == HOST_LINK else "stages" if row.axis is None else f"axis{row.axis}"
        total = sums[row.phase, row.kind, axis]
        for place, count in enumerate((row.predicted, row.emitted)):
            total[place] += count
            total[place + 2] += count * row.nbytes
    table = table_of(
        "Collectives of a step", "pass", "kind", "axis", "predicted", "runtime", "predicted bytes", "runtime bytes"
    )
    for (phase, kind, axis), (predicted, emitted, nbytes, sent) in sums.items():
        counts = (f"{predicted:,.0f}", f"{emitted:,.0f}", bytes_text(nbytes), bytes_text(sent))
        table.add_row(phase, kind, axis, *counts)
    return table


def _products(stage: "StageAudit") -> "Table":
    from planner.report.table import table_of

    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in stage.products:
        sums[row.phase][0] += row.predicted
        sums[row.phase][1] += row.emitted
    most = max((max(pair) for pair in sums.values()), default=0.0)
    scale, unit = next((one for one in _FLOPS if most >= one[0]), _FLOPS[-1])
    table = table_of("FLOPs of a step", "pass", f"predicted {unit}", f"runtime {unit}")
    for phase, (predicted, emitted) in sums.items():
        table.add_row(phase, f"{predicted / scale:,.3f}", f"{emitted / scale:,.3f}")
    return table


def _memory(stage: "StageAudit") -> "Table":
    from planner.report.table import table_of
    from planner.report.units import bytes_text

    table = table_of("Live memory at its peak", "", "predicted", "runtime")
    for name, nbytes in stage.predicted_live.items():
        table.add_row(name, bytes_text(nbytes), bytes_text(stage.live[name]))
    table.add_row("total", bytes_text(stage.predicted_peak), bytes_text(stage.peak))
    table.add_row("predicted peak with allocator slack", bytes_text(stage.stated), "")
    return table


def _print_differences(console: "PlainConsole", stage: "StageAudit") -> None:
    from planner.report.console import styled

    unequal = stage.unequal
    for row in unequal[:_NAMED]:
        console.print(styled(("differs", "red"), f": {_difference(row)}"), soft_wrap=True)
    if len(unequal) > _NAMED:
        console.print(f"and {len(unequal) - _NAMED} more; --json lists all")
    if not stage.memory_agrees:
        share = stage.peak / stage.predicted_peak - 1
        bound = "" if stage.peak <= stage.stated else ", and above the predicted peak with allocator slack"
        words = f": live memory is {share:+.1%} off the prediction{bound}"
        console.print(styled(("differs", "red"), words), soft_wrap=True)


def _difference(row: "Collectives | Products") -> str:
    from runtime.auditing.audit import HOST_LINK, Collectives

    where = f"{row.operator or 'no operator'}, {row.phase}"
    if isinstance(row, Collectives):
        away = "to or from the host" if row.kind == HOST_LINK else "between stages"
        axis = away if row.axis is None else f"along axis{row.axis}"
        return (
            f"{where}: {row.kind} of {row.nbytes:,.0f} bytes {axis}: predicted {row.predicted}, runtime {row.emitted}"
        )
    return f"{where}: predicted {row.predicted:,.0f} floating point operations, runtime {row.emitted:,.0f}"


def _print_verdict(found: "list[StageAudit]") -> None:
    rows = sum(len(stage.collectives) + len(stage.products) for stage in found)
    wrong = sum(len(stage.unequal) for stage in found)
    worst = max(found, key=lambda stage: abs(stage.peak / stage.predicted_peak - 1))
    share = worst.peak / worst.predicted_peak - 1
    if all(stage.agrees for stage in found):
        say(f"\nThe runtime agrees with the plan: {rows} rows equal, live memory within {abs(share):.2%}")
    else:
        say(f"\nThe runtime DIFFERS from the plan: {wrong} of {rows} rows; live memory off by {share:+.2%} at most")


def _content(found: "list[StageAudit]", agrees: bool) -> Mapping[str, Any]:
    stages = [
        {
            "stage": stage.stage,
            "rank": stage.rank,
            "agrees": stage.agrees,
            "collectives": [asdict(row) for row in stage.collectives],
            "products": [asdict(row) for row in stage.products],
            "live_bytes": dict(stage.live),
            "predicted_live_bytes": dict(stage.predicted_live),
            "stated_bytes": stage.stated,
        }
        for stage in found
    ]
    return {"schema_version": OUTPUT_SCHEMA_VERSION, "agrees": agrees, "stages": stages}
