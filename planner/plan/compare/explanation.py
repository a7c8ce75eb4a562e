"""Why a plan costs what it costs: what its time goes to, whether memory binds, what the next best plan would cost.

The parts of a step are those of the prediction, put together under what a person could buy more of: arithmetic, links,
memory (recomputation is time that is paid for memory), or fewer pipeline stages.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from planner.plan.plan import Prediction
from planner.plan.prediction.step import (
    AHEAD,
    BESIDE,
    BETWEEN_STAGES,
    COVERED,
    GATHERED_AHEAD,
    PIPELINE_BUBBLE,
    REDUCED_AHEAD,
    UNCOVERED,
    UNDER_EXCHANGE,
    UNDER_PRODUCTS,
)
from planner.plan.prediction.walk.stage_cost import ACTIVATIONS, FETCHED, GATHERING, OFFLOAD, REDUCING, RETURNED

RESOURCE_OF = {
    "forward": "compute",
    "backward": "compute",
    AHEAD: "compute",  # less than nothing: what forward and backward count of launches that nobody waits for
    "gradient accumulation": "compute",
    "optimizer": "compute",
    "recomputation": "recomputation",
    "communication": "communication",
    GATHERING: "communication",
    REDUCING: "communication",
    "stage transfer": "communication",
    "gradient reduction": "communication",
    "weight gathering": "communication",
    OFFLOAD: "offload",
    ACTIVATIONS: "offload",
    FETCHED: "offload",
    RETURNED: "offload",
    BESIDE: "offload",  # less than nothing: what other blocks compute meanwhile
    UNCOVERED: "communication",
    GATHERED_AHEAD: "communication",  # less than nothing: what other blocks compute meanwhile
    UNDER_PRODUCTS: "communication",  # likewise: what its products compute meanwhile
    UNDER_EXCHANGE: "communication",  # likewise: what runs beside experts
    REDUCED_AHEAD: "communication",  # likewise: what the last backward pass computes meanwhile
    BETWEEN_STAGES: "communication",  # likewise: what a rank computes, or waits for its turn, meanwhile
    COVERED: "communication",  # less than nothing, too
    PIPELINE_BUBBLE: "pipeline bubble",
}
"""What each part of a step's time is spent on."""


def shown_part(name: str) -> str:
    """A part of a step as people expect it: gradients are reduced wherever that happens."""
    return "gradient reduction" if name == REDUCING else name


def shown_parts(time: Iterable[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """The parts of a step by `shown_part`; their sum is the same."""
    found = dict[str, float]()
    for name, seconds in time:
        found[shown_part(name)] = found.get(shown_part(name), 0.0) + seconds
    return tuple(found.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The next best plan: what it costs, and in which words it differs as (name, here, there)."""

    step_seconds: float
    peak_bytes: float
    differences: tuple[tuple[str, str, str], ...]


Outcome = Prediction | str
"""What a plan costs, or why there is none."""


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """One thing that was given made otherwise: what it is and how it changes, what the plan costs then as it is, and
    what the best plan costs then, None where that was not searched. `devices` there are then, and `tokens` in a
    sequence, None for models without one."""

    name: str
    change: str
    kept: Outcome
    searched: Outcome | None
    devices: int
    tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What limits a plan.

    Attributes:
        step_seconds: of the plan; the parts of `shares` sum to it.
        shares: seconds of the step by resource, the largest first.
        memory_price: seconds of the step that a byte more on every device would save, about; 0 where memory does not
            bind.
        free_bytes: left on the fullest device.
        ranks: of the pipeline.
        slowest, fullest: pipeline ranks that set the pace and that hold the most.
        next_best: None where the search kept no other plan.
    """

    step_seconds: float
    shares: tuple[tuple[str, float], ...]
    memory_price: float
    free_bytes: float
    ranks: int
    slowest: int
    fullest: int
    next_best: Alternative | None

    @property
    def memory_binds(self) -> bool:
        return self.memory_price > 0

    @property
    def largest(self) -> str:
        """The resource that most of the step goes to."""
        return self.shares[0][0]


def explain(
    prediction: Prediction, turns: int, capacity: float, memory_price: float, next_best: Alternative | None
) -> Explanation:
    """Explain a plan that was priced: `turns` of micro-batches, or of their slices, in a step, and `capacity` bytes
    that it may use of a device."""
    shares: dict[str, float] = dict.fromkeys(RESOURCE_OF.values(), 0.0)
    for name, seconds in prediction.time:
        shares[RESOURCE_OF[name]] += seconds
    busy = [turns * stage.micro_batch_seconds + stage.once_seconds for stage in prediction.stages]
    peaks = [stage.peak_bytes for stage in prediction.stages]
    return Explanation(
        step_seconds=prediction.step_seconds,
        shares=tuple(sorted(((n, s) for n, s in shares.items() if s > 0), key=lambda share: -share[1])),
        memory_price=memory_price,
        free_bytes=capacity - prediction.peak_bytes,
        ranks=len(prediction.stages),
        slowest=busy.index(max(busy)),
        fullest=peaks.index(prediction.peak_bytes),  # of several kinds, not that with most bytes
        next_best=next_best,
    )
