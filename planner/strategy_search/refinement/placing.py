"""Which embedding tables are offloaded to the host, if the search decides.

    table      rows      look-ups of a sample    rows a look-up        k = 2
    items    10,000,000           1                10,000,000     ─┐ on the host
    words     2,000,000           4                   500,000     ─┘
    days            365           1                       365     ─┐ on the devices
    sexes             3           1                         3     ─┘

On the devices the cost of a table grows with its rows: memory, a gradient that is reduced, an update of every row. On
the host it grows with its look-ups. Both grow with the width of a row. So the rows per look-up decide whether it is
worth moving a table, and how many bytes a second of host time frees. In that order only the first k tables are worth
moving, for some k, as long as latencies and the sizes of single tables do not decide:

    best(k)    seconds of the fastest plan with the first k on the host, infinite where it does not fit
    k          first falls, where a table costs more on the devices, then rises: bisected on the sign of
               best(k + 1) - best(k); devices that are too full ask for a larger k, hosts that are bound k from above

Each best(k) is a search of its own, with all proofs for that k: 2 log2(tables) searches, and those with no table and
with all. A test compares with all subsets on small models. Not good for: tables whose look-ups differ much in number
while memory is short, where a knapsack would mix them otherwise; servers, which are used only if asked for.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from costmodels import ROW_MOMENTS
from hardware_profiles import Bytes, HardwareProfileError, MixedCluster
from planner.errors import InfeasibleError, LimitError, PlannerError, StoppedBy
from planner.graph.operator_graph import OperatorGraph, ValueRef
from planner.graph.placed import Placed, place_of, tables_of
from planner.limits import sharing
from planner.matching import matches
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.result import SearchResult

Solve = Callable[[SearchRequest], SearchResult]
"""The best plans of a request."""
Score = Callable[[SearchResult], float]
"""The value that is minimised."""

_MOSTLY = 0.5  # share of the bytes of a model's parameters
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The best plans with some tables on the host; None if nothing fits."""

    result: SearchResult | None
    seconds: float


_NOTHING = _Found(result=None, seconds=math.inf)


def with_placing(
    request: SearchRequest, solve: Solve, score: Score, cancelled: Callable[[], bool] = lambda: False
) -> SearchResult:
    """`solve`, with tables on the host as `request.placing` says: "auto" where that is better, "fit" if nothing fits
    otherwise and the model is mostly tables, "given" only those of the request. The time limit of the request is that
    of all searches together. When it is over, or `cancelled` says so, the best result so far is returned.

    Raises what `solve` raises for the given tables, if nothing else fits either.
    """
    given = replace(request, placing="given")
    tables = () if request.placing == "given" or request.alltoall is not True else movable(request)
    if request.placing == "fit" and not _mostly_tables(request.graph, tables):
        tables = ()
    if not tables:
        return solve(given)
    bisection = _Bisection(given, tables, solve, score, cancelled)
    try:
        with sharing(1 if request.placing == "fit" else 2):
            first = bisection.begin()
    except InfeasibleError:
        best = bisection.best()
        if best is None:
            raise
        return best
    return first if request.placing == "fit" else bisection.best() or first


def movable(request: SearchRequest) -> tuple[str, ...]:
    """The tables that could be on the host besides those that are placed already, those with the most rows per look-up
    first; empty if the request rules that out. The list ends with the first table that does not fit on the hosts."""
    cluster, update = request.cluster, request.update
    if isinstance(cluster, MixedCluster) or request.optimizer not in ROW_MOMENTS or update.clip_norm is not None:
        return ()
    try:
        room = cluster.store("host").capacity * cluster.devices
    except HardwareProfileError:
        return ()
    graph = request.graph
    free = [name for name in tables_of(graph) if place_of(name, update.placed) is None and not update.is_local(name)]
    found = []
    for name in sorted(free, key=lambda name: (-_rows_a_look_up(graph, name), -graph.types[name].nbytes, name)):
        room -= _host_bytes(request, name)
        if room < 0:
            break
        found.append(name)
    return tuple(found)


def _rows_a_look_up(graph: OperatorGraph, name: str) -> float:
    ids = [graph.operators[at].arguments[1] for at in graph.consumers[name]]
    looked_up = sum(graph.types[one.name].numel for one in ids if isinstance(one, ValueRef))
    return graph.types[name].shape[0] / max(1, looked_up)


def _host_bytes(request: SearchRequest, name: str) -> Bytes:
    """Bytes of a table on the hosts, in full precision, with its optimizer states."""
    kind = request.graph.types[name]
    trained = next(p.trainable for p in request.graph.parameters if p.name == name)
    return float(kind.numel * max(4, kind.element_bytes) * (1 + ROW_MOMENTS[request.optimizer] if trained else 1))


def _mostly_tables(graph: OperatorGraph, tables: Sequence[str]) -> bool:
    every = sum(graph.types[parameter.name].nbytes for parameter in graph.parameters)
    return sum(graph.types[name].nbytes for name in tables) > _MOSTLY * every


class _Bisection:
    """best(k) for the first k of some tables, each found once."""

    def __init__(
        self,
        request: SearchRequest,
        tables: Sequence[str],
        solve: Solve,
        score: Score,
        cancelled: Callable[[], bool],
    ) -> None:
        self._request, self._tables, self._solve, self._score = request, tables, solve, score
        self._cancelled = cancelled
        self._stopped_by: StoppedBy | None = None
        self._known = {0: _NOTHING}

    def begin(self) -> SearchResult:
        """The best plans without further tables on the host. Raises what the search raises."""
        result = self._solve(self._request)
        self._known[0] = _Found(result=result, seconds=self._score(result))
        return result

    def best(self) -> SearchResult | None:
        """The best plans with some tables on the host, or none; None if nothing fits."""
        low, high = 0, len(self._tables)
        self._at(high)
        while low < high:
            middle = (low + high) // 2
            if self._at(middle).seconds > self._at(middle + 1).seconds or self._at(middle).result is None:
                low = middle + 1
            else:
                high = middle
        least = min(self._known.values(), key=lambda found: found.seconds)
        if least.result is None:
            return None
        best = replace(least.result, placements=len(self._known))
        stops = (one.result.statistics.stopped_by for one in self._known.values() if one.result is not None)
        return best.cut_short(self._stopped_by or next(filter(None, stops), None))

    def _at(self, count: int) -> _Found:
        if count not in self._known:
            self._known[count] = self._solved(count)
        return self._known[count]

    def _solved(self, count: int) -> _Found:
        if self._cancelled() or self._stopped_by:
            return _NOTHING
        placed = (*self._request.update.placed, *_as_patterns(self._request.graph, self._tables[:count]))
        try:
            update = replace(self._request.update, placed=placed)
            with sharing(2):  # shared with the next search, which has other tables
                result = self._solve(replace(self._request, update=update))
        except LimitError as error:
            self._stopped_by = error.by
            return _NOTHING
        except PlannerError:  # nothing fits, or one stage does not divide
            return _NOTHING
        return _Found(result=result, seconds=self._score(result))


def _as_patterns(graph: OperatorGraph, tables: Sequence[str]) -> Placed:
    """Tables by their names, or together by a pattern that only they match."""
    found: dict[str, None] = {}
    for name in tables:
        pattern = _NUMBER.sub("*", name)
        matching = {one for one in graph.parameter_names if matches(one, pattern)}
        found[pattern if matching <= set(tables) else name] = None
    return tuple((pattern, "host") for pattern in found)
