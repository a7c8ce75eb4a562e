"""Workers that train DLRM with its tables on parameter servers."""

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from planner.models.zoo import build_model
from runtime.servers.addresses import Addresses
from runtime.servers.served import attach
from runtime.servers.sparse_optimizers import SparseOptimizer

STEPS, SAMPLES = 6, 16


def model() -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = build_model("dlrm-tiny", dtype="float32", device="cpu").module
    return module


def batch(step: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Dense features, fields and clicks of a global batch."""
    generator = torch.Generator().manual_seed(step)
    fields = [torch.randint(0, rows, (SAMPLES,), generator=generator) for rows in (64, 32, 16)]
    return torch.randn(SAMPLES, 4, generator=generator), fields, torch.randint(0, 2, (SAMPLES,), generator=generator)


def share(step: int, worker: int, workers: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The samples of one worker."""
    dense, fields, clicks = batch(step)
    part = slice(worker * SAMPLES // workers, (worker + 1) * SAMPLES // workers)
    return dense[part], [field[part] for field in fields], clicks[part]


def train(
    folder: str, servers: int, optimizer: str, staleness: int | None
) -> tuple[list[float], dict[str, np.ndarray], tuple[int, int, int], int]:
    """Losses of all steps, tables after them, rows and bytes that were pulled with what they should be, and how often a
    server was lost."""
    rank, world = dist.get_rank(), dist.get_world_size()
    module = model()
    addresses = Addresses(folder=Path(folder), count=servers)
    rule = SparseOptimizer(name=optimizer, learning_rate=0.05)
    tables = attach(module, addresses, worker=rank, workers=world, optimizer=rule, staleness=staleness)
    dense = torch.optim.SGD(module.parameters(), lr=0.1)
    losses, touched = [], 0
    for step in range(STEPS):
        given = share(step, rank, world)
        touched += sum(field.unique().numel() for field in given[1])
        tables.prefetch({f"tables.{number}": field for number, field in enumerate(given[1])})
        loss = module(*given)
        loss.backward()
        for weight in module.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= world
        dense.step()
        dense.zero_grad()
        tables.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
    whole = {name: tables.client.whole(name) for name in tables.client.tables}
    counted = (touched, tables.client.traffic.pulled_rows, tables.client.traffic.pulled_bytes)
    lost = tables.client.reconnections
    dist.barrier()
    tables.close()
    return losses, whole, counted, lost
