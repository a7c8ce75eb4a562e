"""What the worker processes do in the tests of sequences that are split: plans that the search finds for a context."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from planner.plan.plan import Plan
from planner.sharding.layout import parse_layout
from planner.sharding.rule import strategy_names
from planner.sharding.window import Window
from planner.sharding.zigzag import zigzag_runs
from planner.strategy_search.request.space import Pinned
from runtime.comm.device_mesh import rank_mesh
from runtime.comm.redistribute import convert, local_piece
from runtime.ops.attention.hidden import Mask
from runtime.ops.attention.ring_attention import Ring, ring_attention
from tests.contract.rule_calls import dense_attention
from tests.distributed import plans, tasks
from tests.distributed.searched import searched_plan


@cache
def context_plan(model: str, devices: int, pinned: Pinned, order: str | None) -> Plan:
    """The best plan, with every axis that cuts sequences in zigzag order in another one where `order` says so."""
    plan = searched_plan(model, devices, memory=1e9, pinned=pinned)
    if order is None:
        return plan
    axes = tuple(replace(axis, order=order if axis.order == "zigzag" else axis.order) for axis in plan.mesh.axes)
    return replace(plan, mesh=replace(plan.mesh, axes=axes))


def parity(model: str, devices: int, pinned: Pinned, order: str | None = None) -> tuple[float, set[str], list[str]]:
    """The worst error of loss and gradients, the factors that attention is split by, and the orders of the axes."""
    plan = context_plan(model, devices, pinned, order)
    step = tasks.build_step(model, plan)
    error = tasks.worst_error(step, model, plan.training.micro_batches)
    split = {
        name
        for bound in step.rank.bound.operators
        if bound.rule.op_class == "attention"
        for name in strategy_names(bound.rule, bound.strategy)
        if name is not None
    }
    return error, split, [axis.order for axis in plan.mesh.axes]


def ring_numerics(
    shape: tuple[int, int, int, int, int, int], causal: bool | Mapping[str, Any], zigzag: bool, dtype: torch.dtype
) -> tuple[float, ...]:
    """Largest relative errors of the result and the gradients of queries, keys and values of a ring of all processes,
    against attention to everything at once. `causal` may be what a mask says. `shape`: batch, heads, heads of keys,
    sequence, head dims of keys and of values."""
    batch, heads, groups, length, width, of_values = shape
    place, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(7)
    extents = ((heads, width), (groups, width), (groups, of_values), (heads, of_values))
    draw = (torch.randn(batch, n, length, d, generator=generator, dtype=dtype) for n, d in extents)
    *whole, gradient = draw
    whole = [tensor.requires_grad_() for tensor in whole]
    mask = None
    if isinstance(causal, bool):
        expected = F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
    else:
        documents = torch.randint(0, 2, (batch, length), generator=generator).cumsum(1)
        expected = dense_attention(*whole, documents, None, **causal, enable_gqa=True)
        mask = Mask(window=Window(**causal), documents=documents)
    expected.backward(gradient)
    runs = zigzag_runs(length, size, place) if zigzag else ((place * length // size, length // size),)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.detach().narrow(2, start, count) for start, count in runs], dim=2)

    pieces = [own(tensor).requires_grad_() for tensor in whole]
    ring = Ring(group=dist.group.WORLD, place=place, causal=causal is True, zigzag=zigzag, mask=mask)
    found = ring_attention(*pieces, ring)
    found.backward(own(gradient))
    pairs = [(found.detach(), own(expected)), *((p.grad, own(w.grad)) for p, w in zip(pieces, whole, strict=True))]
    return tuple(tasks.relative(one.double(), other.double()) for one, other in pairs)


def reordered(extent: int) -> bool:
    """Whether gathering, scattering and exchanging a sequence in zigzag order give back what was cut."""
    mesh = plans.mesh_of(dist.get_world_size())
    mesh = replace(mesh, axes=(replace(mesh.axes[0], order="zigzag"),))
    place = rank_mesh(mesh, tasks.CPU, known=tasks.known())
    whole = torch.arange(extent * 8.0).view(extent, 8)
    cut, other, full = parse_layout("S0"), parse_layout("S1"), parse_layout("R")
    piece = local_piece(whole, cut, place, (0,))
    columns = local_piece(whole, other, place, (0,))
    term = whole * (place.rank + 1) / sum(range(1, mesh.size + 1))
    ways = (
        (piece, cut, full, whole),
        (piece, cut, other, columns),
        (columns, other, cut, piece),
        (term, parse_layout("P"), cut, piece),
        (convert(piece, whole.shape, cut, parse_layout("P"), place, (0,)), parse_layout("P"), full, whole),
    )
    moved = [convert(tensor, whole.shape, a, b, place, (0,)) for tensor, a, b, _ in ways]
    return all(torch.allclose(one, way[3]) for one, way in zip(moved, ways, strict=True)) and not torch.equal(
        piece, local_piece(whole, cut, place)
    )
