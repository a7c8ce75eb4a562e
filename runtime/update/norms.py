"""Norms of sharded tensors: the global gradient norm, for clipping, and norms of whole weights.

Every element counts once. On an axis that does not cut the state of a parameter, devices hold replicas, and only the
first counts; of stages that share a parameter only the first counts. A parameter that each device has for itself counts
on each. A gradient that was pushed to a parameter server exists only there. Sums of squares are float32, or float64
where gradients of the model are.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from planner.graph.operator_graph import OperatorGraph
from planner.plan.layout.parameter_owners import Owner
from runtime.comm.collectives import all_reduce
from runtime.comm.device_mesh import RankMesh, stage_line
from runtime.optimizers.lamb import Total
from runtime.parameters.shards import LocalParameter

_EPSILON = 1e-6  # added to the norm, as in torch.nn.utils.clip_grad_norm_


def global_norm(
    gradients: Mapping[str, torch.Tensor],
    parameters: Mapping[str, LocalParameter],
    place: RankMesh,
    servers: Mapping[str, Owner],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The norm of the gradients of all parameters over all ranks, in the layouts of the state; gradients owned by
    `servers` are only on this rank's host. Squares are summed in a `dtype` on which all ranks agree. Collective."""
    counted = [
        gradient
        for name, gradient in gradients.items()
        if _counts(parameters[name], place, servers[name].axes if name in servers else ())
    ]
    total = torch.zeros((), dtype=dtype, device=place.device)
    for alike in _alike(counted):
        wide = torch.promote_types(alike[0].dtype, dtype)
        total = total + torch.stack(torch._foreach_norm(alike, dtype=wide)).square().sum().to(total)
    for axis, size in enumerate(place.mesh.sizes):
        if size > 1:
            total = all_reduce(total, place.group(axis))
    if place.stages > 1:
        total = all_reduce(total, stage_line(place, tuple(range(place.stages)), "forward"))
    return total.sqrt()


def norm_dtype(graph: OperatorGraph) -> torch.dtype:
    """The dtype of sums of squares of gradients, the same on all ranks, also on those that have none."""
    wide = any(graph.types[one.name].dtype == "float64" for one in graph.parameters if one.trainable)
    return torch.float64 if wide else torch.float32


def _counts(parameter: LocalParameter, place: RankMesh, alone: Collection[int]) -> bool:
    """Whether this rank is the one that counts, among ranks with equal pieces; on axes where it is `alone` it has the
    only piece."""
    if parameter.local:
        return True
    if parameter.twins is not None and parameter.twins.rank() > 0:
        return False
    coordinate = enumerate(zip(parameter.stored.state, place.coordinate, strict=True))
    return all(axis in alone or p.is_shard or at == 0 for axis, (p, at) in coordinate)


def clip(gradients: Mapping[str, torch.Tensor], norm: torch.Tensor, most: float) -> None:
    """Scale the gradients down in place, as torch.nn.utils.clip_grad_norm_ does."""
    share = (most / (norm + _EPSILON)).clamp(max=1.0)
    for alike in _alike(gradients.values()):
        torch._foreach_mul_(alike, share.to(alike[0]))


def _alike(gradients: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group gradients by dtype and device, so that few kernels process all of them."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        found.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return list(found.values())


def whole_squares(parameters: Sequence[LocalParameter], place: RankMesh) -> Total:
    """Adds up the sums of squares of these parameters' pieces, (parameters, 2), over the axes that cut their states."""
    cut = [
        [i for i, p in enumerate(parameters) if p.stored.state[axis].is_shard] if size > 1 else []
        for axis, size in enumerate(place.mesh.sizes)
    ]

    def total(squares: torch.Tensor) -> torch.Tensor:
        for axis, rows in enumerate(cut):
            if rows:
                squares[rows] = all_reduce(squares[rows], place.group(axis))
        return squares

    return total
