"""Mixture of experts: every token is sent to the k of E gated MLPs that a router chooses (Shazeer et al. 2017; Jiang et
al. 2024, Mixtral). No token is dropped.

The experts are one operator, `planner::experts`: how many rows an expert gets depends on the tokens, the shapes of its
operands and its result do not. What is here runs everywhere and is slow; it is what a fused implementation, and one on
several devices, must agree with. The operator is known to torch once this module is imported.

Shape legend: B batch, S sequence, H hidden, K chosen experts, E experts, F width of an expert, R rows of one expert.
"""

import torch
import torch.nn.functional as F
from torch import nn

from planner.models.router import Router, Routing


class Experts(nn.Module):
    """The weights of E gated MLPs, stacked."""

    def __init__(self, hidden_size: int, num_experts: int, ffn_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(num_experts, ffn_size, hidden_size))
        self.up_proj = nn.Parameter(torch.empty(num_experts, ffn_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_size))

    def forward(self, x_BSH: torch.Tensor, weights_BSK: torch.Tensor, chosen_BSK: torch.Tensor) -> torch.Tensor:
        weights = self.gate_proj, self.up_proj, self.down_proj
        result: torch.Tensor = experts(x_BSH, weights_BSK, chosen_BSK, *weights)
        return result


class SparseMLP(nn.Module):
    """A router, its experts, and the MLP that all tokens pass (`shared`), where there is one.

    Called on tokens, B S H, it returns what its experts make of them, B S H, and the loss that evens out their loads, a
    scalar in float32 (None where `routing` has no such loss), to be added to that of the model.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        ffn_size: int,
        routing: Routing,
        *,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.router = Router(num_experts, routing)
        self.experts = Experts(hidden_size, num_experts, ffn_size)
        self.shared_expert = shared

    def forward(self, x_BSH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        weights_BSK, chosen_BSK, loss = self.router(self.gate(x_BSH))
        result_BSH = self.experts(x_BSH, weights_BSK.to(x_BSH.dtype), chosen_BSK)
        return result_BSH if self.shared_expert is None else result_BSH + self.shared_expert(x_BSH), loss


@torch.library.custom_op("planner::experts", mutates_args=())
def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Sum over the chosen experts of weight * down(silu(gate(x)) * up(x)), for every token.

    Args:
        x: tokens, B S H.
        weights: of the chosen experts, B S K.
        chosen: which experts, B S K, integers.
        gate, up: first matrices of all experts, E F H.
        down: their last matrices, E H F.

    Returns:
        The result of every token, B S H.
    """
    return _one_by_one(x, weights, chosen, gate, up, down)


def _one_by_one(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    tokens_NH, flat_weights_NK, flat_chosen_NK = x.flatten(0, 1), weights.flatten(0, 1), chosen.flatten(0, 1)
    result_NH = torch.zeros_like(tokens_NH)
    for expert in range(gate.shape[0]):
        token_R, choice_R = torch.nonzero(flat_chosen_NK == expert, as_tuple=True)
        rows_RH = tokens_NH[token_R]
        wide_RF = F.silu(rows_RH @ gate[expert].T) * (rows_RH @ up[expert].T)
        weighted_RF = wide_RF * flat_weights_NK[token_R, choice_R].unsqueeze(-1)
        result_NH = result_NH.index_add(0, token_R, weighted_RF @ down[expert].T)
    return result_NH.view(x.shape)


@experts.register_fake
def _(x: torch.Tensor, *_others: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Computes the experts once more, and differentiates that."""
    leaves = [saved.detach().requires_grad_(saved.is_floating_point()) for saved in ctx.saved_tensors]  # type: ignore[attr-defined]
    needed = [place for place, wanted in enumerate(ctx.needs_input_grad) if wanted]  # type: ignore[attr-defined]
    with torch.enable_grad():
        result = _one_by_one(*leaves)
    found = torch.autograd.grad(result, [leaves[place] for place in needed], gradient)
    gradients: list[torch.Tensor | None] = [None] * len(leaves)
    for place, each in zip(needed, found, strict=True):
        gradients[place] = each
    return tuple(gradients)


experts.register_autograd(_backward, setup_context=_keep)
