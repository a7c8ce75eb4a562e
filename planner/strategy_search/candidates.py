"""Other plans that a search has priced, named in the plans that it returns, so that a report needs no search of its
own."""

from dataclasses import replace

from planner.plan.layout.roles import roles
from planner.plan.plan import Candidate
from planner.plan.words import plan_words
from planner.sharding.update import DEFAULT
from planner.strategy_search.finalists.proofs import Ranked
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import FREE
from planner.strategy_search.result import SearchResult


def with_candidates(request: SearchRequest, result: SearchResult) -> SearchResult:
    """The result, with the priced plans as candidates in its plans. Without candidates if the user decided something,
    as there may be better plans then."""
    if result.statistics.stopped or not _undecided(request):
        return replace(result, priced=())
    shown = [*result.plans, *(() if result.simpler is None else (result.simpler.fastest,))]
    known = {_place(one) for one in shown}
    every = [*shown, *(one for one in result.priced if _place(one) not in known)]
    found = dict.fromkeys(_candidate(one) for one in every)
    candidates = tuple(sorted(found, key=lambda one: (one.step_seconds, one.peak_bytes)))
    return replace(result, priced=(), plans=tuple(_naming(one, candidates) for one in result.plans))


def _undecided(request: SearchRequest) -> bool:
    free = replace(request.pinned, offload=None) == FREE and not request.shards and not request.stores
    usual = request.objective == "time" and request.algorithm == "dynamic_programming" and request.memory_limit is None
    update = request.update
    usual = (
        usual and (update.buckets, update.gathers) == (DEFAULT.buckets, DEFAULT.gathers) and request.alltoall is True
    )
    return free and usual and request.space is None and request.default == "search"


def _place(ranked: Ranked) -> tuple[object, ...]:
    """The place of a plan in the space, whatever its schedule."""
    c = ranked.configuration
    return c.pipeline, c.virtual_stages, c.micro_batches, c.mesh, c.roles


def _candidate(ranked: Ranked) -> Candidate:
    words = plan_words(ranked.bound, roles(ranked.bound))
    peak = ranked.plan.prediction.peak_bytes
    return Candidate(step_seconds=ranked.seconds, peak_bytes=peak, words=tuple(words.items()))


def _naming(ranked: Ranked, candidates: tuple[Candidate, ...]) -> Ranked:
    return replace(ranked, bound=replace(ranked.bound, plan=replace(ranked.plan, candidates=candidates)))
