"""An auto-parallel planner: traces a PyTorch model, searches how to split it over a cluster, and writes the plan.

The parts, from the ground up (each imports only from those before it):

    errors, limits            what may go wrong; the time and memory that planning may take
    graph, models             what a model computes
    sharding, pricing         how it can be split, and what that costs
    plan                      what was decided: the file, its checks, its price
    strategy_search, report, export    who makes plans, shows them, carries them elsewhere
    cli                       the command line

What it is for, from Python:

    planner.search(model, cluster, ...) -> SearchResult      see planner.strategy_search.api.search
    planner.shard(pattern, strategy)                         a strategy decided by hand, for `search(shards=...)`
    planner.discover(graph) -> OperatorGraph                 rules by trial where there are none; `search` does it
    planner.Pinned(tensor=8, pipeline=4, ...)                degrees decided by hand, for `search(pinned=...)`
    planner.Update(clip_norm=1.0, ...)                       what becomes of gradients, for `search(update=...)`
    planner.save_plan(plan, path), planner.load_plan(path)   plan files, as the command line and the runtime read them
    planner.PlannerError                                     what is raised on purpose; one that says what to do instead
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.errors import PlannerError
    from planner.plan.file import load_plan, save_plan
    from planner.sharding.discover import discover
    from planner.sharding.update import Update
    from planner.strategy_search.api import search, shard
    from planner.strategy_search.request.space import Pinned
    from planner.strategy_search.result import SearchResult

_LAZY = {
    "Pinned": "planner.strategy_search.request.space",
    "PlannerError": "planner.errors",
    "SearchResult": "planner.strategy_search.result",
    "Update": "planner.sharding.update",
    "discover": "planner.sharding.discover",
    "load_plan": "planner.plan.file",
    "save_plan": "planner.plan.file",
    "search": "planner.strategy_search.api",
    "shard": "planner.strategy_search.api",
}

__all__ = [
    "Pinned",
    "PlannerError",
    "SearchResult",
    "Update",
    "discover",
    "load_plan",
    "save_plan",
    "search",
    "shard",
]


def __getattr__(name: str) -> Any:
    """Loaded when it is first used: importing the planner loads neither torch nor numpy."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'planner' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
