"""Prices a plan file anew, on its machine or another one."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hardware_profiles.units import bytes_text
from planner.cli.commands.plan import progress_console
from planner.cli.commands.show import naming, traced_again
from planner.cli.machines import devices_of
from planner.cli.options import Options, flag
from planner.cli.output import plan_content, write_json
from planner.cli.printing import console_of
from planner.cli.waiting import waiting
from planner.errors import InfeasibleError, RequestError

if TYPE_CHECKING:
    from hardware_profiles import Machine
    from planner.plan.binding.bind import BoundPlan
    from planner.plan.plan import Plan

_APPLY = frozenset(
    {"model", "cluster", "software", "devices", "hardware", "output", "as_json", "quiet", "verbose", "layouts"}
)


def price_file(path: Path, options: Options) -> None:
    """Price a plan file, report it, and write the plan if requested.

    Raises InfeasibleError where it does not fit, with the bytes that are missing.
    """
    from planner.plan.file import load_plan, save_plan

    strange = [flag(name) for name in options.given() if name not in _APPLY]
    if strange:
        raise RequestError(
            f"{', '.join(strange)}: {path} decides that; with a plan file give only --hardware, --cluster,"
            " --software and --devices, or edit the file"
        )
    plan = load_plan(path)
    bound, cluster = _moved(path, plan, options)
    _check_fits(path, bound.plan, cluster)
    if options.output:
        save_plan(bound.plan, options.output)
    if options.as_json:
        _print_json(bound, plan, options)
    elif options.speaks:
        _print(bound, plan, options)


def _moved(path: Path, plan: "Plan", options: Options) -> "tuple[BoundPlan, Machine]":
    """The plan as it is priced now, and the machine."""
    from hardware_profiles import is_mixed
    from planner.plan.binding.machine import machine_of
    from planner.plan.compare.repricing import repriced
    from planner.strategy_search.job import machine_from

    grouped = options.hardware is not None and is_mixed(options.hardware)
    devices = options.devices or (devices_of(options.profile) if grouped else plan.cluster.devices)
    with naming(path), waiting(progress_console(options)) as wait:
        software = plan.cluster.software if options.software is None else options.software
        known = replace(plan.cluster, devices=devices, software=software)
        if options.cluster is None and _same_profile(options.hardware, plan):
            cluster = machine_of(known, options.hardware)
        else:
            profile = options.hardware or plan.cluster.profile
            cluster = machine_from(profile, levels=options.cluster, software=software, devices=devices)
        wait.phase("tracing the model")
        model = traced_again(plan, options.model)
        wait.phase("pricing the plan")
        return repriced(plan, model.graph, model.batch, cluster), cluster


def _same_profile(hardware: str | None, plan: "Plan") -> bool:
    """Whether the profile is that of the plan, perhaps given as its file, so that the plan's network levels hold."""
    from hardware_profiles import load_machine

    return hardware is None or load_machine(hardware).name == plan.cluster.profile


def _check_fits(path: Path, plan: "Plan", cluster: "Machine") -> None:
    from planner.plan.layout.offloaded import offloaded_fault

    prediction = plan.prediction
    outside = offloaded_fault(prediction, cluster)
    if outside is not None:
        where = f"{plan.cluster.devices} x {plan.cluster.machine}"
        raise InfeasibleError(f"{path} does not fit on {where}: {outside.reason}; plan again for it")
    missing = prediction.peak_bytes - prediction.capacity_bytes
    if missing > 0:
        raise InfeasibleError(
            f"{path} does not fit on {plan.cluster.devices} x {plan.cluster.machine}: it needs"
            f" {bytes_text(prediction.peak_bytes)} per device, {bytes_text(missing)} more than the"
            f" {bytes_text(prediction.capacity_bytes)} available; plan again for it"
        )


def _print_json(bound: "BoundPlan", before: "Plan", options: Options) -> None:
    from planner.plan.layout.roles import roles

    content = plan_content(bound.plan, roles(bound), bound.plan.prediction)
    content["step_seconds_in_file"] = before.prediction.step_seconds
    content["plan_file"] = options.output
    write_json("plan estimate PLAN", content)


def _print(bound: "BoundPlan", before: "Plan", options: Options) -> None:
    from planner.plan.layout.roles import roles
    from planner.report.console import styled
    from planner.report.terminal import print_plan
    from planner.report.units import percent_text, seconds_text

    console = console_of()
    prediction, told = bound.plan.prediction, before.prediction.step_seconds
    print_plan(console, bound, roles(bound), prediction, layouts=options.layouts)
    change = prediction.step_seconds / told - 1
    words = f"{percent_text(abs(change))} {'more' if change > 0 else 'less'}" if abs(change) > 1e-9 else "as now"
    profile = f"{before.cluster.devices} x {before.cluster.machine}"
    console.print(f"\nIn the file, for {profile}: {seconds_text(told)} a step; this is {words}", soft_wrap=True)
    if options.output:
        console.print(styled("Plan written to ", (str(options.output), "bold")), soft_wrap=True)
