"""The folded graph: the operators before the blocks, one block of each kind, and the operators after the blocks.

    before ──enter──> [ block ] ──leave──> after          depth only decides how often a node or an edge counts
                       │  ^  ^
                       └──┘  └── every: a value from before that all blocks read
                       loop: from one block to the next

With several kinds of blocks, the first block of each kind is in the template, one after the other:

    before ──enter──> [ kind 0 ] ──loop──> [ kind 1 ] ──leave──> after
                          └─────<──loop──────┘                      both hand on the same values (`lanes`)

An edge joins the operator that makes a value to one that reads it. All edges of a lane begin at the first kind of
block: operators that make a lane in another kind are its `twins`, and make the same choice. A graph without repeated
blocks is its own template.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Literal

from hardware_profiles import Bytes
from planner.graph.blocks import Blocks
from planner.graph.operator_graph import OperatorGraph
from planner.plan.layout.kept import EVERY_SECOND_PRODUCT
from planner.pricing.bucket_size import total_gradients
from planner.pricing.liveness import Liveness, Replay, replay
from planner.sharding.matrices import optimizer_of
from planner.sharding.rule import FactorKind
from planner.sharding.rules import rule_of
from planner.sharding.update import Update

Key = int | str
"""An operator, by its place in the template, or a parameter, by its name."""

EdgeKind = Literal["outside", "inside", "enter", "every", "loop", "leave"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueEdge:
    """Operand `operand` of operator `consumer` is the value `name`, made by operator `producer` (positions in the
    template).
    """

    producer: int
    consumer: int
    operand: int
    name: str
    kind: EdgeKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a piece of a pipeline stage holds: `blocks` blocks, and whether also the operators before them (`first`) and
    after them (`last`)."""

    blocks: int
    first: bool
    last: bool


@dataclass(frozen=True, kw_only=True)
class Template:
    """The operators before the blocks, of one block of each kind, and after the blocks, in a separate graph.

    Attributes:
        whole: the graph that is folded, for the batch of the example.
        blocks: all blocks of the model, by their operators in the whole graph.
        held: the operators of the template's block of each kind.
        edges: between the operators.
        own_parameters: for each kind, the parameters of which every block of that kind has its own copy.
        alive: what is kept for backward passes.
        twins: maps operators that make a lane in another kind of block to the one that makes it in the first kind.
        kept_for_next: shared values that only the next block keeps, so they are not kept for the last block.
        whole_blocks: whether recomputation runs a block to its end.
        never_kept: classes of operators whose results no recomputed block keeps.
        kept_for_rest: shared values that only operators after the blocks keep, so they are kept for the last block
            only.
        repeated_outside: maps operators and parameters of equal blocks outside of these blocks, such as an image tower,
            to those of the first block of their kind.
        either: linear layers and experts for which the search decides whether products are in fp8, as in the graph.
        shares_for_rest: for values that blocks hand on, the share that is kept of those of the last block, if it
            differs from the share that `alive` has for all other blocks.
    """

    graph: OperatorGraph
    whole: OperatorGraph
    blocks: Blocks
    held: tuple[range, ...]
    edges: tuple[ValueEdge, ...]
    own_parameters: tuple[frozenset[str], ...]
    alive: Liveness
    twins: Mapping[int, int]
    kept_for_next: frozenset[str] = frozenset()
    whole_blocks: bool = False
    never_kept: frozenset[str] = frozenset()
    kept_for_rest: frozenset[str] = frozenset()
    repeated_outside: Mapping[Key, Key] = field(default_factory=dict)
    either: frozenset[int] = frozenset()
    shares_for_rest: Mapping[str, float] = field(default_factory=dict)

    @property
    def start(self) -> int:
        """The first operator of the blocks."""
        return self.held[0].start if self.held else 0

    @property
    def stop(self) -> int:
        """The first operator after the blocks."""
        return self.held[-1].stop if self.held else 0

    def in_block(self, index: int) -> bool:
        return self.start <= index < self.stop

    def kind_of(self, index: int) -> int | None:
        """The kind of block that an operator is in; None outside of blocks."""
        return self._kinds.get(index)

    @cached_property
    def _kinds(self) -> dict[int, int]:
        """The kind of block of each operator in blocks."""
        return {index: kind for kind, held in enumerate(self.held) for index in held}

    def times(self, index: int) -> int:
        """How often an operator occurs in the model."""
        kind = self.kind_of(index)
        return 1 if kind is None else self._repeated[kind]

    @cached_property
    def _repeated(self) -> tuple[int, ...]:
        """How many blocks of each kind there are."""
        return tuple(self.blocks.kinds.count(kind) for kind in range(len(self.held)))

    @property
    def heavy_ends(self) -> bool:
        """Whether the operators before or after the blocks are as much work as two blocks. A rank that holds them and
        as many blocks as the others is the busiest, and it still is with one block fewer."""
        return self.ends >= 2

    @cached_property
    def ends(self) -> float:
        """The work of the operators before or after the blocks, whichever is more, in blocks. A rank that holds them is
        the busiest of ranks with equally many blocks, and a block is better on another rank if this is above 1."""
        work = [rule_of(self.graph, op).flops for op in self.graph.operators]
        block = min((math.fsum(work[at] for at in held) for held in self.held), default=math.inf)
        return max(math.fsum(work[: self.start]), math.fsum(work[self.stop :])) / block if block else 0.0

    @cached_property
    def leaving(self) -> Mapping[int, tuple[ValueEdge, ...]]:
        """The edges that leave each operator, by its place."""
        found: dict[int, list[ValueEdge]] = defaultdict(list)
        for edge in self.edges:
            found[edge.producer].append(edge)
        return {producer: tuple(edges) for producer, edges in found.items()}

    @cached_property
    def entered(self) -> frozenset[tuple[int, int]]:
        """Pairs of an operator and an operand which, in the first block, come from before all blocks."""
        return frozenset((edge.consumer, edge.operand) for edge in self.edges if edge.kind == "enter")

    def kept_of(self, name: str, *, by_rest: bool) -> float:
        """The share that is kept of the bytes of a value that blocks hand on: `by_rest` for that of the last block,
        else for those of others; 0 if nothing keeps it."""
        if by_rest:
            kept = name in self.alive.kept or name in self.kept_for_rest
            return kept * self.shares_for_rest.get(name, self.alive.share(name))
        return (name in self.alive.kept or name in self.kept_for_next) * self.alive.share(name)

    def never_keeps(self, index: int) -> bool:
        """Whether no recomputed block keeps the results of an operator."""
        if EVERY_SECOND_PRODUCT in self.never_kept and index in self._second_products:
            return True
        return rule_of(self.graph, self.graph.operators[index]).op_class in self.never_kept

    @cached_property
    def _second_products(self) -> frozenset[int]:
        """The second, fourth, ... matrix product of a block of each kind."""
        rules = {index: rule_of(self.graph, self.graph.operators[index]) for held in self.held for index in held}
        products = ([index for index in held if rules[index].op_class == "matmul"] for held in self.held)
        return frozenset(index for found in products for index in found[1::2])

    def works(self, index: int) -> bool:
        """Whether an operator is recomputed with its block."""
        return index in self._again[0]

    def moves(self, index: int) -> bool:
        """Whether the operands of an operator are redistributed again when its block is recomputed."""
        return index in self._again[1]

    @cached_property
    def _again(self) -> tuple[frozenset[int], frozenset[int]]:
        works: set[int] = set()
        moves: set[int] = set()
        for held in self.held:
            again: Replay = replay(self.graph, held, self.whole_blocks)
            works.update(held[: again.works])
            moves.update(held[: again.moves])
        return frozenset(works), frozenset(moves)

    @cached_property
    def every_own_parameter(self) -> frozenset[str]:
        """Parameters that stand for those of all blocks of a kind."""
        return frozenset().union(*self.own_parameters)

    def parameter_times(self, name: str) -> int:
        """How many parameters of the model a parameter of the template stands for."""
        kind = next((kind for kind, own in enumerate(self.own_parameters) if name in own), None)
        return 1 if kind is None else self.blocks.kinds.count(kind)

    def optimizer_of(self, optimizer: str, name: str) -> str:
        """The optimizer that updates a parameter where a plan asks for `optimizer`. The whole graph tells: the template
        does not have what is behind a block."""
        return optimizer_of(self.whole, optimizer, name)

    def gradient_bytes(self, update: Update) -> Bytes:
        """Bytes of the accumulated gradients of all parameters of the model."""
        return total_gradients(self.graph, update, self.parameter_times)

    @cached_property
    def causal_ring(self) -> bool:
        """Whether the model has causal attention that a ring could split."""
        rules = (rule_of(self.graph, op) for op in self.graph.operators)
        return any(rule.causal and any(f.kind is FactorKind.RING for f in rule.factors) for rule in rules)

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """Values that one block hands to the next, by their names in the first block of the template."""
        return tuple(sorted({edge.name for edge in self.edges if edge.kind == "loop"}))

    @cached_property
    def outliving(self) -> frozenset[str]:
        """Values that a block makes and that operators outside of it read."""
        handed = {edge.name for edge in self.edges if edge.kind in ("loop", "leave")}
        lanes = {name for at in self.twins for name in self.graph.operators[at].results if name is not None}
        return frozenset(handed | lanes)

    @cached_property
    def makers(self) -> tuple[int, ...]:
        """Operators that make the values that a block hands to the next, in the first kind of block."""
        return tuple(sorted({edge.producer for edge in self.edges if edge.kind == "loop"}))

    @cached_property
    def shared(self) -> frozenset[int]:
        """Operators before the blocks whose results blocks read."""
        return frozenset(edge.producer for edge in self.edges if edge.kind == "every")

    @cached_property
    def passing(self) -> tuple[str, ...]:
        """Values from before the blocks that blocks read: stages hand them on up to the last stage that reads them."""
        return tuple(sorted({edge.name for edge in self.edges if edge.kind == "every"}))

    @cached_property
    def crossing(self) -> tuple[str, ...]:
        """The passing values that are handed on between any two stages. With several kinds of blocks, this is certain
        only for values that the last block or the operators after it read."""
        if self.blocks.count < 2:
            return ()
        last = self.held[self.blocks.kinds[-1]]
        ahead = {edge.name for edge in self.edges if edge.consumer in last or edge.consumer >= self.held[-1].stop}
        return tuple(name for name in self.passing if name in ahead)

    @cached_property
    def pipelines(self) -> bool:
        """Whether the graph can be cut between blocks: no value bypasses them except those that they read or hand on,
        and the first stage looks up all rows of tables outside of the devices."""
        return self.blocks.count > 1 and self.shared_by_blocks is None and self.late_look_up is None

    @cached_property
    def shared_by_blocks(self) -> str | None:
        """A value that bypasses blocks, or a parameter that blocks share, so that the graph cannot be cut between them;
        None if there is none."""
        past = (
            edge.name
            for edge in self.edges
            if edge.name not in self.passing and edge.kind == "outside" and edge.producer < self.start <= edge.consumer
        )
        shared = (
            name
            for at, op in enumerate(self.graph.operators)
            for name in op.operands
            if self.in_block(at) and name in self.graph.parameter_names and name not in self.every_own_parameter
        )
        return next(chain(past, shared), None)

    @cached_property
    def late_look_up(self) -> str | None:
        """An operator in the blocks or after them that looks up rows of a table outside of the devices; None if all of
        these are before the blocks."""
        late = (op.name for op in self.graph.operators[self.start :] if rule_of(self.graph, op).outside is not None)
        return next(late, None)
