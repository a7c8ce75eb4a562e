"""What the worker processes do in the tests of weights that are gathered together: every function here is called on all
ranks at the same time."""

from dataclasses import replace

import torch

from planner.sharding.update import Update
from runtime.auditing.ledger import Ledger
from runtime.step.training_step import parallelize
from tests.distributed import plans, tasks


def together(
    model: str, kind: int | str, sizes: tuple[int, ...], settings: dict[str, object], dtype: str = "mixed"
) -> tuple[float, int, int]:
    """How far losses, gradients and new weights of two steps are, relatively, from those with weights that are gathered
    one by one, waited for in the general executor and ahead in lowered programs (under ZeRO-2 the other way round); and
    how many collectives the second step sends, one by one and together."""
    plan = tasks.plan_of(model, plans.mesh_of(*sizes), kind, optimizer="sgd", **settings)
    batches = [plans.inputs(model, samples=plan.training.global_batch) for _ in range(2)]
    made, sent = [], []
    programs = kind != "zero2"
    for gathers, lowered in (("each", True), ("block", not programs), ("ahead", programs)):
        update = Update(buckets="none", gathers=gathers, gradient_dtype=dtype)
        step = parallelize(
            plans.build(model),
            replace(plan, training=replace(plan.training, update=update)),
            traced=plans.traced(model),
            device=tasks.CPU,
            known=tasks.known(),
            seed=tasks.SEED,
            lowered=lowered,
        )
        found = [torch.tensor(step(*batches[0]))]
        ledger = Ledger()
        with ledger:
            found.append(torch.tensor(step.accumulate(*batches[1])))
        found += [p.local_gradient().clone() for p in step.rank.parameters.values() if p.trainable]
        found += [p.piece.detach().clone() for p in step.rank.parameters.values()]
        made.append(found)
        sent.append(sum(number for one, number in ledger.sent.items() if one.kind != "send_recv"))
    wanted, *others = made
    worst = max(tasks.relative(one, other) for found in others for one, other in zip(found, wanted, strict=True))
    assert sent[1] == sent[2], "the same is sent, at whatever time and by whatever executor"
    return worst, sent[0], sent[1]
