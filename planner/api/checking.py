"""`planner.verify`, `planner.prove`: whether a plan is legal and costs what it says, and whether its runs are right."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardware_profiles import Machine
from hardware_profiles.nicknames import full_profile
from planner.api.checks import callbacks, names, number, profile, public
from planner.api.planned import PlanOrPath, built_model, loaded, planned_model
from planner.models.nicknames import full_model
from planner.plan.binding.machine import machine_of
from planner.plan.binding.model_of import PlannedModel, buildable
from planner.plan.compare.least_work import LeastWork, least_work
from planner.plan.compare.verify import Verdict
from planner.plan.compare.verify import verify as judged
from planner.plan.file import dump_plan, parse_plan
from planner.plan.plan import Plan, Prediction
from planner.plan.shrinking.limits import PROCESSES
from planner.sharding.discover import prove as prove_rules

if TYPE_CHECKING:
    from runtime.proving.prove import Proof


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What an independent check found of a legal plan.

    Attributes:
        verdict: the plan bound to its model, its price computed anew, and `remarks` on what differs from the file.
        least: the least step time of any plan, by its work alone; or in words why there is no such bound.
    """

    verdict: Verdict
    least: LeastWork | str

    @property
    def plan(self) -> Plan:
        return self.verdict.bound.plan

    @property
    def prediction(self) -> Prediction:
        """The price, computed anew."""
        return self.verdict.prediction

    @property
    def possible(self) -> bool:
        """Whether the step is as long as its work at least."""
        return isinstance(self.least, str) or not self.least.contradicts(self.prediction.step_seconds)

    @property
    def holds(self) -> bool:
        """Whether the plan fits, costs what it says, and is possible."""
        return self.verdict.fits and self.verdict.as_stated and self.possible

    def __repr__(self) -> str:
        verdict = self.verdict
        faults = (
            *(() if verdict.fits else ("does not fit",)),
            *(() if self.possible else ("impossible",)),
            *verdict.remarks,
        )
        said = "; ".join(faults) if faults else "fits and costs what it says"
        return f"Verified({self.plan.model.reference!r}, {said:.120})"


def check_provable(verdict: Verdict, known: PlannedModel) -> None:
    """Raise ModelError where rules that were found by trial cannot be proved, as the model was not built: operators
    that only a file lists are never run."""
    if known.built is None and any(op.rule is not None for op in verdict.bound.graph.operators):
        buildable(verdict.bound.plan.model, None, ", and rules that were found by trial are proved by running it")


def verified(verdict: Verdict, known: PlannedModel, machine: Machine, on_phase: Callable[[str], None]) -> Verified:
    """Prove the rules found by trial, and bound all plans of the job by their work."""
    on_phase("proving rules that were found by trial")
    prove_rules(verdict.bound.graph)
    on_phase("bounding all plans by their work")
    return Verified(verdict=verdict, least=least_work(verdict.bound.plan, known.graph, known.batch, machine))


@public
def verify(plan: PlanOrPath, *, model: str | None = None, hardware: str | os.PathLike[str] | None = None) -> Verified:
    """Check independently that a plan is legal, fits in memory, and costs what it says: `holds`. Everything is derived
    again from the model, the profile and the choices of the plan.

    Args:
        plan: a Plan, or the path of its file.
        model: the model, where the plan does not carry it.
        hardware: TOML file of the plan's profile, if it is not a packaged one.

    Raises:
        PlanFileError, StrategyError: where the plan is not legal.
        ModelError: where the model cannot be found, or is needed to prove rules that were found by trial.
    """
    names(model=model)
    found = parse_plan(dump_plan(loaded(plan)))  # with the checks of a file, for a Plan that was made by hand
    machine, known = machine_of(found.cluster, _profile(hardware)), planned_model(found, model)
    verdict = judged(found, known.graph, known.batch, machine)
    check_provable(verdict, known)
    return verified(verdict, known, machine, lambda _: None)


@public
def prove(
    plan: PlanOrPath,
    *,
    model: str | None = None,
    hardware: str | os.PathLike[str] | None = None,
    small: str | None = None,
    processes: int = PROCESSES,
    on_phase: Callable[[str], None] | None = None,
) -> "Proof":
    """Prove a plan at small scale: the smallest plan with the same decisions trains on processes of this machine, and
    is compared with the unsharded model.

    The result has `agrees`, `complete` (whether every decision was run), `covered` (a record for each kind of decision)
    and `differences` (relative ones of losses, gradients, weight updates and buffers, for each precision).

    Args:
        plan: a Plan, or the path of its file.
        model: the model, where it is not in the zoo.
        hardware: TOML file of the plan's profile, if it is not a packaged one.
        small: a small model with the same layers; needed if a factory builds the large one.
        processes: maximum number of processes.
        on_phase: called with the current phase in words.

    Raises:
        RequestError: for a plan without a small version.
        ModelError: where the model cannot be found: what a file names is never imported.
        RunError: where a process fails.
    """
    callbacks(on_phase=on_phase)
    names(model=model, small=small)
    number("processes", processes)
    found = loaded(plan)
    machine = machine_of(found.cluster, _profile(hardware))
    known = built_model(found, model, why=PROVING)
    given = None if model is None else full_model(model)
    return proved(found, known, machine, given, small, processes, on_phase or (lambda _: None))


PROVING = ", and a proof runs it"
"""Why a proof needs the model, in an error."""


def proved(
    plan: Plan,
    known: PlannedModel,
    machine: Machine,
    given: str | None,
    small: str | None,
    processes: int,
    on_phase: Callable[[str], None],
) -> "Proof":
    """The proof of a plan whose model was built from what is `given`, or from the zoo."""
    from runtime.proving.prove import prove as run

    return run(
        plan,
        known.graph,
        known.batch,
        machine,
        reference=buildable(plan.model, given),
        given=given is not None,
        small=small,
        processes=processes,
        on_phase=on_phase,
    )


def _profile(hardware: str | os.PathLike[str] | None) -> str | None:
    return None if hardware is None else full_profile(profile(hardware))
