"""Proving a rule by execution: what it derives for a strategy must recombine to the call that is not split.

    operands ──cut──> pieces of each rank ──operator──> pieces of the results ──put together──> = the results
                                           <─backward── pieces of a gradient; put together: = the gradients

All ranks run one after the other on plain tensors. Pieces are put together as their layouts say: concatenated where S,
summed where P, found equal where R. A rule is believed for a strategy only if results and gradients come out the same.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from planner.graph.call import Call, Typed
from planner.graph.operator_graph import TensorType
from planner.sharding.discover.trial import Case, gradients_of, run, same
from planner.sharding.layout import Layout, local_shape
from planner.sharding.legality import strategy_fault
from planner.sharding.mesh import Mesh, MeshAxis
from planner.sharding.rule import OperatorLayouts, Rule, Strategy, derive_layouts

Pieces = list[torch.Tensor]  # one per rank


def mesh_of(sizes: Sequence[int]) -> Mesh:
    """A mesh to try a strategy on."""
    return Mesh(
        axes=tuple(
            MeshAxis(name=f"axis{i}", size=size, stride=math.prod(sizes[i + 1 :]), bandwidth=1.0)
            for i, size in enumerate(sizes)
        )
    )


def fault(case: Case, rule: Rule, strategy: Strategy, sizes: Sequence[int]) -> str | None:
    """What goes wrong where the call of a case is split like this; None where nothing does."""
    mesh = mesh_of(sizes)
    illegal = strategy_fault(rule, strategy, mesh)
    if illegal is not None:
        return illegal.reason
    layouts = derive_layouts(rule, strategy)
    operands = [_cut(t, d.forward, sizes) for t, d in zip(case.operands, layouts.operands, strict=True)]
    leaves = [
        [_leaf(piece, gradient is not None) for piece in pieces]
        for pieces, gradient in zip(operands, case.operand_gradients, strict=True)
    ]
    scale = math.prod(size for c, size in zip(strategy, sizes, strict=True) if c in rule.mean_over)
    before = torch.get_rng_state()
    try:
        local = [_local(case.call, [pieces[rank] for pieces in leaves], scale) for rank in range(mesh.size)]
        wrong = _results_fault(case, layouts, sizes, local)
        return wrong or _gradients_fault(case, layouts, sizes, leaves, local)
    except Exception as error:  # an operator may raise anything at all for pieces that it was not written for
        return f"on a piece it raises {type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    finally:
        torch.set_rng_state(before)


def _leaf(piece: torch.Tensor, graded: bool) -> torch.Tensor:
    return piece.detach().clone().requires_grad_(graded)


def _local(call: Call, operands: Sequence[torch.Tensor], scale: int) -> tuple[torch.Tensor, ...]:
    results = run(call, operands)
    return results if scale == 1 else tuple(result * (1.0 / scale) for result in results)


def _results_fault(
    case: Case, layouts: OperatorLayouts, sizes: Sequence[int], local: Sequence[tuple[torch.Tensor, ...]]
) -> str | None:
    for index, (expected, duplex) in enumerate(zip(case.results, layouts.results, strict=True)):
        pieces = [of_rank[index].detach() for of_rank in local]
        shape = local_shape(tuple(expected.shape), duplex.forward, tuple(sizes))
        if any(tuple(piece.shape) != shape for piece in pieces):
            return f"a piece of result {index} has shape {tuple(pieces[0].shape)}, not {shape}"
        found = _combined(pieces, duplex.forward, sizes, case.tolerance)
        if found is None or not same(found, expected, case.tolerance):
            return f"the pieces of result {index} do not make the result"
    return None


def _gradients_fault(
    case: Case,
    layouts: OperatorLayouts,
    sizes: Sequence[int],
    leaves: Sequence[Pieces],
    local: Sequence[tuple[torch.Tensor, ...]],
) -> str | None:
    if not case.gradients:
        return None
    cuts = {i: _cut(g, layouts.results[i].gradient, sizes) for i, g in case.gradients.items()}
    of_ranks = [
        gradients_of([pieces[rank] for pieces in leaves], results, {i: cut[rank] for i, cut in cuts.items()})
        for rank, results in enumerate(local)
    ]
    for index, (expected, duplex) in enumerate(zip(case.operand_gradients, layouts.operands, strict=True)):
        if expected is None:
            continue
        each = [found[index] for found in of_ranks]
        parts = [torch.zeros_like(p) if g is None else g for g, p in zip(each, leaves[index], strict=True)]
        found = _combined(parts, duplex.gradient, sizes, case.tolerance)
        if found is None or not same(found, expected, case.tolerance):
            return f"the pieces of the gradient of operand {index} do not make the gradient"
    return None


def _cut(tensor: torch.Tensor, layout: Layout, sizes: Sequence[int]) -> Pieces:
    """The piece of each rank. Terms of a sum are unequal, so that a missing one is noticed."""
    pieces = [tensor]
    for placement, size in zip(layout, sizes, strict=True):
        if placement.is_shard:
            pieces = [part.contiguous() for piece in pieces for part in piece.chunk(size, placement.dim)]
        elif placement.kind == "partial":
            shares = [2.0 * (i + 1) / (size * (size + 1)) for i in range(size)]
            pieces = [piece * share for piece in pieces for share in shares]
        else:
            pieces = [piece for piece in pieces for _ in range(size)]
    return pieces


def _combined(pieces: Pieces, layout: Layout, sizes: Sequence[int], tolerance: float) -> torch.Tensor | None:
    """The whole tensor from the pieces of all ranks; None where copies differ."""
    for placement, size in reversed(list(zip(layout, sizes, strict=True))):
        groups = [pieces[i : i + size] for i in range(0, len(pieces), size)]
        if placement.is_shard:
            pieces = [torch.cat(group, placement.dim) for group in groups]
        elif placement.kind == "partial":
            if groups[0][0].dtype == torch.bool:
                return None
            pieces = [torch.stack(group).sum(0).to(group[0].dtype) for group in groups]
        else:
            if any(not same(copy, group[0], tolerance) for group in groups for copy in group[1:]):
                return None
            pieces = [group[0] for group in groups]
    return pieces[0]


def retyped(call: Call, shapes: Sequence[Sequence[int]]) -> Call:
    """The call with operands of other shapes; its results are not known."""
    rest = iter(shapes)

    def of(argument: Typed) -> Typed:
        if isinstance(argument, TensorType):
            return replace(argument, shape=tuple(next(rest)))
        return tuple(of(item) for item in argument) if isinstance(argument, tuple) else argument

    arguments = tuple(of(argument) for argument in call.arguments)
    return replace(call, arguments=arguments, keywords=tuple((n, of(v)) for n, v in call.keywords), results=())
