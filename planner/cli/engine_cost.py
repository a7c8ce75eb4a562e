"""The cost of using an engine: its best plan compared with the best plan of our runtime, which chooses the strategy of
each operator."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from planner.cli.searching import find
from planner.errors import InfeasibleError, LimitError

if TYPE_CHECKING:
    from rich.console import Console

    from planner.plan.binding.bind import BoundPlan
    from planner.strategy_search.request.request import SearchRequest
    from planner.strategy_search.result import SearchResult

_STACK = "training stack"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """The plan of an engine, compared with the best per-operator plan of our runtime.

    `differences`: what tells them apart, as it is there and as the engine has it.
    """

    engine: str
    title: str
    step_seconds: float
    possible_seconds: float
    possible_bytes: float
    differences: tuple[tuple[str, str, str], ...]

    @property
    def slower(self) -> float:
        """By how much a step of the engine takes longer, relative."""
        return self.step_seconds / self.possible_seconds - 1

    @property
    def text(self) -> str:
        """`29.1 s would be possible with per-operator strategies; Megatron-LM's best is 31.2 s (+7.2%)`."""
        from planner.report.units import seconds_text

        return (
            f"{seconds_text(self.possible_seconds)} would be possible with per-operator strategies, in the runtime of"
            f" this project; {self.title}'s best is {seconds_text(self.step_seconds)} ({self.slower:+.1%})"
        )

    def content(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "name": self.engine,
            "possible_seconds": self.possible_seconds,
            "possible_bytes": self.possible_bytes,
            "slower": self.slower,
            "differences": {name: {"possible": here, "engine": there} for name, here, there in self.differences},
        }


def free_request(request: "SearchRequest") -> "SearchRequest":
    """The same request for the runtime of this project, with a strategy per operator. Decisions by hand are kept."""
    from hardware_profiles import PYTORCH, load_software

    return replace(request, space=None, cluster=request.cluster.with_software(load_software(PYTORCH.name)))


def possible(request: "SearchRequest", console: "Console") -> "SearchResult | None":
    """The best plan without the engine; None if none was found."""
    try:
        return find(free_request(replace(request, top=1)), console, advise=False).best
    except (InfeasibleError, LimitError):
        return None


def cost_of(request: "SearchRequest", found: "BoundPlan", free: "SearchResult") -> EngineCost:
    """An engine's plan compared with the free one."""
    from planner.plan.layout.roles import roles
    from planner.plan.words import plan_words, telling

    assert request.space is not None
    rows = [{_STACK: one.plan.cluster.software, **plan_words(one, roles(one))} for one in (free.bound, found)]
    return EngineCost(
        engine=request.space.name,
        title=request.space.title,
        step_seconds=found.plan.prediction.step_seconds,
        possible_seconds=free.plan.prediction.step_seconds,
        possible_bytes=free.plan.prediction.peak_bytes,
        differences=tuple((name, rows[0][name], rows[1][name]) for name in telling(rows)),
    )
