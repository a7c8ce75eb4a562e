"""Ways to split the sequence beside each other: what the search found about each of them, which it finds anyway.

A way is a degree of ring and a degree by heads. Of one that was looked at there is the best objective that was found,
or the bytes that its leanest plan needs where nothing fits; of one that was left out, the bound that ruled it out.
"""

import math
from dataclasses import dataclass, field

from planner.strategy_search.request.space import Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOutcome:
    """One way to split the sequence: degrees of ring and by heads, None where every operator splits as it likes.
    `seconds` is the least objective that was found, infinite where none was; no plan
    of this way has one below `bound`, and none fits where that is infinite. `least` has the bytes of the leanest plan
    that was looked at and did not fit, infinite where there is none."""

    ring: int | None
    heads: int | None
    seconds: float
    bound: float
    least: float


@dataclass(slots=True, kw_only=True)
class ContextNotes:
    """Collects what becomes of configurations, by their way to split the sequence; `free`: whether some have axes that
    serve every operator as it likes."""

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
        """The ways, best first: those with plans, those with bounds, those that do not fit. Empty where there was no
        choice."""
        found = [
            ContextOutcome(ring=ring, heads=heads, seconds=seconds, bound=min(bound, seconds), least=least)
            for (ring, heads), (seconds, bound, least) in self._known.items()
        ]
        if len(found) < 2:
            return ()
        return tuple(sorted(found, key=lambda one: (one.seconds, one.bound, one.least, one.ring or 0, one.heads or 0)))
