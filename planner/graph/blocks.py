"""Repeated blocks, recognised from the operators alone, and the places where a value is shared.

    embed | norm attn add norm mlp add | norm attn add norm mlp add | ... | norm head loss
            `---- block 0 ----------'    `---- block 1 ----------'
            start                        start + period

Every operator gets an id for its call (operator, literals, tensor types). A run of blocks is a stretch of operators in
which the id at i equals the id at i + period; the period that covers the most operators wins, the shortest among
equals. Then the dataflow is compared block by block: an operand must come from the same place of the same block, from
the same place of the block before, from the block's own parameter, or from one and the same value outside. The first
block that differs ends the run. Cost: O(n^2) comparisons of ids, done by numpy row by row.

A run shows which values the blocks hand on. Its neighbours in the same list of modules may be blocks of other kinds
(`planner.graph.kinds`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from planner.graph.call import typed_call
from planner.graph.operator_graph import Operator, OperatorGraph, TensorType, ValueRef
from planner.limits import check, checked

IDENTITY = "planner.identity"
SHARED = "/shared"
"""What the names of an identity and of its result add to that of the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """`count` consecutive equal blocks of `period` operators, the first at operator `start`. A count of 0: nothing
    repeats."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """Index of the first operator after the blocks."""
        return self.start + self.covered

    @property
    def covered(self) -> int:
        """Number of operators in the blocks."""
        return self.period * self.count


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Consecutive blocks: block b has the operators `borders[b]` to `borders[b + 1] - 1`, and blocks of one kind in
    `kinds` are equal. Kinds are numbered in the order of their first blocks."""

    borders: tuple[int, ...]
    kinds: tuple[int, ...]

    @staticmethod
    def alike(start: int, period: int, count: int) -> "Blocks":
        """`count` equal blocks of `period` operators."""
        borders = tuple(start + period * block for block in range(count + 1))
        return Blocks(borders=borders, kinds=(0,) * count) if count else NO_BLOCKS

    @property
    def count(self) -> int:
        """Number of blocks of all kinds."""
        return len(self.kinds)

    @property
    def start(self) -> int:
        """Index of the first operator of the first block."""
        return self.borders[0]

    @property
    def stop(self) -> int:
        """Index of the first operator after the blocks."""
        return self.borders[-1]

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first block of each kind."""
        return tuple(self.kinds.index(kind) for kind in range(max(self.kinds, default=-1) + 1))

    def operators(self, block: int) -> range:
        """Operators of a block."""
        return range(self.borders[block], self.borders[block + 1])

    def block_of(self, index: int) -> int | None:
        """Number of the block an operator belongs to; None outside."""
        return self.numbers.get(index)

    @cached_property
    def numbers(self) -> Mapping[int, int]:
        """The block of each operator that is in one."""
        return {at: block for block in range(self.count) for at in self.operators(block)}

    def template(self, index: int) -> int:
        """The operator at the same place of the first block of its kind; an operator outside is its own template."""
        block = self.block_of(index)
        if block is None:
            return index
        return self.borders[self.kinds.index(self.kinds[block])] + index - self.borders[block]

    def part(self, first: int, count: int) -> "Blocks":
        """`count` of the blocks, from the first one on."""
        kinds = self.kinds[first : first + count]
        order = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        return Blocks(borders=self.borders[first : first + count + 1], kinds=tuple(order[kind] for kind in kinds))


NO_BLOCKS = Blocks(borders=(0,), kinds=())
_NO_RUN = BlockRun(start=0, period=1, count=0)


def find_run(graph: OperatorGraph) -> BlockRun:
    """The run of equal blocks that covers the most operators; a count of 0 where nothing repeats."""
    calls = np.array(call_ids(graph))
    runs = []
    for period in checked(range(2, len(calls) // 2 + 1)):
        start, length = _longest_run(calls[:-period] == calls[period:])
        if length >= period:
            runs.append(BlockRun(start=start, period=period, count=length // period + 1))
    best = _NO_RUN
    for run in checked(sorted(runs, key=lambda run: (-run.covered, run.period))):
        if run.covered <= best.covered:
            break
        agreeing = _agreeing(graph, run)
        best = agreeing if agreeing.covered > best.covered else best
    return _least_carried(graph, best)


def call_ids(graph: OperatorGraph) -> list[int]:
    """A number for the call of every operator, equal for equal calls."""
    ids: dict[object, int] = {}
    return [ids.setdefault(typed_call(graph, op), len(ids)) for op in graph.operators]


def _least_carried(graph: OperatorGraph, best: BlockRun) -> BlockRun:
    """The run moved to where the fewest values pass from one block to the next.

    Where the first block does a little more than the others, as in T5, where it makes the bias of all blocks, the run
    would begin in the middle of a block, and more than the hidden states would pass from one block to the next.
    """
    found, fewest = best, _carried(graph, best)
    for shift in checked(range(1, best.period)):
        moved = replace(best, start=best.start + shift)
        if fewest < 2 or moved.stop > len(graph.operators):
            break
        if _carried(graph, moved) < fewest and _agreeing(graph, moved).count == best.count:
            found, fewest = moved, _carried(graph, moved)
    return found


def _carried(graph: OperatorGraph, run: BlockRun) -> int:
    """How many values a block hands to the next."""
    return len({place for kind, place in _sources_in(graph, run, 1) if kind == "before"}) if run.count else 0


def _longest_run(equal: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> tuple[int, int]:
    """Start and length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False]))))
    if not len(edges):
        return 0, 0
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    longest = int(np.argmax(lengths))
    return int(starts[longest]), int(lengths[longest])


def _agreeing(graph: OperatorGraph, run: BlockRun) -> BlockRun:
    """The run cut off before the first block whose dataflow differs from that of the second block.

    Blocks stand one after the other: each reads something from the block before. Parallel branches are no run of
    blocks.
    """
    expected = _sources_in(graph, run, 1)
    count = 1
    while count < run.count and _sources_in(graph, run, count) == expected:
        count += 1
    first = _sources_in(graph, run, 0)
    entering = all(a == b or (b[0] == "before" and a[0] == "outside") for a, b in zip(first, expected, strict=True))
    if not entering or count < 2 or not any(place == "before" for place, _ in expected):
        return _NO_RUN
    return replace(run, count=count)


def _sources_in(graph: OperatorGraph, run: BlockRun, block: int) -> list[tuple[str, object]]:
    check()
    low = run.start + block * run.period
    return operand_sources(graph, low, low + run.period, low - run.period if block else low)


def operand_sources(graph: OperatorGraph, low: int, high: int, before: int) -> list[tuple[str, object]]:
    """Where each operand of a block, the operators `low` to `high` - 1, comes from, in terms that are equal for equal
    blocks: "inside" the block, from the block "before" that starts at operator `before` (with the place in it, and the
    number of the result), a parameter or buffer of its "own", or "outside"."""
    sources: list[tuple[str, object]] = []
    own: dict[str, int] = {}
    held = {**dict.fromkeys(graph.buffers, "buffer"), **{p.name: p.trainable for p in graph.parameters}}
    for op in graph.operators[low:high]:
        for name in op.operands:
            at = graph.producer.get(name)
            if at is not None and low <= at < high:
                sources.append(("inside", (at - low, graph.operators[at].results.index(name))))
            elif at is not None and before <= at < low:
                sources.append(("before", (at - before, graph.operators[at].results.index(name))))
            elif name in held and _only_inside(graph, name, low, high):
                sources.append(("own", (own.setdefault(name, len(own)), held[name])))
            else:
                sources.append(("outside", name))
    return sources


def _only_inside(graph: OperatorGraph, name: str, low: int, high: int) -> bool:
    return all(low <= use < high for use in graph.consumers[name])


def share_values(graph: OperatorGraph, blocks: Blocks) -> tuple[OperatorGraph, Blocks]:
    """Put an identity after every differentiable result with several uses, so that it is redistributed once and its
    gradients are summed once.

    Equal blocks stay equal: where one block needs an identity, all get it.
    """
    wanted: set[tuple[int, int]] = set()
    for index, op in enumerate(graph.operators):
        for place, name in enumerate(op.results):
            if name in graph.differentiable and len(graph.consumers.get(name or "", ())) > 1 and op.op != IDENTITY:
                wanted.add((blocks.template(index), place))
    operators: list[Operator] = []
    types = dict(graph.types)
    names: dict[str, str] = {}
    starts: list[int] = []
    for index, op in enumerate(graph.operators):
        starts.append(len(operators))
        moved = op.reading(names)
        operators.append(moved)
        for place, name in enumerate(op.results):
            if name is not None and (blocks.template(index), place) in wanted:
                operators.append(_identity(op, name, types))
                names[name] = name + SHARED
    starts.append(len(operators))
    updates = tuple((buffer, names.get(value, value)) for buffer, value in graph.updates)
    loss = names.get(graph.loss, graph.loss)
    shared = replace(graph, operators=tuple(operators), types=types, loss=loss, updates=updates)
    return shared, replace(blocks, borders=tuple(starts[border] for border in blocks.borders))


def _identity(op: Operator, name: str, types: dict[str, TensorType]) -> Operator:
    result = name + SHARED
    types[result] = types[name]
    return Operator(name=result, op=IDENTITY, arguments=(ValueRef(name),), results=(result,), module=op.module)


def block_parameters(graph: OperatorGraph, blocks: Blocks, block: int) -> Sequence[str]:
    """Parameters that only this block uses, in the order of their first use; equal blocks list theirs in the same
    order."""
    known = graph.derived.get(("parameters of a block", block))
    if known is not None and known[0] is blocks:
        names: Sequence[str] = known[1]
        return names
    inside = blocks.operators(block)
    found: dict[str, None] = {}
    for at in inside:
        for name in graph.operators[at].operands:
            if name in graph.parameter_names and _only_inside(graph, name, inside.start, inside.stop):
                found.setdefault(name)
    graph.derived["parameters of a block", block] = (blocks, tuple(found))
    return tuple(found)
