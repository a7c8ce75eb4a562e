"""Memory of gradients that live only from the backward pass that makes them to the update that reads them.

PyTorch's zero_grad sets them to None (`set_to_none`, the default since 2.0). So the first backward pass of a step makes
them block by block while it frees activations: not all of both live at the same time. With weights and states W:

    loss      W     + kept + operators after the blocks + transient of the loss           earlier micro-batches: + G
    first     W     + kept + a block under differentiation + gradients of the head        earlier micro-batches: + G
    last      W + G + a block under differentiation
    update    W + G + the roots of second moments, if the optimizer makes all at once

Kept is what waits for the backward pass. A plain sum of everything would count bytes that never live at the same time.
Buckets of all gradients, if any, live in addition at every moment (`Software.keeps_buckets`), or gradients are views of
them, and then live at every moment (`Software.views_buckets`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from costmodels import MOMENT_BYTES
from hardware_profiles import Bytes, Software
from planner.plan.binding.bind import BoundPlan
from planner.plan.prediction.walk.operator_visit import AFTER
from planner.plan.prediction.walk.stage_cost import StageCost
from planner.sharding.layout import local_share

_BRIEF, _KEPT, _GRADIENTS, _STATES = "transient", "activations", "gradients", "optimizer state"


@dataclass(kw_only=True)
class GradientMoments:
    """Transient bytes of operators in blocks and outside, bytes `kept` for the backward pass, and bytes of each block
    that live `at_once` during its backward pass."""

    inside: Bytes = 0.0
    outside: Bytes = 0.0
    kept: Bytes = 0.0
    at_once: Mapping[int, Bytes] = field(default_factory=dict)

    @contextmanager
    def of(self, memory: dict[str, Bytes], *, inside: bool) -> Iterator[None]:
        """Records the transient bytes of what runs inside."""
        before, memory[_BRIEF] = memory[_BRIEF], 0.0
        yield
        taken = memory[_BRIEF]
        if inside:
            self.inside = max(self.inside, taken)
        else:
            self.outside = max(self.outside, taken)
        memory[_BRIEF] = max(before, taken)

    def hold(self, cost: StageCost, bound: BoundPlan, software: Software) -> None:
        """Set the sums of a rank without a pipeline to the memory at its fullest moment."""
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
        """Bytes of the gradients of parameters that operators after the blocks read."""
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
