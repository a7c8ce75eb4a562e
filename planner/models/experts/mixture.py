"""Mixture of experts: every token is sent to the k of E MLPs that a router chooses (Shazeer et al. 2017; Jiang et al.
2024, Mixtral), which have a gate or none. No token is dropped, unless experts have a capacity.

The experts are one operator, `planner::experts`: the number of rows of an expert depends on the tokens, but the shapes
of the operands and the result do not. The operator is known to torch once this module is imported. On several devices
`runtime.ops.experts` replaces it, which computes rows by the same functions.

A capacity applies to each sample: of the sample's choices of one expert, only the first ones up to the capacity, in the
order of the tokens, are computed. So what is dropped depends neither on other samples nor on how tokens are divided
among devices.

Shape legend: B batch, S sequence, H hidden, K chosen experts, E experts, F width of an expert.
"""

from typing import Any

import torch
from torch import nn

from planner.errors import ModelError
from planner.fp8_recipes import RECIPES
from planner.models.experts.fp8 import ALONE, PLAIN, Agreement, Fp8Products, packed_tokens, unpacked_tokens
from planner.models.experts.router import Router, Routing
from planner.models.experts.rows import (
    Matrices,
    Products,
    Rows,
    activation_of,
    capacity_of,
    capped_rows,
    differentiate_experts,
    run_experts,
    sorted_rows,
)


class Experts(nn.Module):
    """The weights of E MLPs, stacked: `gated` ones with SiLU, or ungated ones with two matrices and the square of ReLU.
    With a `capacity_factor` an expert takes at most that times its even share from a sample."""

    def __init__(
        self, hidden_size: int, num_experts: int, ffn_size: int, capacity_factor: float = 0.0, *, gated: bool = True
    ) -> None:
        super().__init__()
        self.num_experts, self.capacity_factor = num_experts, capacity_factor
        self.gate_proj = nn.Parameter(torch.empty(num_experts, ffn_size, hidden_size)) if gated else None
        self.up_proj = nn.Parameter(torch.empty(num_experts, ffn_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_size))

    def forward(self, x_BSH: torch.Tensor, weights_BSK: torch.Tensor, chosen_BSK: torch.Tensor) -> torch.Tensor:
        weights = self.gate_proj, self.up_proj, self.down_proj
        capacity = 0
        if self.capacity_factor:
            capacity = capacity_of(self.capacity_factor, x_BSH.shape[1], chosen_BSK.shape[2], self.num_experts)
        named = {} if self.gate_proj is not None else {"activation": "relu2"}
        result: torch.Tensor = experts(x_BSH, weights_BSK, chosen_BSK, *weights, capacity, **named)
        return result


class SparseMLP(nn.Module):
    """A router, its experts, and the MLP that all tokens pass (`shared`), where there is one.

    Called on tokens, B S H, it returns the result of its experts, B S H, and the load-balancing loss, a
    scalar in float32 (None where `routing` has no such loss), to be added to the loss of the model.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        ffn_size: int,
        routing: Routing,
        *,
        shared: nn.Module | None = None,
        capacity_factor: float = 0.0,
        gated: bool = True,
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.router = Router(num_experts, routing)
        self.experts = Experts(hidden_size, num_experts, ffn_size, capacity_factor, gated=gated)
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
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down: torch.Tensor,
    capacity: int = 0,
    imbalance: float = 1.0,
    once: bool = False,
    groups: int = 1,
    chosen_groups: int = 1,
    fp8: str = "",
    dispatch: bool = False,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    limit: float = 0.0,
    slope: float = 1.0,
    offset: float = 0.0,
    activation: str = "silu",
) -> torch.Tensor:
    """Sum over the chosen experts of weight * down(act(gate(x)) * up(x)), for every token; without a gate of weight *
    down(act(up(x))).

    Args:
        x: tokens, B S H.
        weights: of the chosen experts, B S K.
        chosen: which experts, B S K, integers.
        gate, up: first matrices of all experts, E F H; None for the gate of experts that have none.
        down: their last matrices, E H F.
        capacity: of every expert for a sample, in rows; 0 drops none.
        imbalance: maximum expert load of a device over the average, where experts are divided among devices.
            It changes no result: planning and auditing use it.
        once: whether a token is sent once to each part of the outermost axis over which experts are exchanged.
        groups, chosen_groups: the number of groups of consecutive experts in the router, and the number of these groups
            that it chooses from; for planning and auditing, too.
        fp8: the recipe of products (`planner.graph.fp8`); none where it is empty.
        dispatch: whether tokens, and gradients of the experts' results, are sent to experts in 8 bits.
        gate_bias, up_bias: what is added to gate(x) and up(x), E F.
        limit, slope, offset: of the activation (`planner.models.experts.rows.Activation`); a limit of 0 is none.
        activation: its name (`planner.models.experts.rows.ACTIVATIONS`).

    Returns:
        The result of every token, B S H.
    """
    rows, counts_E = _rows(chosen, up.shape[0], capacity)
    row_weights_R = rows.of_weights(weights)
    rows_RH = rows.of_tokens(_sent(x.flatten(0, 1), dispatch), chosen.shape[2])
    act = activation_of(activation, gated=gate is not None, limit=limit, slope=slope, offset=offset)
    matrices = matrices_of(gate, up, down, gate_bias, up_bias)
    result_RH, _ = run_experts(rows_RH, row_weights_R, counts_E, matrices, products_of(fp8), act)
    return rows.to_tokens(result_RH, chosen.shape[2]).view(x.shape)


def matrices_of(
    gate: torch.Tensor | None,
    up: torch.Tensor,
    down: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
) -> Matrices:
    """The matrices of experts, and their biases. Raises ModelError unless all of the first matrices have biases, or
    none."""
    first = (up,) if gate is None else (gate, up)
    has_gate, has_up = gate_bias is not None, up_bias is not None
    if has_gate != (has_up and gate is not None):
        given, lacking = ("gate_bias", "up_bias") if has_gate else ("up_bias", "gate_bias")
        what = f"{given} and no {lacking}; give both" if gate is not None else "gate_bias and no gate; leave it out"
        raise ModelError(f"experts have {what}")
    return Matrices(first, down, tuple(bias for bias in (gate_bias, up_bias) if bias is not None))


def products_of(fp8: str, agreement: Agreement = ALONE) -> Products:
    """How products of experts are computed under a recipe, or without one."""
    return Fp8Products(recipe=RECIPES[fp8], agreement=agreement) if fp8 else PLAIN


def _sent(x_NH: torch.Tensor, dispatch: bool) -> torch.Tensor:
    """Tokens as experts receive them."""
    return unpacked_tokens(packed_tokens(x_NH), x_NH.shape[1], x_NH) if dispatch else x_NH


def _rows(chosen: torch.Tensor, count: int, capacity: int) -> tuple[Rows, torch.Tensor]:
    """Rows of all choices, and the number of rows of each expert."""
    if not capacity:
        return sorted_rows(chosen.flatten(), count)
    rows = capped_rows(chosen.flatten(1), count, capacity)
    return rows, torch.full((count,), chosen.shape[0] * capacity, device=chosen.device)


_MATRICES, _BIASES = slice(3, 6), slice(13, 15)
"""Slices of the operator's arguments."""


@experts.register_fake
def _(x: torch.Tensor, *others: Any) -> torch.Tensor:
    given = [x, *others]
    tensors: tuple[Any, ...] = (*given[_MATRICES], *given[_BIASES], None, None)[:5]
    matrices_of(*tensors)
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:6], *inputs[_BIASES])
    ctx.capacity, ctx.fp8, ctx.dispatch = inputs[6], *inputs[11:13]
    limit, slope, offset, name = inputs[15:19]
    ctx.activation = activation_of(name, gated=inputs[3] is not None, limit=limit, slope=slope, offset=offset)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Computes the experts once more, and differentiates them."""
    x, weights, chosen, *given = ctx.saved_tensors
    matrices = matrices_of(*given)
    chosen_each = chosen.shape[2]
    rows, counts_E = _rows(chosen, len(matrices.down), ctx.capacity)
    rows_RH, by = rows.of_tokens(_sent(x.flatten(0, 1), ctx.dispatch), chosen_each), products_of(ctx.fp8)
    _, kept = run_experts(rows_RH, rows.of_weights(weights), counts_E, matrices, by, ctx.activation)
    wanted = ctx.needs_input_grad
    places = [at for at, tensor in zip((3, 4, 5, 13, 14), given, strict=True) if tensor is not None]
    gradient_RH = rows.of_tokens(_sent(gradient.flatten(0, 1), ctx.dispatch), chosen_each)
    needed = [*wanted[:2], *(wanted[at] for at in places)]
    found = differentiate_experts(gradient_RH, kept, counts_E, matrices, needed, by, ctx.activation)
    of_x = None if found.rows is None else rows.to_tokens(found.rows, chosen_each).view(x.shape)
    of_weights = None if found.weights is None else rows.to_choices(found.weights).view(weights.shape)
    of_tensors = dict(zip(places, found.matrices, strict=True))
    return of_x, of_weights, *(of_tensors.get(at) for at in range(2, len(wanted)))


experts.register_autograd(_backward, setup_context=_keep)
