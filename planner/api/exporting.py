"""A plan on its way to an engine: what the engine cannot say, and what the nearest plan that it can costs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.api.carrying import Step, Subject, plan_of, priced_losses, target_named
from planner.errors import RequestError

if TYPE_CHECKING:
    from hardware_profiles import Machine
    from planner.export.target import Job, Target
    from planner.graph.operator_graph import OperatorGraph
    from planner.plan.plan import Plan, Prediction

_NEGLIGIBLE = 5e-4  # of a step, or of its memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Hosts of one of several kinds of devices, counted from 0 as engines count nodes."""

    profile: str
    first: int
    count: int

    @property
    def words(self) -> str:
        """`0 to 3 of h100-80gb`."""
        last = f" to {self.first + self.count - 1}" if self.count > 1 else ""
        return f"{self.first}{last} of {self.profile}"


@dataclass(frozen=True, kw_only=True)
class Export:
    """A plan on its way to an engine.

    Attributes:
        steps: what the engine cannot say, with the price of the plan after each.
        prediction: of the plan that the engine will run.
        hosts: in which order hosts are to be started, where they have different devices; else empty.
    """

    target: "Target"
    plan: "Plan"
    job: "Job"
    steps: tuple[Step, ...]
    prediction: "Prediction"
    hosts: tuple[Hosts, ...] = ()

    @property
    def fits(self) -> bool:
        return self.prediction.peak_bytes <= self.prediction.capacity_bytes

    @property
    def change(self) -> str:
        """`39.2 s a step instead of 34.7 s (13% more), 74.4 GiB instead of 79.8 GiB`."""
        from planner.report.units import bytes_text, percent_text, seconds_text

        here, there = self.plan.prediction, self.prediction
        share = there.step_seconds / here.step_seconds - 1
        words = (
            f"{percent_text(abs(share))} {'more' if share > 0 else 'less'}" if abs(share) > _NEGLIGIBLE else "as much"
        )
        fault = "" if self.fits else f", more than the {bytes_text(there.capacity_bytes)} there are"
        return (
            f"{seconds_text(there.step_seconds)} a step instead of {seconds_text(here.step_seconds)} ({words}), and"
            f" {bytes_text(there.peak_bytes)} per device instead of {bytes_text(here.peak_bytes)}{fault}"
        )


def export_of(plan: "Plan", to: str, machine: "Machine", graph: "OperatorGraph", batch: int) -> Export:
    """The nearest plan that an engine can say, for a plan whose model is `graph` on `batch` samples. Raises
    RequestError for an engine that is not known."""
    from planner.export.architecture import architecture_of
    from planner.export.describe import describe, differences
    from planner.export.target import Job
    from planner.plan.binding.bind import bind

    target = target_named(to)
    bound = bind(plan, graph, batch)
    subject = Subject(model=plan.model, graph=graph, batch=batch, cluster=machine)
    description = describe(bound)
    losses = target.nearest(description)
    usual = plan_of(subject, description)
    steps, last = priced_losses(subject, bound, usual, differences(bound, usual), losses)
    job = Job(
        model=plan.model.reference,
        description=losses[-1].description if losses else description,
        architecture=architecture_of(plan.model.reference, plan.model.sequence_length),
        per_node=per_node_of(machine),
    )
    return Export(
        target=target,
        plan=plan,
        job=job,
        steps=steps,
        prediction=last.plan.prediction,
        hosts=tuple(hosts_of(machine, job.per_node)),
    )


def per_node_of(machine: "Machine") -> int:
    """Devices in use on every host. Raises RequestError where groups differ in it: one launch starts equally many
    processes on all."""
    from hardware_profiles import parts_of

    found = {part.name: min(part.devices_per_node or part.devices, part.devices) for part in parts_of(machine)}
    if len(set(found.values())) > 1:
        words = ", ".join(f"{count} on {name}" for name, count in found.items())
        raise RequestError(
            f"hosts have different numbers of devices ({words}), and engines start equally many processes on each;"
            " plan for groups with equal hosts, as in h100-80gb[node=4,cluster@25]:32"
        )
    return next(iter(found.values()))


def hosts_of(machine: "Machine", per_node: int) -> "Iterator[Hosts]":
    """Which hosts of `per_node` devices are of which kind, where there are several: a group in use is whole hosts."""
    from hardware_profiles import Cluster

    if isinstance(machine, Cluster):
        return
    first = 0
    for group in machine.groups:
        count, rest = divmod(group.devices, per_node)
        assert not rest
        yield Hosts(profile=group.name, first=first, count=count)
        first += count
