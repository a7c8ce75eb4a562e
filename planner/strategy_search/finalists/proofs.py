"""The best plans, and the gap of each: how far below its step the objective of another plan can be at most.

gap = 1 - bound / step        no plan has an objective below the bound
"""

import math
from dataclasses import dataclass, replace

from costmodels import step_time
from hardware_profiles import Bytes, Seconds
from planner.plan.binding.bind import BoundPlan
from planner.plan.plan import Plan
from planner.plan.prediction.step import PIPELINE_BUBBLE, UNDER_PRODUCTS
from planner.plan.prediction.timeline import REDUCTION
from planner.plan.prediction.walk.stage_cost import COMMUNICATION
from planner.strategy_search.engine.contenders import Contender
from planner.strategy_search.finalists.settle import Certificate
from planner.strategy_search.request.space import Configuration

OPTIMAL = 1e-9
"""A result within this relative distance of the bound counts as optimal."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One of the best plans, bound to its graph, and its configuration.

    `memory_price`: about the seconds of the step that a byte more on every device would save; 0 if memory does not
    bind. `certificate`: what an independent solver says that knows nothing of how the plan was found, if one was asked.
    `filled`: the bytes of every rank as the search counts them, if the plan comes from the search. `found`: the
    contender that it was made of. `settled`: whether it was settled.
    """

    bound: BoundPlan
    configuration: Configuration
    memory_price: float
    certificate: Certificate | None = None
    filled: tuple[Bytes, ...] = ()
    found: Contender | None = None
    settled: bool = False

    def __repr__(self) -> str:
        return f"Ranked({self.plan!r})"

    @property
    def plan(self) -> Plan:
        return self.bound.plan

    @property
    def seconds(self) -> float:
        """Seconds of a step, as its schedule runs it."""
        return self.plan.prediction.step_seconds

    @property
    def objective(self) -> float:
        """Seconds of a step with all communication exposed, one operator after the other, except for the reductions of
        gradients that the last backward passes overlap."""
        return self.plan.prediction.objective_seconds

    @property
    def bubble(self) -> float:
        """Seconds of a step during which the pipeline is idle."""
        return dict(self.plan.prediction.time)[PIPELINE_BUBBLE]

    @property
    def waited(self) -> float:
        """Exposed seconds of collectives of tensor parallelism, which its objective may assume to overlap with matrix
        products."""
        time = dict(self.plan.prediction.time)
        return time[COMMUNICATION] + time.get(UNDER_PRODUCTS, 0.0)

    @property
    def reduced(self) -> float:
        """Seconds of reductions of gradients once per step, overlapped or not."""
        return dict(self.plan.prediction.time).get(REDUCTION, 0.0)

    @property
    def bounded(self) -> float:
        """The seconds that the bound of the search is about."""
        return bounded_seconds(self.plan)


def with_proof(ranked: Ranked, bound: float, *, covered: bool) -> Ranked:
    """The plan with what has been proved since it was made."""
    plan = proved(ranked.plan, bound, covered=covered)
    return replace(ranked, bound=replace(ranked.bound, plan=plan))


def proved(plan: Plan, bound: float, *, covered: bool) -> Plan:
    """The plan with its proof: no plan takes less than `bound`."""
    gap = gap_of(plan, bound)
    provenance = replace(
        plan.provenance,
        status=status_of(plan, bound, covered=covered),
        gap=0.0 if gap <= OPTIMAL else _rounded_up(gap),
    )
    return replace(plan, provenance=provenance)


def status_of(plan: Plan, bound: Seconds, *, covered: bool) -> str:
    """ "optimal" where no plan has a lower objective than this one, if none is below `bound` and plans like it are
    `covered`; else "feasible"."""
    return "optimal" if objective_gap(plan, bound) <= OPTIMAL and covered else "feasible"


def bounded_seconds(plan: Plan) -> Seconds:
    """The seconds of a plan that the search minimises and bounds: its step. In pipelines, with offload, and with
    interleaved micro-batches or slices, steps may be shorter than the objectives that are bounded, and those of other
    plans, too. Then it is the longer of its step and its objective, the latter minus what every rank saves by launching
    ahead. For stages in a V only the work is bounded."""
    prediction, turns = plan.prediction, plan.training.interleave > 1 or plan.slices > 1
    in_order = plan.pipeline == 1 and not turns and not prediction.offloaded
    if in_order or plan.schedule_kind.v_shaped:
        return prediction.step_seconds
    parts = [stage.micro_batch_seconds - stage.ahead_seconds for stage in prediction.stages]
    once = [stage.once_seconds for stage in prediction.stages]
    summed = step_time(parts, once, plan.stage_passes, plan.virtual_stages)
    return max(prediction.step_seconds, float(summed))


def gap_of(plan: Plan, bound: Seconds) -> float:
    """How far below the step of this plan, relatively, the objective of another plan can be at most if none is below
    `bound`."""
    return max(0.0, 1 - bound / plan.prediction.step_seconds)


def objective_gap(plan: Plan, bound: Seconds) -> float:
    """How much less, relatively, than that of this plan the objective of another plan can be at most if none is below
    `bound`. It is `gap_of` where no step is shorter than its objective."""
    return max(0.0, 1 - bound / bounded_seconds(plan))


def _rounded_up(share: float) -> float:
    """A share rounded up to three digits."""
    digits = 10.0 ** (2 - math.floor(math.log10(share)))
    return float(f"{math.ceil(round(share * digits, 6)) / digits:.3g}")
