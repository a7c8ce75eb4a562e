"""What the worker processes do in the tests of chains that are compiled: every function here is called on all ranks at
the same time."""

import functools
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import torch

from planner.sharding.update import Update
from runtime.step.training_step import parallelize
from tests.distributed import plans, tasks
from tests.distributed.offloading import everywhere, offloaded


def as_written(function: Callable[..., object], **settings: object) -> Callable[..., object]:
    """A chain that nothing is made of."""
    return function


def compared(
    model: str, kind: int | str, sizes: tuple[int, ...], settings: dict[str, object], how: dict[str, object]
) -> tuple[float, int]:
    """How far losses, gradients and new weights of two steps are, relatively, from those without chains, and how many
    distinct chains there are. `how` has what else the plan says: "gathers" of weights, "offloaded" for all that can be
    outside of the device; and the "backend" that compiles, None where chains run as they are written."""
    plan = tasks.plan_of(model, plans.mesh_of(*sizes), kind, optimizer="sgd", **settings)
    plan = replace(
        plan, training=replace(plan.training, update=Update(buckets="none", gathers=str(how.get("gathers", "each"))))
    )
    if how.get("offloaded"):
        plan = offloaded(plan, everywhere("host"), "host", everywhere("device"), "host")
    backend = how["backend"]
    compiler = as_written if backend is None else functools.partial(torch.compile, backend=str(backend))
    batches = [plans.inputs(model, samples=plan.training.global_batch) for _ in range(3)]
    made = []
    for compiled in (True, False):
        with patch("torch.compile", compiler), patch("runtime.step.training_step.check_compiler"):
            step = parallelize(
                plans.build(model),
                plan,
                traced=plans.traced(model),
                device=tasks.CPU,
                known=tasks.known(),
                seed=tasks.SEED,
                check_layouts=False,
                compiled=compiled,
            )
            found = [torch.tensor(step(*batch)) for batch in batches[:2]]
            found.append(step.accumulate(*batches[2]))
        found += [p.local_gradient().clone() for p in step.rank.parameters.values() if p.trainable]
        found += [p.piece.detach().clone() for p in step.rank.parameters.values()]
        chains = 0 if step.rank.programs.compiled is None else len(step.rank.programs.compiled.texts)
        made.append((found, chains))
    (found, chains), (wanted, _) = made
    return max(tasks.relative(one, other) for one, other in zip(found, wanted, strict=True)), chains
