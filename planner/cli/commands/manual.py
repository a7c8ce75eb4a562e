"""`plan manual`, also `plan --mode manual PLAN.json`: verifies, prices and (with --steps) runs an edited plan."""

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.commands.show import Hardware, OfModel, judge
from planner.cli.errors import reporting
from planner.cli.output import plan_content, write_json
from planner.cli.printing import console_of
from planner.cli.waiting import waiting
from planner.errors import InfeasibleError, RequestError

if TYPE_CHECKING:
    from planner.plan.compare.verify import Verdict
    from planner.plan.plan import Plan

_MODE = "--mode"
_MANUAL = "manual"
_TAKE_FILES = frozenset({"--model", "--cluster", "--hardware", "--shard-from", "-o", "--output"})
"""Options whose value may be a file that is not the plan to run."""


def as_command(given: Sequence[str], commands: Collection[str]) -> list[str]:
    """The words of a call, with `plan --mode manual PLAN.json ...` replaced by the command that it means."""
    words = [*given[1:]] if given[:1] == ["search"] else [*given]
    if words and words[0] in commands:
        return [*given]
    rest = list[str]()
    while words:
        word = words.pop(0)
        if word == f"{_MODE}={_MANUAL}" or (word == _MODE and words[:1] == [_MANUAL]):
            words = words[1:] if word == _MODE else words
            if any(_is_plan(rest + words, at) for at in range(len(rest + words))):
                return [_MANUAL, *rest, *words]
            return [*given]
        rest.append(word)
    return [*given]


def _is_plan(words: Sequence[str], at: int) -> bool:
    """Whether a word names the plan file: a file name that is not an option's value."""
    named = words[at].endswith(".json") or os.path.isfile(words[at])
    return named and not words[at].startswith("-") and (at == 0 or words[at - 1] not in _TAKE_FILES)


def manual(
    plan_file: Annotated[Path, typer.Argument(help="A plan file, as you have edited it.")],
    steps: Annotated[int, typer.Option(metavar="N", help="Then run N training steps.", min=0)] = 0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan with its new price.")
    ] = None,
    hardware: Hardware = None,
    model: OfModel = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Verify, price and run a plan file that you have edited. Nothing is searched.

    It is the same as `plan --mode manual PLAN.json`.

    A plan that is not legal is refused with the operator and the reason; a plan that does not fit, with the missing
    bytes. The losses of a run are compared with those of the unsharded model.

        plan manual llama70b-64.json
        plan manual tiny.json --steps 5
        plan --mode manual tiny.json --steps 5
    """
    with reporting(as_json):
        if as_json and steps:
            raise RequestError("--json prints one object; leave out --steps, and run it by plan run PLAN --json")
        with waiting() as wait:
            verdict, _ = judge(plan_file, hardware, model, wait)
        _check_fits(plan_file, verdict)
        before, priced = verdict.bound.plan, _priced(verdict)
        if output is not None:
            from planner.plan.file import save_plan

            save_plan(priced, output)
        if as_json:
            _print_json(verdict, priced, output)
        else:
            _print(verdict, before, priced, output)
        if not steps:
            return
        raise typer.Exit(_run(output or plan_file, steps, model))


def _priced(verdict: "Verdict") -> "Plan":
    """The plan priced as it is now; the proof of the search no longer holds for an edited plan."""
    plan = verdict.bound.plan
    if verdict.as_stated:
        return plan
    proof = replace(plan.provenance, status="feasible", gap=1.0)
    return replace(plan, prediction=verdict.prediction, provenance=proof)


def _check_fits(plan_file: Path, verdict: "Verdict") -> None:
    if verdict.outside is not None:
        raise InfeasibleError(f"{plan_file} does not fit: {verdict.outside}")
    if not verdict.fits:
        from planner.report.units import bytes_text

        missing = verdict.prediction.peak_bytes - verdict.prediction.capacity_bytes
        raise InfeasibleError(
            f"{plan_file} does not fit: {bytes_text(missing)} more than the"
            f" {bytes_text(verdict.prediction.capacity_bytes)} of a device; split or recompute more"
        )


def _print_json(verdict: "Verdict", priced: "Plan", output: Path | None) -> None:
    from planner.plan.layout.roles import roles

    content = plan_content(priced, roles(verdict.bound), verdict.prediction)
    content["step_seconds_in_file"] = verdict.bound.plan.prediction.step_seconds
    content["plan_file"] = None if output is None else str(output)
    write_json("plan manual", content)


def _print(verdict: "Verdict", before: "Plan", priced: "Plan", output: Path | None) -> None:
    from planner.plan.layout.roles import roles
    from planner.report.terminal import print_plan
    from planner.report.units import seconds_text

    console = console_of()
    print_plan(console, replace(verdict.bound, plan=priced), roles(verdict.bound), verdict.prediction)
    told = before.prediction.step_seconds
    words = "as its figures say" if verdict.as_stated else f"edited: its figures say {seconds_text(told)} a step"
    console.print(f"\nThe plan is legal and fits; {words}", soft_wrap=True)
    if output is not None:
        console.print(f"Plan written to {output}", soft_wrap=True)


def _run(path: Path, steps: int, model: str | None) -> int:
    """Run the plan on local processes, or as one rank of a launcher."""
    from planner.cli.texts import say
    from runtime.launch.launch import launch, write_text
    from runtime.run_settings import RunSettings

    return launch(path, RunSettings(steps=steps, model=model), write_text, say)
