"""The search, on one screen.

    traced graph ── prepare ──> graph with identities, blocks ── fold ──> template
    families of configurations (stages, mesh), least lower bound first:              (space, families, best_first)
        a bound for all micro-batch sizes from the largest one; its members join the queue
    configurations, least lower bound first:
        stop when the bound reaches the best step time
        tables = prices of the template on this mesh at this micro-batch                        (cost_table)
        pieces = tables cut where blocks meet; solved for prices of memory; stages filled       (pieces, evaluation)
    of the best few, the fastest by their schedules                                             (contenders, plan.step)
    become plans, which are bound and priced once more, independently                           (assemble, plan.predict)

What is minimised, and proved, is a sum: the slowest rank sets the pace, all fill the pipeline, the latest one ends the
step. Hosts launch ahead in it, and collectives of tensor parallelism travel under products, as far as they can: without
a pipeline no step takes less. As the schedule runs it, uneven ranks take less than their sum, and communication that
has no work to hide under takes more; so plans whose sums are close are told apart by that.

Every configuration has a proved bound: its own where it was evaluated, its family's or that of the work alone where it
was not. The least of them says how far the result may be from the best plan there is.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from hardware_profiles import MixedCluster
from planner.errors import InfeasibleError, LimitError
from planner.limits import check, limited
from planner.strategy_search.best_first import BestFirst
from planner.strategy_search.by_recursion import ByRecursion
from planner.strategy_search.engine.evaluation import NO_HINT
from planner.strategy_search.engine.families import Shared, all_configurations, engine_of, families_of, family_of
from planner.strategy_search.engine.finalists import OverfullError
from planner.strategy_search.engine.proofs import OPTIMAL, Ranked
from planner.strategy_search.request.constraints import NothingAgreesError
from planner.strategy_search.request.limit_words import nothing_before
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.result import Progress, SearchResult

_ROUNDS = 4  # with less memory each, where a schedule holds more than the search thought

_CLOSE = 0.01
"""Share of the memory within which a plan was overfull, by which another limit differs, if it is to find another."""


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
    """The fastest plans that fit, of those whose objectives are close to the least.

    Between two configurations `cancelled` is asked; where it says so, or a limit of the planner is reached
    (`planner.limits`, the time limit of the request among them), the best plans so far are returned. Plans whose
    objective is `cutoff` seconds or more are of no interest. `shared` is for several searches that differ in their
    memory and global batch alone. A plan of the space, or of another that is searched beside it, may be `known`: only
    faster ones are looked for, and without one it is the result; of the one fastest plan. `takes` says
    which configurations may become plans; others are evaluated for comparison alone. Of those that are not `among` them
    nothing is looked at. `bounds` are what a search of the
    same request with free axes has proved of its configurations.

    Raises RequestError where the request divides into nothing, InfeasibleError, with the bytes that are missing, where
    nothing fits, LimitError where a limit was reached before anything was found.
    """
    with limited(request.time_limit):
        try:
            check()
            return _searched(request, on_progress, cancelled, cutoff, shared or Shared(), known, takes, among, bounds)
        except (LimitError, MemoryError) as error:
            raise nothing_before(request, error) from error


def _searched(
    request: SearchRequest,
    on_progress: Callable[[Progress], None],
    cancelled: Callable[[], bool],
    cutoff: float,
    shared: Shared,
    known: Ranked | None,
    takes: Callable[[Configuration], bool],
    among: Callable[[Configuration], bool],
    bounds: Mapping[Configuration, float],
) -> SearchResult:
    kind = ByRecursion if request.algorithm == "recursive_programming" else BestFirst

    def begun(asked: SearchRequest, *, settles: bool = False) -> BestFirst:
        return kind(
            asked,
            on_progress,
            cancelled,
            cutoff,
            shared,
            known,
            settles=settles,
            takes=takes,
            among=among,
            bounds=bounds,
        )

    asked, stated, overfull, proved = request, None, None, math.inf
    low, high = 0.0, math.inf  # memory in which nothing fits, and within which what was found is overfull
    for tried in range(1, _ROUNDS + 1):
        attempt = begun(asked)
        if stated is not None:
            attempt.limits, attempt.most_proved = stated, proved
        try:
            return attempt.run()
        except OverfullError as error:
            if isinstance(request.cluster, MixedCluster):
                raise InfeasibleError(error.message, needed=error.needed) from None
            stated, high = stated or attempt.limits, attempt.memory
            memory = max(high - tried * error.excess, high / 2)  # lean blocks come whole
            proved = min(error.bound, attempt.most_proved)  # what is proved with less memory is no proof
            overfull = error
            if memory <= low:
                memory = (low + high) / 2
                if memory > high * (1 - _CLOSE):
                    break
        except LimitError:
            raise
        except InfeasibleError as error:  # too lean: what fits in between may have room
            if stated is None:
                raise
            low, least = attempt.memory, (error.needed or 0.0) * (1 + OPTIMAL)
            memory = least if low < least < high else (low + high) / 2
            if memory > high * (1 - _CLOSE):
                break
        asked = replace(request, memory_limit=memory)
    assert overfull is not None
    if known is not None:
        return begun(request, settles=True).run()
    raise InfeasibleError(overfull.message, needed=overfull.needed) from None


def least_in_a_v(request: SearchRequest, shared: Shared) -> float:
    """What no plan in the space of a request with its stages in a V takes less than. Raises LimitError where a limit of
    the planner is reached."""
    return BestFirst(request, lambda _: None, lambda: False, math.inf, shared).least_in_a_v()


def find_fitting(request: SearchRequest, cancelled: Callable[[], bool] = lambda: False) -> bool:
    """Whether anything fits. Tries the leanest configurations first and stops at the first that does, or, without an
    answer and so with False, where it is cancelled. Raises LimitError where a limit of the planner is reached."""
    engine, _ = engine_of(request)
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
