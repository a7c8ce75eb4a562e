"""Experts on one of many devices: token rows are dispatched to the devices of their experts, and results are combined.

    forward    tokens ─> rows ─(dispatch)─> experts ─(combine)─> tokens                rows, and the weights of rows
    backward   gradients of tokens ─> rows ─(dispatch)─> experts backward ─(combine)─> gradients of tokens, weights

An axis that splits both experts and tokens (`e@b`, `e@s`) exchanges rows by all-to-all. On an axis that splits only
experts, every device has all tokens and computes the rows of its own experts; its result is then a term of a sum, as on
an axis that splits the width of experts. Axes of all kinds can be combined.

Autograd keeps the same as `planner.models.experts.rows`, for the rows of this device's experts, and the indices of
rows. Expert weights are kept in the form in which they were given, so that gathered ones can be gathered again.

Shape legend: B batch, S sequence, H hidden, K choices, E experts, F width, R rows; all of this device.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from costmodels import once_share
from planner.models.experts.delayed import DelayedProducts
from planner.models.experts.fp8 import PLAIN, packed_tokens
from planner.models.experts.rows import (
    SILU,
    Activation,
    Kept,
    Matrices,
    Products,
    Rows,
    capped_rows,
    differentiate_experts,
    differentiate_rows,
    run_experts,
    sorted_rows,
)
from runtime.ops.fp8 import fp8_groups  # noqa: F401  # its kernels
from runtime.ops.row_exchange import Going, Journey, Unpacking, kept_rows, once, plan_journey


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One axis that shards experts: the number of shards, this device's shard, and the group with which it exchanges
    rows, None where it does not."""

    size: int
    own: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitExperts:
    """The cuts of an operator's experts, the outermost first, and its settings (see
    `planner.models.experts.mixture.experts`). `once`: the router's groups and how many of them it chooses, where a
    token is sent once over the first cut. `products` are the experts' products; with `dispatch`, tokens and the
    gradients of their results are sent to experts in 8 bits."""

    experts: int
    cuts: Sequence[Cut]
    capacity: int = 0
    imbalance: float = 1.0
    once: tuple[int, int] | None = None
    products: Products = PLAIN
    dispatch: bool = False
    activation: Activation = SILU

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return [cut.group for cut in self.cuts if cut.group is not None]

    @property
    def held(self) -> tuple[int, int]:
        """The first expert of this device, and how many it has."""
        first, count = 0, self.experts
        for cut in self.cuts:
            count //= cut.size
            first += cut.own * count
        return first, count

    @property
    def within_reach(self) -> int:
        """The number of experts to which rows of this device can go."""
        return self.experts // math.prod(cut.size for cut in self.cuts if cut.group is None)

    @property
    def fullest(self) -> float:
        """Maximum expert load: rows of the fullest device over the average."""
        return min(self.imbalance, math.prod(cut.size for cut in self.cuts))

    def numbered(self, chosen: torch.Tensor) -> torch.Tensor:
        """Numbers of experts within reach, from 0 in their order; all others get the number `within_reach`."""
        number, rest, block = torch.zeros_like(chosen), chosen, self.experts
        elsewhere = None
        for cut in self.cuts:
            block //= cut.size
            part, rest = rest // block, rest % block
            if cut.group is not None:
                number = number * cut.size + part
            else:
                missed = part != cut.own
                elsewhere = missed if elsewhere is None else elsewhere | missed
        number = number * block + rest
        return number if elsewhere is None else number.masked_fill(elsewhere, self.within_reach)


def split_experts(
    x_BSH: torch.Tensor,
    weights_BSK: torch.Tensor,
    chosen_BSK: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    split: SplitExperts,
) -> torch.Tensor:
    """This device's term of the experts' results for its tokens, B S H. `matrices` are its pieces of the experts'
    matrices and biases (`planner.models.experts.rows.Matrices`). Collective over the groups of the cuts."""
    call = ExpertsCall(split)
    call.depart(x_BSH, weights_BSK, chosen_BSK)
    call.compute(matrices)
    return call.arrive()


class ExpertsCall:
    """One call in three parts, each an autograd node. Whatever runs between two parts, forward or backward, overlaps
    with the all-to-all. With several cuts this holds for the first one, whose network is the slowest.

        forward    depart ──rows──> compute ──results──> arrive
        backward   depart <──of rows── compute <──of results── arrive

    `beside`: whether the gradients of the matrices are computed while the gradients of rows are in flight. Their inputs
    then stay alive for longer: the gradients of the results, and those of the first two products' results. `switch` is
    called before every wait.
    """

    def __init__(self, split: SplitExperts, *, beside: bool = False, switch: Callable[[], None] = lambda: None) -> None:
        self.split, self.beside, self._switch = split, beside, switch
        self.wanted = (False, False)  # gradients of tokens, and of weights
        self.trains = False  # whether a backward pass follows
        self.chosen, self.shape = 0, torch.Size()
        self._token: torch.Tensor | None = None  # without elements: connects a node to the one before
        self._route: tuple[Rows, Journey] | None = None
        self._going: list[Going] = []

    def depart(self, x_BSH: torch.Tensor, weights_BSK: torch.Tensor, chosen_BSK: torch.Tensor) -> None:
        """Start to dispatch rows to their experts."""
        self._token = _Depart.apply(self, x_BSH, weights_BSK, chosen_BSK)  # type: ignore[no-untyped-call]

    def compute(self, matrices: Sequence[torch.Tensor]) -> None:
        """Wait for the rows, compute the experts, and start to send the results back."""
        self.trains = torch.is_grad_enabled()
        self._token = _Compute.apply(self, self._token, *matrices)  # type: ignore[no-untyped-call]

    def arrive(self) -> torch.Tensor:
        """The results of all tokens, B S H."""
        token, self._token = self._token, None
        return _Arrive.apply(self, token)  # type: ignore[no-any-return, no-untyped-call]

    # between the nodes

    @property
    def route(self) -> tuple[Rows, Journey]:
        """The rows of the call and their journey, from its first part to its last."""
        assert self._route is not None, "rows have departed"
        return self._route

    def begin(self, rows: Rows, journey: Journey, x: torch.Size, chosen: int) -> None:
        """Store what all parts of the forward pass need."""
        self._route, self.shape, self.chosen = (rows, journey), x, chosen

    def end(self) -> None:
        """Release it."""
        self._route = None

    def send(self, *going: Going | None) -> None:
        """Hand transfers in flight to the next part, or in the backward pass to the previous one."""
        self._going = [one for one in going if one is not None]

    def landed(self) -> list[torch.Tensor]:
        """The tensors that were sent last, once they have arrived."""
        if self._going:
            self._switch()
        going, self._going = self._going, []
        return [one.land() for one in going]


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: ExpertsCall, x_BSH: torch.Tensor, weights_BSK: torch.Tensor, chosen_BSK: torch.Tensor
    ) -> torch.Tensor:
        rows, journey = _route(chosen_BSK, call.split)
        call.begin(rows, journey, x_BSH.shape, chosen_BSK.shape[2])
        call.wanted = ctx.needs_input_grad[1:3]
        weights = journey.there(rows.of_weights(weights_BSK))
        call.send(_there(x_BSH.flatten(0, 1), rows, journey, call), weights)
        ctx.call, ctx.once, ctx.journey = call, journey.once, journey.ways
        ctx.save_for_backward(*rows, *journey.tensors)
        return x_BSH.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, rows = ctx.call, Rows(*ctx.saved_tensors[:4])
        found, of_x, of_weights = iter(call.landed()), None, None
        if call.wanted[0]:
            come = next(found)
            of_x = (come if ctx.once is not None else rows.to_tokens(come, call.chosen)).view(call.shape)
        if call.wanted[1]:
            of_weights = rows.to_choices(next(found)).view(*call.shape[:2], call.chosen)
        return None, of_x, of_weights, None


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: ExpertsCall, token: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        (rows, journey), split = call.route, call.split
        matrices = Matrices.of(given, split.activation)
        moved_RH, moved_R = call.landed()
        *made, kept = run_experts(moved_RH, moved_R, journey.counts, matrices, split.products, split.activation)
        if call.trains and isinstance(split.products, DelayedProducts):
            split.products.see(kept, journey.counts, matrices)
        ctx.tokens = len(rows.places) // call.chosen
        call.send(_back(made, journey, ctx.tokens))
        ctx.call, ctx.once, ctx.journey = call, journey.once, journey.ways
        ctx.save_for_backward(*kept.tensors, *matrices.first, matrices.down, *journey.tensors)
        ctx.ends = len(kept.tensors), len(kept.tensors) + len(matrices.first) + 1
        return token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, saved, (first, end) = ctx.call, ctx.saved_tensors, ctx.ends
        activation = call.split.activation
        kept, matrices = Kept.of(saved[:first]), Matrices.of(saved[first:end], activation)
        journey = Journey(ways=ctx.journey, tensors=saved[end:], once=ctx.once)
        token, *of_matrices = ctx.needs_input_grad[1:]
        needed = [*(call.wanted if token else (False, False)), *of_matrices]

        def leave(rows: list[Any], weights: torch.Tensor | None) -> None:
            going = None if rows[0] is None else _back(rows, journey, ctx.tokens)
            call.send(going, None if weights is None else journey.back([weights]))

        # Tensors of the size of all rows are passed in lists, so that nothing here holds them after their use.
        come, products = call.landed(), call.split.products
        if call.beside and any(needed[:2]):
            (*rows, of_weights, _), further = differentiate_rows(
                come.pop(), kept, journey.counts, matrices, needed, products, activation
            )
            leave(rows, of_weights)
            return None, gradients[0], *further()
        *rows, of_weights, found = differentiate_experts(
            come.pop(), kept, journey.counts, matrices, needed, products, activation
        )
        leave(rows, of_weights)
        return None, gradients[0], *found


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: ExpertsCall, token: torch.Tensor) -> torch.Tensor:
        rows, journey = call.route
        (come,) = call.landed()
        result_NH = come if journey.once is not None else rows.to_tokens(come, call.chosen)
        ctx.call, ctx.once, ctx.journey = call, journey.once, journey.ways
        ctx.save_for_backward(*rows, *journey.tensors)
        call.end()
        return result_NH.view(call.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, call = ctx.saved_tensors, ctx.call
        journey = Journey(ways=ctx.journey, tensors=saved[4:], once=ctx.once)
        call.send(_there(gradients[0].flatten(0, 1), Rows(*saved[:4]), journey, call))
        return None, gradients[0].new_empty(0)


def _there(x_NH: torch.Tensor, rows: Rows, journey: Journey, call: ExpertsCall) -> Going:
    """Start to send tokens as rows of this device's experts."""
    sent = packed_tokens(x_NH) if call.split.dispatch else x_NH
    going = journey.there(rows.of_tokens(sent, call.chosen)) if journey.once is None else journey.tokens_there(sent)
    return Unpacking(going, x_NH.shape[1], x_NH.new_empty(0)) if call.split.dispatch else going


def _back(given: list[torch.Tensor], journey: Journey, tokens: int) -> Going:
    """Start to send rows of this device's experts, taken out of a list, back to where they came from. Where tokens are
    sent once, `tokens` is their number and the sums of the rows of each are sent back."""
    return journey.back(given) if journey.once is None else journey.tokens_back(given, tokens)


def _route(chosen_BSK: torch.Tensor, split: SplitExperts) -> tuple[Rows, Journey]:
    """The rows of this device's choices, and their journey to the experts."""
    numbers_BSK, count = split.numbered(chosen_BSK), split.within_reach
    if split.capacity:
        samples = chosen_BSK.shape[0]
        rows = capped_rows(numbers_BSK.flatten(1), count, split.capacity)
        counts_E = torch.full((count,), samples * split.capacity, device=chosen_BSK.device)
    else:
        rows, counts_E = sorted_rows(numbers_BSK.flatten(), count)
        if count < split.experts:
            share = count / split.experts * (1.0 if split.groups else split.fullest)
            rows = rows.without_dropped(kept_rows(counts_E, chosen_BSK.numel() * share), numbers_BSK.flatten() == count)
    journey = plan_journey(
        *(counts_E, len(rows.choices), split.groups),
        experts=split.experts,
        capped=bool(split.capacity),
        imbalance=split.fullest,
    )
    if split.once is not None and journey.ways:
        chosen = chosen_BSK.shape[2]
        share = once_share(chosen, journey.ways[0].group.size(), *split.once)
        journey = once(journey, rows.choices // chosen, len(rows.places) // chosen, share)
    return rows, journey
