"""Plans for other numbers of devices, searched when they are needed and kept beside the checkpoints.

    runs/a/plans/4-devices.json       the plan with which the run began
    runs/a/plans/3-devices.json       the plan searched after a device was lost

The training stays as in the first plan: model, global batch, precision, optimizer, treatment of gradients.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hardware_profiles import Cluster, HardwareProfileError, UnknownProfileError
from planner.errors import CheckpointError, PlannerError, RequestError, RunError
from planner.plan.file import dump_plan, load_plan, parse_plan
from planner.plan.plan import Plan
from planner.plan.writing import write_atomically
from runtime.checkpoint.together import said_by_first
from runtime.run_folder.private import ensure_folder
from runtime.run_settings import RunSettings

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph
    from planner.models.zoo import BuiltModel


PLANS = "plans"
"""The folder of the plans, inside of the checkpoint folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The minimum and maximum number of devices on which training continues."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


def range_of(text: str) -> Range:
    """`2:4` as a range. Raises RequestError for anything else."""
    found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text.strip())
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise RequestError(f"--elastic {text}: write MIN:MAX, the fewest and the most devices to train with, as in 2:4")
    return Range(least=int(found[1]), most=int(found[2]))


class Plans:
    """The plans of one run by number of devices, in `folder`; `model` is the user's argument for the model.

    Raises RequestError for a range without the devices of the first plan, and for a plan whose updates depend on the
    number of devices.
    """

    def __init__(self, first: Plan, folder: Path, allowed: Range, model: str | None = None) -> None:
        _check(first, allowed)
        self.allowed = allowed
        self._first, self._folder = first, folder
        self._model = model
        self._key = hashlib.sha256(dump_plan(first).encode()).hexdigest()[:12]
        self._known: dict[int, Plan | PlannerError] = {first.cluster.devices: first}
        self._traced: tuple[BuiltModel, OperatorGraph] | None = None

    def plan(self, devices: int) -> Plan:
        """The plan for this number of devices: kept, or searched and then kept. Raises PlannerError where there is
        none."""
        found = self._known.get(devices)
        if found is None:
            found = self._known[devices] = self._kept(devices) or self._searched(devices)
        if isinstance(found, PlannerError):
            raise found
        return found

    def most(self, devices: int) -> Plan:
        """The plan for the largest number of devices, up to `devices`, that has one. Raises RunError where no allowed
        number has a plan."""
        why = f"there are {devices} devices"
        for count in self._counts(devices):
            try:
                return self.plan(count)
            except PlannerError as error:
                why = f"{count} devices: {error}"
        raise RunError(f"--elastic {self.allowed}: training cannot continue: {why}")

    def path(self, devices: int) -> Path:
        """The path of the plan for this number of devices."""
        return self._folder / f"{devices}-devices-{self._key}.json"

    def _counts(self, devices: int) -> Iterator[int]:
        yield from range(min(devices, self.allowed.most), self.allowed.least - 1, -1)

    def _kept(self, devices: int) -> Plan | None:
        path = self.path(devices)
        return load_plan(path) if path.exists() else None

    def _searched(self, devices: int) -> Plan | PlannerError:
        from planner.plan.binding.machine import machine_of
        from planner.strategy_search.analysis.around import request_for
        from planner.strategy_search.search import search

        model, graph = self._traced = self._traced or self._trace()
        try:
            cluster = machine_of(replace(self._first.cluster, devices=devices))
            if not isinstance(cluster, Cluster):
                raise RequestError("--elastic: a plan for several kinds of devices does not say which of them are left")
            found = search(request_for(self._first, graph, model.batch, cluster)).plan
        except UnknownProfileError:
            named = self._first.cluster.profile
            return RequestError(
                f"--elastic: a plan for another number of devices needs a packaged profile, and '{named}' is none"
            )
        except (PlannerError, HardwareProfileError) as error:
            return error if isinstance(error, PlannerError) else RequestError(str(error))
        ensure_folder(self._folder)
        text = dump_plan(found)
        write_atomically(self.path(devices), text, private=True)
        return parse_plan(text)

    def _trace(self) -> "tuple[BuiltModel, OperatorGraph]":
        from planner.graph.trace import trace
        from planner.graph.tracing.on_meta import on_meta
        from planner.plan.binding.model_of import build_planned

        built = build_planned(self._first, self._model)
        return built, trace(on_meta(built.module), built.args, built.kwargs)


def plan_of_all(first: Plan, settings: RunSettings, devices: int) -> Plan:
    """The plan of an elastic run for as many devices as there are processes, the same on every rank. Collective. Raises
    PlannerError, on every rank, where there is none."""
    assert settings.elastic is not None
    assert settings.save is not None
    allowed, folder = range_of(settings.elastic), Path(settings.save) / PLANS

    def found() -> str:
        try:
            if not allowed.least <= devices <= allowed.most:
                raise RunError(f"--elastic {allowed}: there are {devices} processes")
            return dump_plan(Plans(first, folder, allowed, settings.model).plan(devices))
        except PlannerError as error:
            raise CheckpointError(str(error)) from error

    return parse_plan(said_by_first(found, str))


def _check(plan: Plan, allowed: Range) -> None:
    devices = plan.cluster.devices
    if not allowed.least <= devices <= allowed.most:
        raise RequestError(
            f"--elastic {allowed}: the plan is for {devices} devices; give a range with {devices} in it, such as"
            f" {min(allowed.least, devices)}:{max(allowed.most, devices)}"
        )
    if not plan.schedule_kind.flushes:
        raise RequestError(
            f"--elastic: the staleness of weights under {plan.schedule} depends on the stages, so another number of"
            " devices computes something else; plan with a schedule that flushes, such as --schedule 1f1b"
        )
    if plan.training.update.gradients == "sum":
        raise RequestError(
            "--elastic: gradients are summed over micro-batches and data-parallel ranks (--gradients sum), so another"
            " number of devices trains with other gradients; plan with --gradients mean"
        )
    if plan.training.update.local_parameters:
        names = ", ".join(sorted(plan.training.update.local_parameters)[:3])
        raise RequestError(
            f"--elastic: parameters that each device trains for itself ({names}) need the plan's number of devices"
        )
