"""What the worker processes do for tests of proofs: small plans, run as they are or by a runtime with a fault."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from planner.graph.operator_graph import OperatorGraph
from planner.plan.plan import Plan
from runtime.proving.comparing import compared
from runtime.proving.differences import Differences
from runtime.step.step import RankStep
from runtime.update.optimizer import ShardedOptimizer
from tests.distributed.tasks import known


def proved(plan: Plan, traced: OperatorGraph, fault: str) -> Differences | None:
    """How far a small plan in float64 is from the unsharded model, with one of the `FAULTS`, or none."""
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            FAULTS[fault](patch)
        return compared(plan, None, known(), traced=traced, exact=True)


def _terms_are_not_summed(patch: pytest.MonkeyPatch) -> None:
    def own_term(own: torch.Tensor, flat: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        own.copy_(flat.chunk(group.size())[group.rank()])
        return dist.barrier(group, async_op=async_op)

    patch.setattr(dist, "reduce_scatter_single", own_term)


def _pieces_come_in_another_order(patch: pytest.MonkeyPatch) -> None:
    gather = dist.all_gather_single

    def reversed_pieces(whole: torch.Tensor, flat: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if group is None:  # what ranks say to each other
            return gather(whole, flat)
        gather(whole, flat, group=group)
        whole.copy_(torch.cat(list(reversed(whole.clone().chunk(group.size())))))
        return dist.barrier(group, async_op=async_op)

    patch.setattr(dist, "all_gather_single", reversed_pieces)


def _gradients_are_doubled(patch: pytest.MonkeyPatch) -> None:
    accumulate = RankStep.accumulate

    def doubled(self: RankStep, inputs: Any) -> torch.Tensor:
        self.scale *= 2
        try:
            return accumulate(self, inputs)
        finally:
            self.scale /= 2

    patch.setattr(RankStep, "accumulate", doubled)


def _nothing_is_updated(patch: pytest.MonkeyPatch) -> None:
    step = ShardedOptimizer.step
    patch.setattr(ShardedOptimizer, "step", lambda self, accept=None: step(self, lambda gradients: False) or True)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "terms are not summed": _terms_are_not_summed,
    "pieces come in another order": _pieces_come_in_another_order,
    "gradients are doubled": _gradients_are_doubled,
    "nothing is updated": _nothing_is_updated,
}
