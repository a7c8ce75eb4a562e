"""Ways to split the sequence: what the search found about each of them as a side result.

A way is a degree of ring attention and a degree of Ulysses. For a way that was looked at, the result is the best
objective found, or the bytes that its leanest plan needs if nothing fits. For a way that was ruled out, it is the bound
that ruled it out.
"""

import math
from dataclasses import dataclass, field

from planner.strategy_search.request.space import Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOutcome:
    """One way to split the sequence: degrees of ring attention and Ulysses, None if every operator splits as it likes.
    `seconds` is the lowest objective found, infinite if there was none; no plan of this way has an objective below
    `bound`, and nothing fits if that is infinite. `least` has the bytes of the leanest plan that did not fit, infinite
    if there is none."""

    ring: int | None
    heads: int | None
    seconds: float
    bound: float
    least: float


@dataclass(slots=True, kw_only=True)
class ContextNotes:
    """Collects the results of configurations by their way to split the sequence; `free`: whether some configurations
    have axes that serve every operator as it likes."""

    free: bool
    _known: dict[tuple[int | None, int | None], tuple[float, float, float]] = field(default_factory=dict)

    def note(
        self, configuration: Configuration, *, bound: float, seconds: float = math.inf, least: float = math.inf
    ) -> None:
        new = (seconds, bound, least)
        way = (None, None) if self.free and not configuration.roles else configuration.context
        known = self._known.get(way, (math.inf,) * 3)
        self._known[way] = (min(known[0], new[0]), min(known[1], new[1]), min(known[2], new[2]))

    def outcomes(self) -> tuple[ContextOutcome, ...]:
        """The ways, best first: those with plans, those with bounds, those that do not fit. Empty if there was no
        choice."""
        found = [
            ContextOutcome(ring=ring, heads=heads, seconds=seconds, bound=min(bound, seconds), least=least)
            for (ring, heads), (seconds, bound, least) in self._known.items()
        ]
        if len(found) < 2:
            return ()
        return tuple(sorted(found, key=lambda one: (one.seconds, one.bound, one.least, one.ring or 0, one.heads or 0)))
