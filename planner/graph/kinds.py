"""Blocks of several kinds, one after the other, that hand on the same values.

    embed | attn mlp | attn mlp | attn experts | attn experts | ... | norm head loss
             kind 0     kind 0      kind 1         kind 1

A run of equal blocks (`planner.graph.blocks`) stands in a list of modules. Its neighbours in the same list are blocks
too, of the same kind or of another, as long as blocks are connected only by the values that each hands to the next, and
these are the same everywhere: as many values, of the same types, made by the same calls. Where a run repeats several
modules of the list at once, each of them is a block, unless they share weights that the run repeats.

Values that are handed on are *lanes*: every kind of block makes each of them at a place of its own.
"""

import re
from collections.abc import Sequence
from itertools import groupby

from planner.graph.blocks import NO_BLOCKS, BlockRun, Blocks, call_ids, find_run, operand_sources
from planner.graph.call import typed_call
from planner.graph.operator_graph import OperatorGraph

Place = tuple[int, int]
"""An operator's place in its block, and the number of its result."""

_Form = tuple[tuple[int, ...], tuple[tuple[str, object] | None, ...]]
"""Calls of a block, and where its operands come from; None: from the block before."""

_ITEM = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def find_blocks(graph: OperatorGraph) -> Blocks:
    """The run of equal blocks that covers the most operators, with its neighbours of other kinds; `NO_BLOCKS` where
    nothing repeats."""
    run = find_run(graph)
    if not run.count:
        return NO_BLOCKS
    alone = Blocks.alike(run.start, run.period, run.count)
    items = _items_around(graph, run)
    inside = [at for at, item in enumerate(items) if run.start <= item.start and item.stop <= run.stop]
    if not inside:
        return alone
    first, last, ids = inside[0], inside[-1], call_ids(graph)
    found = _blocks(graph, items[first : last + 1], ids)
    if found is None:
        return alone
    while first and (more := _blocks(graph, items[first - 1 : last + 1], ids)) is not None:
        found, first = more, first - 1
    while last + 1 < len(items) and (more := _blocks(graph, items[first : last + 2], ids)) is not None:
        found, last = more, last + 1
    if found.stop - found.start < run.covered or len(_shared(graph, found)) > len(_shared(graph, alone)):
        return alone
    return found


def _shared(graph: OperatorGraph, blocks: Blocks) -> set[str]:
    """Parameters that several blocks read."""
    readers: dict[str, set[int]] = {}
    for at in range(blocks.start, blocks.stop):
        for name in graph.parameter_names.intersection(graph.operators[at].operands):
            readers.setdefault(name, set()).add(blocks.numbers[at])
    return {name for name, found in readers.items() if len(found) > 1}


def _items_around(graph: OperatorGraph, run: BlockRun) -> list[range]:
    """Operators of each module in the list that the blocks of a run stand in, for consecutive modules with no operator
    in between; none where the blocks stand in no list."""
    levels = zip(*(_items(op.module) for op in graph.operators[run.start : run.stop]), strict=False)
    level = next((at for at, items in enumerate(levels) if len(set(items)) > 1), None)
    if level is None:
        return []
    lists = {items[level][0] for op in graph.operators[run.start : run.stop] if (items := _items(op.module))}
    if len(lists) > 1:
        return []
    (path,) = lists

    def number(at: int) -> int | None:
        items = _items(graph.operators[at].module)
        return items[level][1] if len(items) > level and items[level][0] == path else None

    stretches: list[list[range]] = [[]]
    for found, group in groupby(range(len(graph.operators)), key=number):
        members = list(group)
        if found is None:
            stretches.append([])
        else:
            stretches[-1].append(range(members[0], members[-1] + 1))
    return next((items for items in stretches if any(run.start in item for item in items)), [])


def _items(module: str) -> list[tuple[str, int]]:
    """Lists that a module stands in, outermost first, and its number in each."""
    return [(module[: found.start()], int(found.group(1))) for found in _ITEM.finditer(module)]


def _blocks(graph: OperatorGraph, items: Sequence[range], ids: Sequence[int]) -> Blocks | None:
    """These modules as blocks; None where they are connected in other ways, with each other or with what follows."""
    low = items[0].start
    kinds: list[int] = []
    known: dict[_Form, int] = {}
    for at, item in reversed(list(enumerate(items))):  # the first one gets its inputs from elsewhere
        before = items[at - 1].start if at else item.start
        sources = operand_sources(graph, item.start, item.stop, before)
        if any(where == "outside" and graph.producer.get(str(name), -1) >= low for where, name in sources):
            return None
        if at and not any(where == "before" for where, _ in sources):
            return None
        entering = [None if where == "before" else (where, what) for where, what in sources]
        key = (tuple(ids[item.start : item.stop]), tuple(entering))
        if not at and key not in known:
            key = next((other for other in known if _enters_as(key, other)), key)
        kinds.append(known.setdefault(key, len(known)))
    borders = (*(item.start for item in items), items[-1].stop)
    blocks = Blocks(borders=borders, kinds=tuple(reversed(kinds))).part(0, len(items))
    found = lanes(graph, blocks)
    if found is None or _reads_from_the_midst(graph, blocks) or not _enters_alike(graph, blocks, found):
        return None
    return blocks


def _enters_as(first: _Form, other: _Form) -> bool:
    """Whether the first block differs from another only in where its inputs come from, in place of the block
    before."""
    pairs = zip(first[1], other[1], strict=False)
    return first[0] == other[0] and all(a == b or (b is None and a is not None and a[0] == "outside") for a, b in pairs)


def _reads_from_the_midst(graph: OperatorGraph, blocks: Blocks) -> bool:
    """Whether an operator that is neither in a block nor in the next one reads a value of the block."""
    for block in range(blocks.count - 1):
        reach = range(blocks.borders[block], blocks.borders[block + 2])
        for at in blocks.operators(block):
            for name in graph.operators[at].results:
                if any(use not in reach for use in graph.consumers.get(name or "", ())):
                    return True
    return False


def _enters_alike(graph: OperatorGraph, blocks: Blocks, found: Sequence[Sequence[Place]]) -> bool:
    """Whether the first block reads, beside what all may read, values of the types that blocks hand on."""
    inside = blocks.operators(0)
    handed = sorted(
        str(graph.types[name])
        for place, result in found[0]
        if (name := graph.operators[inside.start + place].results[result]) is not None
    )
    entering = {
        name
        for at in inside
        for name in graph.operators[at].operands
        if name in graph.data_dependent
        and name not in graph.parameter_names
        and name not in graph.buffers
        and graph.producer.get(name, -1) < inside.start
        and all(use < inside.stop for use in graph.consumers[name])
    }
    return sorted(str(graph.types[name]) for name in entering) == handed


def lanes(graph: OperatorGraph, blocks: Blocks) -> tuple[tuple[Place, ...], ...] | None:
    """For each kind of block the places where it makes the values that it hands on, lane by lane; nothing for a kind
    that only comes last. None where kinds hand on different values."""
    made: list[dict[Place, int]] = [{} for _ in blocks.firsts]
    read: list[dict[int, int]] = [{} for _ in blocks.firsts]
    forms: list[object] = []  # of each lane
    seen: set[tuple[int, int]] = set()
    for block in range(1, blocks.count):
        pair = giver, taker = blocks.kinds[block - 1], blocks.kinds[block]
        if pair in seen:
            continue
        inside = blocks.operators(block)
        sources = operand_sources(graph, inside.start, inside.stop, blocks.borders[block - 1])
        for slot, (where, place) in enumerate(sources):
            if where != "before":
                continue
            assert isinstance(place, tuple)
            form = _form(graph, blocks, giver, place)
            if not seen and place not in made[giver]:
                forms.append(form)
            left = [lane for lane, known in enumerate(forms) if known == form and lane not in made[giver].values()]
            lane = made[giver].get(place, read[taker].get(slot, left[0] if left else None))
            if lane is None or made[giver].setdefault(place, lane) != lane:
                return None
            if read[taker].setdefault(slot, lane) != lane or forms[lane] != form:
                return None
        seen.add(pair)
    count = len(forms)
    takers = {taker for _, taker in seen}
    if any(set(read[taker].values()) != set(range(count)) for taker in takers):
        return None
    if any(len(set(places.values())) != count for places in made if places):
        return None
    return tuple(tuple(sorted(places, key=places.__getitem__)) for places in made)


def _form(graph: OperatorGraph, blocks: Blocks, kind: int, place: Place) -> object:
    """The call that makes a value of a kind of block, and whether it needs a gradient: equal for values of a lane."""
    at, result = blocks.borders[blocks.firsts[kind]] + place[0], place[1]
    op = graph.operators[at]
    return typed_call(graph, op), result, op.results[result] in graph.differentiable
