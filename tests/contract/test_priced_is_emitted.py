"""What is priced is what is emitted: kind, axis and bytes of every message of a training step, as multisets.

The runtime runs one rank of a plan in this process, with a fake process group that invents what the other ranks would
have sent; every call into torch.distributed is written down. `stage_costs` lists what the same plan is charged for.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from costmodels import order_1f1b
from hardware_profiles import load_profile
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.gpt import GPT
from planner.models.llama import Llama
from planner.plan.bind import BoundPlan, bind
from planner.plan.plan import Plan
from planner.plan.predict import TIME_PER_STEP, stage_costs
from planner.search.search import search
from planner.search.space import Pinned
from runtime.device_mesh import RankMesh
from runtime.step import TrainingStep, parallelize
from tests.distributed import plans
from tests.unit.search.cases import request_of

CPU = torch.device("cpu")
Messages = Counter[tuple[str, int | None, float]]  # kind, axis (None: between stages), bytes


class Recorder:
    """Stands in for the calls of torch.distributed that the runtime makes, and writes them down."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float, Any]] = []

    def all_gather_single(self, whole: torch.Tensor, piece: torch.Tensor, group: Any) -> None:
        self._note("all_gather", whole, group)
        whole.view(group.size(), *piece.shape).copy_(piece.expand(group.size(), *piece.shape))

    def reduce_scatter_single(self, piece: torch.Tensor, term: torch.Tensor, group: Any) -> None:
        self._note("reduce_scatter", term, group)
        piece.copy_(term[: piece.shape[0]])

    def all_reduce(self, term: torch.Tensor, operation: Any, group: Any) -> None:
        self._note("all_reduce", term, group)

    def all_to_all_single(self, incoming: torch.Tensor, outgoing: torch.Tensor, group: Any) -> None:
        self._note("all_to_all", outgoing, group)
        incoming.copy_(outgoing)

    def recv(self, value: torch.Tensor, source: int, group: Any) -> None:
        self._note("send_recv", value, group)
        value.zero_()

    def isend(self, value: torch.Tensor, target: int, group: Any) -> "Gone":
        return Gone()

    def _note(self, kind: str, tensor: torch.Tensor, group: Any) -> None:
        self.calls.append((kind, float(tensor.nbytes), group))

    def messages(self, place: RankMesh) -> Messages:
        axes = {group: axis for axis, group in enumerate(place.groups) if group is not None}
        return Counter((kind, axes.get(group), nbytes) for kind, nbytes, group in self.calls)


class Gone:
    """A send that has been done."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


@contextmanager
def one_rank(rank: int, world: int) -> Iterator[Recorder]:
    """This process as one rank of many."""
    recorder = Recorder()
    names = ("all_gather_single", "reduce_scatter_single", "all_reduce", "all_to_all_single", "recv", "isend")
    with pytest.MonkeyPatch.context() as patch:
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            for name in names:
                patch.setattr(dist, name, getattr(recorder, name))
            yield recorder
        finally:
            dist.destroy_process_group()


def emitted(model: str, plan: Plan, stage: int, graph: OperatorGraph) -> Messages:
    rank = stage * plan.mesh.size + plan.mesh.size // 2
    with one_rank(rank, plan.cluster.devices) as recorder:
        step = parallelize(plans.build(model), plan, plans.batch(), traced=graph, device=CPU)
        recorder.calls.clear()
        step(*plans.batch())
        return recorder.messages(step.place)


def priced(bound: BoundPlan, stage: int) -> Messages:
    cost = stage_costs(bound, load_profile("cpu").with_devices(bound.plan.cluster.devices))[stage]
    found: Messages = Counter()
    for (part, message), times in cost.messages.items():
        once = part in TIME_PER_STEP
        found[message.kind, message.axis, message.nbytes] += times * (1 if once else bound.plan.training.micro_batches)
    return +found

def show(model, plan):
    graph = plans.traced(model)
    bound = bind(plan, graph, plans.BATCH)
    for stage in range(len(plan.stages)):
        e, p = emitted(model, plan, stage, graph), priced(bound, stage)
        print(stage, "total", sum(e.values()), sum(p.values()), "emitted only", dict(e - p), "priced only", dict(p - e))

if __name__ == "__main__":
    m = plans.mesh_of
    for mb in (1, 2):
      for rc in ("none", "full"):
        print("== megatron", mb, rc); show("llama", plans.hand_plan("megatron", "llama", m(2, 2), micro_batches=mb, recomputation=rc))
        for model in ("llama", "gpt"):
          for k in ("zero1", "zero3"):
            print("==", model, k, mb, rc); show(model, plans.hand_plan(k, model, m(4//mb), micro_batches=mb, recomputation=rc))
    print("== pp"); show("gpt4", plans.random_plan("gpt4", m(2, 2), 0, stages=(1,2,1), micro_batches=2))
    for seed in range(4):
        print("== random", seed); show("llama", plans.random_plan("llama", m(2, 2), seed))
