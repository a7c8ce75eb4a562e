"""Blocks that add the same to the sums of their stages: visited once for all plans of a graph and a mesh.

    stage     | block 3 | block 4 | block 5 | block 6 |     | block 7 | block 8 | ...
    visited        x         x                   x
    added                              4                         3         4        what those added, number by number

A block equals an earlier one if each operator does: same rule, types, strategies and layouts, operands from the same
place of the same block, of the previous block or from outside, the same readers, and the same tensors kept for the
backward pass. Also the graphs of the neighbouring blocks must be the same, they must hand over the same layouts, and
they must equally be in the same stage or in another one. All of this is compared, not assumed. Bytes held per
micro-batch in flight are recorded as such, since their number differs between stages. Sums are made of the same numbers
in the same order as if every operator were visited, so they are the same to the last bit.

Not used for walks that are observed, nor for plans in which blocks wait for each other: plans with interleaved
micro-batches, slices, or shared deferred gradients. What a block offloads is added under its own number. Coalesced
collectives of blocks belong to their stage, and are counted at its end.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from costmodels import counts_beyond
from planner.graph.blocks import Blocks, block_parameters
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import BoundPlan, stage_of_operators
from planner.plan.prediction.charges import Charges
from planner.plan.prediction.step import Launched, Passed
from planner.plan.prediction.walk.stage_cost import StageCost
from planner.plan.schedule import runs_in_pairs
from planner.pricing.liveness import Liveness
from planner.sharding.rules import rule_of


def block_keys(bound: BoundPlan, alive: Liveness) -> Mapping[int, object]:
    """For each block a key: blocks with the same key add the same to the sums of their stages, in this or another plan
    for the same graph, mesh and training settings."""
    plan, blocks = bound.plan, bound.blocks
    update, defers = plan.training.update, plan.schedule_kind.splits_backward
    if (
        update.local_parameters
        or plan.training.interleave > 1
        or plan.slices > 1
        or plan.mesh.zigzag
        or (defers and (runs_in_pairs(plan) or _shares_deferred(bound.graph, blocks)))
    ):
        return {}
    key = ("alike", blocks.borders, blocks.kinds)
    known = bound.graph.derived.get(key)
    if known is None or known[0] is not alive:
        known = bound.graph.derived[key] = (alive, _kinds(bound.graph, blocks, alive))
    kinds = cast("Sequence[int]", known[1])
    stages, chosen = stage_of_operators(bound), _chosen(bound)
    held = [stages[blocks.borders[block]] for block in range(blocks.count)]
    others = (_number(bound, (id(alive), _overlaps(bound), runs_in_pairs(plan), defers), (alive,)), _outside(bound))
    found = dict[int, object]()
    for block in range(1, blocks.count - 1):
        around = kinds[block - 1 : block + 2]
        own = (held[block - 1] == held[block], held[block] == held[block + 1])
        given = _given(bound, block, (*around[:2], chosen[block - 1]))
        taken = _taken(bound, block, (*around[1:], chosen[block + 1]))
        found[block] = (*others, own, *around, chosen[block], given, taken)
    return found


def repeated_blocks(keys: Mapping[int, object]) -> Mapping[int, int]:
    """For blocks with the key of an earlier block, the first such block."""
    first = dict[object, int]()
    return {block: like for block, key in keys.items() if (like := first.setdefault(key, block)) != block}


def _chosen(bound: BoundPlan) -> list[int]:
    """For each block a number for the choices of the plan; equal choices have equal numbers, in any group."""
    groups, blocks = bound.plan.groups, bound.blocks
    numbers = dict[int, int]()
    for group in groups if len(groups) < blocks.count else ():
        if group.blocks:
            number = _choice(bound, group.first_block)
            numbers.update((group.first_block + k, number) for k in range(group.blocks))
    return [numbers[block] if block in numbers else _choice(bound, block) for block in range(blocks.count)]


def _choice(bound: BoundPlan, block: int) -> int:
    inside = bound.blocks.operators(block)
    parameters = tuple(bound.parameters[name] for name in block_parameters(bound.graph, bound.blocks, block))
    own = (bound.recompute_of(block), bound.offloaded_blocks.get(block))
    return _number(bound, (*own, *_of(bound, inside), parameters), _layouts(bound, inside))


def _shares_deferred(graph: OperatorGraph, blocks: Blocks) -> bool:
    """Whether deferred weight gradients need a value that several blocks read: it is kept once."""
    key = ("shared by deferred gradients", blocks.borders)
    if key not in graph.derived:
        readers: dict[str, set[int | None]] = {}
        for at, op in enumerate(graph.operators):
            for name in op.operands if rule_of(graph, op).deferred_weight_gradients else ():
                readers.setdefault(name, set()).add(blocks.block_of(at))
        graph.derived[key] = any(len(of) > 1 for name, of in readers.items() if name not in graph.parameter_names)
    return cast("bool", graph.derived[key])


def _overlaps(bound: BoundPlan) -> object:
    """The overlaps of blocks."""
    training = bound.plan.training
    if not training.tensor_overlap and not training.expert_overlap:
        return ()
    named = {bound.graph.operators[at].name for first in bound.blocks.firsts for at in bound.blocks.operators(first)}
    return tuple(one for one in training.tensor_overlap if one[0] in named), training.expert_overlap


def _given(bound: BoundPlan, block: int, told: tuple[int, ...]) -> int:
    """A number for the layouts in which a block receives the values of the previous one; `told` is the key of both."""
    known = bound.graph.derived.setdefault(("given", bound.plan.mesh), {})
    if told not in known:
        before = set(bound.blocks.operators(block - 1))
        operands = (name for at in bound.blocks.operators(block) for name in bound.graph.operators[at].operands)
        names = (name for name in operands if bound.graph.producer.get(name, -1) in before)
        known[told] = _number(bound, ("given", tuple(bound.promised[name] for name in names)), ())
    return cast("int", known[told])


def _taken(bound: BoundPlan, block: int, told: tuple[int, ...]) -> int:
    """A number for the layouts in which the next block reads the values of a block, and for whether it is recomputed;
    `told` is the key of both."""
    known = bound.graph.derived.setdefault(("taken", bound.plan.mesh), {})
    if told not in known:
        own, found = set(bound.blocks.operators(block)), list[object]()
        for at in bound.blocks.operators(block + 1):
            op = bound.operators[at]
            for place, name in enumerate(op.operator.operands):
                if bound.graph.producer.get(name, -1) in own:
                    found.append(op.layouts.operands[place])
        known[told] = _number(bound, ("taken", bound.recompute_of(block + 1) is None, tuple(found)), ())
    return cast("int", known[told])


def _outside(bound: BoundPlan) -> int:
    """A number for the layouts of all values that blocks read and that none of them makes."""
    graph, blocks = bound.graph, bound.blocks
    key = ("read by blocks", blocks.borders)
    if key not in graph.derived:
        inside = range(blocks.start, blocks.stop)
        names = dict.fromkeys(name for at in inside for name in graph.operators[at].operands)
        made = (name for name in names if graph.producer.get(name, -1) not in inside)
        graph.derived[key] = tuple(name for name in made if name not in graph.parameter_names)
    return _number(bound, ("outside", tuple(bound.promised[name] for name in graph.derived[key])), ())


def _of(bound: BoundPlan, operators: Sequence[int]) -> tuple[object, ...]:
    """Layouts, by id, since equal calls share them, and strategies."""
    return tuple(map(id, _layouts(bound, operators))), tuple(bound.operators[at].strategy for at in operators)


def _layouts(bound: BoundPlan, operators: Sequence[int]) -> tuple[object, ...]:
    return tuple(bound.operators[at].layouts for at in operators)


def _number(bound: BoundPlan, what: object, kept: tuple[object, ...]) -> int:
    """A number for a choice of a plan, the same for all plans of its graph and mesh. Objects that are identified by id
    are held in `kept`."""
    known = bound.graph.derived.setdefault(("numbers of choices", bound.plan.mesh), {})
    numbers = cast("dict[object, tuple[int, tuple[object, ...]]]", known)
    return numbers.setdefault(what, (len(numbers), kept))[0]


def _kinds(graph: OperatorGraph, blocks: Blocks, alive: Liveness) -> tuple[int, ...]:
    """A number for each block; blocks that are equal under every plan have equal numbers."""
    found, kinds, own = list[list[object]](), list[int](), _own_buffers(graph, blocks)
    for block in range(blocks.count):
        told = _told(graph, blocks, alive, block, own)
        if told is None:  # equal to no other block
            kinds.append(-1 - block)
            continue
        like = next((number for number, other in reversed([*enumerate(found)]) if other == told), len(found))
        if like == len(found):
            found.append(told)
        kinds.append(like)
    return tuple(kinds)


def _told(
    graph: OperatorGraph, blocks: Blocks, alive: Liveness, block: int, own: Mapping[str, bool]
) -> list[object] | None:
    """Everything about a block that decides what its visits add; `own` are the buffers that only one block reads. None
    if the block exchanges values with blocks that are not its neighbours."""
    inside, start, stop = blocks.operators(block), blocks.start, blocks.stop
    first = blocks.borders[max(block - 1, 0)]
    last = blocks.borders[min(block + 2, blocks.count)]
    found: list[object] = [blocks.kinds[block]]
    for at in inside:
        op = graph.operators[at]
        found += (id(rule_of(graph, op)), alive.saved[at], alive.weights[at], at in alive.piecewise)
        found.append(at in alive.overwritten)
        for name in op.operands:
            made = graph.producer.get(name)
            if made is not None and start <= made < stop:
                if not first <= made < inside.stop:
                    return None
                found.append(made - inside.start)
            elif name in graph.parameter_names or name in own:
                uses = graph.consumers[name]
                found.append(tuple([use - inside.start for use in uses]))
                found.append(own.get(name))
            else:
                found.append(name)
            found += (graph.types[name], name in graph.differentiable, name in graph.data_dependent)
        for result in op.results:
            if result is None:
                continue
            uses = graph.consumers.get(result, ())
            if [use for use in uses if start <= use < stop and not inside.start <= use < last]:
                return None
            found.append(tuple([use - inside.start if use < stop else -use for use in uses]))
            found += (graph.types[result], result in graph.differentiable, result in alive.kept)
            found.append(alive.share(result))
    return found


def _own_buffers(graph: OperatorGraph, blocks: Blocks) -> Mapping[str, bool]:
    """Buffers that only one block reads, and whether the forward pass changes them. All are full copies on every
    device."""
    changed = {buffer for buffer, _ in graph.updates}
    readers = {name: {blocks.numbers.get(use) for use in graph.consumers.get(name, ())} for name in graph.buffers}
    return {name: name in changed for name, of in readers.items() if len(of) == 1}


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes held for every micro-batch in flight; or for those beyond `taken` of them; or for each micro-batch whose
    weight gradients are `deferred`."""

    each: float
    taken: int = 0
    deferred: bool = False

    def __radd__(self, other: float) -> "Held":
        assert other == 0.0, other
        return self

    def of(self, live: int, waiting: int) -> float:
        """Bytes for `live` micro-batches in flight, and `waiting` ones whose weight gradients are deferred, at each
        moment."""
        if self.deferred:
            return waiting * self.each
        return self.each * (counts_beyond(live, self.taken) if self.taken else live)


@dataclass(frozen=True, slots=True)
class InFlight:
    """Stands for the number of micro-batches in flight, so that bytes per micro-batch are recorded; or of those whose
    weight gradients are `deferred`."""

    taken: int = 0
    deferred: bool = False

    def __mul__(self, each: float) -> Held:
        return Held(each, self.taken, self.deferred)

    __rmul__ = __mul__

    def beyond(self, taken: int) -> "InFlight":
        return InFlight(taken)


class _Sums(dict[Any, float]):
    """Sums that always read as 0, so that a written value is the one to add; by key, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.added: dict[Any, list[float]] = {}

    def __getitem__(self, key: Any) -> float:
        return 0.0

    def get(self, key: Any, default: Any = None) -> Any:
        return default

    def __setitem__(self, key: Any, value: float) -> None:
        self.added.setdefault(key, []).append(value)


class _Launches(list[Launched]):
    """What is added to launches."""

    def add(self, ran: float, late: float, host: float, sent: float = 0.0) -> None:
        self.append((ran, late, host, sent))


class _Pass(list[Passed]):
    """What is added to a pass."""

    def add(
        self,
        *,
        work: float = 0.0,
        waits: float = 0.0,
        hidden: float = 0.0,
        sent: float = 0.0,
        under_products: float = 0.0,
        exchanged: float = 0.0,
    ) -> None:
        self.append((work, waits, hidden, sent, under_products, exchanged))


@dataclass(kw_only=True)
class _Chunk:
    """A chunk whose passes are recorded."""

    forward: _Pass = field(default_factory=_Pass)
    backward: _Pass = field(default_factory=_Pass)
    later: _Pass = field(default_factory=_Pass)

    def pass_of(self, *, later: bool) -> _Pass:
        return self.later if later else self.backward


@dataclass(kw_only=True)
class BlockSums:
    """What the visits of one `block` of a chunk add. Visits use it in place of the sums of their rank (`cost`)."""

    block: int
    chunk: int
    chunks: dict[int, _Chunk] = field(init=False)
    micro_batch: _Sums = field(default_factory=_Sums)
    memory: _Sums = field(default_factory=_Sums)
    at_once: _Sums = field(default_factory=_Sums)
    launches: defaultdict[tuple[int, int | None, str], _Launches] = field(
        default_factory=lambda: defaultdict(_Launches)
    )
    messages: Charges = field(default_factory=Counter)
    charged: _Sums = field(default_factory=_Sums)  # for coalesced weights
    flops: list[float] = field(default_factory=list)
    backward: Sequence[float] = ()  # backward seconds of each operator
    together: _Sums = field(default_factory=_Sums)
    values: list[tuple[str, float, tuple[float, float]]] = field(default_factory=list)  # offloaded activations
    _memory: dict[object, Sequence[tuple[str, Sequence[object]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chunks = {self.chunk: _Chunk()}

    @property
    def cost(self) -> StageCost:
        return cast("StageCost", self)

    def offload_values(
        self, key: tuple[int, int], home: str, nbytes: float, live: int, seconds: tuple[float, float]
    ) -> None:
        """As that of `StageCost`, which has sums for every block: recorded."""
        assert key == (self.chunk, self.block), key
        assert isinstance(live, InFlight), live
        self.values.append((home, nbytes, seconds))

    def add(
        self,
        cost: StageCost,
        at_once: dict[int, float],
        charged: MutableMapping[Any, float],
        block: int,
        place: tuple[int, int],
        counts: tuple[int, int],
    ) -> None:
        """Add it to the sums of a rank, as those of this `block`. `place` has its stage and the chunk of the rank;
        `counts` the micro-batches in flight, and those that wait for weight gradients. `charged` are the charges for
        coalesced weights."""
        stage, number = place
        for name, values in self.micro_batch.added.items():
            cost.micro_batch[name] = _one_by_one(cost.micro_batch[name], values)
        for name, held in self._held(*counts):
            if name == "transient":
                cost.memory[name] = max(cost.memory[name], *held)
            else:
                cost.memory[name] = _one_by_one(cost.memory[name], held)
        for home, nbytes, seconds in self.values:
            cost.offload_values((number, block), home, nbytes, counts[0], seconds)
        for key, values in self.charged.added.items():
            charged[stage, *key[1:]] = _one_by_one(charged[stage, *key[1:]], values)
        for part, values in self.together.added.items():
            cost.together[part] = _one_by_one(cost.together[part], values)
        for where, values in self.at_once.added.items():
            assert where == self.block, where
            at_once[block] = _one_by_one(at_once.get(block, 0.0), values)
        own, written = cost.chunks[number], self.chunks[self.chunk]
        own.forward.add_all(written.forward)
        own.backward.add_all(written.backward)
        if own.later is not None:
            own.later.add_all(written.later)
        for (_, _, name), launched in self.launches.items():
            cost.launches[number, block, name].add_all(launched)

    def _held(self, live: int, waiting: int) -> Sequence[tuple[str, Sequence[float]]]:
        """The values to add to memory, by name, for these numbers of micro-batches in flight, and of those that wait;
        cached."""
        every: tuple[Any, ...] = (live, waiting)  # arrays if there are several moments
        key = tuple(counts if isinstance(counts, int) else counts.tobytes() for counts in every)
        if key not in self._memory:
            self._memory[key] = [
                (
                    name,
                    [
                        held.of(live, waiting) if isinstance(held, Held) else held
                        for held in cast("list[object]", values)
                    ],
                )
                for name, values in self.memory.added.items()
            ]
        return cast("Sequence[tuple[str, Sequence[float]]]", self._memory[key])


def _one_by_one(total: float, values: Sequence[float]) -> float:
    """A total to which values are added one after the other, as visits of each block would add them."""
    for value in values:
        total += value
    return total
