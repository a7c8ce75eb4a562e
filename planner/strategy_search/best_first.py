"""Best-first search over families of configurations, then over their members.

incumbent a conventional plan, found and priced first, so that a search that is stopped has an answer  (incumbent)
queue     (lower bound, family or configuration), the lowest bound first
family    replaced by its members, each with the lower bound that the largest micro-batch proves
member    evaluated; the search ends when the lowest bound of the queue reaches the best step time
"""

import contextlib
import heapq
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

from hardware_profiles import Hidden
from planner.errors import InfeasibleError, LimitError, RequestError
from planner.limits import check, finishing, reading, seconds_after, seconds_left, sooner
from planner.plan.plan import Prediction
from planner.plan.prediction.stage_cost import ACCUMULATION, FORWARD
from planner.sharding.update import AHEAD
from planner.strategy_search.engine.assemble import assembly
from planner.strategy_search.engine.contenders import NEAR, Contender, Contenders, apart_seconds, in_1f1b
from planner.strategy_search.engine.contexts import ContextNotes
from planner.strategy_search.engine.evaluation import NO_HINT, Hint
from planner.strategy_search.engine.exchange_overlap import may_exchange_under_work
from planner.strategy_search.engine.families import Shared, all_configurations, engine_of, families_of, family_of
from planner.strategy_search.engine.family import Family, least_share
from planner.strategy_search.engine.finalists import Finalists, OverfullError
from planner.strategy_search.engine.incumbent import conventional
from planner.strategy_search.engine.outcome import Outcome
from planner.strategy_search.engine.outcome_words import configuration_words, fate_words, nothing_fits
from planner.strategy_search.engine.plan_maker import PlanMaker
from planner.strategy_search.engine.proofs import OPTIMAL, Ranked, with_proof
from planner.strategy_search.engine.regions import MANY, Regions
from planner.strategy_search.engine.scheduling import WORTH, asks, assumed, reorders, runs_in_order
from planner.strategy_search.request.checks import runs_here
from planner.strategy_search.request.constraints import NothingAgreesError
from planner.strategy_search.request.refusals import no_configuration
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.result import Progress, SearchResult, Statistics

_LOG = logging.getLogger(__name__)
"""Reports the result of every configuration, at level INFO."""

_REORDERED = 2
"""Maximum number of pipelines that do not contend by their objectives and are priced in other schedules all the same;
the same limit holds for pipelines with virtual stages."""

_FOR_OTHER_ORDERS = 6
"""Maximum number of pipelines that are evaluated for other schedules than 1F1B. With few micro-batches, uneven stages
and the work that a rank does once per step weigh much, and lower bounds say little about either."""

_IN_A_V = 64
"""Maximum number of pipeline families for which the search bounds how long the busiest rank is busy with its stages in
a V. With more families it uses the bound by work alone."""

_NOT_ASKED: Hint = (-1.0, (-1.0, -1.0, -1.0))

_LOOKED_AT = 4
"""Number of configurations that are evaluated when nothing fits, to say how much memory is missing: those whose bounds
on memory are lowest."""


_UNEVEN_TRIED = 3
"""Configurations with unequal numbers of blocks in their virtual stages are evaluated with the most promising first.
The search stops trying them when this many in a row were slower than the best plan known."""

_UNEVEN_BOUNDED = 32
"""Maximum number of the others whose lower bounds are raised afterwards: each takes up to half a second."""

_UNEVEN = 1e-3
"""Share of the objective that virtual stages of unequal numbers of blocks must save where equal ones are possible."""


class BestFirst:
    """The search of one request: its queue, the plans found and the lower bounds proved."""

    def __init__(
        self,
        request: SearchRequest,
        on_progress: Callable[[Progress], None],
        cancelled: Callable[[], bool],
        cutoff: float,
        shared: Shared,
        known: Ranked | None = None,
        *,
        settles: bool = False,
        takes: Callable[[Configuration], bool] = lambda _: True,
        among: Callable[[Configuration], bool] = lambda _: True,
        bounds: Mapping[Configuration, float] = MappingProxyType({}),
    ) -> None:
        self.started = time.perf_counter()
        self.known, self.settles, self.takes, self.among, self.known_bounds = known, settles, takes, among, bounds
        self.request, self.on_progress, self.cancelled, self.limit = request, on_progress, cancelled, cutoff
        self.engine, self.prepared = engine_of(request, shared)
        hides = request.cluster.software.hidden != Hidden() or AHEAD in self.engine.gathers
        decided = request.pinned.pipeline == 1 and not hides and not self.engine.overlapped and request.prune
        self.contenders = Contenders(request.top, decided=decided, every=not request.prune)
        memory = max(group.device.memory for group in self.engine.groups)
        self.memory = min(memory, memory if request.memory_limit is None else request.memory_limit)
        self.limits = tuple(self.engine.limit_bytes(group) * (1 + OPTIMAL) for group in self.engine.groups)
        self.least = self.missing = math.inf
        self.fullest = (0, 1)  # the rank that needs `least`, number of ranks
        self.short = self.engine.groups[0]  # the group of devices of that rank
        self.proved = math.inf
        self.most_proved = math.inf  # bound of earlier attempts, with more memory
        self.total = self.solved = 0
        self.evaluated = set[Configuration]()
        self.bounds = dict[Configuration, float]()  # lower bounds of evaluated configurations
        self.queue: list[tuple[float, tuple[object, ...], Family | None, tuple[Configuration, ...], Hint]] = []
        self.hint = NO_HINT
        self.alone: dict[object, tuple[float, float]] = {}  # one stage on each rank: seconds, bound
        self.roomy = set[tuple[object, int]]()  # keys of `alone` where memory does not bind
        self.interleaved = list[tuple[float, Configuration, Family | None]]()  # virtual stages: later
        self.cut_off = list[tuple[float, Configuration, Family | None]]()  # at least the cutoff then
        self.several = dict[Configuration, float]()  # seconds found with several stages on each rank
        self.unequal = dict[Configuration, float]()  # bounds with unequal virtual stages whose number was left open
        self.contexts = ContextNotes(free=request.pinned.free)
        self.full = False
        self.disagreement: NothingAgreesError | None = None
        self.incumbent: Contender | None = None
        self.overfull = dict[Configuration, Outcome]()  # conventional, do not fit
        self.space: list[Configuration] = []
        self.regions: Regions | None = None  # for a space of many families
        # configurations with one stage on each rank, by family and micro-batches
        self.plain: dict[object, dict[int, Configuration]] = {}
        self.families: list[tuple[Configuration, ...]] = []
        self.usual: dict[int, tuple[Configuration, ...]] = {}  # usual members, by id
        self.finalists: Finalists | None = None  # after the best contender became a plan early
        self.first: Ranked | None = None  # plan of the best contender, once bounds reach it
        self.made_first = False  # the attempt was made, perhaps without a plan
        self.ready: tuple[Ranked, ...] = ()  # the incumbent priced, with a time limit
        self.pricing = 0.0  # seconds that pricing the incumbent took
        self.priced: tuple[Ranked, ...] = ()  # contenders that became plans
        self.of_outcomes: dict[int, tuple[Outcome, Contender]] = {}  # by id

    @property
    def cutoff(self) -> float:
        """Plans that take this long or longer are of no interest."""
        if not self.request.prune:
            return self.limit
        if self.request.tolerance:
            return min(self.limit, self.best * (1 - self.request.tolerance))
        first = math.inf
        if self.incumbent and self.request.top == 1 and not self.contenders.step:
            first = self.incumbent.objective * (1 + NEAR)
        if self.known is not None and not self.contenders.step:
            first = min(first, self.known.bounded * (1 + NEAR))
        return min(self.limit, self.contenders.cutoff, first)

    @property
    def best(self) -> float:
        """The lowest objective found so far; a plan that was known before the search counts too."""
        known = math.inf if self.known is None else self.known.bounded
        return min(self.contenders.best, self.incumbent.objective if self.incumbent else math.inf, known)

    def run(self) -> SearchResult:
        """Search until nothing better is left, the user cancels, or a limit of the planner is reached."""
        try:
            with finishing():
                self._begin()
            with sooner(2.5 * self.pricing - seconds_after() / 2):  # other plans are settled as well when priced
                stopped = self._explore()
            return self._result(stopped)
        except (LimitError, MemoryError) as error:
            if self.best == math.inf:
                raise
            self.full = isinstance(error, MemoryError) or error.memory
        with finishing():
            return self._result(True)

    def least_in_a_v(self) -> float:
        """A lower bound on the step time of plans with their stages in a V, without a search."""
        self._open_families()
        return self._in_a_v

    def _begin(self) -> None:
        """Open the families and look for the incumbent; with a time limit, make it a plan at once."""
        self._open_families()
        hurried = seconds_left() < math.inf
        other = self.request.algorithm == "recursive_programming" or self.engine.spreads
        if self.engine.hopeless or not self.request.prune or (other and not hurried):
            return
        self._tell()
        for smallest, *others in conventional(self.engine, self.families):
            if self.cancelled():
                return
            if self._tried_first(smallest):
                all(self._tried_first(larger) for larger in others)  # stops when one is slower or does not fit
                break
        self._tell()
        if self.incumbent is not None and hurried:
            began = reading()
            with contextlib.suppress(OverfullError, InfeasibleError):
                self.ready = self._finalists([self.incumbent]).plans()
            self.pricing = reading() - began

    def _tried_first(self, configuration: Configuration) -> bool:
        """Evaluate a conventional configuration. Returns whether it is the best so far."""
        cutoff = min(self.limit, self.best)
        if not self.takes(configuration) or self._bound_before(configuration) >= cutoff:
            return False
        try:
            outcome = self.engine.evaluate(configuration, cutoff=cutoff)
        except NothingAgreesError:
            return False
        self.solved += outcome.solved
        if outcome.bound == math.inf or (outcome.overfull and cutoff == math.inf):
            self.overfull[configuration] = replace(outcome, solved=0)
        if not outcome.ranks or outcome.seconds >= cutoff:
            return False
        self.incumbent = self.engine.contender(configuration, outcome)
        self.hint = (outcome.price, outcome.under)
        return True

    def _explore(self) -> bool:
        """Look for the best contenders. Returns whether the search was stopped before its end."""
        if self._evaluate_promising():
            return True
        self._take_incumbent()
        self._refine()
        return False

    def _evaluate_promising(self) -> bool:
        """Evaluate the configurations whose bound is below the cutoff. Returns whether the search was stopped before
        its end."""
        while self.queue and self.queue[0][0] < self.cutoff:
            if self.cancelled():
                return True
            check()
            if self.queue[0][0] >= self.contenders.best:
                self._make_first()
            bound, _, family, members, asked = heapq.heappop(self.queue)
            try:
                if self._too_slow(members[0], bound):
                    self.proved = min(self.proved, bound)
                    self.cut_off += [(bound, one, family) for one in members]
                elif family is None and len(members) > 1:
                    better = None if self.regions is None else self.regions.better(self._usual(members), bound)
                    if better is None:
                        self._open_family(members, bound)
                    else:
                        heapq.heappush(self.queue, (better, _order(members[0]), None, members, NO_HINT))
                elif self._waits_for_plain(members[0]):
                    self.interleaved.append((bound, members[0], family))
                elif self.regions is not None and (own := self.regions.with_its_micro_batch(members[0])) > bound:
                    heapq.heappush(self.queue, (own, _order(members[0]), family, members, asked))
                elif not self._delayed(bound, family, members[0], asked):
                    self._evaluate(members[0], family, bound)
            except (LimitError, MemoryError):
                self.proved = min(self.proved, bound)  # the entry just taken may hold the best plan
                raise
        return self._evaluate_interleaved()

    def _waits_for_plain(self, configuration: Configuration) -> bool:
        """Whether a configuration has virtual stages whose number the user left open, and so waits until the same
        configuration with one stage on each rank is done."""
        c = configuration
        return (
            c.virtual_stages > 1
            and self.request.pinned.virtual_stages is None
            and c.micro_batches in self.plain.get(c.family, ())
        )

    def _is_apart(self, configuration: Configuration) -> bool:
        """Whether virtual stages hold unequal numbers of blocks and the user left their number open. They are tried
        when their family is opened, and their bounds are weaker."""
        return configuration.uneven and self._waits_for_plain(configuration)

    def _note(self, configuration: Configuration, bound: float) -> None:
        """Lower the proved bound to that of this configuration."""
        if self._is_apart(configuration):
            self.unequal[configuration] = max(bound, self.unequal.get(configuration, 0.0))
        else:
            self.proved = min(self.proved, bound)

    def _evaluate_interleaved(self) -> bool:
        """Evaluate the waiting configurations with virtual stages. Returns whether the search was stopped before its
        end.

        A configuration is evaluated if nothing proves that it is slower than the best plan, or if the time found with
        one stage on each rank, times the share that a shorter bubble may leave of it (`least_share`), is below the
        cutoff. Where the best contender is already a plan, its step bounds what may contend: interleaved stages run in
        one schedule only, other schedules need whole stages. Stages of unequal blocks come after those of equal blocks,
        which they have to beat.
        """
        self.interleaved.sort(key=lambda one: (one[1].uneven, one[0], _order(one[1])), reverse=True)
        step, asked, missed = math.inf, set[tuple[Configuration, bool]](), 0
        untried = list[tuple[float, tuple[object, ...], Configuration, Family]]()
        if self.interleaved:
            self._make_first()
        if self.first is not None:
            step = self.first.bounded
        while self.interleaved:
            if self.cancelled():
                return True
            check()
            bound, c, family = self.interleaved[-1]
            if not self.takes(c):
                self.interleaved.pop()
                continue
            alone, proved = self.alone.get((c.family, c.micro_batches), (math.inf, self.cutoff))
            share, cutoff = least_share(c), min(self.cutoff, step)
            bound = max(bound, proved * share)
            given_up = c.uneven and missed == _UNEVEN_TRIED
            if bound < cutoff and family is not None and not given_up:
                bound = self._bound_with_virtual_stages(c, family, bound, cutoff, asked)
            if not given_up and (bound < min(self.best, cutoff) or (bound < cutoff and alone * share < cutoff)):
                self._evaluate(c, family, bound, cutoff)
                missed = missed + 1 if c.uneven and self.several.get(c, math.inf) >= cutoff else 0
            else:
                self._note(c, bound)
                self.cut_off.append((bound, c, family))
                if given_up and family is not None and self._is_apart(c):
                    untried.append((bound, _order(c), c, family))
            self.interleaved.pop()
        self._bound_untried(untried, asked)
        return False

    def _bound_with_virtual_stages(
        self,
        c: Configuration,
        family: Family,
        bound: float,
        cutoff: float,
        asked: set[tuple[Configuration, bool]],
    ) -> float:
        """A lower bound on a configuration with virtual stages, also from its configuration with one stage on each
        rank where that was not evaluated; `asked` has those whose family was asked, with free memory and with a price.
        """
        plain, alone = self.plain[c.family][c.micro_batches], self.alone.get((c.family, c.micro_batches))
        hint, found = self._hint_for(family), math.inf if alone is None else alone[0]
        for free in (True, False):  # the bound holds for all numbers of virtual stages
            if bound < cutoff and math.isinf(found):
                if (plain, free) not in asked:
                    asked.add((plain, free))
                    family.priced_seconds(plain, hint, cutoff / least_share(c), free=free)
                bound = max(bound, family.seconds_with_one_stage(c, cutoff))
        return max(bound, family.priced_seconds(c, hint, cutoff))

    def _bound_untried(
        self,
        untried: list[tuple[float, tuple[object, ...], Configuration, Family]],
        asked: set[tuple[Configuration, bool]],
    ) -> None:
        """Raise the lower bounds on configurations with unequal virtual stages that were not tried, the lowest first,
        until no lower bound is left below one that was raised, or below the bound on equal stages. If nothing was
        found, if a plan was known before, or if time is limited, the bounds stay as they are."""
        if self.best == math.inf or self.known is not None or seconds_left() < math.inf:
            return
        waiting = {c for _, _, c, _ in untried}
        least = min((bound for c, bound in self.unequal.items() if c not in waiting), default=math.inf)
        least = min(least, self._bounds()[1])
        for bound, _, c, family in sorted(untried, key=lambda one: one[:2])[:_UNEVEN_BOUNDED]:
            if bound >= least or self.cancelled():
                break
            self._note(c, self._bound_with_virtual_stages(c, family, bound, least, asked))
            least = min(least, self.unequal[c])
        self.cut_off = [(max(bound, self.unequal.get(c, 0.0)), c, family) for bound, c, family in self.cut_off]

    def _make_first(self) -> None:
        """Make the best contender a plan. Other contenders then have to beat its step time. There is no such plan if it
        does not fit, or if the software hides a share of the communication: then objectives say less about the steps of
        other plans."""
        hides = self.request.cluster.software.hidden != Hidden()
        decides = self.request.prune and self.request.top == 1 and not hides and not self.made_first
        if self.contenders.found and decides and seconds_left() == math.inf:
            self.made_first = True
            best, *others = self.contenders.found
            self.finalists = self._finalists([best])
            with contextlib.suppress(OverfullError, InfeasibleError, RequestError):
                rival = min((one.objective for one in others), default=math.inf)
                (self.first,) = self.finalists.plans(settle=False, rival=rival)

    def _too_slow(self, configuration: Configuration, bound: float) -> bool:
        """Whether the bound of a configuration rules it out against the step of the best contender's plan. This holds
        only for configurations with one stage whose operators run in order: their bound is a bound on the step
        itself."""
        if self.first is None or self.first.plan.training.interleave > 1 or self.first.plan.slices > 1:
            return False  # other plans may interleave or slice as well
        return bound >= self.first.seconds and runs_in_order(self.request, configuration)

    def _search_on(self, finalists: Finalists, plans: tuple[Ranked, ...]) -> tuple[Ranked, ...]:
        """Search on if the best plans take longer than the objectives that ruled others out.

        First come configurations that contended until better objectives were found, then configurations that were not
        evaluated and may be faster than the best of these plans. Two kinds of pipelines are tried as well: those ruled
        out by the bubble of 1F1B, if another schedule may make them faster, and those ruled out by exposed transfers
        between virtual stages.
        """
        if not self.request.prune or self.request.tolerance > 0:
            return plans
        slowest, contended = self._slowest(plans), {id(found) for found in self.contenders.found}
        piped = any(one.plan.pipeline > 1 for one in plans)
        gradients = min(_of_weight_gradients(one.plan.prediction) for one in plans)
        shorter = self._promising_in_other_orders(slowest, gradients, piped)
        shorter += self._promising_with_virtual_stages(slowest)
        if shorter or not contended.issuperset(map(id, self.contenders.found)):
            finalists.found = self._contending_with(shorter)
            plans = finalists.plans()
        slowest = min(self._slowest(plans), self.limit)
        if slowest <= self.contenders.cutoff:
            return plans
        self._tell("searching on")
        self.contenders.step, self.first = slowest, self.first and plans[0]
        again = [(c, outcome) for c, outcome in self.contenders.left.items() if outcome.seconds < slowest]
        for c, outcome in again:
            self.contenders.add(self._contender(c, outcome))
        if again:
            finalists.found = self._contending_with(shorter)
            plans = finalists.plans()
            self.contenders.step = min(self._slowest(plans), self.limit)
        for bound, configuration, family in self.cut_off:
            heapq.heappush(self.queue, (bound, _order(configuration), family, (configuration,), _NOT_ASKED))
        self.cut_off.clear()
        if not self._evaluate_promising():
            finalists.found = self._contending_with(shorter)
            plans = finalists.plans()
        return plans

    def _contender(self, configuration: Configuration, outcome: Outcome) -> Contender:
        """The contender of an outcome. Every caller gets the same object, so each is priced once."""
        if id(outcome) not in self.of_outcomes:
            self.of_outcomes[id(outcome)] = (outcome, self.engine.contender(configuration, outcome))
        return self.of_outcomes[id(outcome)][1]

    def _contending_with(self, others: Sequence[Contender]) -> list[Contender]:
        """The contenders by objective, and `others` whose configurations do not contend."""
        found = self.contenders.found
        contending = {one.configuration for one in found}
        return [*found, *(other for other in others if other.configuration not in contending)]

    def _promising_in_other_orders(self, slowest: float, gradients: float, piped: bool) -> list[Contender]:
        """The most promising pipelines that do not contend by their objectives, but may take less than `slowest` in a
        schedule with deferred weight gradients. `gradients`: the most seconds of a step in which a rank computes weight
        gradients. `piped`: a plan that was found is a pipeline."""
        cluster, pinned = self.request.cluster, self.request.pinned
        if not reorders(pinned) or asks(pinned) or not runs_here(cluster):
            return []
        self._evaluate_for_other_orders(slowest, gradients, piped)
        left = self.contenders.left.items()
        plain = ((c, outcome) for c, outcome in left if c.pipeline > 1 and c.virtual_stages == 1 and outcome.ranks)
        found = {c: self._contender(c, outcome) for c, outcome in plain}
        promise = {c: one.promise(gradients) for c, one in found.items()}
        promising = [one for c, one in found.items() if promise[c] < slowest * (1 - WORTH)]
        return sorted(promising, key=lambda one: (promise[one.configuration], one.order))[:_REORDERED]

    def _promising_with_virtual_stages(self, slowest: float) -> list[Contender]:
        """The most promising pipelines with several stages on each rank that do not contend by their objectives. The
        objective counts all their transfers between stages as exposed; with overlapped transfers they may take less
        than `slowest`."""
        self._evaluate_with_virtual_stages(slowest)
        left = self.contenders.left.items()
        found = [self._contender(c, outcome) for c, outcome in left if c.virtual_stages > 1 and outcome.ranks]
        promise = {one.configuration: one.sum_with(one.outcome.ranks) for one in found}
        promising = [one for one in found if promise[one.configuration] < slowest]
        return sorted(promising, key=lambda one: (promise[one.configuration], one.order))[:_REORDERED]

    def _evaluate_with_virtual_stages(self, slowest: float) -> None:
        """Evaluate the most promising pipelines with several stages on each rank that were ruled out because bounds
        count all their transfers as exposed, if they may take less than `slowest` with overlapped transfers.

        The estimate is the time found with one stage on each rank, times `least_share`, plus the share of the transfers
        by which they slow the work beside them. The rank must have memory for more micro-batches in flight. Where plans
        with several stages contend, plans with fewer stages were compared with them already.
        """
        if asks(self.request.pinned):
            return
        contend = max((found.configuration.virtual_stages for found in self.contenders.found), default=1)
        beside, several = 1 - self.engine.groups[0].device.overlapped, []
        for bound, c, family in self._not_evaluated():
            alone, _ = self.alone.get((c.family, c.micro_batches), (math.inf, 0.0))
            roomy = c.virtual_stages > contend and (c.family, c.micro_batches) in self.roomy
            if roomy and family is not None and alone * least_share(c) < slowest:
                transfers = family.transfer_seconds(c)
                several.append((alone * least_share(c) + beside * transfers, _order(c), bound, c, family, transfers))
        for promise, _, bound, c, family, transfers in sorted(several, key=lambda one: one[:2])[:_REORDERED]:
            cutoff = slowest + transfers
            if promise < slowest and family.priced_seconds(c, self._hint_for(family), cutoff) < cutoff:
                with contextlib.suppress(NothingAgreesError):
                    outcome = self.engine.evaluate(c, cutoff=cutoff, hint=self._hint_for(family))
                    self._take(c, outcome, max(bound, outcome.bound))

    def _evaluate_for_other_orders(self, slowest: float, gradients: float, piped: bool) -> None:
        """Evaluate the most promising pipelines whose bounds say that another schedule than 1F1B may take less than
        `slowest`.

        Pipelines with more micro-batches than ranks are evaluated only if no plan found is a pipeline, and no more of
        them than are priced: otherwise their bubbles were already compared with those of the pipelines found. Each
        pipeline is first bounded at the price of memory that mattered last.
        """
        queue = [
            (apart_seconds(c, bound := max(known, self.engine.bound(c)), gradients), _order(c), bound, c, family)
            for known, c, family in self._not_evaluated()
            if 1 < c.pipeline >= c.micro_batches * piped and c.virtual_stages == 1 and c not in self.contenders.left
        ]
        heapq.heapify(queue)
        least, evaluated, many = slowest * (1 - WORTH), 0, 0
        while queue and queue[0][0] < least and evaluated - many < _FOR_OTHER_ORDERS and not self.cancelled():
            _, order, bound, c, family = heapq.heappop(queue)
            if c.micro_batches > c.pipeline and many == _REORDERED:
                continue
            cutoff = in_1f1b(c, least, gradients)
            if family is not None:
                bound = max(bound, family.priced_seconds(c, self._hint_for(family), cutoff))
                heapq.heappush(queue, (apart_seconds(c, bound, gradients), order, bound, c, None))  # bounded already
                continue
            evaluated += 1
            many += c.micro_batches > c.pipeline
            with contextlib.suppress(NothingAgreesError):
                outcome = self.engine.evaluate(c, cutoff=cutoff)
                self._take(c, outcome, max(bound, outcome.bound))

    def _not_evaluated(self) -> list[tuple[float, Configuration, Family | None]]:
        """Configurations left in the queue, and those that were cut off."""
        return [*((bound, c, family) for bound, _, family, members, _ in self.queue for c in members), *self.cut_off]

    def _slowest(self, plans: tuple[Ranked, ...]) -> float:
        """Seconds of the slowest of the `top` plans that the request asks for."""
        return plans[min(self.request.top, len(plans)) - 1].seconds

    def _take_incumbent(self) -> None:
        """Let the incumbent contend if nothing better was found."""
        if self.incumbent is not None and self.incumbent.objective < self.contenders.best:
            self.contenders.add(self.incumbent)

    def _refine(self) -> None:
        """Try whether the best plan gets faster on a mesh of three or four axes. Such meshes are not searched
        exhaustively."""
        found = self.contenders.found
        if not found or self.request.algorithm != "dynamic_programming" or not self.request.prune:
            return
        self._tell("refining")
        best = found[0]
        c = best.configuration
        whole = assembly(best.pipeline_of_kinds.chain, best.outcome.ranks, c.virtual_stages, uneven=c.uneven)
        refined = self.engine.refined(best.configuration, whole, best.objective, best.outcome.gathers)
        if refined is not None:
            adopted = self.engine.adopt(best.configuration, refined)
            self._take(adopted, self.engine.evaluate(adopted), best.outcome.bound)

    def _space(self) -> list[Configuration]:
        """All configurations of the request that pass `among`. Raises RequestError if there are none."""
        space = list(filter(self.among, all_configurations(self.engine)))
        if not space:
            raise RequestError(no_configuration(self.request, self.engine.template))
        return space

    def _open_families(self) -> None:
        self.space = self._space()
        self.total = len(self.space)
        families = families_of(self.space)
        self.plain = {
            members[0].family: {c.micro_batches: c for c in members if c.virtual_stages == 1} for members in families
        }
        if self.request.alternatives and self.request.prune and len(families) >= MANY and len(self.engine.groups) == 1:
            self.regions = Regions(engine=self.engine, families=families)
            families = [members for members in families if self.regions.fits(members[0])] or families
        self.families = families
        for members in families:
            bound = min(map(self._bound_before, self._usual(members)))
            heapq.heappush(self.queue, (bound, _order(members[0]), None, members, NO_HINT))

    def _bound_before(self, configuration: Configuration) -> float:
        """A lower bound on the step time by the work alone, and by a search with free axes of the same request. The
        latter holds because axes with one purpose each leave operators fewer strategies on the same mesh."""
        by_work, c = self.engine.bound(configuration), configuration
        if not self.known_bounds or len(c.mesh) > 2 or c.decided is not None or "ring" in c.roles:
            return by_work
        return max(by_work, self.known_bounds.get(replace(c, roles=(), zigzag=False), 0.0))

    def _usual(self, members: tuple[Configuration, ...]) -> tuple[Configuration, ...]:
        """The members of a family that decide when it is opened: those whose virtual stages do not hold unequal blocks,
        if any."""
        if id(members) not in self.usual:
            self.usual[id(members)] = tuple(c for c in members if not self._is_apart(c)) or members
        return self.usual[id(members)]

    def _open_family(self, members: tuple[Configuration, ...], floor: float) -> None:
        """Put the members of a family into the queue, each with the bound that the largest micro-batch proves. `floor`
        is the bound of the family's usual members."""
        family = family_of(self.engine, members) if self.request.prune else None
        floors = [max(0.0 if self._is_apart(c) else floor, self._bound_before(c)) for c in members]
        proved = floors if family is None else family.step_seconds(members, floors, self.cutoff)
        for configuration, bound in zip(members, proved, strict=True):
            heapq.heappush(self.queue, (bound, _order(configuration), family, (configuration,), _NOT_ASKED))

    def _delayed(self, bound: float, family: Family | None, configuration: Configuration, asked: Hint) -> bool:
        """Whether a price of memory that mattered elsewhere raises a configuration's bound. It then goes back into the
        queue."""
        if family is None:
            return False
        hint = self._hint_for(family)
        if hint == asked:
            return False
        better = max(bound, family.priced_seconds(configuration, hint, self.cutoff))
        heapq.heappush(self.queue, (better, _order(configuration), family, (configuration,), hint))
        return True

    def _hint_for(self, family: Family | None) -> Hint:
        """The price and shares that mattered to a member of the family, or else to the configuration evaluated last."""
        return family.hint if family is not None and family.hint != NO_HINT else self.hint

    def _evaluate(
        self, configuration: Configuration, family: Family | None, bound: float, cutoff: float = math.inf
    ) -> None:
        hint, cutoff = self._hint_for(family), min(cutoff, self.cutoff)
        try:
            proved = {} if family is None else family.proved(configuration)
            outcome = self.overfull.get(configuration) or self.engine.evaluate(
                configuration, cutoff=cutoff, hint=hint, proved=proved
            )
        except NothingAgreesError as error:
            self.disagreement = self.disagreement or error
            _LOG.info("%s: left out, %s", configuration_words(configuration), error)
            return
        if outcome.price or any(outcome.under):
            self.hint = (outcome.price, outcome.under)
            if family is not None:
                family.hint = self.hint
        own = 0.0 if self.engine.spreads else outcome.bound  # it bounds the propagated strategies, not all
        if not outcome.ranks and outcome.bound < math.inf:
            self.cut_off.append((max(bound, own), configuration, family))
        self.bounds[configuration] = max(bound, own)
        self._take(configuration, outcome, max(bound, own))

    def _take(self, configuration: Configuration, outcome: Outcome, bound: float) -> None:
        """Note an outcome. `bound`: no plan of this configuration is faster."""
        self.evaluated.add(configuration)
        self.solved += outcome.solved
        self._missed(configuration, outcome)
        found = outcome.seconds if outcome.ranks else math.inf
        if configuration.virtual_stages == 1:
            self.alone[configuration.family, configuration.micro_batches] = (found, bound)
            if outcome.ranks and not outcome.price:
                self.roomy.add((configuration.family, configuration.micro_batches))
        else:
            self.several[configuration] = found
        known = max(bound, outcome.bound)
        self.contexts.note(configuration, bound=known, seconds=found, least=outcome.least)
        _LOG.info("%s: %s", configuration_words(configuration), fate_words(outcome, self.cutoff))
        self._note(configuration, bound)
        takes = outcome.ranks and self.takes(configuration)
        if configuration.uneven:
            equal = self.several.get(replace(configuration, uneven=False), math.inf)
            takes = takes and found < equal * (1 - _UNEVEN)
        if takes and outcome.seconds < self.cutoff:
            self.contenders.add(self._contender(configuration, outcome))
        elif takes:  # it contends if the best plans take longer than their objectives
            self.contenders.left[configuration] = outcome
        self._tell()

    def _tell(self, phase: str = "searching") -> None:
        self.on_progress(
            Progress(
                total=self.total,
                done=len(self.evaluated),
                best_seconds=self.best,
                bound_seconds=self._bound(),
                phase=phase,
            )
        )

    def _bound(self) -> float:
        """The bound proved so far: evaluated configurations count with their own bounds, the others with those in the
        queue. These bounds hold for stages laid one after the other. For stages in a V only the work is bounded."""
        if self.request.pinned.in_a_v:
            return min(self.engine.least_work, self.best)  # `_bound_of` improves on it at the end
        ahead = self.queue[0][0] if self.queue else math.inf
        return min(self.proved, ahead, self.best, *(bound for bound, *_ in self.interleaved))

    def _left(self) -> Iterator[tuple[float, Configuration]]:
        """The bounds of configurations that are still waiting."""
        for bound, _, family, members, _ in self.queue:
            for c in members:  # the bound of a closed family covers its usual members
                yield self._bound_before(c) if family is None and self._is_apart(c) else bound, c
        yield from ((bound, c) for bound, c, _ in self.interleaved)

    def _bounds(self) -> tuple[float, float]:
        """The bounds at the end: of all configurations, and of those whose virtual stages hold equal numbers of
        blocks."""
        if self.request.pinned.in_a_v:
            return (min(self._bound(), self.most_proved),) * 2
        left = [(bound, self._is_apart(c)) for bound, c in self._left()]
        equal = min((bound for bound, apart in left if not apart), default=math.inf)
        unequal = min((bound for bound, apart in left if apart), default=math.inf)
        equal = min(self.proved, equal, self.most_proved)
        return min(equal, unequal, self.best, *self.unequal.values()), equal

    def _result(self, stopped: bool) -> SearchResult:
        if self.best == math.inf:
            if self.disagreement is not None and not self.evaluated:
                raise self.disagreement
            if self.least == math.inf and not stopped and self.limit == math.inf:
                self._tell("measuring what is missing")
                self._look_at_the_leanest()
            raise nothing_fits(self.request, self.least, self.fullest, self.short, stopped)
        self._tell("scheduling the best")
        bound, _ = self._bounds()
        for ahead, _, _, members, _ in sorted(self.queue, key=lambda one: one[:2]):
            self.contexts.note(members[0], bound=ahead)
            more = f" and {len(members) - 1} with other micro-batches" if len(members) > 1 else ""
            why = f"takes {ahead:.4g} s or more, and a plan of {self.best:.4g} s is known"
            why = "nothing fits" if ahead == math.inf else why
            _LOG.info(
                "%s%s: cut off, %s",
                configuration_words(members[0]),
                more,
                why if not stopped else "the search was stopped",
            )
        plans = self._plans(bound, stopped)
        proved, equal = self._bounds()  # as more was evaluated after the search
        if proved > bound:
            bound, plans = proved, self._proved(plans, proved)
        return SearchResult(
            plans=plans,
            priced=self.priced,
            bound_seconds=self._bound_of(plans[0], bound),
            usual_seconds=0.0 if self.request.pinned.in_a_v or (self.request.pinned.slices or 1) > 1 else bound,
            equal_seconds=equal,
            covered=self._covers(plans[0].configuration),
            contexts=self.contexts.outcomes(),
            limits=self.limits,
            close=tuple(found.configuration for found in self.contenders.found),
            bounds=self._bounds_of_all(),
            assumed=assumed(self.request, self.space),
            statistics=Statistics(
                configurations=self.total,
                evaluated=len(self.evaluated),
                solved=self.solved,
                seconds=time.perf_counter() - self.started,
                stopped=stopped,
                full=self.full,
            ),
        )

    def _bounds_of_all(self) -> dict[Configuration, float]:
        """The bound of every configuration; empty if the search had less memory than the request asks for."""
        if self.most_proved < math.inf:
            return {}
        left = {c: bound for bound, c in self._left()}
        return {**left, **{c: bound for bound, c, _ in self.cut_off}, **self.bounds}

    def _of_degrees(self) -> list[tuple[float, Configuration]]:
        """For each pipeline degree, the configuration with the lowest bound and that bound without the bubble of 1F1B;
        the lowest first. The bounds are those by prices of memory. Configurations have one stage on each rank and at
        least as many micro-batches as a schedule in a V needs to fill its ranks (2p)."""
        best: dict[int, tuple[float, tuple[object, ...], Configuration]] = {}
        for c, bound in {**{c: bound for bound, c, _ in self.cut_off}, **self.bounds}.items():
            if 1 < c.pipeline <= c.micro_batches // 2 and c.virtual_stages == 1 and bound < math.inf:
                one = (bound, _order(c), c)
                best[c.pipeline] = min(best.get(c.pipeline, one), one, key=lambda known: known[:2])
        filled = [(b * c.micro_batches / (c.micro_batches + c.pipeline - 1), c) for b, _, c in best.values()]
        return sorted(filled, key=lambda one: one[0])

    def _plans(self, bound: float, stopped: bool) -> tuple[Ranked, ...]:
        """The best contenders as plans. A search that was stopped returns the incumbent, which is already a plan, if
        nothing better was found or no time is left to make plans of others."""
        if self.ready and stopped and (self.best < self.contenders.best or seconds_left() < self.pricing):
            return self._proved(self.ready, bound)
        self._take_incumbent()
        try:
            finalists = self.finalists or self._finalists(())
            finalists.maker.bound, finalists.found = bound, self.contenders.found
            finalists.of_degrees = self._of_degrees()
            plans = finalists.plans()
            if not stopped and self.request.algorithm != "recursive_programming":
                with contextlib.suppress(LimitError):
                    plans = self._search_on(finalists, plans)
            self.priced = self._proved(finalists.priced, bound)
            return self._proved(plans, bound)
        except LimitError:
            if not self.ready:
                raise
            return self._proved(self.ready, bound)

    def _proved(self, plans: Sequence[Ranked], bound: float) -> tuple[Ranked, ...]:
        """The plans with the bounds known by now."""
        return tuple(
            with_proof(one, self._bound_of(one, bound), covered=self._covers(one.configuration)) for one in plans
        )

    def _covers(self, configuration: Configuration) -> bool:
        """Whether the bound covers plans of this configuration. It does not cover meshes of three and four axes that a
        plan adopted, unless the request asks for them."""
        return len(configuration.mesh) <= 2 or any(c.mesh == configuration.mesh for c in self.space)

    def _bound_of(self, ranked: Ranked, bound: float) -> float:
        """The lower bound that holds for a plan. The search's bound holds for stages laid one after the other; for
        stages in a V there is a bound on how long ranks are busy. Slices of a sequence may save more of what a host
        launches ahead than the bound counts, so plans with slices are bounded by the work alone."""
        if ranked.plan.slices > 1 and any(stage.ahead_seconds for stage in ranked.plan.prediction.stages):
            return min(bound, self.engine.least_work)
        if not ranked.plan.schedule_kind.v_shaped:
            return bound
        return self._in_a_v if self.request.pinned.in_a_v else min(bound, self._in_a_v)

    @cached_property
    def _in_a_v(self) -> float:
        """A lower bound on the step time of plans with their stages in a V.

        The slowest rank runs its passes one after the other, so the step takes as long as this rank is busy; and every
        micro-batch passes all stages. Where passes of two micro-batches run together, they may overlap the exchanges of
        experts and nothing else. With too many families the bound is that by the work alone.
        """
        least, families = self.engine.least_work, [one for one in self.families if one[0].pipeline > 1]
        if not 0 < len(families) <= _IN_A_V or self.request.alternatives or seconds_left() < math.inf:
            return least
        paired = self.engine.has_experts and may_exchange_under_work(self.request.pinned, self.request.cluster)
        engine, found = self.engine.in_pairs if paired else self.engine, math.inf
        for members in families:
            plain = tuple(c for c in members if c.virtual_stages == 1)
            family = family_of(engine, plain) if plain else None
            if family is None:
                return least
            found = min(found, *(max(family.busy_in_a_v(c), self.engine.seconds_of_one(c)) for c in plain))
        return max(least, found)

    def _finalists(self, found: Sequence[Contender]) -> Finalists:
        maker = PlanMaker(
            request=self.request,
            engine=self.engine,
            prepared=self.prepared,
            bound=0.0,
            limits=self.limits,
            covered=True,
        )
        return Finalists(maker=maker, found=found, known=self.known, settles=self.settles)

    def _look_at_the_leanest(self) -> None:
        """Where bounds rule out everything, evaluate a few configurations to measure how much memory is missing."""
        regions = self.regions
        if regions is not None and all(family is None for _, _, family, *_ in self.queue):
            closed = sorted(self.queue, key=lambda one: (regions.least_bytes(one[3][0]), one[1]))
            for bound, _, _, members, _ in closed[:_LOOKED_AT]:
                self._open_family(members, bound)
        known = [
            (family.least_bytes(members[0]), _order(members[0]), members[0])
            for _, _, family, members, _ in self.queue
            if family is not None
        ]
        for _, _, configuration in sorted(known)[:_LOOKED_AT]:
            with contextlib.suppress(NothingAgreesError):
                self._missed(configuration, self.engine.evaluate(configuration))

    def _missed(self, configuration: Configuration, outcome: Outcome) -> None:
        """For a configuration in which nothing fits, note how much memory would be enough, and on which rank."""
        group = self.engine.group_of(configuration, outcome.fullest)
        missing = outcome.least - self.engine.capacities[group]
        if missing < self.missing:
            self.missing, self.least = missing, outcome.least
            self.fullest, self.short = (outcome.fullest, configuration.pipeline), self.engine.groups[group]


def _of_weight_gradients(prediction: Prediction) -> float:
    """An upper estimate of the seconds of a step that weight gradients take. Their matrix products take no longer than
    a forward pass, which runs other operators too; adding the gradients up comes on top."""
    time = dict(prediction.time)
    return time[FORWARD] + time.get(ACCUMULATION, 0.0)


def _order(configuration: Configuration) -> tuple[object, ...]:
    """A fixed order for configurations of equal bound."""
    return configuration.tie
