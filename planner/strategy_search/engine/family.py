"""Families: configurations that differ only in their micro-batches. The largest micro-batch gives bounds for all.

proof     k times the batch takes at most k times as long, and holds k times as much, so the pieces of the largest
          micro-batch bound those of its k-th parts, under the strategies that are legal for them   (Scaling)
ways      to gather weights have separate bounds: one for prefetched weights, one for all ways that wait for them
launches  of a micro-batch take as long however small it is, and no block takes less: they count once per micro-batch

The step time that is bounded here is the objective: in a pipeline, that of 1F1B with exposed transfers.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner.sharding.rule import pieces_of
from planner.sharding.rules import rule_of
from planner.strategy_search.decomposition.crossings import crossing_seconds
from planner.strategy_search.decomposition.heterogeneous_pipeline import HeterogeneousPipeline, step_bounds
from planner.strategy_search.decomposition.lagrangian import Multipliers, first_bounds
from planner.strategy_search.decomposition.pieces import NEITHER, Passes
from planner.strategy_search.decomposition.setting import Setting, setting_of
from planner.strategy_search.decomposition.state_bounds import StateBounds
from planner.strategy_search.decomposition.v_bound import busy_in_a_v
from planner.strategy_search.engine.evaluation import NO_HINT, Hint
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.request.template import Template
from planner.strategy_search.tables.cost_table import CostTables

_MANY_STATES = 2**17
"""From this many states of the boundary on, prices that were solved for all members to order them are not kept: each
takes a megabyte."""

_RECENT = 2**28
"""About the bytes that are kept of the latest prices solved for families with that many states."""

Ways: TypeAlias = tuple[str, ...]
"""Ways to gather weights (`planner.sharding.update.GATHERS`) that share a bound."""


@dataclass(frozen=True, eq=False)
class Recent:
    """The latest prices solved for families with many states, by the parts into which micro-batches were cut, and about
    how many bytes they take. Older ones are dropped, and solved again if needed."""

    asked: OrderedDict[tuple[int, int], tuple["_Bounds", int]] = field(default_factory=OrderedDict)

    def note(self, bounds: "_Bounds", parts: int, nbytes: int) -> None:
        self.asked[id(bounds), parts] = (bounds, nbytes)
        self.asked.move_to_end((id(bounds), parts))
        while sum(held for _, held in self.asked.values()) > _RECENT and len(self.asked) > 1:
            (_, oldest), (other, _) = self.asked.popitem(last=False)
            other.forget(oldest)


class Family:
    """Configurations that differ only in the number of micro-batches.

    `pieces`: of the largest micro-batch, for ways to gather weights that share a bound; the first takes the least time
    where memory is free, the last the least memory. `launched`: a lower bound on the seconds of a micro-batch in all
    stages, from launches alone.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[Ways, HeterogeneousPipeline]],
        micro_batches: int,
        scaling: "Scaling",
        recent: Recent,
        launched: float,
    ) -> None:
        self.hint = NO_HINT  # price and shares that mattered to a member
        self.launched = launched
        self._parts = [(ways, _Bounds(own, micro_batches, scaling, recent)) for ways, own in pieces]
        self._proved: dict[tuple[int, int, bool], dict[Ways, float]] = {}  # by micro-batches, virtual stages

    def step_seconds(
        self, members: Sequence[Configuration], floors: Sequence[float] = (), cutoff: float = math.inf
    ) -> list[float]:
        """A lower bound on the step time of each member, for any memory; to be called once. Members with virtual stages
        get what follows from one stage on each rank, if that is a member too. Members whose launches or `floors`
        (bounds known before) reach the `cutoff` get no more than that."""
        (_, fastest), *_ = self._parts
        known = floors or [0.0] * len(members)
        least = {c: max(floor, self._launched_seconds(c)) for c, floor in zip(members, known, strict=True)}
        plain = {c.micro_batches: c for c in members if c.virtual_stages == 1}
        alike: dict[Configuration, list[Configuration]] = {}
        for c in members:
            if least[c] < cutoff:
                alike.setdefault(plain.get(c.micro_batches, c), []).append(c)
        for c, seconds in fastest.step_seconds(alike).items():
            least[c] = max(least[c], seconds)
        return [least[c] for c in members]

    def busy_in_a_v(self, configuration: Configuration) -> float:
        """A lower bound on the busy seconds of the slowest rank of a member with its stages in a V, for any memory. If
        ranks are on several kinds of devices, it is what the host of the average rank launches."""
        (_, fastest), *_ = self._parts
        launched = self.launched / configuration.pipeline * configuration.micro_batches
        return max(launched, fastest.busy_in_a_v(configuration))

    def transfer_seconds(self, configuration: Configuration) -> float:
        """About the seconds of a step in which a rank of a member sends to others and back, all exposed."""
        (_, fastest), *_ = self._parts
        return fastest.transfer_seconds(configuration)

    def priced_seconds(
        self, configuration: Configuration, hint: Hint, cutoff: float = math.inf, *, free: bool = False
    ) -> float:
        """A lower bound on the step time of a member at a price of memory and shares of exposed communication, or the
        bound known before; infinite if even the leanest choice does not fit. Ways to gather whose bound has reached the
        cutoff are not solved again. With `free` only the prices with memory for free are solved."""
        launched, proved = self._launched_seconds(configuration), self._known(configuration)
        if launched >= cutoff:
            return launched
        for ways, part in self._parts:
            if proved.get(ways, 0.0) < cutoff:
                proved[ways] = max(proved.get(ways, 0.0), part.priced_seconds(configuration, hint, cutoff, free=free))
        return max(launched, min(proved.values()))

    def seconds_with_one_stage(self, configuration: Configuration, cutoff: float) -> float:
        """The bound of a member with virtual stages that follows from prices solved for it with one stage on each
        rank."""
        proved = self._known(configuration)
        for ways, part in self._parts:
            if proved.get(ways, 0.0) < cutoff:
                proved[ways] = max(proved.get(ways, 0.0), part.seconds_with_one_stage(configuration, cutoff))
        return min(proved.values())

    def _launched_seconds(self, configuration: Configuration) -> float:
        """A lower bound on the step time of a member from launches alone: of p ranks the slowest has a p-th of them or
        more."""
        p, v, m = configuration.pipeline, configuration.virtual_stages, configuration.micro_batches
        return self.launched / p * (m + (p - 1) / v)

    def proved(self, configuration: Configuration) -> dict[str, float]:
        """The lower bounds known for a member, by way to gather weights."""
        return {way: seconds for ways, seconds in self._known(configuration).items() for way in ways}

    def _known(self, configuration: Configuration) -> dict[Ways, float]:
        """The bounds of a member by ways to gather; with virtual stages, what follows from the member without them."""
        m, key = configuration.micro_batches, (configuration.micro_batches, *configuration.stages)
        if key not in self._proved:
            share = least_share(configuration)
            alone = self._proved.get((m, 1, False), {})
            self._proved[key] = {ways: share * seconds for ways, seconds in alone.items()}
        return self._proved[key]

    def least_bytes(self, configuration: Configuration) -> float:
        """About the least bytes that a member needs; never more."""
        *_, (_, leanest) = self._parts
        return leanest.least_bytes(configuration)


def least_share(configuration: Configuration) -> float:
    """A step with v stages on each of p ranks takes at least this share of a step with one: m micro-batches take

        (m - 1/v) max t + sum t / v >= (m + (p-1)/v) / (m + p-1)  of what they take with one,

    as sum t <= p max t, and stages that hold as many blocks together hold no less.
    """
    p, v, m = configuration.pipeline, configuration.virtual_stages, configuration.micro_batches
    return (m + (p - 1) / v) / (m + p - 1)


class _Bounds:
    """What the pieces of the largest micro-batch prove, for one way to gather weights."""

    def __init__(
        self, pipeline_of_kinds: HeterogeneousPipeline, micro_batches: int, scaling: "Scaling", recent: Recent
    ) -> None:
        self.pipeline_of_kinds, self.micro_batches, self.scaling = pipeline_of_kinds, micro_batches, scaling
        self.recent, self.states = recent, math.prod(pipeline_of_kinds.chain.shape)
        self._duals: dict[tuple[int, float], list[Multipliers]] = {}
        self._known: set[tuple[int, float, float, float, Passes]] = set()

    def step_seconds(self, alike: Mapping[Configuration, Sequence[Configuration]]) -> dict[Configuration, float]:
        """Lower bounds on the step time of members, for any memory. `alike` maps each member that is solved to the
        members bounded by it. To be called once."""
        known = {asked: self._of(asked) for asked in alike}
        if len(self.pipeline_of_kinds.chains) == 1:
            first_bounds([(multipliers[0], setting) for multipliers, setting in known.values()])
            found = {
                c: multipliers[0].whatever_memory(setting, self._setting_of(c)[1])
                for asked, (multipliers, setting) in known.items()
                for c in alike[asked]
            }
            if self.states >= _MANY_STATES:
                self._duals.clear()
            return found
        found = {}
        for asked, (multipliers, setting) in known.items():
            for one in multipliers:
                one.solve(0.0, 0.0)
            seconds = float(step_bounds(self.pipeline_of_kinds, multipliers, setting).min())
            found |= {c: seconds if c == asked else least_share(c) * seconds for c in alike[asked]}
        return found

    def priced_seconds(self, configuration: Configuration, hint: Hint, cutoff: float, *, free: bool = False) -> float:
        """A lower bound on the step time of a member at a price of memory and shares of exposed communication; infinite
        if even the leanest choice does not fit. The cheapest problems are solved first, until the cutoff is reached."""
        if (alone := self.seconds_with_one_stage(configuration, cutoff)) >= cutoff:
            return alone
        multipliers, setting = self._of(configuration)
        price, under = hint
        chain = self.pipeline_of_kinds.chain
        under, flights = chain.shares(under, setting.ranks), setting.tried_first(chain)
        most = flights[1:] if setting.unlike(chain) else flights[-1:]
        leanest = [(math.inf, number, NEITHER) for number in most]
        priced = [(float(f"{price:.3g}"), number, under) for number in flights if price]
        shares = [(0.0, 0.0, under)] if any(under) else []
        bounds, proved = None, 0.0
        for tries in ([(0.0, 0.0, NEITHER)], [*shares, *priced], leanest)[: 1 if free else None]:
            known = {(multipliers[0].parts, multipliers[0].weight, *one): one for one in tries}
            asked = [one for key, one in known.items() if key not in self._known]
            if len(multipliers) == 1 and asked and not multipliers[0].averages(setting):
                multipliers[0].solve_all(asked, average=setting)
            else:
                for each in multipliers:
                    each.solve_all(asked)
            self._known |= known.keys()
            if bounds is None:
                bounds = StateBounds.of(self.pipeline_of_kinds, multipliers, setting, limit=cutoff)
            elif tries:
                bounds.outdate()
            _, proved = bounds.least(cutoff)
            if proved >= cutoff:
                break
        if self.states >= _MANY_STATES:
            self._note(configuration.micro_batches // self.micro_batches)
        return proved

    def _note(self, parts: int) -> None:
        """Note the latest prices, solved for micro-batches cut into `parts`: each takes a number or two for every
        state, for each number of virtual stages."""
        prices = sum(2 + len(one.priced) for (cut, _), known in self._duals.items() if cut == parts for one in known)
        self.recent.note(self, parts, 2 * prices * self.states * 8)

    def forget(self, parts: int) -> None:
        """Drop the prices solved for micro-batches that are cut into `parts`."""
        self._duals = {key: known for key, known in self._duals.items() if key[0] != parts}
        self._known = {key for key in self._known if key[0] != parts}

    def busy_in_a_v(self, configuration: Configuration) -> float:
        """A lower bound on the busy seconds of the slowest rank of a member with its stages in a V."""
        multipliers, setting = self._of(configuration)
        return busy_in_a_v(multipliers[0].questions, setting) if len(multipliers) == 1 else 0.0

    def seconds_with_one_stage(self, configuration: Configuration, cutoff: float) -> float:
        """The bound of a member with virtual stages by prices that were solved with one stage on each rank, where a
        micro-batch counts less: it is no higher than the member's own bound would be. Nothing is solved for it. States
        are left out if their bound reaches the cutoff by what the average rank takes with one stage (`least_share`)."""
        if configuration.virtual_stages == 1:
            return 0.0
        ratio, setting = self._setting_of(configuration)
        weight = replace(setting, chunks=1).shared_weight
        known = self._duals.get((ratio, weight))
        if known is None or not known[0].knows(0.0, 0.0, NEITHER):
            return 0.0
        share = least_share(configuration)
        alone = known[0].where_free(replace(setting, chunks=1)) if len(known) == 1 else None
        least = None if alone is None else share * alone
        _, seconds = StateBounds.of(self.pipeline_of_kinds, known, setting, known=least).least(cutoff)
        return seconds

    def transfer_seconds(self, configuration: Configuration) -> float:
        """Seconds of a step that the rank with the longest transfers spends on them, for the layouts that take
        least."""
        (multipliers, *_), setting = self._of(configuration)
        longest = max(float(crossing_seconds(multipliers.chain, setting, rank).min()) for rank in range(setting.ranks))
        return setting.micro_batches * longest / multipliers.parts

    def least_bytes(self, configuration: Configuration) -> float:
        """About the least bytes that a member needs; never more."""
        multipliers, setting = self._of(configuration)
        multipliers[0].solve(math.inf, multipliers[0].least_flights(setting))
        return multipliers[0].least_bytes(setting)

    def _of(self, configuration: Configuration) -> tuple[list[Multipliers], Setting]:
        """The multipliers of a member, and how it is run, with micro-batches in flight counted in those of the family's
        chain."""
        ratio, setting = self._setting_of(configuration)
        key = (ratio, setting.shared_weight)
        if key not in self._duals:
            chains, weight = self.pipeline_of_kinds.chains, setting.shared_weight
            most, holds = self.pipeline_of_kinds.blocks_of(setting)
            like = [known for (parts, _), known in self._duals.items() if parts == ratio]
            others: Sequence[Multipliers | None] = like[0] if like else [None] * len(chains)
            allowed = None if like else self.scaling.allowed(ratio)
            single = setting.ranks == 1
            self._duals[key] = [
                Multipliers(
                    chain, weight, ratio, allowed, most=most, holds=holds, columns=False, single=single, like=other
                )
                for chain, other in zip(chains, others, strict=True)
            ]
        return self._duals[key], setting

    def _setting_of(self, configuration: Configuration) -> tuple[int, Setting]:
        """Into how many parts a member cuts the micro-batches of the family's chain, and how it is run, with
        micro-batches in flight counted in those of the chain."""
        ratio = configuration.micro_batches // self.micro_batches
        return ratio, setting_of(configuration, self.pipeline_of_kinds.capacities[0]).scaled(ratio)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scaling:
    """How candidates depend on the batch.

    `hindered` are operators for which a larger batch may forbid a strategy: one that splits an inner factor of a
    compound dim after the outer one, which grows with the batch, has been split completely. For all other operators
    `pieces` has the extents that grow with the batch, and into how many pieces each candidate cuts them. Empty for a
    batch that never changes.
    """

    hindered: frozenset[int] = frozenset()
    pieces: tuple[tuple[int, int, NDArray[np.int64]], ...] = ()  # operator, extent, pieces of each candidate

    def allowed(self, parts: int) -> dict[int, NDArray[np.bool_]]:
        """Candidates that are still legal for a batch of a `parts`-th."""
        found: dict[int, NDArray[np.bool_]] = {}
        for index, extent, pieces in self.pieces:
            legal = (extent // parts) % pieces == 0
            found[index] = found[index] & legal if index in found else legal
        return found


def scaling_of(tables: CostTables, doubled: Template) -> Scaling:
    """The scaling of candidates, from a comparison with twice the batch."""
    template, sizes = tables.template, tables.mesh.sizes
    hindered, pieces = set(), []
    for index, (op, other) in enumerate(zip(template.graph.operators, doubled.graph.operators, strict=True)):
        rule, twin = rule_of(template.graph, op), rule_of(doubled.graph, other)
        changing = [f for f, factor in enumerate(rule.factors) if factor.extent != twin.factors[f].extent]
        if any(f in changing for dims in (*rule.operands, *rule.results) for factors in dims for f in factors[:-1]):
            hindered.add(index)
            continue
        strategies = tables.operators[index].candidates.strategies
        for f in changing:
            counts = [pieces_of(rule, strategy, sizes)[f] for strategy in strategies]
            pieces.append((index, rule.factors[f].extent, np.array(counts, dtype=np.int64)))
    return Scaling(hindered=frozenset(hindered), pieces=tuple(pieces))
