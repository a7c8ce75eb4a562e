"""Instructions whose collectives overlap with their products: several instructions become one.

    x ─gather─> identity    q = x Wq    k = x Wk      becomes     (x, q, k) = one call of (piece of x, Wq, Wk)
    y = z W ─scatter─> add                            becomes     y = one call of (z, W), in the layout that `add` wants

`planner.plan.layout.overlapped_products` chooses them; `runtime.ops.overlapped_products` has the calls. A merged
instruction promises the layouts of all operands and results of the call, so observers find what they expect.
"""

from collections.abc import Mapping
from dataclasses import replace

from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.overlapped_products import Overlap, is_shared
from planner.sharding.layout import local_shape
from planner.sharding.rule import Duplex
from runtime.comm.device_mesh import RankMesh
from runtime.executor.instruction import Instruction
from runtime.ops.overlapped_products import overlapped_call


def overlap(
    instructions: Mapping[int, Instruction], overlaps: tuple[Overlap, ...], bound: BoundPlan, place: RankMesh
) -> dict[int, Instruction]:
    """The instructions of a stage with its overlaps; products that run inside of another instruction are left out."""
    found, promised = dict(instructions), bound.promised if overlaps else {}
    for one in overlaps:
        (_result if one.kind == "result" else _operand)(found, one, bound, place, promised)
    return found


def _result(
    found: dict[int, Instruction], one: Overlap, bound: BoundPlan, place: RankMesh, promised: Mapping[str, Duplex]
) -> None:
    """Make the product return its result in the layout that its reader wants."""
    product, reader = found[one.at], found[one.reader]
    wanted = bound.operators[one.reader].layouts.operands[one.place]
    shape = local_shape(bound.graph.types[one.value].shape, wanted.forward, place.mesh.sizes)
    layouts = replace(product.bound.layouts, results=(wanted,))
    found[one.at] = replace(
        product,
        bound=replace(product.bound, layouts=layouts),
        call=overlapped_call(one, place, (len(product.operands) > 2,), shared=False),
        results=((one.value, shape),),
    )
    found[one.reader] = _without_way(reader, one.place)


def _operand(
    found: dict[int, Instruction], one: Overlap, bound: BoundPlan, place: RankMesh, promised: Mapping[str, Duplex]
) -> None:
    """Make the reader, or the identity in its place, take the operand in its producer's layout."""
    reader = _without_way(found[one.reader], one.place)
    products = [found.pop(at) if at != one.at else reader for at in one.products]
    through = one.at not in one.products
    operands = [reader.operands[one.place], *(operand for each in products for operand in each.operands[1:])]
    layouts = [promised[one.value], *(way for each in products for way in each.bound.layouts.operands[1:])]
    results, made = list(products), [way for each in products for way in each.bound.layouts.results]
    slots = [result for each in results for result in each.results]
    shared = is_shared(one, bound.graph)
    if through:
        (name,) = (name for name in reader.bound.operator.results if name is not None)
        slots = [reader.results[0] if shared else None, *slots]
        made = [*(reader.bound.layouts.results if shared else ()), *made]
    over = {name for each in (reader, *products) for name in each.last}
    if through and not shared:
        over.discard(name)
    found[one.at] = replace(
        reader,
        bound=replace(
            reader.bound, layouts=replace(reader.bound.layouts, operands=tuple(layouts), results=tuple(made))
        ),
        operands=tuple(operands),
        call=overlapped_call(
            one,
            place,
            [len(each.operands) > 2 for each in products],
            kept=[each.kept for each in products],
            shared=shared,
        ),
        results=tuple(slots),
        kept=any(each.kept for each in products),
        last=tuple(sorted(over)),
    )


def _without_way(instruction: Instruction, place: int) -> Instruction:
    """The instruction without the redistribution of this operand."""
    operands = list(instruction.operands)
    operands[place] = replace(operands[place], transfer=None)
    return replace(instruction, operands=tuple(operands))
