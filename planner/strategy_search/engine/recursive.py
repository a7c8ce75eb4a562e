"""Recursive programming: one axis of the mesh after the other, each solved exactly, for meshes of any number of axes.

    devices of a stage: 16 nodes of 8      2 x 2 x 2 x 2 | 2 x 2 x 2       prime factors, slowest links first

    for every axis:     its devices make the last axis of the mesh wider, or a further axis, whichever is faster;
                        candidates = what was decided on the axes before, and anything legal on this one;
                                     the axes after it split nothing yet
                        the configuration evaluated with these candidates           (cost_table, pieces, evaluation)

    data | data | data | data | data | tensor | tensor   ->   32 x 4

    then sweeps:        every axis is decided once more, given all others; so is one axis of the nearest meshes
                        (two axes joined, a factor shifted to the neighbour, an axis split), until nothing gets faster

The same is done once more with whole levels of the network in place of primes. An operator has as many candidates as
factors, and the mesh stays small. So the time of one axis is linear in the operators of the template and hardly grows
with the mesh: log(devices) problems of some dozens of variables. Prices, stages, recomputation and the handling of
memory are those of any other search. Dividing the devices recursively is due to Tofu (Wang, Huang and Li 2019).

Memory: tensors that are kept when an axis is decided will be divided further by the axes after it. So the limit is the
usable memory times the product of these axes, and exact at the last axis. If something cannot be divided that far, some
axis finds nothing that fits. Then the axes before it are decided again with limits that are tighter by what was
missing, in the end with the least memory that each axis can reach.

If the user has decided about operators, the mesh is given, and its axes are decided in turn.

It is a heuristic. An axis is decided without knowing what the next ones do. So the result may be slower than the best
on the same mesh, and if nothing is found, that does not prove that nothing fits. All blocks of a kind are run alike
while axes are decided: as most of them are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hardware_profiles import Cluster
from planner.graph.fp8 import NO_FP8, Fp8
from planner.limits import checked
from planner.sharding.layout import REPLICATE, Layout
from planner.sharding.mesh import Alltoall, Mesh, build_mesh
from planner.sharding.stored import StoredParameter
from planner.sharding.update import EACH, PLAIN, Update
from planner.strategy_search.decomposition.cutting import cut
from planner.strategy_search.decomposition.setting import setting_of
from planner.strategy_search.engine.assemble import assembly
from planner.strategy_search.engine.evaluation import Evaluation, check_virtual_stages
from planner.strategy_search.engine.propagation import fixed_of
from planner.strategy_search.request.constraints import Decided
from planner.strategy_search.request.offload import NOTHING, Offload
from planner.strategy_search.request.restriction import Fixed, OneAxisFree, Restriction
from planner.strategy_search.request.space import Configuration, Running
from planner.strategy_search.request.template import Template
from planner.strategy_search.tables.table_builder import TableBuilder

_ROUNDING = 1e-9  # relative: sums of the same numbers in another order differ by less
_MARGIN = 1.05  # how much tighter limits get than by what was missing
_MOST_AXES = 4
_NEW_AXIS = 0.01  # relative gain that a further axis must bring
_ROUNDS = 5  # number of prices of memory tried for an axis
_TRIES = 4  # attempts at limits, the last at the least memory


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is planned.

    Attributes:
        template: the graph with the batch of one micro-batch.
        configuration: ranks, virtual stages, micro-batches; and the mesh, if it is `given`.
        offload: what may be offloaded.
        recomputation: ways to run a block.
        decided: what the user has decided about operators.
        sweeps: how often at most all axes are decided once more at the end.
        alltoall: the axes on which there is that collective.
        gathers: how weights are gathered (`planner.sharding.update.GATHERS`).
        fp8: what layers with delayed scales keep of the steps before.
    """

    template: Template
    cluster: Cluster
    configuration: Configuration
    precision: str
    optimizer: str
    update: Update = PLAIN
    offload: Offload = NOTHING
    recomputation: tuple[Running, ...] = ("none", "selective", "full")
    decided: Decided | None = None
    given: bool = False
    sweeps: int = 3
    alltoall: Alltoall = True
    gathers: str = EACH
    fp8: Fp8 = NO_FP8

    def starts(self) -> tuple[tuple[int, ...], ...]:
        """The axes that are decided one after the other: the finest, or whole levels at once."""
        if self.given:
            return (self.configuration.mesh,)
        levels = level_sizes(self.cluster.devices // self.configuration.pipeline, self.cluster)
        finest = tuple(prime for size in levels for prime in reversed(_primes(size)))
        return tuple(dict.fromkeys((finest, levels))) if self.sweeps else (levels if len(levels) > 1 else finest,)


class _Builders:
    """Keeps a table builder for every mesh, so that everything is priced once."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._known: dict[tuple[tuple[int, ...], int], TableBuilder] = {}

    def of(self, sizes: tuple[int, ...], rest: int = 1) -> TableBuilder:
        """The builder for a mesh of these sizes, every point of which stands for `rest` devices."""
        task = self._task
        if (sizes, rest) not in self._known:
            self._known[sizes, rest] = TableBuilder(
                mesh=build_mesh(task.cluster, sizes, rest, task.configuration.zigzag_axes, alltoall=task.alltoall),
                cluster=task.cluster,
                precision=task.precision,
                optimizer=task.optimizer,
                update=task.update,
                offload=task.offload,
                together=task.gathers != EACH,
                fp8=task.fp8,
            )
        return self._known[sizes, rest]


@dataclass(frozen=True, kw_only=True)
class RecursivePlan:
    """A mesh, the only candidate of each operator and parameter of the template on it, and the seconds of a step."""

    mesh: Mesh
    chosen: Fixed
    seconds: float


def plan_recursively(task: Task, capacity: float) -> RecursivePlan | None:
    """The best plan found, or None. `capacity`: bytes of tensors that a device can hold."""
    descent = _Descent(task, capacity)
    found = descent.run()
    return None if found is None else descent.polished(*found)


def refine(task: Task, mesh: tuple[int, ...], chosen: Fixed, seconds: float, capacity: float) -> RecursivePlan | None:
    """A plan that takes less than `seconds`, by splitting, joining and resizing the axes of a plan on a mesh.

    None if nothing better was found.
    """
    found = _Descent(task, capacity).polished(_Decided(sizes=mesh, chosen=chosen), seconds)
    return found if found.seconds < seconds else None


def level_sizes(devices: int, cluster: Cluster) -> tuple[int, ...]:
    """The number of devices as a product, slowest links first, with one factor for the part that divides each network
    level."""
    sizes: list[int] = []
    for level in cluster.levels:
        sizes.append(devices if level.fan_out is None else math.gcd(devices, level.fan_out))
        devices //= sizes[-1]
    return tuple(size for size in (devices, *reversed(sizes)) if size > 1)


def _primes(number: int) -> list[int]:
    found: list[int] = []
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor:
            divisor += 1
        else:
            found.append(divisor)
            number //= divisor
    return [*found, number] if number > 1 else found


@dataclass(frozen=True, kw_only=True)
class _Decided:
    """The decided axes, and what every operator and parameter does on them."""

    sizes: tuple[int, ...]
    chosen: Fixed

    @staticmethod
    def nothing(template: Template) -> "_Decided":
        """No axis yet."""
        alone = StoredParameter(weight=(), gradient=(), state=())
        operators = ((),) * len(template.graph.operators)
        parameters = dict.fromkeys((parameter.name for parameter in template.graph.parameters), alone)
        return _Decided(sizes=(), chosen=Fixed(operators=operators, parameters=parameters))

    def with_axis(self, size: int) -> "_Decided":
        """One more axis, which nothing uses."""
        return _Decided(
            sizes=(*self.sizes, size),
            chosen=Fixed(
                operators=tuple((*strategy, None) for strategy in self.chosen.operators),
                parameters=_each(self.chosen, lambda layout: (*layout, REPLICATE)),
            ),
        )

    def with_factor(self, size: int, free: bool) -> "list[_Decided]":
        """The devices multiplied by a factor: as a wider last axis, or as one more axis; only the latter on a given
        mesh."""
        if not free:
            return [self.with_axis(size)]
        wider = _Decided(sizes=(*self.sizes[:-1], math.prod(self.sizes[-1:]) * size), chosen=self.chosen)
        return [*([wider] if self.sizes else []), *([self.with_axis(size)] if len(self.sizes) < _MOST_AXES else [])]

    def joined(self, axis: int) -> "_Decided | None":
        """An axis and the next as one, which is used as the first of them was."""
        if axis + 1 >= len(self.sizes):
            return None
        first, second = self.sizes[axis : axis + 2]
        return self._with(
            (*self.sizes[:axis], first * second, *self.sizes[axis + 2 :]),
            lambda column: (*column[: axis + 1], *column[axis + 2 :]),
        )

    def shifted(self, axis: int, towards: int) -> "_Decided | None":
        """A factor of an axis moved to its neighbour."""
        to, factor = axis + towards, _primes(self.sizes[axis])[0]
        if not 0 <= to < len(self.sizes) or self.sizes[axis] == factor:
            return None
        changed = {axis: self.sizes[axis] // factor, to: self.sizes[to] * factor}
        return self._with(tuple(changed.get(at, size) for at, size in enumerate(self.sizes)), lambda column: column)

    def split(self, axis: int) -> "_Decided | None":
        """An axis as two of about the same size, both used as it was."""
        primes = _primes(self.sizes[axis])
        if len(primes) < 2 or len(self.sizes) == _MOST_AXES:
            return None
        inner = math.prod(primes[: len(primes) // 2])
        return self._with(
            (*self.sizes[:axis], self.sizes[axis] // inner, inner, *self.sizes[axis + 1 :]),
            lambda column: (*column[: axis + 1], *column[axis:]),
        )

    def _with(self, sizes: tuple[int, ...], change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> "_Decided":
        operators = tuple(change(strategy) for strategy in self.chosen.operators)
        return _Decided(sizes=sizes, chosen=Fixed(operators=operators, parameters=_each(self.chosen, change)))


_Move = tuple[Callable[[_Decided, int], _Decided | None], int, float]
_MOVES: tuple[_Move, ...] = (  # change, offset of the free axis, factor of the time that it must beat
    (_Decided.joined, 0, 1 + _ROUNDING),
    (lambda state, axis: state.shifted(axis, 1), 1, 1 - _ROUNDING),
    (lambda state, axis: state.shifted(axis, -1), -1, 1 - _ROUNDING),
    (_Decided.split, 1, 1 - _NEW_AXIS),
)


def _each(chosen: Fixed, change: Callable[[Layout], Layout]) -> dict[str, StoredParameter]:
    """The stored parameters with each of their layouts changed."""
    return {
        name: replace(
            stored, weight=change(stored.weight), gradient=change(stored.gradient), state=change(stored.state)
        )
        for name, stored in chosen.parameters.items()
    }


class _Descent:
    """Decides axis after axis."""

    def __init__(self, task: Task, limit: float) -> None:
        self.task, self.limit, self.builders = task, limit, _Builders(task)

    def run(self) -> tuple[_Decided, float] | None:
        """All axes decided, from the start that leads to the faster plan."""
        found = [outcome for axes in self.task.starts() if (outcome := self._from(axes)) is not None]
        return min(found, key=lambda one: one[1], default=None)

    def _from(self, axes: tuple[int, ...]) -> tuple[_Decided, float] | None:
        """All axes decided, with limits as tight as needed."""
        tightened = 1.0
        for attempt in checked(range(1, _TRIES + 1)):
            outcome = self._decide(axes, tightened)
            if not isinstance(outcome, float):
                return outcome
            if outcome == math.inf:
                break
            tightened = tightened * outcome * _MARGIN if attempt < _TRIES - 1 else math.inf
        return None

    def _decide(self, axes: tuple[int, ...], tightened: float) -> tuple[_Decided, float] | float:
        """All axes decided; or the factor by which they take too much memory, infinite if the first axis already does.

        Limits are tighter by the factor `tightened`.
        """
        decided, seconds = _Decided.nothing(self.task.template), math.inf
        if not axes:
            alone = self._solved(self.builders.of(()), decided.chosen, self.limit)
            return math.inf if isinstance(alone, float) else (decided, alone[1])
        for at, size in enumerate(axes):
            rest = math.prod(axes[at + 1 :])
            best: tuple[_Decided, float] | None = None
            excess = math.inf
            for state in checked(decided.with_factor(size, not self.task.given)):
                bar = math.inf if best is None else best[1] * (1 - _NEW_AXIS)
                outcome = self._last_axis(state, rest, tightened, bar)
                if isinstance(outcome, float):
                    excess = min(excess, outcome)
                else:
                    best = outcome
            if best is None:
                return excess if at else math.inf
            decided, seconds = best
        return decided, seconds

    def _last_axis(self, state: _Decided, rest: int, tightened: float, bar: float) -> tuple[_Decided, float] | float:
        """The last axis decided for good, given those before it, or the factor by which it takes too much memory.
        `rest` devices are left to the axes after it, and only plans that are faster than `bar` are wanted."""
        builder, most = self.builders.of(state.sizes, rest), self.limit * rest
        among = self._among(state, len(state.sizes) - 1)
        found = self._solved(builder, among, max(self.limit, most / tightened), bar)
        if isinstance(found, float) and found <= most:
            found = self._solved(builder, among, found, bar)  # the least that this axis can reach
        if isinstance(found, float):
            return found / most
        return _Decided(sizes=state.sizes, chosen=found[0]), found[1]

    def _solved(
        self, builder: TableBuilder, among: Restriction, limit: float, bar: float = math.inf
    ) -> tuple[Fixed, float] | float:
        """The best of the candidates and its seconds; or, if none fits, the least bytes that one needs; infinite if
        none beats the bar."""
        task = self.task
        tables = builder.build(task.template, among)
        chain = cut(
            tables,
            task.cluster,
            recomputation=task.recomputation,
            stages=task.configuration.pipeline,
            activations=task.offload.activations,
            saved=task.offload.saved,
            gathers=task.gathers,
        )
        setting = setting_of(task.configuration, limit)
        check_virtual_stages(chain, setting)
        outcome = Evaluation(chain, setting, cutoff=bar, rounds=_ROUNDS).run()
        if not outcome.ranks or outcome.seconds >= bar:
            return math.inf if outcome.ranks or bar < math.inf else outcome.least * (1 + _ROUNDING)
        return fixed_of(assembly(chain, outcome.ranks, setting)), outcome.seconds

    def polished(self, decided: _Decided, best: float) -> RecursivePlan:
        """Decide every axis once more given all others, and meshes that differ a little, until nothing gets faster."""
        for _ in range(self.task.sweeps):
            before = best
            for axis in reversed(range(len(decided.sizes))):
                found = self._freed(decided, axis, best * (1 - _ROUNDING))
                decided, best = found or (decided, best)
            for change, free, share in _MOVES if not self.task.given else ():
                for axis in reversed(range(len(decided.sizes))):
                    while axis < len(decided.sizes) and (other := change(decided, axis)) is not None:
                        found = self._freed(other, axis + free, best * share)
                        if found is None:
                            break
                        decided, best = found
            if best == before:
                break
        return RecursivePlan(mesh=self.builders.of(decided.sizes).mesh, chosen=decided.chosen, seconds=best)

    def _freed(self, state: _Decided, axis: int, bar: float) -> tuple[_Decided, float] | None:
        """One axis decided given all others, if that beats the bar and the others can stay as they are."""
        builder, among = self.builders.of(state.sizes), self._among(state, axis)
        if not among.possible(self.task.template.graph, builder.mesh):
            return None
        found = self._solved(builder, among, self.limit, bar)
        return None if isinstance(found, float) else (_Decided(sizes=state.sizes, chosen=found[0]), found[1])

    def _among(self, state: _Decided, axis: int) -> OneAxisFree:
        return OneAxisFree(fixed=state.chosen, axis=axis, decided=self.task.decided)
