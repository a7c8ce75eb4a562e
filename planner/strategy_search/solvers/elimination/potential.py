"""The best possible cost of a whole choice through one cell of a clique table, for two prices at once.

    bound(cell) = time + λ memory of the best choice through it     useful only if bound ≤ cutoff + λ budget
    need(cell)  = memory of the leanest choice through it           fits only if need ≤ budget

A candidate whose own best (its min-marginal, see messages.py) violates either is in no useful choice and is dropped:
reduced-cost fixing. With the small duality gaps of large problems, few candidates per variable remain.
"""

from dataclasses import dataclass

from planner.strategy_search.solvers.elimination.messages import complete, eliminate
from planner.strategy_search.solvers.elimination.order import Schedule
from planner.strategy_search.solvers.elimination.tables import Tables
from planner.strategy_search.solvers.problem import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Potential:
    """Tables with their messages, completions per bucket and min-marginals per variable, for one price."""

    tables: list[Array]
    down: list[Array]
    marginals: list[Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The multiplier, and the memory budget without `tables.base`."""

    multiplier: float
    budget: float

    def price(self, time: float) -> float:
        """The largest time + multiplier * memory of a choice that fits and takes this time."""
        return time + self.multiplier * self.budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """The tables after fixing, their potentials, and the limits by which candidates were fixed."""

    tables: Tables
    bound: Potential
    need: Potential
    limits: Limits


def narrow(tables: Tables, limits: Limits, cutoff: float) -> Tables | None:
    """Drop candidates by their bound, once; None if no choice is left."""
    bound = _potential(tables.plan, tables.weighted(limits.multiplier))
    keep = [marginal <= limits.price(cutoff) for marginal in bound.marginals]
    return tables.restrict(keep) if all(mask.any() for mask in keep) else None


def fix(tables: Tables, limits: Limits, cutoff: float) -> Fixed | None:
    """Drop candidates by their bound and their need, until none is dropped; None if no choice is left."""
    while True:
        bound = _potential(tables.plan, tables.weighted(limits.multiplier))
        need = _potential(tables.plan, tables.allowed_memory())
        price, budget = limits.price(cutoff), limits.budget
        keep = [(b <= price) & (n <= budget) for b, n in zip(bound.marginals, need.marginals, strict=True)]
        if not all(mask.any() for mask in keep):
            return None
        left = tables.restrict(keep)
        if left is tables:
            return Fixed(tables=tables, bound=bound, need=need, limits=limits)
        tables = left


def _potential(plan: Schedule, tables: list[Array]) -> Potential:
    messages = eliminate(plan, tables)
    down, marginals = complete(plan, messages)
    return Potential(tables=messages, down=down, marginals=marginals)
