"""Blocks of a stage that add the same to its sums, visited once.

    stage     | block 3 | block 4 | block 5 | block 6 | block 7 |
    visited        x         x                             x        the first, the second (written down), the last
    added                              4         4                  what the second added, number by number, again

A block is like the one before it where each operator is: same rule, types, strategies and layouts, operands from the
same place of the same block, of the block before or from outside, the same readers, and the same of it kept for the
backward pass. All of that is compared, not assumed. Sums are made of the same numbers in the same order as if every
operator were visited, so that they are the same to the last bit.

Not for walks that somebody looks on at, nor for plans in which blocks differ by their names or wait for each other:
those that offload, interleave, slice, or defer gradients. What blocks gather together travels in messages of a stage,
which are counted at its end.
"""

from collections import Counter, defaultdict
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast

from planner.graph.blocks import Blocks, block_parameters
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import BoundPlan, stage_of_operators
from planner.plan.prediction.charges import Charges
from planner.plan.prediction.stage_cost import StageCost
from planner.pricing.liveness import Liveness
from planner.sharding.rules import rule_of


def repeated_blocks(bound: BoundPlan, alive: Liveness) -> frozenset[int]:
    """Blocks that add what the one before them adds; that one has another of their like before it."""
    plan, blocks = bound.plan, bound.blocks
    update = plan.training.update
    if (
        bound.offloaded_blocks
        or bound.offloads_weights
        or update.local_parameters
        or plan.training.interleave > 1
        or plan.slices > 1
        or plan.schedule_kind.splits_backward
        or plan.mesh.zigzag
    ):
        return frozenset()
    key = ("alike", blocks.borders, blocks.kinds)
    known = bound.graph.derived.get(key)
    if known is None or known[0] is not alive:
        known = bound.graph.derived[key] = (alive, _alike(bound.graph, blocks, alive))
    alike = cast("frozenset[int]", known[1])
    stages = stage_of_operators(bound)
    chosen = _chosen(bound)
    runs = [(chosen[block], stages[blocks.borders[block]]) for block in range(blocks.count)]
    return frozenset(
        block
        for block in range(2, blocks.count - 1)
        if len(set(runs[block - 2 : block + 2])) == 1 and alike.issuperset((block - 1, block, block + 1))
    )


def _chosen(bound: BoundPlan) -> list[object]:
    """For each block what the plan chooses for it, equal where that is the same, whatever groups it names."""
    groups, blocks = bound.plan.groups, bound.blocks
    if len(groups) < blocks.count:
        numbers = {group.first_block + k: at for at, group in enumerate(groups) for k in range(group.blocks)}
        return [numbers[block] for block in range(blocks.count)]
    return [
        (
            bound.recompute_of(block),
            tuple(id(bound.operators[at].layouts) for at in blocks.operators(block)),  # equal calls share theirs
            tuple(bound.parameters[name] for name in block_parameters(bound.graph, blocks, block)),
        )
        for block in range(blocks.count)
    ]


def _alike(graph: OperatorGraph, blocks: Blocks, alive: Liveness) -> frozenset[int]:
    """Blocks that are like the one before them, whatever plan there is."""
    told = [_told(graph, blocks, alive, block) for block in range(blocks.count)]
    pairs = zip(told[1:], told[:-1], strict=True)
    return frozenset(at for at, (own, before) in enumerate(pairs, start=1) if own is not None and own == before)


def _told(graph: OperatorGraph, blocks: Blocks, alive: Liveness, block: int) -> list[object] | None:
    """All of a block that decides what its visits add; None where it has to do with blocks that are no neighbours."""
    inside = blocks.operators(block)
    first = blocks.borders[max(block - 1, 0)]
    last = blocks.borders[min(block + 2, blocks.count)]
    found: list[object] = [blocks.kinds[block]]
    for at in inside:
        op = graph.operators[at]
        found += (id(rule_of(graph, op)), alive.saved[at], alive.weights[at], at in alive.piecewise)
        found.append(at in alive.overwritten)
        for name in op.operands:
            made = graph.producer.get(name)
            if made is not None and blocks.start <= made < blocks.stop:
                if not first <= made < inside.stop:
                    return None
                found.append(made - inside.start)
            elif name in graph.parameter_names:
                uses = graph.consumers[name]
                found.append(tuple(use - inside.start for use in uses))
            else:
                found.append(name)
            found += (graph.types[name], name in graph.differentiable, name in graph.data_dependent)
        for result in op.results:
            if result is None:
                continue
            uses = graph.consumers.get(result, ())
            if any(blocks.start <= use < blocks.stop and not inside.start <= use < last for use in uses):
                return None
            found.append(tuple(use - inside.start if use < blocks.stop else -use for use in uses))
            found += (graph.types[result], result in graph.differentiable, result in alive.kept)
            found.append(alive.share(result))
    return found


class _Sums(dict[Any, float]):
    """Sums that are always 0, so that what is written is what would be added; by key, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.added: dict[Any, list[float]] = {}

    def __getitem__(self, key: Any) -> float:
        return 0.0

    def get(self, key: Any, default: Any = None) -> Any:
        return default

    def __setitem__(self, key: Any, value: float) -> None:
        self.added.setdefault(key, []).append(value)


class _Added(list[tuple[tuple[float, ...], dict[str, float]]]):
    """What is added to a pass, or to launches."""

    def add(self, *values: float, **named: float) -> None:
        self.append((values, named))


@dataclass(kw_only=True)
class _Chunk:
    """A chunk whose passes are written down; none of its gradients are deferred."""

    forward: _Added = field(default_factory=_Added)
    backward: _Added = field(default_factory=_Added)

    def pass_of(self, *, later: bool) -> _Added:
        return self.backward


@dataclass(kw_only=True)
class BlockSums:
    """What the visits of one `block` of a chunk add. They take it for the sums of their rank (`cost`)."""

    block: int
    chunk: int
    chunks: dict[int, _Chunk] = field(init=False)
    micro_batch: _Sums = field(default_factory=_Sums)
    memory: _Sums = field(default_factory=_Sums)
    at_once: _Sums = field(default_factory=_Sums)
    launches: defaultdict[tuple[int, int | None, str], _Added] = field(default_factory=lambda: defaultdict(_Added))
    messages: Charges = field(default_factory=Counter)
    charged: _Sums = field(default_factory=_Sums)  # of weights that are gathered together
    flops: list[float] = field(default_factory=list)
    together: _Sums = field(default_factory=_Sums)

    def __post_init__(self) -> None:
        self.chunks = {self.chunk: _Chunk()}

    @property
    def cost(self) -> StageCost:
        return cast("StageCost", self)

    def add(self, cost: StageCost, at_once: dict[int, float], charged: MutableMapping[Any, float], block: int) -> None:
        """Add it to the sums of a rank, as those of this block, and to what weights were `charged` that are gathered
        together."""
        for name, values in self.micro_batch.added.items():
            for value in values:
                cost.micro_batch[name] += value
        for name, values in self.memory.added.items():
            if name == "transient":
                cost.memory[name] = max(cost.memory[name], *values)
                continue
            for value in values:
                cost.memory[name] += value
        for key, values in self.charged.added.items():
            for value in values:
                charged[key] += value
        for part, values in self.together.added.items():
            for value in values:
                cost.together[part] += value
        for where, values in self.at_once.added.items():
            assert where == self.block, where
            for value in values:
                at_once[block] = at_once.get(block, 0.0) + value
        own, written = cost.chunks[self.chunk], self.chunks[self.chunk]
        for into, added in ((own.forward, written.forward), (own.backward, written.backward)):
            for _, named in added:
                into.add(**named)
        for (chunk, _, name), added in self.launches.items():
            for launched, _ in added:
                cost.launches[chunk, block, name].add(*launched)
