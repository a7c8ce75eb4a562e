"""The search, on one screen.

    traced graph ── prepare ──> graph with identities, blocks ── fold ──> template
    families of configurations (stages, mesh), lowest bound first:                   (attempt, best_first, frontier)
        a bound for all micro-batch sizes from the largest one; its members join the queue
    configurations, lowest bound first:
        stop when the bound reaches the best step time
        tables = prices of the template on this mesh at this micro-batch                        (cost_table)
        pieces = tables cut where blocks meet; solved for prices of memory; stages filled       (pieces, evaluation)
    of the best few, the fastest by their schedules                                             (contenders, plan.step)
    become plans, which are bound and priced once more, independently                           (assemble, plan.predict)

The objective, for which the search also proves a lower bound, is a sum: the slowest rank sets the pace, all ranks fill
the pipeline, the latest rank ends the step. It assumes that hosts launch ahead, and that the collectives of tensor
parallelism overlap with matrix products, as far as they can. Without a pipeline no step is shorter than this sum. In
the actual schedule uneven ranks may take less than their sum, and communication with no work beside it is exposed and
takes more. So plans with close objectives are compared by their schedules.

Every configuration has a proved lower bound: its own if it was evaluated, otherwise that of its family or of the work
alone. The lowest of these bounds says how far the result may be from the best plan in the space.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from hardware_profiles import MixedCluster
from planner.errors import InfeasibleError, LimitError
from planner.limits import check_late, finishing, limited
from planner.strategy_search.engine.evaluation import NO_HINT
from planner.strategy_search.engine.families import Shared, all_configurations, engine_of, families_of, family_of
from planner.strategy_search.exploration.attempt import Attempt
from planner.strategy_search.exploration.families import Families
from planner.strategy_search.exploration.options import SearchOptions
from planner.strategy_search.exploration.plan_proofs import PlanProofs
from planner.strategy_search.finalists.finalists import FullHostError, OverfullError
from planner.strategy_search.finalists.proofs import OPTIMAL, Ranked
from planner.strategy_search.request.constraints import NothingAgreesError
from planner.strategy_search.request.limit_words import nothing_before
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.result import Progress, SearchResult

_ROUNDS = 4  # attempts, each with less memory, if a schedule holds more than the search assumed

_CLOSE = 0.01
"""The retries stop when the next memory limit is closer than this share to one with which the plan was overfull."""


def search(
    request: SearchRequest,
    on_progress: Callable[[Progress], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
    cutoff: float = math.inf,
    shared: Shared | None = None,
    known: Ranked | None = None,
    takes: Callable[[Configuration], bool] = lambda _: True,
    among: Callable[[Configuration], bool] = lambda _: True,
    bounds: Mapping[Configuration, float] = MappingProxyType({}),
) -> SearchResult:
    """The fastest plans that fit, among those whose objectives are close to the lowest.

    Between two configurations the search asks `cancelled`. If it says so, or a limit of the planner is reached
    (`planner.limits`, including the time limit of the request), the best plans so far are returned. Plans with an
    objective of `cutoff` seconds or more are of no interest. `shared` is for several searches that differ only in their
    memory and global batch. With a `known` plan, of this space or of another that is searched beside it, only faster
    plans are looked for, and the known plan is the result if there is none; this works for one fastest plan only.
    `takes` says which configurations may become plans; the others are evaluated for comparison only. Configurations
    that are not `among` those of interest are skipped. `bounds` are the lower bounds that a search of the same request
    with free axes has proved for its configurations.

    Raises RequestError if the request allows no configuration, InfeasibleError, with the missing bytes, if nothing
    fits, and LimitError if a limit was reached before anything was found.
    """
    options = SearchOptions(
        on_progress=on_progress,
        cancelled=cancelled,
        cutoff=cutoff,
        known=known,
        takes=takes,
        among=among,
        bounds=bounds,
    )
    with limited(request.time_limit):
        try:
            check_late()
            return _searched(request, options, shared or Shared())
        except (LimitError, MemoryError) as error:
            raise nothing_before(request, error) from error


def _searched(request: SearchRequest, options: SearchOptions, shared: Shared) -> SearchResult:
    """The result of the first attempt whose plans fit. A plan may hold more than the search counts; then the next
    attempt has less memory, on the devices or on hosts, and what it proves does not hold."""
    asked, stated, proved = request, None, math.inf
    overfull: OverfullError | None = None
    low, high = 0.0, math.inf  # memory in which nothing fits; memory with which the plan found was overfull
    for tried in range(1, _ROUNDS + 1):
        with finishing():
            attempt = Attempt(asked, options, shared, limits=stated, with_more_memory=proved)
        try:
            return attempt.run()
        except FullHostError as error:
            proved, overfull = min(error.bound, proved), error
            memory = attempt.engine.host
            asked = replace(asked, host_limit=max(memory - tried * error.excess, memory / 2))
            continue
        except OverfullError as error:
            if isinstance(request.cluster, MixedCluster):
                raise InfeasibleError(error.message, needed=error.needed) from None
            stated, high = attempt.limits, attempt.memory
            memory = max(high - tried * error.excess, high / 2)  # each attempt cuts more, as lean blocks are whole
            proved = min(error.bound, proved)  # a bound proved with less memory is no bound
            overfull = error
            if memory <= low:
                memory = (low + high) / 2
                if memory > high * (1 - _CLOSE):
                    break
        except LimitError:
            raise
        except InfeasibleError as error:  # too little memory: a plan may fit between the two limits
            if stated is None and overfull is None:
                raise
            if stated is None:  # nor with less memory of the host
                break
            low, least = attempt.memory, (error.needed or 0.0) * (1 + OPTIMAL)
            memory = least if low < least < high else (low + high) / 2
            if memory > high * (1 - _CLOSE):
                break
        asked = replace(asked, memory_limit=memory)
    assert overfull is not None
    if options.known is not None:
        return Attempt(request, options, shared, settles=True).run()
    raise InfeasibleError(overfull.message, needed=overfull.needed) from None


def least_in_a_v(request: SearchRequest, shared: Shared) -> float:
    """A lower bound on the step time of all plans of a request with their stages in a V. Raises LimitError if a limit
    of the planner is reached."""
    engine, _ = engine_of(request, shared)
    families = Families(engine)
    families.list_all()
    return PlanProofs(families).in_a_v


def least_work(request: SearchRequest, shared: Shared) -> float:
    """A lower bound on the step time of all plans of a request, by their work alone. Raises LimitError if a limit of
    the planner is reached."""
    return engine_of(request, shared)[0].least_work


def find_fitting(
    request: SearchRequest, cancelled: Callable[[], bool] = lambda: False, shared: Shared | None = None
) -> bool:
    """Whether any plan fits. Tries the leanest configurations first and stops at the first that fits. Returns False,
    without an answer, when it is cancelled. `shared`: as for `search`. Raises LimitError if a limit of the planner is
    reached."""
    engine, _ = engine_of(request, shared)
    if engine.hopeless:
        return False
    for members in families_of(all_configurations(engine)):
        family = family_of(engine, members)
        for configuration in sorted(members, key=lambda c: -c.micro_batches):
            if cancelled():
                return False
            if family is not None and family.priced_seconds(configuration, NO_HINT) == math.inf:
                continue
            with contextlib.suppress(NothingAgreesError):
                if engine.evaluate(configuration, enough=math.inf).ranks:
                    return True
    return False
