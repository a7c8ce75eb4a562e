"""The progress of a search while it runs, and its result."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from planner.errors import StoppedBy
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.roles import roles
from planner.plan.plan import Plan
from planner.plan.words import plan_words
from planner.strategy_search.engine.contexts import ContextOutcome
from planner.strategy_search.engine.scheduling import Assumed
from planner.strategy_search.finalists.proofs import Ranked, gap_of, objective_gap, status_of
from planner.strategy_search.request.space import Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a running search.

    Attributes:
        total: number of configurations.
        done: number of configurations evaluated so far.
        best_seconds: objective of the best plan so far; infinite before the first.
        bound_seconds: the lower bound on objectives proved so far.
        phase: what is being done.
    """

    total: int
    done: int
    best_seconds: float
    bound_seconds: float
    phase: str = "searching"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What the search did: number of configurations, of evaluated ones and of problems solved, and seconds; what
    stopped it before its end, if anything did."""

    configurations: int
    evaluated: int
    solved: int
    seconds: float
    stopped_by: StoppedBy | None = None

    @property
    def stopped(self) -> bool:
        """Whether the search was stopped before its end."""
        return self.stopped_by is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another number of samples or devices, near the requested one, which divides better.

    Attributes:
        step_seconds: of a plan that was found; the search for this number finds one as fast, or a faster one.
        samples_per_second: of that plan, in all.
        gain: relative gain in samples per second and device over the best plan for the request.
    """

    devices: int
    global_batch: int
    step_seconds: float
    samples_per_second: float
    gain: float


@dataclass(frozen=True, kw_only=True)
class Simpler:
    """Why the first plan of a result is not the fastest: it is simpler
    (see `planner.strategy_search.refinement.simplicity`).

    Attributes:
        fastest: the plan that would be the first otherwise.
        decisions: of the first plan, in words (`planner.plan.layout.decisions`).
        fastest_decisions: of the fastest plan, which has more.
    """

    fastest: Ranked
    decisions: tuple[str, ...]
    fastest_decisions: tuple[str, ...]


Apart: TypeAlias = tuple[Literal["v", "slices"], float]
"""Plans with a weaker bound than others, and how much faster than the first plan one of these others could be."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The fastest plans, fastest first, of different configurations, and what is proved about them.

    Bounds: no plan in the space of the request has an objective below `bound_seconds`. In this space equal blocks
    outside pipelines run alike. No plan with its stages one after the other and whole sequences has an objective below
    `usual_seconds`. A step may take less than its objective (see `planner.strategy_search.engine.contenders`);
    `assumed` is what objectives assume that a step may do better, and bounds compare plans with these assumptions. If
    axes are free, the space is that of meshes of one and two axes with equal virtual stages, and with several kinds of
    blocks the virtual stages of a rank run alike. `covered` is False if the best plan has more axes, a ring, or unequal
    virtual stages that were not asked for: nothing is proved about plans like it. `bounds` has the lower bound of each
    configuration, and `bounds_with_any_memory` those that hold however much memory there is, and so with offload, too.

    Alternatives: `placements` is how many ways to place tables on the host were compared, 0 if there was no choice; the
    bounds are about the chosen one. `contexts` compares ways to split the sequence, if there was a choice. `neighbours`
    are numbers of samples or devices nearby that do better (see `planner.strategy_search.refinement.neighbours`).
    `limits` has the highest predicted peak, in bytes, that a plan may have on a device of each group. `close` has the
    configurations whose objectives were close to the lowest, that first. `priced` has plans of these, until the plans
    of the result name them (`Plan.candidates`). If a simpler plan was preferred to the fastest, it comes first, and
    `simpler` says so. `on_devices_alone` is the best plan without offload, if it fits and a plan with offload was taken
    all the same (see `planner.strategy_search.refinement.offloading`).
    """

    plans: tuple[Ranked, ...]
    bound_seconds: float
    statistics: Statistics
    usual_seconds: float = 0.0
    covered: bool = True
    placements: int = 0
    contexts: tuple[ContextOutcome, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    limits: tuple[float, ...] = ()
    close: tuple[Configuration, ...] = ()
    priced: tuple[Ranked, ...] = ()
    simpler: Simpler | None = None
    on_devices_alone: Ranked | None = None
    bounds: Mapping[Configuration, float] = field(default_factory=dict, repr=False, compare=False)
    bounds_with_any_memory: Mapping[Configuration, float] = field(default_factory=dict, repr=False, compare=False)
    assumed: tuple[Assumed, ...] = ()

    def __repr__(self) -> str:
        more = f" and {len(self.plans) - 1} more" if len(self.plans) > 1 else ""
        return f"SearchResult({self.plan!r}{more}, {self.status}, gap {self.gap:.1%})"

    def _repr_html_(self) -> str:
        from planner.report.notebook import plans_html
        from planner.report.search import proof_text

        said = proof_text(
            self.status, self.gap, "in the search space", self.assumed, covered=self.covered, apart=self.apart
        )
        return plans_html([one.plan for one in self.plans], self.to_rows(), said)

    def to_rows(self) -> list[dict[str, object]]:
        """The plans for pandas, fastest first: `pandas.DataFrame(result.to_rows())`."""
        return [
            {
                "step_seconds": one.seconds,
                "peak_bytes": one.plan.prediction.peak_bytes,
                "model_flops_utilisation": one.plan.prediction.model_flops_utilisation,
                "samples_per_second": one.plan.prediction.samples_per_second,
                **plan_words(one.bound, roles(one.bound)),
            }
            for one in self.plans
        ]

    @property
    def bound(self) -> BoundPlan:
        return self.plans[0].bound

    @property
    def plan(self) -> Plan:
        return self.plans[0].plan

    @property
    def slower(self) -> float:
        """How much longer, relatively, the step of the first plan takes than that of the fastest, because it is
        simpler."""
        return 0.0 if self.simpler is None else self.plans[0].seconds / self.simpler.fastest.seconds - 1

    @property
    def gap(self) -> float:
        """How far below the step of the first plan, relatively, the objective of another plan can be at most."""
        return gap_of(self.plan, self.bound_seconds)

    @property
    def apart(self) -> Apart | None:
        """The plans with a weaker bound, and how much less, relatively, the objective of one of the other plans could
        be at most than the step of the first plan. A weaker bound holds for plans in a V, or with sequences in slices,
        if the first plan is one of them."""
        if not self.bound_seconds < self.usual_seconds:
            return None
        gap = gap_of(self.plan, self.usual_seconds)
        if self.plan.schedule_kind.v_shaped:
            return "v", gap
        return ("slices", gap) if self.plan.slices > 1 else None

    @property
    def objective_gap(self) -> float:
        """How much less, relatively, than that of the first plan the objective of another plan can be at most."""
        return objective_gap(self.plan, self.bound_seconds)

    def cut_short(self, by: StoppedBy | None) -> "SearchResult":
        """The same result as that of a search that was stopped by this, if by anything; what stopped it first stays."""
        if by is None or self.statistics.stopped:
            return self
        return replace(self, statistics=replace(self.statistics, stopped_by=by))

    @property
    def status(self) -> str:
        """ "optimal" where no plan in the space has a lower objective than the first, else "feasible"."""
        return status_of(self.plan, self.bound_seconds, covered=self.covered)
