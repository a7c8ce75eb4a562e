"""Training with stale weights in one process: what schedules without a flush are compared with.

The plain module is called with the weights that each stage would have, which is all there is to PipeDream: no process,
no message, no order but that of the schedule's definition.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from costmodels import order_1f1b

Weights = dict[str, torch.Tensor]


class StaleTraining:
    """SGD with momentum on the weights of `module`, whose stage is in `stage_of`, one list of versions per stage."""

    def __init__(self, module: nn.Module, stage_of: Mapping[str, int], rate: float) -> None:
        self._module, self._stage_of = module, stage_of
        stages = range(max(stage_of.values()) + 1)
        held = {name: weight.detach().clone() for name, weight in module.named_parameters()}
        self._own = [{name: held[name] for name in held if stage_of[name] == stage} for stage in stages]
        self._optimizers = [
            torch.optim.SGD(list(own.values()), lr=rate, momentum=0.9, weight_decay=1e-2) for own in self._own
        ]
        self.versions: list[list[Weights]] = [[_copy(own)] for own in self._own]

    def pipedream(self, micro_batches: Sequence[tuple[torch.Tensor, ...]]) -> list[float]:
        """Narayanan et al. 2019: stage s goes forward with the newest weights that it has when its turn comes, and
        updates them with the gradient at those. Returns the losses of a window, at the end of which it drains."""
        count, stages = len(micro_batches), len(self._own)
        begun = [len(versions) - 1 for versions in self.versions]
        chosen = []
        for stage in range(stages):
            order = order_1f1b(stage, stages, count)
            before = [
                sum(turn.kind == "backward" for turn in order[: order.index(turn)])
                for turn in order
                if turn.kind == "forward"
            ]
            chosen.append([begun[stage] + updates for updates in before])
        losses = []
        for number, batch in enumerate(micro_batches):
            losses.append(self._train([batch], [chosen[stage][number] for stage in range(stages)]))
        return losses

    def two_versions(self, batches: Sequence[Sequence[tuple[torch.Tensor, ...]]]) -> list[float]:
        """Narayanan et al. 2021, section 3.1: W(t+1) = W(t) - update of the gradient of batch t at W(t-1)."""
        losses = []
        for batch in batches:
            done = len(self.versions[0]) - 1
            losses.append(self._train(batch, [max(done - 1, 0)] * len(self._own)))
        return losses

    def weights(self) -> Weights:
        """The newest of every stage."""
        return {name: weight for versions in self.versions for name, weight in versions[-1].items()}

    def _train(self, parts: Sequence[tuple[torch.Tensor, ...]], versions: Sequence[int]) -> float:
        """One update of every stage with the mean gradient at these versions."""
        held = {
            name: self.versions[stage][version][name].clone().requires_grad_()
            for stage, version in enumerate(versions)
            for name in self._own[stage]
        }
        total = 0.0
        for part in parts:
            loss = torch.func.functional_call(self._module, held, part) / len(parts)
            loss.backward()
            total += float(loss.detach())
        for stage, own in enumerate(self._own):
            for name, weight in own.items():
                weight.grad = held[name].grad
            self._optimizers[stage].step()
            self.versions[stage].append(_copy(own))
        return total


def _copy(weights: Weights) -> Weights:
    return {name: weight.detach().clone() for name, weight in weights.items()}
