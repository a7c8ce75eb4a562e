"""Reports the progress of a search to its caller."""

from collections.abc import Callable

from planner.strategy_search.exploration.families import Families
from planner.strategy_search.exploration.found import Found
from planner.strategy_search.exploration.lower_bounds import LowerBounds
from planner.strategy_search.exploration.record import Record
from planner.strategy_search.result import Progress


class Reporter:
    """Reports the progress of a search."""

    def __init__(
        self,
        on_progress: Callable[[Progress], None],
        families: Families,
        record: Record,
        found: Found,
        bounds: LowerBounds,
    ) -> None:
        self.on_progress = on_progress
        self.families, self.record, self.found, self.bounds = families, record, found, bounds

    def __call__(self, phase: str = "searching") -> None:
        self.on_progress(
            Progress(
                total=self.families.total,
                done=len(self.record.evaluated),
                best_seconds=self.found.best,
                bound_seconds=self.bounds.so_far(),
                phase=phase,
            )
        )
