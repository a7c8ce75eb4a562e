"""The same search for many commands: what one of them has found is handed to the next that asks for the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

import pytest

import planner.strategy_search.objectives
from planner.graph.operator_graph import OperatorGraph
from planner.strategy_search.objectives import Listener, Stop
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.result import SearchResult

_found: dict[tuple[int, str], tuple[OperatorGraph, SearchResult]] = {}  # a graph that is held keeps its number


@contextmanager
def searched_once() -> Iterator[None]:
    """For tests of what becomes of a plan. Those of the search itself, of its progress, of limits and of files that are
    the same every time do without."""
    with pytest.MonkeyPatch.context() as patch:
        plan_for = planner.strategy_search.objectives.plan_for
        patch.setattr(planner.strategy_search.objectives, "plan_for", _remembering(plan_for))
        yield


Search = Callable[[SearchRequest, Listener, Stop], SearchResult]


def _remembering(plan_for: Search) -> Search:
    def remembered(request: SearchRequest, on_progress: Listener, cancelled: Stop) -> SearchResult:
        others = [(one.name, getattr(request, one.name)) for one in fields(request) if one.name != "graph"]
        key = (id(request.graph), repr(others))
        if request.time_limit is not None:
            return plan_for(request, on_progress, cancelled)
        if key in _found:
            return _found[key][1]
        found = plan_for(request, on_progress, cancelled)
        if not found.statistics.stopped:
            _found[key] = (request.graph, found)
        return found

    return remembered
