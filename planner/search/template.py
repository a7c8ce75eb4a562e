"""The folded graph: what comes before the blocks, one block that stands for all, what comes after.

    before ──enter──> [ block ] ──leave──> after          depth enters only as how often a node or an edge counts
                       │  ^  ^
                       └──┘  └── every: a value from before that all blocks read
                       loop: from one block to the next

An edge joins the operator that makes a value to one that reads it. How often it counts in a pipeline stage follows from
its kind and from what the stage holds (`Share`). A graph without repeated blocks is its own template.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from hardware_profiles import PYTORCH, Software
from planner.graph.blocks import IDENTITY, NO_BLOCKS, BlockRun, block_parameters, operand_sources
from planner.graph.operator_graph import OperatorGraph, substitute
from planner.pricing.liveness import Liveness, Replay, liveness, replay
from planner.sharding.rule import FactorKind
from planner.sharding.rules import rule_of

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
    """What one pipeline stage holds: `blocks` blocks, and whether also what comes before and what comes after them."""

    blocks: int
    first: bool
    last: bool

    def times(self, kind: EdgeKind) -> int:
        """How often an edge of a kind counts in the stage; a value from the stage before counts where it is read."""
        return {
            "outside": 1,
            "inside": self.blocks,
            "every": self.blocks,
            "enter": int(self.first),
            "loop": self.blocks - int(self.first),
            "leave": int(self.last),
        }[kind]


@dataclass(frozen=True, kw_only=True)
class Template:
    """Operators before, of one block and after, in a graph of their own; `blocks.count` says how many blocks there
    really are.
    """

    graph: OperatorGraph
    blocks: BlockRun
    edges: tuple[ValueEdge, ...]
    own_parameters: frozenset[str]  # every block has parameters of its own in place of these
    alive: Liveness
    kept_for_next: frozenset[str] = frozenset()  # shared values that only the next block keeps: not those of the last
    whole_blocks: bool = False  # recomputation runs a block to its end
    repeated: frozenset[str] = frozenset()  # classes of operators whose results no recomputed block keeps
    kept_for_rest: frozenset[str] = frozenset()  # shared values that only what follows keeps: those of the last block

    def in_block(self, index: int) -> bool:
        return self.blocks.count > 0 and self.blocks.start <= index < self.blocks.start + self.blocks.period

    def held(self, index: int, share: Share) -> int:
        """How often an operator of the template stands in a stage."""
        if not self.blocks.count:
            return 1
        if self.in_block(index):
            return share.blocks
        return int(share.first if index < self.blocks.start else share.last)

    @cached_property
    def replay(self) -> Replay:
        """How much of the block is recomputed where blocks are."""
        start = self.blocks.start
        return replay(self.graph, start, start + self.blocks.period, self.whole_blocks)

    @cached_property
    def causal_ring(self) -> bool:
        """Whether there is causal attention that a ring could split."""
        rules = (rule_of(self.graph, op) for op in self.graph.operators)
        return any(rule.causal and any(f.kind is FactorKind.RING for f in rule.factors) for rule in rules)

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """Values that one block hands to the next, under their names in the template's block."""
        return tuple(sorted({edge.name for edge in self.edges if edge.kind == "loop"}))

    @cached_property
    def shared(self) -> frozenset[int]:
        """Operators before the blocks that every block reads."""
        return frozenset(edge.producer for edge in self.edges if edge.kind == "every")

    @cached_property
    def pipelines(self) -> bool:
        """Whether the graph can be cut between blocks: nothing but what the blocks hand on flows past them."""
        past = any(
            edge.kind == "every" or (edge.kind == "outside" and edge.producer < self.blocks.start <= edge.consumer)
            for edge in self.edges
        )
        shared = any(
            self.in_block(at) and name in self.graph.parameter_names and name not in self.own_parameters
            for at, op in enumerate(self.graph.operators)
            for name in op.operands
        )
        return self.blocks.count > 1 and not past and not shared


def fold(
    graph: OperatorGraph, blocks: BlockRun, software: Software = PYTORCH, repeated: frozenset[str] = frozenset()
) -> Template:
    """The template of a prepared graph, run by some software; `repeated` says how recomputation goes.

    Where the part after the blocks reads more than the last block, nothing is folded.
    """
    if not blocks.count:
        return _unfolded(graph, software)
    stop = blocks.start + blocks.period
    last = {
        name: twin
        for at in range(blocks.start, stop)
        for name, twin in zip(
            graph.operators[at + (blocks.count - 1) * blocks.period].results, graph.operators[at].results, strict=True
        )
        if name is not None and twin is not None
    }
    inner = {
        name
        for op in graph.operators[blocks.start : blocks.stop - blocks.period]
        for name in op.results
        if name is not None
    }
    after = graph.operators[blocks.stop :]
    if any(name in inner for op in after for name in op.operands):
        return _unfolded(graph, software)
    renamed = tuple(
        replace(
            op,
            arguments=tuple(substitute(a, last) for a in op.arguments),
            keywords=tuple((key, substitute(value, last)) for key, value in op.keywords),
        )
        for op in after
    )
    operators = (*graph.operators[:stop], *renamed)
    used = {name for op in operators for name in (*op.operands, *(r for r in op.results if r is not None))}
    folded = replace(
        graph,
        operators=operators,
        types={name: tensor for name, tensor in graph.types.items() if name in used or name in graph.inputs},
        parameters=tuple(p for p in graph.parameters if p.name in used),
        buffers=tuple(name for name in graph.buffers if name in used),
        loss=last.get(graph.loss, graph.loss),
    )
    loops = _loops(graph, blocks)
    own = frozenset(block_parameters(graph, blocks, 0))
    edges = (*_straight(folded, blocks, loops), *loops)
    return _with_liveness(
        Template(
            graph=folded,
            blocks=blocks,
            edges=edges,
            own_parameters=own,
            alive=liveness(folded, software.fused, software.loss),
            whole_blocks=software.whole_blocks,
            repeated=repeated,
        )
    )


def _with_liveness(template: Template) -> Template:
    """Tell apart for whom the shared values that leave a block are kept: the folded graph has no next block."""
    alive, operators = template.alive, template.graph.operators
    kept: dict[str, set[EdgeKind]] = {}
    for edge in template.edges:
        if operators[edge.producer].op == IDENTITY and edge.operand in alive.saved[edge.consumer]:
            kept.setdefault(edge.name, set()).add(edge.kind)
    next_only = {name for name in template.carried if kept.get(name) == {"loop"}}
    rest_only = {name for name in template.carried if kept.get(name) == {"leave"}}
    return replace(
        template,
        alive=replace(alive, kept=alive.kept - rest_only),
        kept_for_next=frozenset(next_only),
        kept_for_rest=frozenset(rest_only),
    )


def _unfolded(graph: OperatorGraph, software: Software) -> Template:
    return Template(
        graph=graph,
        blocks=NO_BLOCKS,
        edges=_straight(graph, NO_BLOCKS, ()),
        own_parameters=frozenset(),
        alive=liveness(graph, software.fused, software.loss),
    )


def _straight(graph: OperatorGraph, blocks: BlockRun, loops: tuple[ValueEdge, ...]) -> tuple[ValueEdge, ...]:
    """Edges of the template as it stands; those into the block are told apart by what later blocks read there."""
    stop = blocks.start + blocks.period * min(1, blocks.count)
    entering = {(edge.consumer, edge.operand) for edge in loops}
    edges = []
    for consumer, op in enumerate(graph.operators):
        for operand, name in enumerate(op.operands):
            producer = graph.producer.get(name)
            if producer is None or name not in graph.data_dependent:
                continue
            kind: EdgeKind = "outside"
            if blocks.start <= consumer < stop:
                outside = producer < blocks.start
                kind = "inside" if not outside else "enter" if (consumer, operand) in entering else "every"
            elif blocks.start <= producer < stop:
                kind = "leave"
            edges.append(ValueEdge(producer=producer, consumer=consumer, operand=operand, name=name, kind=kind))
    return tuple(edges)


def _loops(graph: OperatorGraph, blocks: BlockRun) -> tuple[ValueEdge, ...]:
    """Edges from one block to the next, seen at the second block, drawn inside the template's block."""
    sources = iter(operand_sources(graph, blocks, 1))
    edges = []
    for at in range(blocks.start, blocks.start + blocks.period):
        for operand, _ in enumerate(graph.operators[at].operands):
            where, what = next(sources)
            if where == "before":
                assert isinstance(what, tuple)
                place, result = what
                producer = blocks.start + blocks.period + place  # counted back from the start of the second block
                name = graph.operators[producer].results[result]
                assert name is not None
                edges.append(ValueEdge(producer=producer, consumer=at, operand=operand, name=name, kind="loop"))
    return tuple(edges)
