"""`planner.replan`: the job of a plan searched again for another profile, such as one that measured runs corrected."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardware_profiles import Machine, load_machine
from hardware_profiles.nicknames import full_profile
from planner.api.checks import amounts, callbacks, names, profile, public
from planner.api.planned import PlanOrPath, loaded, planned_graph
from planner.limits import limited
from planner.plan.binding.machine import computing_in, machine_of
from planner.plan.compare.contrasts import Difference
from planner.plan.compare.repricing import repriced
from planner.plan.layout.roles import roles
from planner.plan.plan import Plan
from planner.plan.words import plan_words, telling
from planner.strategy_search.analysis.around import request_for
from planner.strategy_search.job import machine_from
from planner.strategy_search.result import Progress, SearchResult
from planner.strategy_search.search import search

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph
    from planner.plan.binding.bind import BoundPlan

WORTH = 1e-3
"""Another plan is taken if it saves this share of the step."""


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """A plan and the best one of its job for another profile.

    Attributes:
        before: the plan as its file says.
        kept: the same plan, priced by the other profile.
        best: the plan that was found, if it takes 0.1% less than `kept`, or if `kept` needs more memory than there is;
            else `kept`.
        found: the result of the search, with its gap and whether it was stopped.
    """

    before: Plan
    kept: "BoundPlan"
    best: "BoundPlan"
    found: SearchResult

    @property
    def plan(self) -> Plan:
        """The plan to take."""
        return self.best.plan

    @property
    def saved_seconds(self) -> float:
        """Seconds of a step that the best plan saves; 0 where the plan stays, below 0 where only slower plans fit."""
        return self.kept.plan.prediction.step_seconds - self.plan.prediction.step_seconds

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What the best plan changes, in words; empty where the plan stays, or where only operators differ."""
        here, there = (plan_words(bound, roles(bound)) for bound in (self.kept, self.best))
        return tuple(Difference(name=name, here=here[name], there=there[name]) for name in telling((here, there)))

    def __repr__(self) -> str:
        now = f"{self.kept.plan.prediction.step_seconds:.3g} s a step"
        there = "the plan stays" if self.best is self.kept else f"{self.plan.prediction.step_seconds:.3g} s"
        return f"Replanned({self.before.model.reference!r}, {now}, {there})"


def machine_by(plan: Plan, hardware: str, levels: str | None = None) -> Machine:
    """The machine of a plan by another profile, in the plan's precision. Its network has the levels that are given;
    else those of the plan if the profile has the same name, as levels state bandwidths of that hardware."""
    if levels is None and load_machine(hardware).name == plan.cluster.profile:
        return machine_of(plan.cluster, hardware)
    machine = machine_from(hardware, levels=levels, software=plan.cluster.software, devices=plan.cluster.devices)
    return computing_in(machine, plan.training.precision)


def replanned(
    before: Plan,
    kept: "BoundPlan",
    graph: "OperatorGraph",
    batch: int,
    machine: Machine,
    on_progress: Callable[[Progress], None],
    cancelled: Callable[[], bool],
) -> Replanned:
    """Search the job of a plan on a machine, by which `kept` is priced. `graph` has `batch` samples."""
    found = search(request_for(kept.plan, graph, batch, machine), on_progress, cancelled)
    held = kept.plan.prediction
    worth = held.step_seconds * (1 - WORTH) if held.peak_bytes <= held.capacity_bytes else math.inf
    best = found.bound if found.plan.prediction.step_seconds <= worth else kept
    return Replanned(before=before, kept=kept, best=best, found=found)


@public
def replan(
    plan: PlanOrPath,
    hardware: str | os.PathLike[str],
    *,
    cluster: str | None = None,
    model: str | None = None,
    time_limit: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Replanned:
    """Search the job of a plan again for another profile, with no decision fixed.

    Args:
        plan: a Plan, or the path of its file.
        hardware: name or TOML file of the profile, such as one that `fit` corrected. A profile of the same name keeps
            the network levels of the plan.
        cluster: network levels in place of these, as for `search`.
        model: the model, where the plan does not carry it.
        time_limit: seconds after which the best plan so far is taken.
        on_progress: called with a `Progress` after every configuration.
        cancelled: asked between configurations; once it returns True, the best plan so far is taken.

    Raises:
        RequestError: for an unknown profile, or an argument of a wrong type.
        PlanFileError: for a file that is none.
        ModelError: where the model cannot be found or traced.
        InfeasibleError: if nothing fits on that machine.
        LimitError: where `time_limit` was reached before there was a plan.
    """
    callbacks(on_progress=on_progress, cancelled=cancelled)
    names(cluster=cluster, model=model)
    amounts(time_limit=time_limit)
    with limited(time_limit):
        before = loaded(plan)
        machine = machine_by(before, full_profile(profile(hardware)), cluster)
        graph, batch = planned_graph(before, model)
        kept = repriced(before, graph, batch, machine)
        return replanned(
            before, kept, graph, batch, machine, on_progress or (lambda _: None), cancelled or (lambda: False)
        )
