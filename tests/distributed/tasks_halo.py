"""What the worker processes do for tests of edges that are exchanged between neighbours."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from planner.sharding.halo import Halo
from runtime.comm.halo import Neighbours

OUTSIDE = -7.0


def exchanged(before: int, after: int, length: int) -> tuple[bool, bool]:
    """Whether a piece of so many elements comes with what is around it, and its gradient with what others have of it,
    as from the whole."""
    size, place = dist.get_world_size(), dist.get_rank()
    drawn = torch.Generator().manual_seed(1)
    whole = torch.randint(0, 9, (2, size * length, 3), generator=drawn).double().requires_grad_()
    wide = F.pad(whole, (0, 0, before, after), value=OUTSIDE)
    read = [wide.narrow(1, number * length, before + length + after) for number in range(size)]
    given = [torch.randint(0, 9, one.shape, generator=drawn).double() for one in read]
    torch.autograd.backward(read, given)
    assert whole.grad is not None
    assert dist.group.WORLD is not None
    neighbours = Neighbours(
        dim=1, halo=Halo(before=before, after=after), group=dist.group.WORLD, place=place, outside=OUTSIDE
    )
    piece = whole.detach().narrow(1, place * length, length)
    found = neighbours.joined(piece, neighbours.edges(piece))
    gradient = neighbours.own(given[place])
    return torch.equal(found, read[place]), torch.equal(gradient, whole.grad.narrow(1, place * length, length))
