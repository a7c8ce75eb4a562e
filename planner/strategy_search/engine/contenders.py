"""The best few configurations by the objective of the search. Their schedules decide among them.

    objective   m max t + (sum t - max t) / v + max u                       minimised, with a lower bound
    step        the schedule simulated, pass by pass                       decides between plans that are close

The two differ by tenths of a percent with many micro-batches, by some percent with few micro-batches and uneven stages.
A configuration contends if its objective is within `NEAR` of the best, and at most `CONTENDERS` do. Within a
configuration the objective decides alone: the search does not look for a slower division of blocks that the schedule
would favour.

Binding and pricing a plan takes longer than adding up its ranks by the tables, which bounds its step from below
(`costmodels.least_step_time`). So contenders are priced in the order of that bound, until it says that the others are
slower.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from costmodels import SCHEDULES, least_step_time, step_time
from hardware_profiles import Seconds
from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.heterogeneous_pipeline import HeterogeneousPipeline
from planner.strategy_search.decomposition.pieces import Column
from planner.strategy_search.decomposition.setting import Setting, setting_of
from planner.strategy_search.engine.outcome import Outcome, RankFilling
from planner.strategy_search.request.space import Configuration

CONTENDERS = 5
"""Maximum number of configurations that are compared by their schedules."""

NEAR = 0.02
"""Relative amount by which the objective of a contender may exceed the lowest."""

_APART = 1 / 3
"""Share of a rank's time for a micro-batch that its weight gradients take, at most about: F, B and W take about as long
each. ZB-H1 computes them when nothing else can run. It leaves a bubble of (p-1)(F + B - W), where 1F1B has
(p-1)(F + B + W) (Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, table 2)."""


def apart_seconds(configuration: Configuration, seconds: Seconds, gradients: Seconds = math.inf) -> Seconds:
    """A rough estimate of the step time with deferred weight gradients, for a pipeline of equal ranks that takes
    `seconds` in 1F1B. `gradients`: seconds of the step in which a rank computes weight gradients, if that is known to
    be less than a third of its work. With fewer micro-batches than ranks they are too few to fill the bubble: then
    m + p - 1 passes forward and back remain, and the last weight gradient."""
    p, m = configuration.pipeline, configuration.micro_batches
    passes = m + p - 1
    own = min(_APART * seconds / passes, gradients / m)
    return seconds - own * min(2 * (p - 1), passes - 1)


def in_1f1b(configuration: Configuration, seconds: Seconds, gradients: Seconds = math.inf) -> Seconds:
    """The inverse of `apart_seconds`, of a pipeline: the step time in 1F1B that gives these seconds."""
    p, m = configuration.pipeline, configuration.micro_batches
    assert p > 1
    passes = m + p - 1
    saved = min(2 * (p - 1), passes - 1)
    return min(seconds / (1 - _APART * saved / passes), seconds + saved * gradients / m)


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """An evaluated configuration with the plan found for it, which leaves `room` bytes of every device free."""

    configuration: Configuration
    outcome: Outcome
    pipeline_of_kinds: HeterogeneousPipeline
    room: float = 0.0

    @property
    def objective(self) -> float:
        return self.outcome.seconds

    @property
    def order(self) -> tuple[object, ...]:
        """A fixed order for contenders that are equally good."""
        return self.configuration.tie

    def promise(self, gradients: Seconds = math.inf) -> Seconds:
        """A rough estimate of the step time in another schedule: one with deferred weight gradients, with the least
        bubble that these may leave and no overlap with matrix products, or one that holds more micro-batches, with
        overlapped transfers. `gradients`: the most seconds of a step in which a rank computes weight gradients."""
        work, c = self.work, self.configuration
        apart = work + max(0.0, self.objective - work) * (1 - 2 * min(_APART, gradients / work))
        if c.micro_batches <= c.pipeline:  # most of the step is bubble, few passes can fill it
            apart = max(apart, apart_seconds(c, self.objective, gradients))
        return max(apart, min(apart + self.beneath, self.sum_with(self.outcome.ranks)))

    def least_step(self, *, any_order: bool = False) -> float:
        """A lower bound on the step time of the plan found. With `any_order` it holds for all schedules: no step takes
        less than its ranks work, and with deferred weight gradients the collectives that overlapped with matrix
        products run before or after them."""
        if not SCHEDULES[self.configuration.schedule].in_rows:  # another schedule may beat the simple order
            return self.work
        setting = setting_of(self.configuration, math.inf)
        in_rows = least_step_time(*self._least_sums(setting), setting.micro_batches, setting.chunks)
        return min(in_rows, self.work + self.beneath) if any_order else in_rows

    @property
    def work(self) -> float:
        """Seconds of a step that the busiest rank works."""
        setting = setting_of(self.configuration, math.inf)
        sums = zip(*self._least_sums(setting), strict=True)
        return max(setting.micro_batches * part + step for part, step in sums)

    @property
    def beneath(self) -> float:
        """A lower bound on the seconds that a step takes longer if nothing overlaps with the matrix products of
        blocks."""
        if self.configuration.virtual_stages > 1:
            return 0.0
        chain = self.pipeline_of_kinds.chain
        columns = {id(column): column for rank in self.outcome.ranks for column in rank.inner}
        saved = {at: _beneath(chain, column) for at, column in columns.items()}
        least = min(math.fsum(saved[id(column)] for column in rank.inner) for rank in self.outcome.ranks)
        return self.configuration.micro_batches * least

    @property
    def busy(self) -> float:
        """Seconds that the average rank of the plan found is busy. No step takes less, in whatever schedule and with
        whatever division of blocks, unless passes run together."""
        setting = setting_of(self.configuration, math.inf)
        parts, steps = self._least_sums(setting)
        return (setting.micro_batches * math.fsum(parts) + math.fsum(steps)) / len(parts)

    def _least_sums(self, setting: Setting) -> tuple[list[float], list[float]]:
        """`_sums`, without the seconds per step if gradients are reduced in buckets: these may overlap, and so may
        transfers."""
        parts, steps = self._sums(self.outcome.ranks, setting)
        hidden = self.pipeline_of_kinds.chain.tables.update.bucketed
        return parts, [0.0] * len(steps) if hidden else steps

    def sum_with(self, ranks: Sequence[RankFilling]) -> float:
        """A rough estimate of the objective with other ways to run the same blocks of each rank. It leaves transfers
        out, and counts as overlapped all reductions that the work of last backward passes may cover."""
        setting = setting_of(self.configuration, math.inf)
        return float(step_time(*self._sums(ranks, setting), setting.micro_batches, setting.chunks))

    def _sums(self, ranks: Sequence[RankFilling], setting: Setting) -> tuple[list[float], list[float]]:
        """Seconds of every rank per micro-batch, and its exposed seconds per step."""
        parts, steps = [], []
        for rank, filling in enumerate(ranks):
            ends = [column.amounts for column in (filling.head, filling.tail) if column is not None]
            inner = [column.amounts for column in filling.inner]
            amounts = [*ends, *inner]
            alone = 0.0  # of a block without another before it
            if rank and not setting.relays:
                alone = setting.chunks * min((a.under for a in inner), default=0.0)
            excess = max(0.0, sum(a.excess_forward for a in amounts)) + max(
                0.0, sum(a.excess_backward for a in amounts)
            )
            waits = max(alone, excess)  # the excess includes that block
            covered = min(sum(a.reduction for a in amounts), sum(a.backward for a in amounts))
            parts.append(sum(a.part for a in amounts) + waits)
            steps.append(sum(a.step for a in amounts) - covered)
        return parts, steps


def _beneath(chain: Chain, column: Column) -> float:
    """A lower bound on the seconds that a block takes longer for a micro-batch if nothing overlaps with its matrix
    products. A result that a recomputed block keeps overlaps with none of them."""
    chosen, alias, seconds = column.candidates, chain.alias, 0.0
    for table in chain.tables.edges:
        kept = table.under is not None and table.edge.producer in column.kept
        if table.beneath is not None and table.edge.kind in ("inside", "loop") and not kept:
            made, read = (chosen.get(alias.get(at, at)) for at in (table.edge.producer, table.edge.consumer))
            seconds += 0.0 if made is None or read is None else float(table.beneath[made, read])
    return seconds


class Contenders:
    """The `top` best configurations by their objectives, and, unless steps always equal objectives (`decided`), those
    that contend with the best. Plans with one stage on each rank and plans with several contend separately, because
    other schedules may take the former below their objectives. With `every` all configurations contend."""

    def __init__(self, top: int, *, decided: bool, every: bool = False) -> None:
        self.top, self.decided, self.every = top, decided, every
        self.step = 0.0  # everything below contends: the best plans take as long, whatever their objectives
        self.left: dict[Configuration, Outcome] = {}  # contended until better ones were found
        self._plain: list[Contender] = []  # lowest objective first
        self._interleaved: list[Contender] = []

    @property
    def found(self) -> list[Contender]:
        """All contenders, the lowest objective first."""
        return sorted([*self._plain, *self._interleaved], key=lambda found: (found.objective, found.order))

    @property
    def best(self) -> float:
        """The lowest objective; infinite before there is any."""
        return min((found[0].objective for found in (self._plain, self._interleaved) if found), default=math.inf)

    @property
    def cutoff(self) -> float:
        """Configurations with objectives from here on do not contend."""
        found = self._plain or self._interleaved
        if len(found) < self.top:
            return math.inf
        last = found[self.top - 1].objective
        if self.step:
            return max(last, self.step)
        if self.decided:
            return last
        near = found[0].objective * (1 + NEAR)
        if len(found) >= CONTENDERS:
            near = min(near, found[CONTENDERS - 1].objective)
        return max(last, near)

    def add(self, contender: Contender) -> None:
        """Add a contender; it replaces what was found for its configuration before."""
        alike = self._interleaved if contender.configuration.virtual_stages > 1 else self._plain
        others = [found for found in alike if found.configuration != contender.configuration]
        ordered = sorted([*others, contender], key=lambda found: (found.objective, found.order))
        if self.every:
            alike[:] = ordered
            return
        near = -math.inf if self.decided else ordered[0].objective * (1 + NEAR)
        most, near = (2 * CONTENDERS, self.step) if self.step else (CONTENDERS, near)
        close = [found for found in ordered[self.top : most] if found.objective < near]
        alike[:] = [*ordered[: self.top], *close]
        self.left.update({found.configuration: found.outcome for found in ordered if found not in alike})
