"""Routers: which experts a token takes, with which weights, and how their loads are balanced.

    scores ── + bias ──> groups ──> the best k ──> weights = their scores, without the bias
              only chooses   only the best groups    normalised, times a scale

Scores are the softmax of the router's logits (Shazeer et al. 2017, arXiv 1701.06538), or their sigmoid (DeepSeek-AI
2024, arXiv 2412.19437, section 2.1.2). If experts are in groups, one group for each device, only experts of the best
groups may be chosen. Groups are compared by their best expert (arXiv 2405.04434, section 2.1.3), or by the sum of their
two best (DeepSeek-V3). Loads are balanced in two ways, each of which may be left out:

    a loss    batch       coefficient * E * sum over experts of f P, over the whole micro-batch (Fedus et al. 2021,
                          arXiv 2101.03961, section 2.2); f the share of the choices, P the mean score
              sequence    the same for each sample alone, and the mean of that (DeepSeek-V3, equations 17 to 20)
    a bias    after each step the bias of an expert with more than its share goes down by `bias_speed`, that of an
              expert with less goes up (Wang et al. 2024, arXiv 2408.15664, algorithm 1)

The bias is kept as a whole number of steps: models are converted to 16 bits with all their floating point buffers, and
a 16-bit bias would stop changing. Loads are counted over the whole global batch: each micro-batch adds to a buffer.

Shape legend: B batch, S sequence, E experts, K chosen experts, G groups, C chosen groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from planner.errors import ModelError
from planner.nearest import divisors, nearest_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How tokens choose their experts.

    Attributes:
        chosen: K, experts of each token.
        scores: how scores are computed from the logits.
        normalised: whether the weights of the chosen experts sum up to one.
        scale: factor of the weights, after that.
        groups: number of groups of consecutive experts; 1 is none.
        chosen_groups: number of groups from which a token may choose experts.
        groups_by: number of best experts whose scores are summed to compare groups.
        loss: coefficient of the load-balancing loss; 0 is none.
        loss_over: what that loss is taken over.
        bias_speed: by how much the bias of an expert changes after a step; 0 is no bias.
    """

    chosen: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    groups_by: Literal[1, 2] = 1
    loss: float = 0.0
    loss_over: Literal["batch", "sequence"] = "batch"
    bias_speed: float = 0.0


class Routed(NamedTuple):
    """Where tokens go: weights of their experts, B S K, float32; which experts, B S K, integers; and the load-balancing
    loss, a scalar in float32, None where there is none."""

    weights: torch.Tensor
    chosen: torch.Tensor
    loss: torch.Tensor | None


class Router(nn.Module):
    """Chooses experts by their logits. It has no weights: those of the logits stay where checkpoints have them.

    Buffers, where there is a bias: `bias_steps`, E, the bias of each expert in units of `bias_speed`; `loads`, E,
    the number of choices of each expert since the last step. Both are integers.

    Raises ModelError for a routing that does not fit the number of experts.
    """

    bias_steps: torch.Tensor
    loads: torch.Tensor

    def __init__(self, num_experts: int, routing: Routing) -> None:
        super().__init__()
        _check(num_experts, routing)
        self.num_experts, self.routing = num_experts, routing
        if routing.bias_speed:
            self.register_buffer("bias_steps", torch.zeros(num_experts, dtype=torch.int64))
            self.register_buffer("loads", torch.zeros(num_experts, dtype=torch.int64))

    def forward(self, logits_BSE: torch.Tensor) -> Routed:
        routing = self.routing
        if routing.scores == "softmax":
            scores_BSE = F.softmax(logits_BSE, dim=-1, dtype=torch.float32)
        else:
            scores_BSE = logits_BSE.float().sigmoid()
        weights_BSK, chosen_BSK = self._choose(scores_BSE)
        if routing.normalised:
            weights_BSK = weights_BSK / weights_BSK.sum(dim=-1, keepdim=True)
        if routing.scale != 1.0:
            weights_BSK = weights_BSK * routing.scale
        counted = bool(routing.loss or routing.bias_speed) and self.training
        loads_BE = expert_loads(chosen_BSK, self.num_experts) if counted else None
        if loads_BE is not None and routing.bias_speed:
            self.loads += loads_BE.sum(0)
        loss = self._loss(scores_BSE, loads_BE) if loads_BE is not None and routing.loss else None
        return Routed(weights_BSK, chosen_BSK, loss)

    def after_step(self, buffers: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The content of this module's `buffers` after a training step: each bias moved by one step where
        an expert has more or less than its share, and loads of 0."""
        if not self.routing.bias_speed:
            return {}
        loads_E = buffers["loads"]
        further_E = torch.sign(loads_E.sum() - loads_E * self.num_experts)
        return {"bias_steps": buffers["bias_steps"] + further_E, "loads": torch.zeros_like(loads_E)}

    def _choose(self, scores_BSE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and numbers of the chosen experts."""
        routing = self.routing
        if not routing.bias_speed and routing.groups == 1:
            best = scores_BSE.topk(routing.chosen, dim=-1)
            return best.values, best.indices
        choosing_BSE = scores_BSE.detach()
        if routing.bias_speed:
            choosing_BSE = choosing_BSE + self.bias_steps.float() * routing.bias_speed
        if routing.groups > 1:
            choosing_BSE = choosing_BSE.masked_fill(self._outside(choosing_BSE), float("-inf"))
        chosen_BSK = choosing_BSE.topk(routing.chosen, dim=-1)[1]
        return scores_BSE.gather(-1, chosen_BSK), chosen_BSK

    def _outside(self, choosing_BSE: torch.Tensor) -> torch.Tensor:
        """Which experts are outside of the best groups, B S E."""
        routing, each = self.routing, self.num_experts // self.routing.groups
        grouped_BSGE = choosing_BSE.reshape(*choosing_BSE.shape[:-1], routing.groups, each)
        best_BSG = grouped_BSGE.topk(routing.groups_by, dim=-1)[0].sum(-1)
        chosen_BSC = best_BSG.topk(routing.chosen_groups, dim=-1)[1]
        groups_G = torch.arange(routing.groups, device=choosing_BSE.device)
        hits_BSG = (chosen_BSC.unsqueeze(-1) == groups_G).sum(-2)
        outside_BSE: torch.Tensor = (hits_BSG == 0).unsqueeze(-1).expand(grouped_BSGE.shape).flatten(-2)
        return outside_BSE

    def _loss(self, scores_BSE: torch.Tensor, loads_BE: torch.Tensor) -> torch.Tensor:
        routing = self.routing
        if routing.scores == "sigmoid":
            scores_BSE = scores_BSE / scores_BSE.sum(dim=-1, keepdim=True)
        share = self.num_experts / (scores_BSE.shape[1] * routing.chosen)  # f is 1 where loads are even
        f_BE, p_BE = loads_BE.float() * share, scores_BSE.mean(dim=1)
        if routing.loss_over == "batch":
            return (f_BE.mean(dim=0) * p_BE.mean(dim=0)).sum() * routing.loss
        return (f_BE * p_BE).sum(dim=-1).mean() * routing.loss


def start_of_losses(x_BSH: torch.Tensor) -> torch.Tensor:
    """The sum of router losses before any router, 0, in float32; every block adds its own.

    It depends on the tokens, as every later sum does. So all blocks get the same kinds of values and are alike, and
    what is found out about one holds for all.
    """
    return x_BSH.float().mean() * 0.0


def _check(experts: int, routing: Routing) -> None:
    if not 1 <= routing.chosen <= experts:
        raise ModelError(f"a token cannot choose {routing.chosen} of {experts} experts; choose 1 to {experts}")
    if routing.groups < 1 or experts % routing.groups:
        near = nearest_words(routing.groups, divisors(experts))
        raise ModelError(f"{experts} experts do not divide into {routing.groups} groups; {near}")
    each = experts // routing.groups
    if not 1 <= routing.chosen_groups <= routing.groups:
        raise ModelError(f"a token cannot choose from {routing.chosen_groups} of {routing.groups} groups of experts")
    if routing.chosen > routing.chosen_groups * each:
        raise ModelError(
            f"a token chooses {routing.chosen} experts from {routing.chosen_groups} groups that have"
            f" {routing.chosen_groups * each}; let it choose from more groups"
        )
    if routing.groups_by > each:
        raise ModelError(f"groups of {each} experts cannot be compared by their {routing.groups_by} best")


@torch.library.custom_op("planner::expert_loads", mutates_args=())
def expert_loads(chosen_BSK: torch.Tensor, experts: int, counts: bool = True) -> torch.Tensor:
    """The number of choices of each expert in each sample, B E, int64, from the numbers of the experts, B S K. Zeros
    without `counts`, for example in evaluation: a router then has no loss."""
    loads_BE = chosen_BSK.new_zeros((chosen_BSK.shape[0], experts))
    if not counts:
        return loads_BE
    flat = chosen_BSK.flatten(1)
    return loads_BE.scatter_add_(1, flat, torch.ones_like(flat))


@expert_loads.register_fake
def _(chosen_BSK: torch.Tensor, experts: int, counts: bool = True) -> torch.Tensor:
    return chosen_BSK.new_empty((chosen_BSK.shape[0], experts))
