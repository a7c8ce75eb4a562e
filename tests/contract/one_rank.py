"""One rank of a plan in this process: what others would have sent is made up, what this one sends is listed."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.graph.operator_graph import OperatorGraph
from planner.plan.plan import Plan
from runtime.comm.device_mesh import RankMesh
from runtime.step.training_step import TrainingStep, parallelize
from tests.distributed import plans

Messages = Counter[tuple[str, int | None, float]]
"""Kind, axis (None: between stages) and bytes, in the convention of `costmodels.collective_time`."""


class Recorder:
    """Stands in for the calls of torch.distributed that the runtime makes, and writes them down.

    Of what crosses stages the receiver writes it down.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, float, Any]] = []

    def all_gather_single(self, whole: torch.Tensor, piece: torch.Tensor, group: Any, async_op: bool = False) -> "Gone":
        whole.view(group.size(), *piece.shape).copy_(piece.expand(group.size(), *piece.shape))
        return self._note("all_gather", whole, group)

    def reduce_scatter_single(
        self, piece: torch.Tensor, term: torch.Tensor, group: Any, async_op: bool = False
    ) -> "Gone":
        piece.copy_(term[: piece.shape[0]])
        return self._note("reduce_scatter", term, group, piece)

    def all_reduce(self, term: torch.Tensor, operation: Any, group: Any = None, async_op: bool = False) -> "Gone":
        return self._note("all_reduce", term, group)

    def all_to_all_single(
        self, incoming: torch.Tensor, outgoing: torch.Tensor, group: Any, async_op: bool = False
    ) -> "Gone":
        incoming.copy_(outgoing)
        return self._note("all_to_all", outgoing, group)

    def recv(self, value: torch.Tensor, source: int, group: Any) -> None:
        self.irecv(value, source, group).wait()

    def irecv(self, value: torch.Tensor, source: int, group: Any) -> "Gone":
        value.zero_()
        return self._note("send_recv", value, group)

    def isend(self, value: torch.Tensor, target: int, group: Any) -> "Gone":
        return Gone()

    def batch_isend_irecv(self, calls: list[tuple[Any, torch.Tensor, Any]]) -> list["Gone"]:
        for op, tensor, group in calls:
            if op == self.isend:
                self._note("send_recv", tensor, group)
            else:
                tensor.zero_()
        return []

    def _note(self, kind: str, tensor: torch.Tensor, group: Any, *others: torch.Tensor) -> "Gone":
        if group is not None:  # the comparison of the first batch is between all ranks, and in no plan
            self.calls.append((kind, float(tensor.nbytes), group))
        return Gone(tensor, *others)

    def messages(self, place: RankMesh) -> Messages:
        """What has been written down. An axis may have several process groups of the same ranks."""
        axes = {_ranks(group): axis for axis, group in enumerate(place.groups) if group is not None}
        return Counter((kind, axes.get(_ranks(group)), nbytes) for kind, nbytes, group in self.calls)


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


class Gone:
    """Something sent that has arrived; it holds on to tensors, as what torch returns does."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


@contextmanager
def one_rank(
    model: str,
    plan: Plan,
    graph: OperatorGraph,
    stage: int = 0,
    dtype: torch.dtype = torch.float32,
    *,
    lowered: bool = True,
) -> Iterator[tuple[TrainingStep, Recorder]]:
    """The training step of a rank in the middle of a stage, with nothing written down yet."""
    recorder = Recorder()
    names = ("all_gather_single", "reduce_scatter_single", "all_reduce", "all_to_all_single", "recv", "irecv", "isend")
    names = (*names, "batch_isend_irecv")
    rank = stage * plan.mesh.size + plan.mesh.size // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", sys.excepthook)  # a process group puts its own in front of it
        dist.init_process_group("fake", rank=rank, world_size=plan.cluster.devices, store=FakeStore())
        try:
            for name in names:
                patch.setattr(dist, name, getattr(recorder, name))
            patch.setattr(dist, "P2POp", lambda op, tensor, group, group_peer: (op, tensor, group))
            module = plans.build(model).to(dtype)
            step = parallelize(
                module,
                plan,
                example=plans.inputs(model),
                traced=graph,
                device=torch.device("cpu"),
                check_layouts=False,
                lowered=lowered,
            )
            step.rank.pipeline.has_gone = Gone.is_completed
            recorder.calls.clear()
            yield step, recorder
        finally:
            dist.destroy_process_group()
