"""What the worker processes do for tests of what is computed across the batch, and of data that goes on."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import runtime
from planner.graph.trace import trace
from planner.models.zoo import BuiltModel
from runtime.data.datasets import synthetic_batches
from tests.distributed import plans
from tests.distributed.tasks import CPU, build_step, known


class Centred(nn.Module):
    """What it computes for a sample depends on all samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x_BH: torch.Tensor) -> torch.Tensor:
        y_BH = self.linear(x_BH)
        return (y_BH - y_BH.mean(dim=0, keepdim=True)).pow(2).mean()


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Any:
        tokens = (torch.arange(plans.SEQUENCE + 1) * (number + 1)) % plans.VOCABULARY
        return tokens[:-1], tokens[1:]


def across(full_batch: bool) -> tuple[float, float, float]:
    """The loss of a plan that cuts the batch in four, that of one device, and the mean of the losses that four devices
    have which look at their own samples only."""
    torch.manual_seed(0)
    model, rows = Centred(), [torch.randn(8) for _ in range(plans.BATCH)]
    whole = torch.stack(rows)
    with torch.no_grad():
        one, local = float(model(whole)), sum(float(model(part)) for part in whole.chunk(4)) / 4
    graph = trace(model, (whole,))
    plan = plans.hand_plan("zero1", "centred", plans.mesh_of(4), graph=graph, samples=plans.BATCH)
    step = runtime.parallelize(model, plan, traced=graph, example=(whole,), device=CPU, known=known())
    batch = next(iter(runtime.loader(rows, step, full_batch=full_batch)))  # type: ignore[arg-type]
    return step(batch), one, local


def goes_on(
    kind: str, sizes: tuple[int, ...], stages: tuple[int, ...] | None, full_batch: bool
) -> tuple[list[float], Any]:
    """Losses of a first step, and where the loader then stands; the weights are those of the start again when another
    loader, told that, gives the second batch, and the first one of the loader that knows nothing."""

    def opened() -> tuple[Any, Any]:
        more = {} if stages is None else {"stages": stages}
        step = build_step("llama", plans.hand_plan(kind, "llama", plans.mesh_of(*sizes), micro_batches=2, **more))
        return step, runtime.loader(Rows(), step, shuffle=True, seed=1, full_batch=full_batch)

    step, data = opened()
    first = step(next(iter(data)))
    state = data.state()
    step, data = opened()
    data.load_state(state)
    second = step(next(iter(data)))
    return [first, second], state


def drawn() -> list[list[float]]:
    """A synthetic batch of a model whose example is another one on every rank: labels, numbers that are no labels on
    some, and integers of two lengths without a bound."""
    rank = dist.get_rank()
    numbers = torch.tensor([40 + rank, 50 + rank])
    args = (torch.tensor([0.0, float(rank == 0)]), numbers, numbers.to(torch.int16))
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of(4))
    built = BuiltModel(
        reference="m:f", module=None, args=args, kwargs={}, batch=2, sequence_length=None, bounds=(None,) * 3
    )
    return [tensor.tolist() for tensor in next(synthetic_batches(built, plan, CPU, seed=0)).tensors()]
