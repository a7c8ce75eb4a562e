"""Trains the model of a plan on synthetic data for some steps, and compares with the model unsharded.

Every rank builds the model that the plan names from the same seed, keeps its pieces, and draws the same batches.
Rank 0 trains the plain model beside it. The losses of the two agree up to rounding; `TOLERANCE` says what that
means for a precision.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from planner.graph.trace import trace
from planner.models.zoo import BuiltModel, build_model
from planner.plan.plan import PRECISIONS, Plan
from runtime.data import synthetic_batch
from runtime.device_mesh import current_device
from runtime.optimizer import OptimizerSettings
from runtime.step import local_rank, parallelize, tensors_of
from runtime.unsharded import UnshardedStep

TOLERANCE: Mapping[str, float] = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
"""Largest relative difference of a loss that counts as equal. Assumed, not derived: float32 sums in another order
differ by about 1e-6 at first and drift with the steps; 16-bit activations carry 8 (bf16) or 11 (fp16) bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step: its number from 1, its loss, and that of the unsharded model (None where that is not run)."""

    step: int
    loss: float
    unsharded: float | None

    @property
    def difference(self) -> float:
        """Relative difference of the two losses; NaN in either is infinitely different."""
        if self.unsharded is None:
            return 0.0
        relative = abs(self.loss - self.unsharded) / max(abs(self.unsharded), 1e-12)
        return relative if relative == relative else float("inf")


def train(
    plan: Plan, *, steps: int, seed: int, check: bool, settings: OptimizerSettings | None = None
) -> Iterator[StepReport]:
    """Reports of `steps` training steps, one by one. Collective. `check` runs the unsharded model on rank 0.

    Raises PlannerError where the plan cannot be executed (see `runtime.step.parallelize`).
    """
    chosen = settings or OptimizerSettings()
    device = current_device(local_rank())
    built = _build(plan, seed)
    planned = _build(plan, seed, "meta")  # strides, and with them copies, may differ by device: as when it was planned
    step = parallelize(
        built.module,
        plan,
        built.args,
        built.kwargs,
        batch=built.batch,
        traced=trace(planned.module, planned.args, planned.kwargs),
        settings=chosen,
        device=device,
    )
    plain = None
    if check and step.place.rank == 0 and step.place.stage == 0:
        names = step.bound.graph.inputs
        batched = frozenset(number for number, name in enumerate(names) if name in step.batched)
        plain = UnshardedStep(built.module.to(device), plan.training, chosen, batched)
    examples = tensors_of(built.args, built.kwargs)
    for number in range(steps):
        batch = synthetic_batch(
            examples,
            batch=built.batch,
            samples=plan.training.global_batch,
            vocabulary=built.vocabulary,
            seed=seed,
            step=number,
        )
        args, kwargs = _arguments(built, [tensor.to(device) for tensor in batch])
        loss = step(*args, **kwargs)
        yield StepReport(step=number + 1, loss=loss, unsharded=None if plain is None else plain(args, kwargs))


def _build(plan: Plan, seed: int, where: str = "cpu") -> BuiltModel:
    """The model: the same weights on every rank, or none on "meta"."""
    torch.manual_seed(seed)
    return build_model(
        plan.model.reference,
        dtype=PRECISIONS[plan.training.precision],
        device=where,
        sequence_length=plan.model.sequence_length,
    )


def _arguments(built: BuiltModel, tensors: list[torch.Tensor]) -> tuple[tuple[object, ...], dict[str, object]]:
    """The example arguments with these tensors in place of theirs."""
    leaves, spec = pytree.tree_flatten((built.args, dict(built.kwargs)))
    rest = iter(tensors)
    args, kwargs = pytree.tree_unflatten(
        [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
    )
    return tuple(args), dict(kwargs)
