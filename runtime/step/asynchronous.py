"""Training without a pipeline flush: a stage continues with the next batch while earlier ones still come back.

    pipedream       every micro-batch is a batch of its own: a stage updates after each backward pass, and runs forward
                    passes with its newest weights; the backward pass uses the weights of its forward pass (stashing)
    pipedream_2bw   W(t+1) = W(t) - update of the gradient of batch t at W(t-1): the weights of one update ago, on all
                    stages, so that two versions are enough

Batches of one `window` follow each other without a break; at its end the pipeline drains. Autograd keeps a version of
the weights alive as long as a backward pass needs it, because an update writes the new weights into new memory
(`LocalParameter.renew`).

Sources: Narayanan et al., "PipeDream", SOSP 2019, section 3.3; "Memory-efficient pipeline-parallel DNN training", ICML
2021, section 3.1 (2BW). Not good for: gradients that are clipped by a norm over all stages, tied weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from costmodels import Turn, ends
from planner.errors import NonFiniteError
from planner.plan.binding.bind import BoundPlan
from planner.plan.schedule import orders
from runtime.comm.device_mesh import RankMesh
from runtime.executor.deferred_weight_gradients import DeferredGradients
from runtime.observer import Observer
from runtime.parameters.shards import LocalParameter, Version
from runtime.step.checking import LayoutCheck
from runtime.step.inputs import Inputs
from runtime.step.pipeline import Pipeline, Values
from runtime.update.optimizer import ShardedOptimizer

Held = Mapping[str, LocalParameter | Version]


class _Rank(Protocol):
    """The part of a rank's step that is used here."""

    bound: BoundPlan
    place: RankMesh
    pieces: int
    steps: int
    check_layouts: bool
    parameters: dict[str, LocalParameter]
    pipeline: Pipeline
    optimizer: ShardedOptimizer

    def compute(
        self,
        turn: Turn,
        received: Sequence[Values],
        inputs: Inputs,
        looking: Callable[[int], Observer] | None = None,
        held: Held | None = None,
        ahead: int = 0,
    ) -> list[dict[str, torch.Tensor]]: ...


class Asynchronous:
    """The steps of one rank under a schedule without a flush. Every call is collective."""

    def __init__(self, rank: _Rank) -> None:
        training = rank.bound.plan.training
        self._rank, self._parts = rank, training.micro_batches
        self._each = rank.bound.plan.schedule == "pipedream"
        self._scale = training.update.seed(1 if self._each else self._parts, rank.pieces)
        self._versions: dict[int, Held] = {0: self._newest()}  # by the number of updates; empty except under 2BW

    def earlier(self) -> Held:
        """The weights of one update ago, which the next batch uses; empty where it uses the newest."""
        return {} if self._each else self._versions.get(self._rank.steps - 1, {})

    def start(self, steps: int) -> None:
        """Allocate the weights that are needed after `steps` steps; they are written next."""
        if self._each or not steps:
            self._versions = {0: self._newest()}
            return
        before = self._newest()
        for parameter in self._rank.parameters.values():
            if parameter.trainable:
                parameter.renew()
        self._versions = {steps - 1: before, steps: self._newest()}

    def window(self, batches: Sequence[Inputs], rates: Sequence[float]) -> list[float]:
        """Train on global batches, each with its learning rate; returns the mean loss of each.

        Raises NonFiniteError, on every rank, where one is not finite; the weights have been updated then.
        """
        rank, plan = self._rank, self._rank.bound.plan
        check = LayoutCheck(bound=rank.bound, place=rank.place) if rank.check_layouts else None
        first = rank.steps
        if check is not None:
            check.weights(rank.parameters)

        def forward(turn: Turn, received: Sequence[Values], _: Sequence[DeferredGradients | None]) -> Sequence[Values]:
            batch, part = divmod(turn.micro_batch, self._parts)
            looking = None if check is None or batch else check.micro_batch
            own = replace(turn, micro_batch=part)
            return rank.compute(own, received, batches[batch], looking, self._weights(first + batch), batch)

        def then(turn: Turn) -> None:
            batch, part = divmod(turn.micro_batch, self._parts)
            if ends(turn) and (self._each or part == self._parts - 1):
                self._update(rates[batch], first + batch + 1)

        order = orders(plan.schedule, plan.pipeline, self._parts * len(batches))[rank.place.stage]
        found = rank.pipeline.run(forward, self._scale, order=order, batches=len(batches), then=then)
        if check is not None:
            check.verify()
            rank.check_layouts = False
        rank.steps += len(batches)
        losses: list[float] = found.reshape(-1).tolist()
        for number, loss in enumerate(losses, first + 1):
            if not math.isfinite(loss):
                raise NonFiniteError(
                    f"the loss of step {number} is {loss}, and with '{plan.schedule}' weights have been updated since;"
                    " run the plan with schedule '1f1b' to find the operator"
                )
        return losses

    def _weights(self, batch: int) -> Held:
        """The weights for a batch, counted from the very first: the newest, or those of one update ago."""
        return self._rank.parameters if self._each else self._versions[max(batch - 1, 0)]

    def _update(self, rate: float, updates: int) -> None:
        if not self._each:  # the batch that used older ones is done
            self._versions = {updates - 1: self._versions[updates - 1]}
        self._rank.optimizer.set_learning_rate(rate)
        self._rank.optimizer.step()
        if not self._each:
            self._versions[updates] = self._newest()

    def _newest(self) -> Held:
        return {name: parameter.version for name, parameter in self._rank.parameters.items()}
