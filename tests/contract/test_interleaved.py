"""What one of two interleaved micro-batches sends is on its way while the other multiplies, forward and backward: the
order of what one rank does, on made-up neighbours."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.plan.binding.bind import bind
from planner.plan.plan import Plan
from planner.plan.prediction.predict import stage_costs
from runtime.comm.async_collectives import Flight
from tests.contract.one_rank import one_rank
from tests.contract.test_priced_is_emitted import cluster_of
from tests.distributed import plans

LAYERS = 4
TOGETHER = {"micro_batches": 2, "global_batch": 8, "interleave": 2}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        return func(*args, **(kwargs or {}))


def plan_of(recomputation: str, kind: str = "megatron") -> Plan:
    return plans.hand_plan(kind, "llama4", plans.mesh_of(1, 2), **TOGETHER, recomputation=recomputation)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Products that run while each collective is on its way, in the order in which collectives set out."""
    found: list[int] = []
    began: dict[int, int] = {}
    go, arrived = Flight._go, Flight._arrived

    def going(flight: Flight) -> None:
        go(flight)
        if flight._started is not None:
            began[id(flight)] = len(found)
            found.append(-products.count)

    def arriving(flight: Flight, room: Any) -> Any:
        found[began.pop(id(flight))] += products.count
        return arrived(flight, room)

    with Products() as products, patch.object(Flight, "_go", going), patch.object(Flight, "_arrived", arriving):
        yield found


def under_products(plan: Plan, lowered: bool = True) -> list[int]:
    """Products under each collective of a step of a plan of the small Llama."""
    with one_rank("llama4", plan, plans.traced("llama4"), 0, lowered=lowered) as (step, _):
        batch = plans.inputs("llama4", samples=plan.training.global_batch)
        step.prepare(*batch)
        step.accumulate(*batch)  # looks at what it makes, the first time
        with counted() as found:
            step.accumulate(*batch)
    assert found
    return found


@pytest.mark.parametrize("lowered", [True, False])
def test_sums_of_both_micro_batches_travel_under_products_of_the_other(lowered: bool) -> None:
    """All but the first of a step and the last: autograd goes on with the other micro-batch where a gradient departs
    that nobody waited for on the way forward."""
    found = under_products(plan_of("none"), lowered)
    assert len(found) == 2 * 2 * (1 + 2 * LAYERS)  # forward and back, of two micro-batches: the table, and two a block
    assert [at for at, count in enumerate(found) if not count] == [0, len(found) - 1]


@pytest.mark.parametrize("lowered", [True, False])
def test_scatters_and_gathers_of_sequence_parallelism_travel_under_products_of_the_other(lowered: bool) -> None:
    """A micro-batch adds and normalises, between a scatter and a gather, in the middle of the products of the other
    one. Uncovered are a few at both ends of the pass; on the way back sums of the gradients of norms are sent, too."""
    found = under_products(plan_of("none", "sequence"), lowered)
    forward, back = found[: 2 * (2 + 4 * LAYERS)], found[2 * (2 + 4 * LAYERS) :]
    assert [at for at, count in enumerate(forward) if not count] == [0, 1, 2, len(forward) - 1]
    assert len(back) == len(forward) + 2 * (1 + 2 * LAYERS)
    assert [at for at, count in enumerate(back) if not count] == [0, 1, *range(len(back) - 5, len(back))]


@pytest.mark.parametrize("kind", ["megatron", "sequence"])
def test_what_travels_under_products_is_priced_so(kind: str) -> None:
    """On a link on which messages take a third of the time of the operators, most of them is covered, at both ends of
    so small a model nothing."""
    plan = plan_of("none", kind)
    bound, cluster = bind(plan, plans.traced("llama4"), plans.BATCH), cluster_of(plan)
    (cost,) = stage_costs(bound, cluster)
    (chunk,) = cost.chunks
    for one, backward in ((chunk.forward, False), (chunk.backward, True)):
        assert one.sent > 0
        slower = one.work / one.sent / 3
        slow = [part._replace(sent=part.sent and slower * part.sent) for part in one.operators]
        priced = replace(one, operators=slow, sent=slower * one.sent, waits=slower * one.sent)
        (turn,) = priced.turns(2, 1, backward=backward)
        assert turn.blocking < 0.4 * 2 * priced.sent, (kind, backward)


def test_recomputed_blocks_wait_forward_for_the_last_sum_of_the_last_micro_batch() -> None:
    """A block is through with both before the next one begins, as is what comes before the first; on the way back the
    other one computes a whole block again meanwhile."""
    found = under_products(plan_of("full"))
    forward, back = [count == 0 for count in found[: 2 * (1 + 2 * LAYERS)]], found[2 * (1 + 2 * LAYERS) :]
    assert forward == [True, True, *[False, False, False, True] * LAYERS]
    assert [at for at, count in enumerate(back) if not count] == [len(back) - 1]
