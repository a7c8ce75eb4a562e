"""What the caller of a search asks for besides the plan."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from planner.strategy_search.finalists.proofs import Ranked
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.result import Progress


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What the caller of a search asks for besides the plan (see `planner.strategy_search.search.search`).

    Attributes:
        on_progress: called after every evaluation.
        cancelled: asked between two configurations; if it says so, the search stops with what it has found.
        cutoff: plans with an objective of as many seconds or more are of no interest.
        known: a plan that was found before; only faster plans are looked for.
        takes: which configurations may become plans; the others are evaluated for comparison only.
        among: which configurations are of interest; the others are skipped.
        bounds: lower bounds that a search of the same request with free axes has proved for its configurations.
    """

    on_progress: Callable[[Progress], None] = lambda _: None
    cancelled: Callable[[], bool] = lambda: False
    cutoff: float = math.inf
    known: Ranked | None = None
    takes: Callable[[Configuration], bool] = lambda _: True
    among: Callable[[Configuration], bool] = lambda _: True
    bounds: Mapping[Configuration, float] = field(default_factory=dict)
