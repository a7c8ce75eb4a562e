"""Which strategies of a rule are legal on a mesh, and why others are not.

Every factor must be divided by the axes that cut it. A compound dim (f g h) is cut into contiguous pieces: outer
factors first and completely, by earlier axes. Aligned loops, rings and halos have conditions of their own
(`planner.sharding.rule` says what they are).
"""

import math
from collections.abc import Callable, Sequence

from planner.errors import StrategyError
from planner.faults import Fault
from planner.limits import check, checked
from planner.sharding.mesh import Mesh
from planner.sharding.rule import FactorKind, Rule, Strategy, local_extents, pieces_of, splittable

Choices = Sequence[Sequence[int | None]]
"""Per mesh axis the factors, or None, that a strategy may give it."""

Keep = Callable[[int, tuple[Strategy, ...]], tuple[Strategy, ...]]
"""Which strategies, over the axes up to one, are extended to the next axis."""


def strategy_fault(rule: Rule, strategy: Strategy, mesh: Mesh) -> Fault | None:
    """Why a strategy is illegal, with the numbers that clash; None where it is legal."""
    reason = _strategy_reason(rule, strategy, mesh)
    if reason is None:
        return None
    return Fault(reason=reason, hint=f"splittable factors: {', '.join(splittable(rule)) or 'none'}")


def _strategy_reason(rule: Rule, strategy: Strategy, mesh: Mesh) -> str | None:
    if len(strategy) != len(mesh.axes):
        return f"has {len(strategy)} entries for a mesh of {len(mesh.axes)} axes"
    for choice, axis in zip(strategy, mesh.axes, strict=True):
        if choice is not None and rule.factors[choice].kind is FactorKind.BLOCKED:
            return f"{axis.name} splits factor '{rule.factors[choice].name}', which cannot be split"
        if choice is not None and rule.factors[choice].kind is FactorKind.EXCHANGE and not axis.alltoall:
            return f"{axis.name} has no all-to-all, with which '{rule.factors[choice].name}' exchanges rows"
        if choice is not None and rule.factors[choice].kind is FactorKind.RING and strategy.count(choice) > 1:
            return f"{axis.name} and another axis both split '{rule.factors[choice].name}': a ring goes round one axis"
    for index, factor in enumerate(rule.factors):
        axes = [a for c, a in zip(strategy, mesh.axes, strict=True) if c is not None and index in rule.splits[c]]
        count = math.prod(axis.size for axis in axes)
        if factor.extent % count:
            names = " and ".join(f"{axis.name} of size {axis.size}" for axis in axes)
            return f"{names} does not divide factor '{factor.name}' of extent {factor.extent}"
    reason = _aligned_reason(rule, strategy, mesh.sizes) or _halo_reason(rule, strategy, mesh)
    if reason:
        return reason
    for dims in (*rule.operands, *rule.results):
        for factors in dims:
            reason = _compound_reason(rule, factors, strategy, mesh)
            if reason:
                return reason
    return None


def _aligned_reason(rule: Rule, strategy: Strategy, sizes: Sequence[int]) -> str | None:
    """Why the longer loop of aligned factors cannot be split alone as it is; None where it can."""
    for both, few, many in rule.aligned:
        left, alone, names = rule.factors[few].extent, False, [rule.factors[f].name for f in (both, few, many)]
        for choice, size in zip(strategy, sizes, strict=False):
            if choice == both and alone:
                return f"the axes split factor '{names[2]}' alone before '{names[0]}'; split '{names[0]}' first"
            if choice == both:
                left //= size
            elif choice == many and not alone:
                alone = True
                if left > 1 and (size % left or size == left):
                    return (
                        f"factor '{names[2]}' is split into {size} alone, and there are {left} of '{names[1]}' to"
                        f" share: split '{names[0]}', or '{names[2]}' into a larger multiple of {left}"
                    )
    return None


def _halo_reason(rule: Rule, strategy: Strategy, mesh: Mesh) -> str | None:
    """Why pieces cannot be read with the edges of their neighbours; None where they can."""
    cut = [axis for axis, choice in enumerate(strategy) if choice in rule.halos]
    if len(cut) > 1:
        names = " and ".join(mesh.axes[axis].name for axis in cut)
        return f"{names} both split a dim whose pieces are read with their neighbours' edges; one axis can"
    for axis in cut:
        halo, line = rule.factors[strategy[axis] or 0], mesh.axes[axis]
        read = rule.factors[halo.parts[0]]
        others = read.extent - local_extents(rule, strategy, mesh)[halo.parts[0]]
        if others < halo.reach:
            return (
                f"{line.name} of size {line.size} leaves {others} of factor '{read.name}' beside a piece, and"
                f" {halo.reach} are read beside it; leave it whole"
            )
    return None


def _compound_reason(rule: Rule, factors: tuple[int, ...], strategy: Strategy, mesh: Mesh) -> str | None:
    """A dim (f g h) must be cut into contiguous pieces: outer factors first and completely, by earlier axes."""
    if len(factors) < 2:
        return None
    cut = [factor for choice in strategy if choice is not None for factor in rule.splits[choice]]
    order = [factors.index(factor) for factor in cut if factor in factors]
    names = " ".join(rule.factors[f].name for f in factors)
    if order != sorted(order):
        return f"the axes cut the compound dim ({names}) from the inside out"
    for position in set(order):
        for outer in factors[:position]:
            count = pieces_of(rule, strategy, mesh.sizes)[outer]
            if count != rule.factors[outer].extent:
                inner = rule.factors[factors[position]].name
                return (
                    f"factor '{inner}' inside the compound dim ({names}) is split, but factor"
                    f" '{rule.factors[outer].name}' outside of it, of extent {rule.factors[outer].extent}, is "
                    f"split into {count} only"
                )
    return None


def check_strategy(rule: Rule, strategy: Strategy, mesh: Mesh, where: str) -> None:
    """Raise StrategyError, naming `where`, unless the strategy is legal."""
    fault = strategy_fault(rule, strategy, mesh)
    if fault:
        raise StrategyError(f"{where} ({rule.format()}): {fault}")


def legal_strategies(
    rule: Rule, mesh: Mesh, allowed: Choices | None = None, *, rings: bool = False, keep: Keep | None = None
) -> tuple[Strategy, ...]:
    """All legal strategies in a fixed order; the one that splits nothing comes first. `allowed` restricts the choices
    on every axis; `keep` restricts which beginnings of a strategy are extended. Strategies with `rings` are included
    only where they are asked for.

    Strategies are extended axis by axis, because later axes cannot make an illegal beginning legal.
    """
    every: list[int | None] = [None]
    unused = (FactorKind.BLOCKED,) if rings else (FactorKind.BLOCKED, FactorKind.RING)
    every += [i for i, factor in enumerate(rule.factors) if factor.kind not in unused]
    grown: list[tuple[Strategy, tuple[int, ...]]] = [((), (1,) * len(rule.factors))]  # and the pieces of each factor
    for axis, size in enumerate(mesh.sizes):
        check()
        wanted = every if allowed is None else allowed[axis]
        if not mesh.axes[axis].alltoall:
            wanted = [at for at in wanted if at is None or rule.factors[at].kind is not FactorKind.EXCHANGE]
        grown = [
            ((*strategy, choice), after)
            for strategy, pieces in checked(grown)
            for choice in wanted
            if (after := _cut_on(rule, strategy, pieces, choice, size)) is not None
            and not (rule.aligned and _aligned_reason(rule, (*strategy, choice), mesh.sizes))
        ]
        if keep is not None:
            kept = frozenset(keep(axis, tuple(strategy for strategy, _ in grown)))
            grown = [one for one in grown if one[0] in kept]
    return tuple(strategy for strategy, _ in grown)


def _cut_on(
    rule: Rule, strategy: Strategy, pieces: tuple[int, ...], choice: int | None, size: int
) -> tuple[int, ...] | None:
    """Pieces of each factor when one more axis takes `choice` after a legal strategy; None where that is illegal."""
    if choice is None:
        return pieces
    kind = rule.factors[choice].kind
    if kind is FactorKind.BLOCKED or (kind is FactorKind.RING and choice in strategy):
        return None
    if choice in rule.halos and not rule.halos.isdisjoint(strategy):
        return None
    reach = rule.factors[choice].reach
    for factor in rule.splits[choice]:
        count = pieces[factor] * size
        outside, inside = rule.nesting[factor]
        if (
            not rule.factors[factor].extent
            or rule.factors[factor].extent % count
            or (reach and factor == rule.factors[choice].parts[0] and _beside(rule, factor, count) < reach)
            or any(pieces[outer] != rule.factors[outer].extent for outer in outside)
            or (inside and any(not inside.isdisjoint(rule.splits[other]) for other in strategy if other is not None))
        ):
            return None
        pieces = (*pieces[:factor], count, *pieces[factor + 1 :])
    return pieces


def _beside(rule: Rule, factor: int, count: int) -> int:
    """Elements of a loop that lie in other pieces than this one."""
    return rule.factors[factor].extent - rule.factors[factor].extent // count
