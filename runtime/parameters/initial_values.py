"""Initial values of the ranks: each rank's own, which must be equal, or those of rank 0.

Every rank builds the module, so equal seeds give equal values. If they differed, training would continue with an
inconsistent model, so a sum over the bits of every weight and buffer is compared over all ranks. With
`Update.broadcast` rank 0 sends its values instead, whole and one after the other, so a rank needs memory for only one
of them; the other ranks may then have the meta device. Parameters that a plan leaves to each device are neither
compared nor sent.
"""

import torch
import torch.distributed as dist
from torch import nn

from planner.errors import ModelError
from planner.graph.operator_graph import ROWS_FROM
from planner.plan.binding.bind import BoundPlan
from runtime.comm.exchange import world

_AS_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def from_first(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The value that rank 0 has, on the device. Collective."""
    own = torch.empty(value.shape, dtype=value.dtype, device=device) if value.is_meta else value.detach().to(device)
    if world() > 1:
        own = own.clone(memory_format=torch.contiguous_format)
        dist.broadcast(own.view(-1).view(torch.uint8), 0)  # gloo has no int16
    return own


def check_values(module: nn.Module, bound: BoundPlan, device: torch.device) -> None:
    """Raise ModelError, on every rank, where ranks hold different values that will not be broadcast, or where rank 0
    has no values to broadcast. Collective."""
    update = bound.plan.training.update
    if world() == 1:
        return
    if update.broadcast:
        _check_first(module, bound, device)
        return
    values = {name: value for name, value in _values(module, bound).items() if not update.is_local(name)}
    sums = torch.tensor([_bit_sum(value) for value in values.values()], dtype=torch.int64, device=device)
    most = torch.stack([sums, ~sums])  # the minimum of a sum is the maximum of its complement
    dist.all_reduce(most, dist.ReduceOp.MAX)
    different = [name for name, same in zip(values, (most[0] == ~most[1]).tolist(), strict=True) if not same]
    if different:
        more = f" and of {len(different) - 1} more" if len(different) > 1 else ""
        raise ModelError(
            f"ranks hold different values of '{different[0]}'{more}: build the module from the same seed on every rank,"
            " or plan with broadcast, which sends those of rank 0 to all"
        )


def _check_first(module: nn.Module, bound: BoundPlan, device: torch.device) -> None:
    empty = [name for name, value in _values(module, bound).items() if value.is_meta]
    found = torch.tensor(len(empty), device=device)
    dist.broadcast(found, 0)
    if int(found):
        raise ModelError(
            f"{int(found)} parameters and buffers of rank 0 are on the meta device and have no values to send;"
            " build the module on a real device there"
        )


def _values(module: nn.Module, bound: BoundPlan) -> dict[str, torch.Tensor]:
    """Parameters and buffers that the plan's graph names."""
    known = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    tables = (str(dict(op.keywords)["table"]) for op in bound.graph.operators if op.op in ROWS_FROM.values())
    names = (*dict.fromkeys(parameter.in_module for parameter in bound.graph.parameters), *bound.graph.buffers, *tables)
    return {name: known[name] for name in names if name in known}


def _bit_sum(value: torch.Tensor) -> int:
    """The sum of the elements' bits, taken as integers."""
    if value.is_meta:
        return 0
    flat = value.detach().contiguous().reshape(-1)
    return int(flat.view(_AS_INTEGERS.get(flat.element_size(), torch.uint8)).sum(dtype=torch.int64))
