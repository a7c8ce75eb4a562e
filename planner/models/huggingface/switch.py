"""Experts of transformers that are modules of their own, each with two linear layers, rewritten as one operator.

    transformers   router ─> which token goes where, beyond the capacity of an expert nowhere ─> a loop over experts
    here           router ─> an expert and a weight for each token ────────────────────────────> one operator

Switch Transformers (Fedus et al. 2021, arXiv 2101.03961) sends a token to the best expert. An expert takes the first
`expert_capacity` tokens of a sample that chose it; the result of the others is 0. Where all experts together take fewer
tokens than there are, the operator has that capacity. Else a token beyond the capacity is a row like others, with a
weight of 0: results and gradients are the same, and the work is that of every token, not the larger work of all
capacities. Matrices of all experts are stacked, so that devices may divide them. The router computes in its own dtype
without changing the dtype of its weight, which transformers changes in its first call.

Shape legend: B batch, S sequence, H hidden, E experts, F width of an expert.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from planner.errors import ModelError
from planner.models.experts.mixture import experts
from planner.models.huggingface.any_experts import activation_name
from planner.models.huggingface.layers import give_forward

_SWITCH, _NLLB = "SwitchTransformersSparseMLP", "NllbMoeSparseMLP"
"""The classes of mixtures of experts to look for."""


class StackedExperts(nn.Module):
    """The matrices of all experts: up, E F H, and down, E H F."""

    def __init__(self, made: list[Any]) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.stack([one.wi.weight.detach() for one in made]))
        self.down_proj = nn.Parameter(torch.stack([one.wo.weight.detach() for one in made]))


def stack_experts(module: nn.Module, where: str) -> None:
    """Make experts of Switch Transformers one operator, in each layer of a model that has them. Raises ModelError,
    which begins with `where`, for experts that the operator cannot compute, and for NLLB-MoE."""
    for name, part in module.named_modules():
        kind = type(part).__name__
        if kind == _NLLB:
            raise ModelError(
                f"{where}: of NLLB-MoE transformers 5.24 computes the first two experts of '{name}' alone, whatever the"
                " router chooses (its mask of choices is read as numbers of experts); write a factory whose experts"
                " are: --model package.module:factory"
            )
        if kind == _SWITCH and not isinstance(part.experts, StackedExperts):
            _stack(part, name, where)


def unstacked(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a model that may have such experts, each under its name in files of transformers."""
    made = dict(tensors)
    for name, part in module.named_modules():
        if isinstance(part, StackedExperts):
            for ours, theirs in (("up_proj", "wi"), ("down_proj", "wo")):
                stack = made.pop(f"{name}.{ours}")
                made |= {f"{name}.expert_{at}.{theirs}.weight": one.clone() for at, one in enumerate(stack)}
    return made


def _stack(part: Any, name: str, where: str) -> None:
    router, made = part.router, [*part.experts.values()]
    activation = activation_name(made[0].act)
    for key, value in (("dropout_rate", made[0].dropout.p), ("router_jitter_noise", router.jitter_noise)):
        if value:
            raise ModelError(
                f"{where}: {key} is {value:g}, and experts that are planned draw no random numbers: those of '{name}'"
                f" are planned with {key}=0"
            )
    if activation is None:
        raise ModelError(
            f"{where}: the experts of '{name}' have the activation {type(made[0].act).__name__}, which is none that is"
            " planned; write a factory whose experts are: --model package.module:factory"
        )
    part.experts = StackedExperts(made)
    part.activation = activation
    give_forward(router, _route)
    give_forward(part, _compute)


def _route(router: Any, hidden_BSH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The expert of every token, B S 1, its weight, B S 1, and the logits, B S E, from which losses are made."""
    layer = router.classifier
    bias = None if layer.bias is None else layer.bias.to(router.dtype)
    logits_BSE = F.linear(hidden_BSH.to(router.dtype), layer.weight.to(router.dtype), bias)
    chances_BSE = F.softmax(logits_BSE, dim=-1, dtype=router.dtype).to(hidden_BSH.dtype)
    weights_BS1, chosen_BS1 = chances_BSE.topk(1, dim=-1)
    return chosen_BS1, weights_BS1, logits_BSE


def _compute(part: Any, hidden_BSH: torch.Tensor) -> torch.Tensor:
    router, length = part.router, hidden_BSH.shape[1]
    chosen_BS1, weights_BS1, _ = router(hidden_BSH)
    capacity = router.expert_capacity if router.expert_capacity * router.num_experts < length else 0
    if not capacity and router.expert_capacity < length:
        numbers_E = torch.arange(router.num_experts, device=chosen_BS1.device)
        turns_BSE = (chosen_BS1 == numbers_E).long().cumsum(dim=1)
        weights_BS1 = weights_BS1 * (turns_BSE.gather(-1, chosen_BS1) <= router.expert_capacity)
    matrices = None, part.experts.up_proj, part.experts.down_proj
    one_each = hidden_BSH, weights_BS1, chosen_BS1
    made_BSH: torch.Tensor = experts(*one_each, *matrices, capacity, activation=part.activation)
    return made_BSH
