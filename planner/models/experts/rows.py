"""Experts on rows that lie sorted by expert: gate, up, activation, weight, down, and the way back.

    rows ─ gate ─> g ─ silu ─┐
         ─ up ───> u ────────┴ * weight ─> p ─ down ─> result         kept for the backward pass: rows, g, u, p

    with t = silu(g) u and the gradient d of the result:
        of down     d^T p               of p        d down            of the weight   sum over f of that times t
        of u        that w silu(g)      of g        that w u silu'(g) of the rows     those of g, u with gate, up

Experts without a gate (Switch Transformers: Fedus et al. 2021, arXiv 2101.03961) have one first matrix, up: the
activation is of u, and t = act(u). Experts may add biases to g and u, E F, and clamp them (`Activation`); then g and u
are kept with their biases added. The activation is one of `ACTIVATIONS`.

A row is multiplied with its weight before the last product, so that the result of that product need not be kept (as in
Megatron). Tokens become rows by an index, and rows tokens by its inverse (MegaBlocks, Gale et al. 2022, arXiv
2211.15841).

Shape legend: N tokens, H hidden, K choices of a token, R rows, E experts, F width of an expert.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from planner.errors import ModelError
from planner.models.experts.delayed import DelayedProducts
from planner.models.experts.fp8 import PLAIN, Fp8Products, Matrix, PlainProducts, experts_of


class Rows(NamedTuple):
    """The rows of choices, and the choices of rows.

    `choices` has for every row its choice, token * K + place, R; `places` for every choice its row, N K. A choice
    without a row (`dropped`, N K; None where there is none) has any place, and a row without a choice (`blank`, R) any
    choice.
    """

    choices: torch.Tensor
    places: torch.Tensor
    dropped: torch.Tensor | None = None
    blank: torch.Tensor | None = None

    def without_dropped(self, kept: int, dropped_C: torch.Tensor) -> "Rows":
        """The first `kept` rows, where all other rows belong to dropped choices."""
        return Rows(self.choices[:kept], self.places.masked_fill(dropped_C, 0), dropped_C, self.blank)

    def of_tokens(self, x_NH: torch.Tensor, chosen: int) -> torch.Tensor:
        """The token of every row, R H."""
        return x_NH.index_select(0, self.choices // chosen)

    def of_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """The weight of every row, R, from those of all choices, N K; 0 for a blank row, whose result is then 0."""
        found_R = weights.flatten().index_select(0, self.choices)
        return found_R if self.blank is None else found_R.masked_fill_(self.blank, 0)

    def to_choices(self, rows: torch.Tensor) -> torch.Tensor:
        """The row of every choice, N K ..., 0 for dropped choices."""
        if not len(rows):  # all were dropped: there is no row to point to
            return rows.new_zeros((len(self.places), *rows.shape[1:]))
        found = rows.index_select(0, self.places)
        if self.dropped is None:
            return found
        return found.masked_fill_(self.dropped.view(-1, *(1,) * (rows.dim() - 1)), 0)

    def to_tokens(self, rows_RH: torch.Tensor, chosen: int) -> torch.Tensor:
        """The sum of the rows of every token, N H."""
        return self.to_choices(rows_RH).view(-1, chosen, rows_RH.shape[1]).sum(1)


class Kept(NamedTuple):
    """What the backward pass needs from the forward pass: rows, R H, the results of the first matrices (g and u, or
    u), and p, R F, and the weight of every row, R."""

    rows: torch.Tensor
    made: tuple[torch.Tensor, ...]
    product: torch.Tensor
    weights: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """One after the other, for autograd to keep."""
        return self.rows, *self.made, self.product, self.weights

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> "Kept":
        """The inverse of `tensors`."""
        rows, *made, product, weights = tensors
        return Kept(rows, tuple(made), product, weights)


MatrixGradients: TypeAlias = tuple[torch.Tensor | None, ...]
"""Gradients of the first matrices, of down, and of the biases of the first matrices where experts have them, in the
order of `Matrices`; None for those that are not needed."""


class Gradients(NamedTuple):
    """Gradients of rows, R H, of their weights, R, and of the matrices; None for those that are not needed."""

    rows: torch.Tensor | None
    weights: torch.Tensor | None
    matrices: MatrixGradients


class Matrices(NamedTuple):
    """The `first` matrices, E F H: gate and up, or only up; `down`, E H F; and the biases of the first, E F, where
    experts have them."""

    first: tuple[torch.Tensor, ...]
    down: torch.Tensor
    biases: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def of(tensors: Sequence[torch.Tensor], activation: "Activation") -> "Matrices":
        """The matrices from tensors in this order."""
        count = len(activation.first)
        return Matrices(tuple(tensors[:count]), tensors[count], tuple(tensors[count + 1 :]))


Products: TypeAlias = PlainProducts | Fp8Products | DelayedProducts


def _relu_backward(gradient: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten.threshold_backward(gradient, given, 0)
    return made


ACTIVATIONS: Mapping[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "silu": (F.silu, torch.ops.aten.silu_backward),
    "gelu": (F.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": (partial(F.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward, approximate="tanh")),
    "relu": (F.relu, _relu_backward),
    "relu2": (lambda given: F.relu(given).square_(), lambda gradient, given: F.relu(given).mul_(2).mul_(gradient)),
}
"""Activations by name: the function, whose result has memory of its own, and its backward function of the result's
gradient and the input. relu2 is the square of ReLU (So et al. 2021, arXiv 2109.08668)."""


class Activation(NamedTuple):
    """How experts combine g and u: act(g) u, or act(u) without a gate. With a `limit` it is a (u + offset) with a = g
    sigmoid(slope g), where g is clamped to at most the limit and u to between -limit and limit (gpt-oss: OpenAI 2025,
    arXiv 2508.10925)."""

    name: str = "silu"
    gated: bool = True
    limit: float = 0.0
    slope: float = 1.0
    offset: float = 0.0

    @property
    def first(self) -> tuple[Matrix, ...]:
        """The matrices whose products it combines."""
        return ("gate", "up") if self.gated else ("up",)

    def active(self, gate_RF: torch.Tensor) -> torch.Tensor:
        """act(g), or a."""
        if not self.limit:
            return ACTIVATIONS[self.name][0](gate_RF)
        bounded_RF = gate_RF.clamp(max=self.limit)
        return (bounded_RF * self.slope).sigmoid_().mul_(bounded_RF)

    def factor(self, up_RF: torch.Tensor) -> torch.Tensor:
        """The factor of act(g) or a."""
        return up_RF.clamp(-self.limit, self.limit).add_(self.offset) if self.limit else up_RF

    def of_gate(self, gradient_RF: torch.Tensor, gate_RF: torch.Tensor) -> torch.Tensor:
        """The gradient of g from the gradient of `active`'s result."""
        if not self.limit:
            return ACTIVATIONS[self.name][1](gradient_RF, gate_RF)
        scaled_RF = gate_RF.clamp(max=self.limit).mul_(self.slope)
        steep_RF: torch.Tensor = torch.ops.aten.silu_backward(gradient_RF, scaled_RF)  # a = silu(slope g) / slope
        return steep_RF.masked_fill_(gate_RF > self.limit, 0.0)

    def of_up(self, gradient_RF: torch.Tensor, up_RF: torch.Tensor) -> torch.Tensor:
        """The gradient of u from the gradient of `factor`'s result, in place."""
        return gradient_RF.masked_fill_(up_RF.abs() > self.limit, 0.0) if self.limit else gradient_RF


SILU = Activation()


def activation_of(name: str, *, gated: bool, limit: float = 0.0, slope: float = 1.0, offset: float = 0.0) -> Activation:
    """The activation of experts. Raises ModelError for an unknown name, and for a limit of an activation without
    one."""
    if name not in ACTIVATIONS:
        raise ModelError(f"experts have no activation '{name}'; take one of {', '.join(ACTIVATIONS)}")
    if limit and not (gated and name == SILU.name):
        raise ModelError(f"experts with a limit ({limit:g}) have a gate and {SILU.name}; leave the limit 0")
    return Activation(name, gated, limit, slope, offset)


def run_experts(
    rows_RH: torch.Tensor,
    weights_R: torch.Tensor,
    counts_E: torch.Tensor,
    matrices: Matrices,
    by: Products = PLAIN,
    activation: Activation = SILU,
) -> tuple[torch.Tensor, Kept]:
    """The results of the experts for their rows, each times its weight, R H, and what is kept; `by` computes
    products."""
    made = tuple(
        by.product(rows_RH, matrix.transpose(1, 2), counts_E, "hidden", of=name, back=False)
        for name, matrix in zip(activation.first, matrices.first, strict=True)
    )
    for made_RF, bias_EF in zip(made, matrices.biases, strict=bool(matrices.biases)):
        made_RF.add_(bias_EF.index_select(0, experts_of(counts_E, len(rows_RH))))
    product_RF = activation.active(made[0])
    for up_RF in made[1:]:
        product_RF.mul_(activation.factor(up_RF))
    product_RF.mul_(weights_R.unsqueeze(-1))
    result_RH = by.product(product_RF, matrices.down.transpose(1, 2), counts_E, "width", of="down", back=False)
    return result_RH, Kept(rows_RH, made, product_RF, weights_R)


def differentiate_experts(
    gradient_RH: torch.Tensor,
    kept: Kept,
    counts_E: torch.Tensor,
    matrices: Matrices,
    needed: Sequence[bool],
    by: Products = PLAIN,
    activation: Activation = SILU,
) -> Gradients:
    """The gradients that are `needed`, of rows, weights and matrices in this order, from the gradient of the result."""
    of_first, of_last, of_biases = _parts(needed[2:], activation)
    of_down = by.outer(gradient_RH, kept.product, counts_E, "hidden", of="down") if of_last else None
    if not any((*needed[:2], *of_first, *of_biases)):
        return Gradients(None, None, (*(None for _ in of_first), of_down, *(None for _ in of_biases)))
    of_made, of_weights = _inside(gradient_RH, kept, counts_E, matrices.down, by, activation, weights=needed[1])
    del gradient_RH  # frees a tensor as large as all rows as soon as possible
    first = _of_first(of_made, kept.rows, counts_E, of_first, by, activation)
    biases = _of_biases(of_made, counts_E, of_biases)
    of_rows = _of_rows(of_made, counts_E, matrices, by, activation) if needed[0] else None
    return Gradients(of_rows, of_weights, (*first, of_down, *biases))


def differentiate_rows(
    gradient_RH: torch.Tensor,
    kept: Kept,
    counts_E: torch.Tensor,
    matrices: Matrices,
    needed: Sequence[bool],
    by: Products = PLAIN,
    activation: Activation = SILU,
) -> tuple[Gradients, Callable[[], MatrixGradients]]:
    """The same in two parts: the gradients of rows and weights, which others wait for, and a call that computes those
    of the matrices. Until then it keeps the gradient of the result, R H, and those of g and u, R F."""
    of_first, of_last, of_biases = _parts(needed[2:], activation)
    of_made, of_weights = _inside(gradient_RH, kept, counts_E, matrices.down, by, activation, weights=needed[1])
    of_rows = _of_rows([*of_made], counts_E, matrices, by, activation) if needed[0] else None

    def of_matrices() -> MatrixGradients:
        return (
            *_of_first(of_made, kept.rows, counts_E, of_first, by, activation),
            by.outer(gradient_RH, kept.product, counts_E, "hidden", of="down") if of_last else None,
            *_of_biases(of_made, counts_E, of_biases),
        )

    return Gradients(of_rows, of_weights, ()), of_matrices


def _parts(needed: Sequence[bool], activation: Activation) -> tuple[Sequence[bool], bool, Sequence[bool]]:
    """Which gradients of matrices are needed: of the first ones, of down, and of biases."""
    count = len(activation.first)
    return needed[:count], needed[count], needed[count + 1 :]


def _inside(
    gradient_RH: torch.Tensor,
    kept: Kept,
    counts_E: torch.Tensor,
    down: torch.Tensor,
    by: Products,
    activation: Activation,
    *,
    weights: bool,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The gradients of the first matrices' results, R F, and of the weights of rows, R, where they are needed."""
    of_product_RF = by.product(gradient_RH, down, counts_E, "hidden", of="down", back=True)
    active_RF, factors = activation.active(kept.made[0]), [activation.factor(up_RF) for up_RF in kept.made[1:]]
    of_weights = None
    if weights:  # reuses the active values where they have no factor: they are not needed again then
        of_weights = reduce(torch.mul, factors, active_RF).mul_(of_product_RF).sum(-1)
    of_wide_RF = of_product_RF.mul_(kept.weights.unsqueeze(-1))
    of_ups = [activation.of_up(active_RF.mul_(of_wide_RF), up_RF) for up_RF in kept.made[1:]]
    del active_RF
    of_gate_RF = activation.of_gate(reduce(torch.Tensor.mul_, factors, of_wide_RF), kept.made[0])
    return [of_gate_RF, *of_ups], of_weights


def _of_first(
    of_made: Sequence[torch.Tensor],
    rows_RH: torch.Tensor,
    counts_E: torch.Tensor,
    needed: Sequence[bool],
    by: Products,
    activation: Activation,
) -> list[torch.Tensor | None]:
    """The gradients of the first matrices, E F H, from the gradients of their results, R F."""
    return [
        by.outer(of_RF, rows_RH, counts_E, "width", of=name) if wanted else None
        for name, of_RF, wanted in zip(activation.first, of_made, needed, strict=True)
    ]


def _of_rows(
    of_made: list[torch.Tensor], counts_E: torch.Tensor, matrices: Matrices, by: Products, activation: Activation
) -> torch.Tensor:
    """The gradient of rows, R H, from the gradients of the first matrices' results, R F, which are taken from the
    list."""
    found_RH: torch.Tensor | None = None
    for name, matrix in zip(activation.first, matrices.first, strict=True):
        made_RH = by.product(of_made.pop(0), matrix, counts_E, "width", of=name, back=True)
        found_RH = made_RH if found_RH is None else found_RH.add_(made_RH)
    assert found_RH is not None
    return found_RH


def _of_biases(
    gradients: Sequence[torch.Tensor], counts_E: torch.Tensor, needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The gradients of biases, E F: sums over the rows of each expert, from those of g and of u, R F."""
    found: list[torch.Tensor | None] = []
    for gradient_RF, wanted in zip(gradients, needed, strict=False):
        sums_EF = gradient_RF.new_zeros((len(counts_E), gradient_RF.shape[1])) if wanted else None
        if sums_EF is not None:
            sums_EF.index_add_(0, experts_of(counts_E, len(gradient_RF)), gradient_RF)
        found.append(sums_EF)
    return found


def sorted_rows(experts_C: torch.Tensor, count: int) -> tuple[Rows, torch.Tensor]:
    """Choices sorted by their expert, those of one expert in the order of the tokens; and the number of rows of each of
    `count` experts. `experts_C` are the experts of all choices; choices of number `count`, the last rows, have none."""
    order_C = torch.argsort(experts_C, stable=True)
    numbers_C = torch.arange(len(experts_C), device=experts_C.device)
    places_C = torch.empty_like(order_C).scatter_(0, order_C, numbers_C)
    counts = experts_C.new_zeros(count + 1).scatter_add_(0, experts_C, torch.ones_like(experts_C))
    return Rows(order_C, places_C), counts[:count]


def capped_rows(experts_BC: torch.Tensor, count: int, capacity: int) -> Rows:
    """`capacity` rows for every sample and expert, blank rows included: E B capacity in all, sorted by
    expert, then sample. If there are more choices, the first ones in the order of the tokens have a row (Fedus et
    al. 2021, arXiv 2101.03961, section 2.2). Choices of number `count` have none."""
    samples, each = experts_BC.shape
    at_B = torch.arange(samples, device=experts_BC.device)
    keys_C = (experts_BC * samples + at_B.unsqueeze(-1)).flatten()
    order_C = torch.argsort(keys_C, stable=True)
    sorted_C = keys_C[order_C]
    groups = keys_C.new_zeros((count + 1) * samples).scatter_add_(0, keys_C, torch.ones_like(keys_C))
    numbers_C = torch.arange(samples * each, device=experts_BC.device)
    turn_C = numbers_C - (groups.cumsum(0) - groups)[sorted_C]  # number of a choice within its sample and expert
    total = count * samples * capacity
    fits_C = (turn_C < capacity) & (sorted_C < count * samples)
    place_C = torch.where(fits_C, sorted_C * capacity + turn_C, total)
    choices_R = order_C.new_zeros(total + 1).scatter_(0, place_C, order_C)[:total]
    blank_R = order_C.new_ones(total + 1, dtype=torch.bool).scatter_(0, place_C, False)[:total]
    places_C = torch.empty_like(order_C).scatter_(0, order_C, place_C)
    dropped_C = places_C == total
    return Rows(choices_R, places_C.masked_fill_(dropped_C, 0), dropped_C, blank_R)


def capacity_of(factor: float, tokens: int, chosen: int, experts: int) -> int:
    """Rows that an expert takes from a sample of `tokens` tokens: `factor` times its even share, rounded up, and no
    more than there are tokens."""
    return min(tokens, max(1, -int(-(factor * tokens * chosen) // experts)))
