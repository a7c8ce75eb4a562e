"""What the worker processes do for tests of operators that every replica computes by itself."""

from typing import Any

import torch

import planner
import runtime
from planner.graph.trace import trace
from planner.plan.plan import Plan
from tests.distributed.tasks import CPU, known, relative
from tests.kept import kept
from tests.replicas import SAMPLES, batch, by_hand, loss_of, network, trained


def _planned(pattern: str, replicas: int, pinned: dict[str, Any]) -> Plan:
    """Searched by one rank for all: the same request has the same plan."""
    return planner.search(
        trace(network(), batch()), "cpu", devices=torch.distributed.get_world_size(), global_batch=SAMPLES,
        batch=SAMPLES, precision="fp32", pinned=pinned, per_replica=[f"{pattern}={replicas}"],
    ).plan  # fmt: skip


def parity(pattern: str, replicas: int, pinned: dict[str, Any], full_batch: bool | None) -> tuple[float, float]:
    """The worst error of loss, gradients, buffers and then the loss in evaluation under a plan, and how far the same is
    from the model that looks at whole batches. The batch is given whole, or read from a dataset, of which every rank
    reads all or its part."""
    module = network()
    whole = batch()
    wanted = (torch.distributed.get_world_size(), pattern, replicas, sorted(pinned.items()))
    plan = kept(f"plan per replica {wanted}", lambda: _planned(pattern, replicas, pinned))
    assert plan.training.update.replicas == replicas
    step = runtime.parallelize(module, plan, example=whole, device=CPU, known=known())
    if full_batch is None:
        loss = float(step.accumulate(*whole))
    else:
        rows: Any = list(zip(*whole, strict=True))
        loss = float(step.accumulate(next(iter(runtime.loader(rows, step, full_batch=full_batch)))))
    gradients, buffers = step.full_gradients(), step.changed_buffers()
    evaluated, parts = float(step.evaluate(*whole)), plan.training.micro_batches
    errors = []
    for hand in (by_hand(pattern, replicas), network()):
        wanted, of_gradient, of_buffer = trained(hand, parts)
        in_the_end = loss_of(hand, parts)
        errors.append(
            max(
                abs(loss - wanted) / wanted,
                abs(evaluated - in_the_end) / in_the_end,
                *(relative(gradients[name], of_gradient[name]) for name in of_gradient),
                *(relative(buffers[name].double(), of_buffer[name].double()) for name in buffers),
            )
        )
    return errors[0], errors[1]
