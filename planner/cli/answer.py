"""The result of a search: to print, to write and to hand on."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.engine_cost import EngineCost
from planner.cli.options import Options

if TYPE_CHECKING:
    from planner.cli.searching import Found
    from planner.plan.compare.explanation import Explanation
    from planner.plan.layout.roles import Roles
    from planner.plan.plan import Prediction
    from planner.strategy_search.finalists.proofs import Ranked
    from planner.strategy_search.request.request import SearchRequest
    from planner.strategy_search.result import SearchResult


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer to what the options ask for.

    Attributes:
        files: where plans were written, by their place in `shown`; the first is the best.
        seconds: from the start of the command.
        choices: of `plan estimate`, what was not given: (name, value, why).
        engine: of a plan for an engine, what would be possible without it.
    """

    options: Options
    request: "SearchRequest"
    found: "Found"
    files: tuple[Path, ...]
    seconds: float
    choices: tuple[tuple[str, str, str], ...] = ()
    engine: EngineCost | None = None

    @property
    def result(self) -> "SearchResult":
        return self.found.best

    @property
    def gap(self) -> float:
        """By how much another plan could be faster at most, relative; of a front, the maximum over its points."""
        return max(result.gap for result in self.found.results)

    @property
    def status(self) -> str:
        """The status: "optimal" if the gap is zero, else "feasible"."""
        return "optimal" if all(result.status == "optimal" for result in self.found.results) else "feasible"

    @cached_property
    def shown(self) -> "tuple[Ranked, ...]":
        """The requested plans, best first."""
        return shown_plans(self.options, self.found)

    @cached_property
    def roles(self) -> "tuple[Roles, ...]":
        """The roles of each plan (degrees, ZeRO, recomputation and so on)."""
        from planner.plan.layout.roles import roles

        return tuple(roles(ranked.bound) for ranked in self.shown)

    @cached_property
    def words(self) -> tuple[dict[str, str], ...]:
        """Each plan in a few words."""
        from planner.plan.words import plan_words

        return tuple(plan_words(ranked.bound, found) for ranked, found in zip(self.shown, self.roles, strict=True))

    @cached_property
    def explanation(self) -> "Explanation | None":
        """The explanation of the best plan, if one was requested."""
        if not self.options.explain:
            return None
        from planner.plan.compare.explanation import Alternative, explain
        from planner.plan.layout.roles import roles
        from planner.plan.words import plan_words, telling

        best, *others = self.result.plans
        prediction = best.plan.prediction
        next_best = None
        if others:
            here, there = self.words[0], plan_words(others[0].bound, roles(others[0].bound))
            next_best = Alternative(
                step_seconds=others[0].seconds,
                peak_bytes=others[0].plan.prediction.peak_bytes,
                differences=tuple((name, here[name], there[name]) for name in telling((here, there))),
            )
        return explain(
            prediction,
            turns=best.plan.stage_passes,
            capacity=min(_planned(prediction), self.request.memory_limit or math.inf),
            memory_price=best.memory_price,
            next_best=next_best,
        )


def _planned(prediction: "Prediction") -> float:
    """Bytes of a device that a predicted peak may fill, so that its margin fits too."""
    high = prediction.peak_bytes if prediction.high_peak_bytes is None else prediction.high_peak_bytes
    return prediction.capacity_bytes * prediction.peak_bytes / high


def shown_plans(options: Options, found: "Found") -> "tuple[Ranked, ...]":
    """The plans to show: the front, or the `--top` best. The search may have kept one more to explain the best."""
    if options.pareto:
        return tuple(result.plans[0] for result in found.results)
    return found.best.plans[: options.top or 1]
