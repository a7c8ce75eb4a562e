"""What a search says while it runs, and what it has found."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.roles import roles
from planner.plan.plan import Plan
from planner.plan.words import plan_words
from planner.strategy_search.engine.contexts import ContextOutcome
from planner.strategy_search.engine.proofs import OPTIMAL, Ranked, gap_of
from planner.strategy_search.engine.scheduling import Assumed
from planner.strategy_search.request.space import Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the search is.

    Attributes:
        total: configurations in all.
        done: evaluated so far.
        best_seconds: objective of the best plan yet; infinite before the first.
        bound_seconds: no plan has a smaller one, as far as is known.
        phase: what is being done.
    """

    total: int
    done: int
    best_seconds: float
    bound_seconds: float
    phase: str = "searching"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What the search did: configurations there were, evaluated ones, problems solved, seconds; whether it was stopped
    before its end, and whether that was as its own memory was `full`."""

    configurations: int
    evaluated: int
    solved: int
    seconds: float
    stopped: bool = False
    full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another number of samples or devices, near the one that was asked for, which divides better.

    Attributes:
        step_seconds: of a plan that was found; the search for this number finds one as fast, or a faster one.
        samples_per_second: of that plan, in all.
        gain: how many more samples a second and device that is than the best plan for what was asked, relatively.
    """

    devices: int
    global_batch: int
    step_seconds: float
    samples_per_second: float
    gain: float


@dataclass(frozen=True, kw_only=True)
class Simpler:
    """Why the first plan of a result is not the fastest: it is simpler (see `planner.strategy_search.simplicity`).

    Attributes:
        fastest: the plan that would be the first otherwise.
        decisions: of the first plan, in words (`planner.plan.layout.decisions`).
        fastest_decisions: of the fastest one; they are more.
    """

    fastest: Ranked
    decisions: tuple[str, ...]
    fastest_decisions: tuple[str, ...]


Apart: TypeAlias = tuple[Literal["v", "slices", "unequal", "unequal, v", "unequal, slices"], float]
"""Plans of which less is known than of others, and how much faster than one of them one of the others could be."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The fastest plans, fastest first, of different configurations, and what is proved about them.

    No plan in the space of the request, in which alike blocks beside a pipeline's run alike, has an objective below
    `bound_seconds`, and none with its stages one after the other and sequences taken whole has one below
    `usual_seconds`, nor, if all virtual stages hold equal blocks, below `equal_seconds`. Unequal ones count with as
    many micro-batches in flight as the average one of their rank has. A step may take less than its objective (see
    `planner.strategy_search.engine.contenders`). Where
    axes are free, that is the space of meshes of one and two axes, whose virtual stages on a rank run alike where
    blocks are of several kinds; `covered` is False where the best plan has more axes, so that nothing is proved about
    its like. `placements` is how many ways to place tables on the host were compared, 0 where there was no choice: what
    is proved is about the one that was taken. `contexts` compares ways to split the sequence, where there was a choice.
    `neighbours` are numbers of samples or devices nearby that do better (see `planner.strategy_search.neighbours`).
    `limits`: the most bytes that a plan may be predicted to need on a device of each group. `close` are configurations
    whose objectives were close to the least, that first; `priced` are plans of these, until the plans of the result
    name them (`Plan.candidates`). Where a simpler plan was preferred to the fastest one it stands before it, and
    `simpler` says so. `on_devices_alone` is the best plan that offloads nothing, where one that does was taken though
    that one fits (see `planner.strategy_search.offloading`). `bounds` is what is proved of each configuration.
    `assumed` is what objectives assume that a step may do better: what is proved compares plans so.
    """

    plans: tuple[Ranked, ...]
    bound_seconds: float
    statistics: Statistics
    usual_seconds: float = 0.0
    equal_seconds: float = 0.0
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
    assumed: tuple[Assumed, ...] = ()

    def __repr__(self) -> str:
        more = f" and {len(self.plans) - 1} more" if len(self.plans) > 1 else ""
        return f"SearchResult({self.plan!r}{more}, {self.status}, gap {self.gap:.1%})"

    def _repr_html_(self) -> str:
        from planner.report.notebook import plans_html
        from planner.report.search import proof_text

        said = proof_text(self.status, self.gap, "in the space", self.assumed, covered=self.covered, apart=self.apart)
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
        """How much longer than the fastest, relatively, the step of the first plan takes, as it is simpler."""
        return 0.0 if self.simpler is None else self.plans[0].seconds / self.simpler.fastest.seconds - 1

    @property
    def gap(self) -> float:
        """How much less than the step of the first plan, relatively, the objective of another one could be at most;
        less than its objective, where that is longer than its step."""
        return gap_of(self.plan, self.bound_seconds)

    @property
    def apart(self) -> Apart | None:
        """Of which plans less is known than of others, and how much less than the step of the first plan, relatively,
        the objective of one of the others could be at most: those in a V, or with sequences in slices, where it is one
        of them, and those whose virtual stages hold unequal blocks, where less is known of these."""
        if not self.bound_seconds < self.equal_seconds or not self.usual_seconds:
            return None
        gap = gap_of(self.plan, self.equal_seconds)
        unequal = gap < gap_of(self.plan, self.usual_seconds)
        if self.plan.schedule_kind.v_shaped:
            return "unequal, v" if unequal else "v", gap
        if self.plan.slices > 1:
            return "unequal, slices" if unequal else "slices", gap
        return "unequal", gap

    @property
    def equal_gap(self) -> float:
        """`gap`, if virtual stages that hold unequal blocks are left out where less is known of them."""
        return self.gap if self.apart is None or self.apart[0] != "unequal" else self.apart[1]

    def cut_short(self) -> "SearchResult":
        """The same of a search that was stopped before its end."""
        return replace(self, statistics=replace(self.statistics, stopped=True))

    @property
    def status(self) -> str:
        """ "optimal" where no plan in the space has an objective below the step of the first, else "feasible"."""
        return "optimal" if self.gap <= OPTIMAL and self.covered else "feasible"
