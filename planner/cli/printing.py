"""Prints an answer for people: the best plan, other plans, the explanation, and the proof."""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING

from planner.cli.answer import Answer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.cli.engine_cost import EngineCost
    from planner.errors import StoppedBy
    from planner.report.console import PlainConsole

WIDTH = 120
"""Width of a report that goes into a file or a pipe."""


_MORE: "Mapping[StoppedBy, str]" = MappingProxyType(
    {"interrupt": "", "memory": " --planner-memory SIZE gives more.", "time": " --time-limit SECONDS gives more."}
)


def console_of() -> "PlainConsole":
    """The console for reports: as wide as the terminal or as COLUMNS says, else `WIDTH`."""
    from planner.report.console import PlainConsole

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return PlainConsole(width=None if known else WIDTH)


def print_answer(answer: Answer) -> None:
    """Print everything that was requested, on stdout."""
    from planner.report.explanation import explanation_lines, explanation_table
    from planner.report.search import Way, contexts_table, plans_table
    from planner.report.terminal import print_plan
    from planner.report.units import seconds_text

    console = console_of()
    best = answer.shown[0]
    print_plan(console, best.bound, answer.roles[0], best.plan.prediction, layouts=answer.options.layouts)
    if len(answer.shown) > 1 or answer.options.pareto or (answer.options.top or 1) > 1:
        against = "cost, in device-seconds" if answer.request.objective == "cost" else "memory"
        title = f"Time against {against}" if answer.options.pareto else "The best plans"
        rows = [(ranked.plan.prediction, words) for ranked, words in zip(answer.shown, answer.words, strict=True)]
        if answer.options.pareto and answer.request.objective == "cost":
            rows = [
                (
                    prediction,
                    {"devices": str(devices), "cost": seconds_text(prediction.step_seconds * devices), **words},
                )
                for devices, (prediction, words) in zip(
                    (one.plan.cluster.devices for one in answer.shown), rows, strict=True
                )
            ]
        console.print(plans_table(title, rows))
    if ways := answer.found.best.contexts:
        console.print(contexts_table([Way(**asdict(way)) for way in ways]))
    if answer.explanation is not None:
        console.print(explanation_table(answer.explanation))
        for line in explanation_lines(answer.explanation):
            console.print(line, soft_wrap=True)
    _print_choices(console, answer)
    if answer.engine is not None:
        console.print(_engine_table(answer.engine))
        console.print(answer.engine.text, soft_wrap=True)
    _print_proof(console, answer)
    _print_files(console, answer)


def _print_choices(console: "PlainConsole", answer: Answer) -> None:
    """The values that an estimate chose by itself."""
    if not answer.choices:
        return
    from planner.report.table import table_of

    table = table_of("\nNot given", "", "", "")
    table.show_header = False
    for choice in answer.choices:
        table.add_row(*choice)
    console.print(table)


def _engine_table(cost: "EngineCost") -> "RenderableType":
    """The differences between the best plan overall and the engine's best."""
    from planner.report.table import table_of

    table = table_of("\nWhat makes the difference", "", "possible", cost.title)
    for row in cost.differences:
        table.add_row(*row)
    return table


def _print_proof(console: "PlainConsole", answer: Answer) -> None:
    from hardware_profiles import parts_of
    from planner.report.search import (
        certificate_text,
        effort_text,
        misaligned_text,
        neighbour_text,
        offload_text,
        placements_text,
        proof_text,
        simpler_text,
        simulated_text,
        stopped_text,
        without_fp8_text,
    )
    from planner.strategy_search.request.offload import offload_of
    from planner.strategy_search.variants import misaligned_rows

    best, searches = answer.shown[0], [result.statistics for result in answer.found.results]
    console.print()
    if answer.found.stopped_by is not None:
        by = answer.found.stopped_by
        console.print(f"{stopped_text(by)}; this is the best so far.{_MORE[by]}", soft_wrap=True)
    covered = all(result.covered for result in answer.found.results)
    console.print(
        proof_text(
            answer.status,
            answer.gap,
            _where(answer),
            answer.result.assumed,
            covered=covered,
            apart=answer.result.apart if len(searches) == 1 else None,
        ),
        soft_wrap=True,
    )
    if about := simulated_text(best.seconds, best.bounded, fastest=answer.result.simpler is None):
        console.print(about, soft_wrap=True)
    if answer.result.placements:
        console.print(placements_text(answer.result.placements), soft_wrap=True)
    if answer.request.pinned.offload is None and offload_of(answer.result.plan).stores:
        alone = answer.result.on_devices_alone
        own = offload_text(answer.result.plan.prediction.step_seconds, None if alone is None else alone.seconds)
        console.print(own, soft_wrap=True)
    if answer.request.fp8 and not answer.result.plan.training.fp8:
        console.print(without_fp8_text(answer.request.fp8.recipe), soft_wrap=True)
    if (simpler := answer.result.simpler) is not None:
        counts = len(simpler.decisions), len(simpler.fastest_decisions)
        console.print(simpler_text(answer.result.slower, *counts), soft_wrap=True)
    here = (answer.request.global_batch, answer.request.cluster.devices)
    for near in answer.result.neighbours:
        there = (near.global_batch, near.devices)
        console.print(neighbour_text(here, there, near.step_seconds, near.gain), soft_wrap=True)
    if rows := misaligned_rows(answer.request):
        times = max(part.device.misaligned for part in parts_of(answer.request.cluster))
        console.print(misaligned_text(rows, times), soft_wrap=True)
    effort = effort_text(
        answer.request.algorithm,
        evaluated=sum(statistics.evaluated for statistics in searches),
        configurations=sum(statistics.configurations for statistics in searches),
        seconds=sum(statistics.seconds for statistics in searches),
        total=answer.seconds,
    )
    console.print(effort, soft_wrap=True)
    if (certificate := best.certificate) is not None:
        text = certificate_text(certificate.solver, certificate.status, certificate.gap, certificate.seconds)
        console.print(text, soft_wrap=True)


def _where(answer: Answer) -> str:
    """The plans that the proof is about, in words."""
    from planner.report.search import SPACES

    if answer.request.algorithm == "sharding_propagation":
        return "with the propagated strategies"
    if answer.options.pareto:
        by_cost = answer.request.objective == "cost"
        return "on the devices of each plan shown" if by_cost else "within the memory of each plan shown"
    if answer.choices:
        return "of this configuration"
    if (space := answer.request.space) is not None:
        return f"in the search space of {space.title}"
    return SPACES[answer.request.objective] + (" with this placement of tables" if answer.result.placements else "")


def _print_files(console: "PlainConsole", answer: Answer) -> None:
    if not answer.files:
        return
    from planner.models.zoo import is_of_zoo
    from planner.report.console import styled

    first, *others = answer.files
    model = answer.request.model.reference
    named = "" if is_of_zoo(model) else f" --model {shlex.quote(model)}"
    run = f"run it with: plan run {shlex.quote(str(first))}{named}"
    if (space := answer.request.space) is not None:
        run = f"write its settings with: plan export {shlex.quote(str(first))} --to {space.name} -o DIR{named}"
    console.print(styled("Plan written to ", (str(first), "bold"), f"; {run}"), soft_wrap=True)
    if others:
        console.print(f"The others: {' '.join(map(str, others))}", soft_wrap=True)
