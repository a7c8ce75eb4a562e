"""Plans that are made before the search ends.

With a time limit the conventional plan is made at once, so that a search that is stopped has a result. Without one the
best contender becomes a plan as soon as the bounds of the others reach its objective: its step may be shorter than its
objective, and the others then have to beat the step.
"""

import contextlib
import math
from collections.abc import Sequence

from hardware_profiles import Bytes, Hidden, Seconds
from planner.errors import InfeasibleError, RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.limits import reading, seconds_left
from planner.strategy_search.engine.contenders import Contender
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.scheduling import runs_in_order
from planner.strategy_search.exploration.found import Found
from planner.strategy_search.finalists.finalists import Finalists, OverfullError
from planner.strategy_search.finalists.plan_maker import PlanMaker
from planner.strategy_search.finalists.proofs import Ranked
from planner.strategy_search.request.space import Configuration


class EarlyPlans:
    """Plans that are made before the search ends. `prepared` is the whole graph of the engine's template; `limits` has
    the highest predicted peak, in bytes, of a device of each group. If no plan that beats the known one fits, the known
    one is taken if it `settles` the search.

    Attributes:
        best: the plan of the best contender; None before it is made, and if it does not fit.
        incumbent: that of the conventional configuration, if there is a time limit.
        pricing: the seconds that making the latter took.
    """

    def __init__(
        self, engine: Engine, prepared: OperatorGraph, limits: tuple[Bytes, ...], found: Found, *, settles: bool
    ) -> None:
        self.engine, self.prepared, self.limits, self.request = engine, prepared, limits, engine.request
        self.found, self.settles = found, settles
        self.best: Ranked | None = None
        self.incumbent: tuple[Ranked, ...] = ()
        self.pricing: Seconds = 0.0
        self._finalists: Finalists | None = None  # once the best contender became a plan
        self._tried = False  # to make a plan of the best contender

    def finalists(self) -> Finalists:
        """The finalists of the search, with the plans that were made of the best contender."""
        return self._finalists or self.finalists_of(())

    def finalists_of(self, contenders: Sequence[Contender]) -> Finalists:
        """Finalists that know no plans yet."""
        maker = PlanMaker(
            request=self.request,
            engine=self.engine,
            prepared=self.prepared,
            bound=0.0,
            limits=self.limits,
            covered=True,
        )
        limit = self.found.limit
        return Finalists(maker=maker, found=contenders, known=self.found.known, settles=self.settles, limit=limit)

    def make_incumbent(self) -> None:
        """Make the conventional configuration a plan, and measure how long that takes."""
        assert self.found.incumbent is not None
        began = reading()
        with contextlib.suppress(OverfullError, InfeasibleError):
            self.incumbent = self.finalists_of([self.found.incumbent]).plans()
        self.pricing = reading() - began

    def make_best(self) -> None:
        """Make the best contender a plan. Other contenders then have to beat its step time. There is no such plan if it
        does not fit, or if the software hides a share of the communication: then objectives say less about the steps of
        other plans."""
        hides = self.request.cluster.software.hidden != Hidden()
        decides = self.request.prune and self.request.top == 1 and not hides and not self._tried
        if self.found.contenders.found and decides and seconds_left() == math.inf:
            self._tried = True
            best, *others = self.found.contenders.found
            self._finalists = self.finalists_of([best])
            with contextlib.suppress(OverfullError, InfeasibleError, RequestError):
                rival = min((one.objective for one in others), default=math.inf)
                (self.best,) = self._finalists.plans(settle=False, rival=rival)

    def rules_out(self, configuration: Configuration, bound: float) -> bool:
        """Whether the bound of a configuration rules it out against the step of the best contender's plan. This holds
        only for configurations with one stage whose operators run in order: their bound is a bound on the step
        itself."""
        if self.best is None or self.best.plan.training.interleave > 1 or self.best.plan.slices > 1:
            return False  # other plans may interleave or slice as well
        return bound >= self.best.seconds and runs_in_order(self.request, configuration)
