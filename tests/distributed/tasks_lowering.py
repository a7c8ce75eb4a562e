"""What the worker processes do in the tests of lowered programs: every function here is called on all ranks at the same
time."""

import torch

from runtime.step.training_step import parallelize
from tests.distributed import plans, tasks


def same(model: str, kind: int | str, sizes: tuple[int, ...], settings: dict[str, object]) -> tuple[int, int]:
    """How many tensors of two passes over a batch, watched and bare, are not bit for bit those of the general executor,
    and how many there are: losses, gradients on this rank, buffers. With dropout, as seeds are the same."""
    plan = tasks.plan_of(model, plans.mesh_of(*sizes), kind, **settings)
    batch = plans.inputs(model, samples=plan.training.global_batch)
    made = []
    for lowered in (True, False):
        step = parallelize(
            plans.build(model),
            plan,
            traced=plans.traced(model),
            device=tasks.CPU,
            known=tasks.known(),
            seed=tasks.SEED,
            check_layouts=False,
            lowered=lowered,
        )
        found = []
        for _ in range(2):
            found.append(step.accumulate(*batch))
            found += [p.local_gradient().clone() for p in step.rank.parameters.values() if p.trainable]
        found += step.rank.buffers.values()
        assert (step.rank.programs is not None) == lowered
        made.append(found)
    pairs = list(zip(*made, strict=True))
    return sum(not torch.equal(one, other) for one, other in pairs), len(pairs)
