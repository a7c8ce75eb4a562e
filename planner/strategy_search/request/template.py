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
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Literal

from hardware_profiles import PYTORCH, Bytes, Software
from planner.graph.blocks import IDENTITY, NO_BLOCKS, Blocks, block_parameters, operand_sources
from planner.graph.kinds import find_blocks, lanes
from planner.graph.operator_graph import OperatorGraph
from planner.plan.layout.kept import EVERY_SECOND_PRODUCT
from planner.pricing.bucket_size import total_gradients
from planner.pricing.kept_shares import kept_shares
from planner.pricing.liveness import Liveness, Replay, liveness, replay
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
        return next((kind for kind, held in enumerate(self.held) if index in held), None)

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
            again: Replay = replay(self.graph, held.start, held.stop, self.whole_blocks)
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


def fold(
    graph: OperatorGraph, blocks: Blocks, software: Software = PYTORCH, never_kept: frozenset[str] = frozenset()
) -> Template:
    """The template of a prepared graph for some training software. `never_kept`: classes of operators whose results
    recomputed blocks never keep.

    Nothing is folded if the operators after the blocks read values of blocks other than the last.
    """
    if not blocks.count:
        return _unfolded(graph, software)
    inner = {name for op in graph.operators[blocks.start : blocks.borders[-2]] for name in op.results}
    after = graph.operators[blocks.stop :]
    if any(name in inner for op in after for name in op.operands):
        return _unfolded(graph, software)
    folding = _Folding(graph, blocks)
    folded = folding.folded()
    template = Template(
        graph=folded,
        blocks=blocks,
        held=folding.held,
        edges=folding.edges(folded),
        own_parameters=tuple(frozenset(block_parameters(graph, blocks, first)) for first in blocks.firsts),
        alive=liveness(folded, software),
        twins=folding.twins,
        repeated_outside=_repeated(folded, 0, folding.held[0].start)
        | _repeated(folded, folding.held[-1].stop, len(folded.operators)),
        whole_blocks=software.whole_blocks,
        never_kept=never_kept,
    )
    if not template.alive.trains:
        return _with_passing(template, folding.names)
    return _with_shares(_with_liveness(template, folding.names), folding.names, software)


def _repeated(graph: OperatorGraph, low: int, high: int) -> dict[Key, Key]:
    """Maps operators and parameters of equal blocks, within a range of operators, to those of the first block of their
    kind."""
    found: dict[Key, Key] = {}
    part = replace(graph, operators=graph.operators[low:high])
    blocks = find_blocks(part)
    for block, kind in enumerate(blocks.kinds):
        first = blocks.firsts[kind]
        places = zip(blocks.operators(block), blocks.operators(first), strict=True)
        found |= {low + at: low + other for at, other in places if at != other}
        own = zip(block_parameters(part, blocks, block), block_parameters(part, blocks, first), strict=True)
        within = (pair for pair in own if all(low <= use < high for use in graph.consumers[pair[0]]))
        found |= {name: other for name, other in within if name != other}
    return found


class _Folding:
    """Where the blocks of a graph are in its template, and the names of their lanes there."""

    def __init__(self, graph: OperatorGraph, blocks: Blocks) -> None:
        self.graph, self.blocks = graph, blocks
        held, start = [], blocks.start
        for first in blocks.firsts:
            held.append(range(start, start + len(blocks.operators(first))))
            start = held[-1].stop
        self.held = tuple(held)
        found = lanes(graph, blocks)
        assert found is not None
        self.lanes = found
        self.names: dict[str, str] = {}  # names in other kinds of blocks: name in the first kind
        self.twins: dict[int, int] = {}
        for kind, places in enumerate(found):
            for (place, result), (first, first_result) in zip(places, found[0], strict=False):
                if kind:
                    self.names[self._made(kind, place, result)] = self._made(0, first, first_result)
                    self.twins[self.held[kind].start + place] = self.held[0].start + first

    def _made(self, kind: int, place: int, result: int) -> str:
        name = self.graph.operators[self.blocks.operators(self.blocks.firsts[kind])[place]].results[result]
        assert name is not None
        return name

    def folded(self) -> OperatorGraph:
        """The graph of the template."""
        graph, blocks = self.graph, self.blocks
        operators = list(graph.operators[: blocks.start])
        for kind, first in enumerate(blocks.firsts):
            inside = graph.operators[blocks.borders[first] : blocks.borders[first + 1]]
            entering = self._entering(first) if kind else {}
            operators += [op.reading(entering) for op in inside]
        last = self._twins_of(blocks.count - 1)
        operators += [op.reading(last) for op in graph.operators[blocks.stop :]]
        used = {name for op in operators for name in (*op.operands, *(r for r in op.results if r is not None))}
        return replace(
            graph,
            operators=tuple(operators),
            types={name: tensor for name, tensor in graph.types.items() if name in used or name in graph.inputs},
            parameters=tuple(p for p in graph.parameters if p.name in used),
            buffers=tuple(name for name in graph.buffers if name in used),
            loss=last.get(graph.loss, graph.loss),
        )

    def _twins_of(self, block: int) -> dict[str, str]:
        """The values that a block makes, mapped to the names in the template's block of its kind."""
        first = self.blocks.firsts[self.blocks.kinds[block]]
        return {
            name: twin
            for at, other in zip(self.blocks.operators(block), self.blocks.operators(first), strict=True)
            for name, twin in zip(self.graph.operators[at].results, self.graph.operators[other].results, strict=True)
            if name is not None and twin is not None
        }

    def _entering(self, block: int) -> dict[str, str]:
        """The values that the previous block makes, mapped to the names of the lanes."""
        return {name: self.names.get(twin, twin) for name, twin in self._twins_of(block - 1).items()}

    def edges(self, folded: OperatorGraph) -> tuple[ValueEdge, ...]:
        """All edges of the folded graph, and the edges from one block to the next that it does not have."""
        loops = self._loops()
        entering = {(edge.consumer, edge.operand) for edge in loops}
        first, start, stop = self.held[0], self.held[0].start, self.held[-1].stop
        found = []
        for consumer, op in enumerate(folded.operators):
            for operand, name in enumerate(op.operands):
                producer = folded.producer.get(name)
                if producer is None or name not in folded.data_dependent:
                    continue
                kind: EdgeKind = "outside"
                if start <= consumer < stop:
                    if producer < start:
                        alone = not loops and consumer in first  # the only block of its kind, before all others
                        kind = "enter" if alone or (consumer, operand) in entering else "every"
                    else:
                        inside = any(producer in held and consumer in held for held in self.held)
                        kind = "inside" if inside else "loop"
                elif start <= producer < stop:
                    kind = "leave"
                assert kind != "loop" or producer in first
                found.append(ValueEdge(producer=producer, consumer=consumer, operand=operand, name=name, kind=kind))
        return (*found, *loops)

    def _loops(self) -> tuple[ValueEdge, ...]:
        """Edges into blocks of the first kind from the previous block, derived from the lanes."""
        blocks = self.blocks
        block = next((at for at in range(1, blocks.count) if blocks.kinds[at] == 0), None)
        if block is None:
            return ()
        inside, before = blocks.operators(block), blocks.operators(block - 1)
        sources = iter(operand_sources(self.graph, inside.start, inside.stop, before.start))
        lane_of = {place: lane for lane, place in enumerate(self.lanes[blocks.kinds[block - 1]])}
        edges = []
        for at in self.held[0]:
            for operand, _ in enumerate(self.graph.operators[at].operands):
                where, what = next(sources)
                if where == "before":
                    assert isinstance(what, tuple)
                    place, result = self.lanes[0][lane_of[what]]
                    edges.append(
                        ValueEdge(
                            producer=self.held[0].start + place,
                            consumer=at,
                            operand=operand,
                            name=self._made(0, place, result),
                            kind="loop",
                        )
                    )
        return tuple(edges)


def _with_liveness(template: Template, names: Mapping[str, str]) -> Template:
    """Distinguishes the readers for which shared values that leave a block are kept, since the folded graph has no next
    block. `names` maps a lane's value in another kind of block to its name in the first."""
    alive, operators = template.alive, template.graph.operators
    kept: dict[str, set[EdgeKind]] = {}
    for edge in template.edges:
        if operators[edge.producer].op == IDENTITY and edge.operand in alive.saved[edge.consumer]:
            handed = edge.kind in ("loop", "leave")
            kept.setdefault(names.get(edge.name, edge.name) if handed else edge.name, set()).add(edge.kind)
    lanes_of = {name: (name, *(other for other, lane in names.items() if lane == name)) for name in template.carried}
    kinds = {
        one: kept.get(one, set()) | (kept.get(name, set()) & {"loop", "leave"})
        for name, made in lanes_of.items()
        for one in made
    }
    next_only = {name for name, found in kinds.items() if found == {"loop"}}
    rest_only = {name for name, found in kinds.items() if found == {"leave"}}
    both = {name for name, found in kinds.items() if found} - next_only - rest_only
    return replace(
        template,
        alive=replace(alive, kept=(alive.kept - rest_only - next_only) | both),
        kept_for_next=frozenset(next_only),
        kept_for_rest=frozenset(rest_only),
    )


def _with_shares(template: Template, names: Mapping[str, str], software: Software) -> Template:
    """The shares that are kept of values, for software that keeps only part of them. A value that leaves a block is
    read by the next block, of any kind, or by the operators after the last. `names` as for `_with_liveness`."""
    lanes = {*template.carried, *names, *names.values()}
    inside: dict[str, set[int]] = {}
    leaving: dict[EdgeKind, dict[str, set[int]]] = {"loop": {}, "leave": {}}
    for edge in template.edges:
        if edge.operand in template.alive.saved[edge.consumer]:
            handed = leaving.get(edge.kind)
            name = edge.name if handed is None else names.get(edge.name, edge.name)
            (inside if handed is None else handed).setdefault(name, set()).add(edge.consumer)

    def users(kind: EdgeKind) -> dict[str, set[int]]:
        handed = {lane: leaving[kind].get(names.get(lane, lane), set()) for lane in lanes}
        found = {lane: inside.get(lane, set()) | readers for lane, readers in handed.items()}
        return {lane: readers for lane, readers in found.items() if readers}

    shares = kept_shares(template.graph, {**inside, **users("loop")}, software)
    for_rest = kept_shares(template.graph, users("leave"), software)
    alive = replace(template.alive, shares=shares)
    return replace(template, alive=alive, shares_for_rest={lane: for_rest.get(lane, 1.0) for lane in lanes})


def _with_passing(template: Template, names: Mapping[str, str]) -> Template:
    """For a graph that is not trained. Values that every block reads live through all blocks. A value that a block
    hands on is held while operators of this block, or of the next one, run that do not read it; the folded graph has no
    next block."""
    graph, kept = template.graph, set(template.alive.kept)
    if template.blocks.count > 1:
        kept |= {edge.name for edge in template.edges if edge.kind == "every"}
    for name in template.carried:
        loops = [edge for edge in template.edges if edge.kind == "loop" and edge.name == name]
        first = loops[0].producer
        for made in (first, *(twin for twin, other in template.twins.items() if other == first)):
            own = next(held for held in template.held if made in held)
            behind = set(range(made + 1, own.stop)) & {
                use for one in graph.operators[made].results for use in graph.consumers.get(one or "", ())
            }
            for following in template.held:
                ahead = {edge.consumer for edge in loops if edge.consumer in following}
                if ahead and len(behind) + len(ahead) < own.stop - made + max(ahead) - following.start:
                    kept |= {name, *(other for other, lane in names.items() if lane == name)}
    return replace(template, alive=replace(template.alive, kept=frozenset(kept)))


def _unfolded(graph: OperatorGraph, software: Software) -> Template:
    edges = []
    for consumer, op in enumerate(graph.operators):
        for operand, name in enumerate(op.operands):
            producer = graph.producer.get(name)
            if producer is not None and name in graph.data_dependent:
                edges.append(
                    ValueEdge(producer=producer, consumer=consumer, operand=operand, name=name, kind="outside")
                )
    return Template(
        graph=graph,
        blocks=NO_BLOCKS,
        held=(),
        edges=tuple(edges),
        own_parameters=(),
        alive=liveness(graph, software),
        twins={},
    )
