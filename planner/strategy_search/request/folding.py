"""A graph folded to its template: one block of each kind stands for all."""

from collections.abc import Mapping
from dataclasses import replace

from hardware_profiles import PYTORCH, Software
from planner.graph.blocks import IDENTITY, NO_BLOCKS, Blocks, block_parameters, operand_sources
from planner.graph.kinds import find_blocks, lanes
from planner.graph.operator_graph import OperatorGraph
from planner.pricing.kept_shares import kept_shares
from planner.pricing.liveness import liveness
from planner.strategy_search.request.template import EdgeKind, Key, Template, ValueEdge


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
        whole=graph,
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
        whole=graph,
        blocks=NO_BLOCKS,
        held=(),
        edges=tuple(edges),
        own_parameters=(),
        alive=liveness(graph, software),
        twins={},
    )
