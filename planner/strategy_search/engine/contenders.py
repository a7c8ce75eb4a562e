"""The best few configurations by the sum that the search minimises, among which their schedules decide.

    objective   m max t + (sum t - max t) / v + max u                       what is minimised, with a bound
    step        the schedule gone through, pass by pass                    what decides between plans that are close

The two differ by tenths of a percent where micro-batches are many, by some percent where they are few and stages are
uneven. A configuration contends when its objective is `NEAR` the best, and no more than `CONTENDERS` do. Which plan of
a configuration is best remains a matter of the objective: a slower division of blocks that its schedule would favour is
not looked for.

Binding and pricing a plan takes longer than what its ranks take by the tables, which bound its step from below
(`costmodels.least_step_time`), so contenders are priced in the order of that bound, until it says that the others are
slower.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from costmodels import SCHEDULES, least_step_time, step_time
from hardware_profiles import Seconds
from planner.strategy_search.decomposition.heterogeneous_pipeline import HeterogeneousPipeline
from planner.strategy_search.decomposition.pieces import Chain, Column
from planner.strategy_search.decomposition.setting import Setting, setting_of
from planner.strategy_search.engine.outcome import Outcome, RankFilling
from planner.strategy_search.request.space import Configuration

CONTENDERS = 5
"""Configurations that are told apart by their schedules, at most."""

NEAR = 0.02
"""How much more, relatively, the objective of a contender may be than the least."""

_APART = 1 / 3
"""Of what a micro-batch takes on a rank, its weight gradients, at most about: F, B and W take about as long each. ZB-H1
computes them when nothing else is, and leaves (p-1)(F + B - W) of the bubble of 1F1B, (p-1)(F + B + W) (Qi et al.,
"Zero bubble pipeline parallelism", ICLR 2024, table 2)."""


def apart_seconds(configuration: Configuration, seconds: Seconds, gradients: Seconds = math.inf) -> Seconds:
    """About what a pipeline of equal ranks takes in an order with weight gradients apart that takes so many `seconds`
    in 1F1B. `gradients`: seconds of the step in which a rank computes those, where that is known to be less than a
    third of its work. With fewer micro-batches than ranks they are too few for the bubble: what is left are m + p - 1
    passes forward and back, and the last weight gradient."""
    p, m = configuration.pipeline, configuration.micro_batches
    passes = m + p - 1
    own = min(_APART * seconds / passes, gradients / m)
    return seconds - own * min(2 * (p - 1), passes - 1)


def in_1f1b(configuration: Configuration, seconds: Seconds, gradients: Seconds = math.inf) -> Seconds:
    """What `apart_seconds` is so many seconds of."""
    p, m = configuration.pipeline, configuration.micro_batches
    passes = m + p - 1
    saved = min(2 * (p - 1), passes - 1)
    return min(seconds / (1 - _APART * saved / passes), seconds + saved * gradients / m)


@dataclass(frozen=True, kw_only=True, eq=False)
class Contender:
    """An evaluated configuration that something was found for, which leaves `room` bytes of every device."""

    configuration: Configuration
    outcome: Outcome
    pipeline_of_kinds: HeterogeneousPipeline
    room: float = 0.0

    @property
    def objective(self) -> float:
        return self.outcome.seconds

    @property
    def order(self) -> tuple[object, ...]:
        """Contenders that are equally good come in a fixed order."""
        return self.configuration.tie

    def promise(self, gradients: Seconds = math.inf) -> Seconds:
        """About what a step takes in an order with weight gradients apart, of which a rank computes so many seconds at
        most: with as little of its bubble, and nothing of it under products; or in one that holds more, with transfers
        under work."""
        work, c = self.work, self.configuration
        apart = work + max(0.0, self.objective - work) * (1 - 2 * min(_APART, gradients / work))
        if c.micro_batches <= c.pipeline:  # most of a step is bubble, and few passes fill it
            apart = max(apart, apart_seconds(c, self.objective, gradients))
        return max(apart, min(apart + self.beneath, self.sum_with(self.outcome.ranks)))

    def least_step(self, *, any_order: bool = False) -> float:
        """No step of what was found takes less; in `any_order` of turns none takes less than its ranks work, and what
        travels under products travels before or after them where weight gradients are apart."""
        if not SCHEDULES[self.configuration.schedule].in_rows:  # which another order may beat
            return self.work
        setting = setting_of(self.configuration, math.inf)
        in_rows = least_step_time(*self._least_sums(setting), setting.micro_batches, setting.chunks)
        return min(in_rows, self.work + self.beneath) if any_order else in_rows

    @property
    def work(self) -> float:
        """Seconds that the busiest rank works in a step."""
        setting = setting_of(self.configuration, math.inf)
        sums = zip(*self._least_sums(setting), strict=True)
        return max(setting.micro_batches * part + step for part, step in sums)

    @property
    def beneath(self) -> float:
        """Seconds that a step takes longer, at least, where nothing travels under the products of blocks."""
        if self.configuration.virtual_stages > 1:
            return 0.0
        chain = self.pipeline_of_kinds.chain
        columns = {id(column): column for rank in self.outcome.ranks for column in rank.inner}
        saved = {at: _beneath(chain, column) for at, column in columns.items()}
        least = min(math.fsum(saved[id(column)] for column in rank.inner) for rank in self.outcome.ranks)
        return self.configuration.micro_batches * least

    @property
    def busy(self) -> float:
        """Seconds that the average rank of what was found is busy: no step takes less, in whatever order of turns and
        however its blocks are divided, unless passes run together."""
        setting = setting_of(self.configuration, math.inf)
        parts, steps = self._least_sums(setting)
        return (setting.micro_batches * math.fsum(parts) + math.fsum(steps)) / len(parts)

    def _least_sums(self, setting: Setting) -> tuple[list[float], list[float]]:
        """`_sums`, but for gradients that may travel under work, which updates wait for; so may transfers."""
        parts, steps = self._sums(self.outcome.ranks, setting)
        hidden = self.pipeline_of_kinds.chain.tables.update.bucketed
        return parts, [0.0] * len(steps) if hidden else steps

    def sum_with(self, ranks: Sequence[RankFilling]) -> float:
        """About the objective with other ways to run its ranks, of the same blocks: transfers left out, and with all of
        the reductions that the work of last backward passes may cover."""
        setting = setting_of(self.configuration, math.inf)
        return float(step_time(*self._sums(ranks, setting), setting.micro_batches, setting.chunks))

    def _sums(self, ranks: Sequence[RankFilling], setting: Setting) -> tuple[list[float], list[float]]:
        """Seconds of every rank per micro-batch, and those per step that nothing covers."""
        parts, steps = [], []
        for rank, filling in enumerate(ranks):
            ends = [column.amounts for column in (filling.head, filling.tail) if column is not None]
            inner = [column.amounts for column in filling.inner]
            amounts = [*ends, *inner]
            alone = 0.0  # of a block with none before it
            if rank and not setting.relays:
                alone = setting.chunks * min((a.under for a in inner), default=0.0)
            excess = max(0.0, sum(a.excess_forward for a in amounts)) + max(
                0.0, sum(a.excess_backward for a in amounts)
            )
            waits = max(alone, excess)  # which counts that block, too
            covered = min(sum(a.reduction for a in amounts), sum(a.backward for a in amounts))
            parts.append(sum(a.part for a in amounts) + waits)
            steps.append(sum(a.step for a in amounts) - covered)
        return parts, steps


def _beneath(chain: Chain, column: Column) -> float:
    """Seconds that a block takes longer for a micro-batch, at least, where nothing travels under its products. A result
    that a recomputed block keeps travels under none."""
    chosen, alias, seconds = column.candidates, chain.alias, 0.0
    for table in chain.tables.edges:
        kept = table.under is not None and table.edge.producer in column.kept
        if table.beneath is not None and table.edge.kind in ("inside", "loop") and not kept:
            made, read = (chosen.get(alias.get(at, at)) for at in (table.edge.producer, table.edge.consumer))
            seconds += 0.0 if made is None or read is None else float(table.beneath[made, read])
    return seconds


class Contenders:
    """The `top` best by their objectives, and, unless steps are always as long as that (`decided`), what contends with
    the best: of plans with one stage on each rank, and of those with several, each among themselves, as other orders of
    turns take the former less than their objectives. Or `every` one contends."""

    def __init__(self, top: int, *, decided: bool, every: bool = False) -> None:
        self.top, self.decided, self.every = top, decided, every
        self.step = 0.0  # what takes less than that contends: the best plans take as long, whatever their sums
        self.left: dict[Configuration, Outcome] = {}  # what contended, until better was found
        self._plain: list[Contender] = []  # least objective first
        self._interleaved: list[Contender] = []

    @property
    def found(self) -> list[Contender]:
        """All, least objective first."""
        return sorted([*self._plain, *self._interleaved], key=lambda found: (found.objective, found.order))

    @property
    def best(self) -> float:
        """The least objective; infinite before there is any."""
        return min((found[0].objective for found in (self._plain, self._interleaved) if found), default=math.inf)

    @property
    def cutoff(self) -> float:
        """What takes as long as that by its objective does not contend."""
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
        """Take one in, in place of what was found for its configuration before."""
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
