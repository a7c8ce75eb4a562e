"""Gradients that stand only from the backward pass that makes them to the update that reads them.

PyTorch's zero_grad sets them to None (`set_to_none`, the default since 2.0), so that the first backward pass of a step
makes them block by block, while activations go: not all of both are there at any moment. With weights and states W:

    loss      W     + kept + what stands behind the blocks + what the loss takes          earlier micro-batches: + G
    first     W     + kept + a block as it is differentiated + gradients of the head      earlier micro-batches: + G
    last      W + G + a block as it is differentiated
    update    W + G + the roots of second moments, where the optimizer makes all at once

Kept is what waits for the backward pass. Whoever sums up all of it counts what never meets. Buckets of all gradients
stand at each moment beside, where there are any (`Software.keeps_buckets`), or are what gradients are views of, which
stand at each moment then (`Software.views_buckets`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from costmodels import MOMENT_BYTES
from hardware_profiles import Bytes, Software
from planner.plan.binding.bind import BoundPlan
from planner.plan.prediction.operator_visit import AFTER
from planner.plan.prediction.stage_cost import StageCost
from planner.sharding.layout import local_share

_BRIEF, _KEPT, _GRADIENTS, _STATES = "transient", "activations", "gradients", "optimizer state"


@dataclass(kw_only=True)
class GradientMoments:
    """What operators of blocks and others take for a moment, what is `kept` for the backward pass, and what of each
    block is there `at_once` while that runs; bytes."""

    inside: Bytes = 0.0
    outside: Bytes = 0.0
    kept: Bytes = 0.0
    at_once: Mapping[int, Bytes] = field(default_factory=dict)

    @contextmanager
    def of(self, memory: dict[str, Bytes], *, inside: bool) -> Iterator[None]:
        """Note what is taken for a moment meanwhile."""
        before, memory[_BRIEF] = memory[_BRIEF], 0.0
        yield
        taken = memory[_BRIEF]
        if inside:
            self.inside = max(self.inside, taken)
        else:
            self.outside = max(self.outside, taken)
        memory[_BRIEF] = max(before, taken)

    def hold(self, cost: StageCost, bound: BoundPlan, software: Software) -> None:
        """Have in the sums of a rank, whose pipeline is it alone, what is there at its fullest moment."""
        memory, blocks = cost.memory, bound.blocks
        gradients, head = memory[_GRADIENTS], self._behind(bound, memory[_GRADIENTS])
        stands = gradients if bound.plan.training.micro_batches > 1 or software.views_buckets else 0.0
        after = self.at_once.get(AFTER, 0.0)
        block = max((nbytes for where, nbytes in self.at_once.items() if where != AFTER), default=0.0)
        rest = self.kept / max(1, blocks.count)
        moments = [
            (stands, self.kept + after, self.outside + software.buffers),
            (max(stands, head), self.kept + block, self.inside),
            (gradients, rest + block, self.inside),
            (gradients, 0.0, self._roots(bound) if software.roots_moments and memory[_STATES] else 0.0),
        ]
        there, memory[_KEPT], memory[_BRIEF] = max(moments, key=sum)
        memory[_GRADIENTS] = there + (gradients if software.keeps_buckets else 0.0)

    def _behind(self, bound: BoundPlan, gradients: Bytes) -> Bytes:
        """Bytes of the gradients of what is read behind the blocks."""
        own = {name: self._elements(bound, name, of="gradient") for name in self._trained(bound)}
        stop, readers = bound.blocks.stop, bound.graph.consumers
        behind = sum(count for name, count in own.items() if max(readers[name]) >= stop)
        return gradients * behind / max(1.0, sum(own.values()))

    def _roots(self, bound: BoundPlan) -> Bytes:
        elements = sum(self._elements(bound, name, of="state") for name in self._trained(bound))
        return elements * MOMENT_BYTES[bound.plan.training.update.moment_dtype]

    def _trained(self, bound: BoundPlan) -> list[str]:
        return [name for name in bound.parameters if name in bound.graph.differentiable]

    def _elements(self, bound: BoundPlan, name: str, *, of: str) -> float:
        tensor, stored = bound.graph.types[name], bound.parameters[name]
        layout = stored.gradient if of == "gradient" else stored.state
        return tensor.numel * local_share(tensor.shape, layout, bound.plan.mesh.sizes)
