"""Experts on one device of many: the rows of its tokens go to the devices of their experts, and come back as results.

    forward    tokens ─> rows ─(there)─> experts ─(back)─> tokens                      rows, and the weights of rows
    backward   gradients of tokens ─> rows ─(there)─> experts backward ─(back)─> gradients of tokens and of weights

On an axis that splits experts and tokens at once (`e@b`, `e@s`) rows are exchanged; on one that splits experts alone
every device has all tokens and computes the rows of its own experts, which makes its result a term of a sum, as on one
that splits the width of experts. All may stand side by side.

What autograd keeps is what `planner.models.expert_rows` keeps, of the rows of this device's experts, and the indices of
rows. Weights of experts are kept as they were given, so that those that were gathered can be gathered again.

Shape legend: B batch, S sequence, H hidden, K choices, E experts, F width, R rows; all of this device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from costmodels import once_share
from planner.models.expert_rows import Kept, Rows, capped_rows, differentiate_experts, run_experts, sorted_rows
from runtime.ops.row_exchange import Journey, kept_rows, once, plan_journey


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One axis that cuts experts: into how many parts, which of them this device has, and with whom it exchanges rows,
    None where it does not."""

    size: int
    own: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitExperts:
    """How the experts of an operator are cut, the outermost cut first, and its settings (see
    `planner.models.experts.experts`). `once`: the groups of its router and how many of them it chooses, where a token
    is sent once over the first cut."""

    experts: int
    cuts: Sequence[Cut]
    capacity: int = 0
    imbalance: float = 1.0
    once: tuple[int, int] | None = None

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return [cut.group for cut in self.cuts if cut.group is not None]

    @property
    def within_reach(self) -> int:
        """Experts that rows of this device can go to."""
        return self.experts // math.prod(cut.size for cut in self.cuts if cut.group is None)

    @property
    def fullest(self) -> float:
        """Rows of the device with the most of them over the average."""
        return min(self.imbalance, math.prod(cut.size for cut in self.cuts))

    def numbered(self, chosen: torch.Tensor) -> torch.Tensor:
        """Experts within reach numbered from 0 on, in their order; all others are `within_reach`."""
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
    """This device's term of what the experts make of its tokens, B S H. `matrices` are its pieces of gate, up and down.
    Collective over the groups of the cuts."""
    return _Experts.apply(x_BSH, weights_BSK, chosen_BSK, *matrices, split)  # type: ignore[no-any-return, no-untyped-call]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BSH: torch.Tensor,
        weights_BSK: torch.Tensor,
        chosen_BSK: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        split: SplitExperts,
    ) -> torch.Tensor:
        chosen, matrices = chosen_BSK.shape[2], (gate, up, down)
        rows, journey = _route(chosen_BSK, split)
        moved_RH = _there(x_BSH.flatten(0, 1), rows, journey, chosen)
        moved_R = journey.there(rows.of_weights(weights_BSK))
        made_RH, kept = run_experts(moved_RH, moved_R, journey.counts, matrices)
        result_NH = _back(made_RH, rows, journey, chosen)
        ctx.once, ctx.journey, ctx.shape, ctx.chosen = journey.once, journey.ways, x_BSH.shape, chosen
        ctx.save_for_backward(*kept, *matrices, *rows, *journey.tensors)
        return result_NH.view(x_BSH.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        kept, matrices, rows = Kept(*saved[:5]), saved[5:8], Rows(*saved[8:12])
        journey = Journey(ways=ctx.journey, tensors=saved[12:], once=ctx.once)
        wanted = ctx.needs_input_grad
        needed = [wanted[0], wanted[1], *wanted[3:6]]
        found = differentiate_experts(
            _there(gradients[0].flatten(0, 1), rows, journey, ctx.chosen),
            *(kept, journey.counts, matrices, needed),
        )
        of_x = of_weights = None
        if found.rows is not None:
            of_x = _back(found.rows, rows, journey, ctx.chosen).view(ctx.shape)
        if found.weights is not None:
            of_weights = rows.to_choices(journey.back(found.weights)).view(*ctx.shape[:2], ctx.chosen)
        return of_x, of_weights, None, *found.matrices, None


def _there(x_NH: torch.Tensor, rows: Rows, journey: Journey, chosen: int) -> torch.Tensor:
    """Tokens as rows of this device's experts."""
    return journey.there(rows.of_tokens(x_NH, chosen)) if journey.once is None else journey.tokens_there(x_NH)


def _back(rows_RH: torch.Tensor, rows: Rows, journey: Journey, chosen: int) -> torch.Tensor:
    """Rows of this device's experts as sums of tokens, N H."""
    if journey.once is None:
        return rows.to_tokens(journey.back(rows_RH), chosen)
    return journey.tokens_back(rows_RH, len(rows.places) // chosen)


def _route(chosen_BSK: torch.Tensor, split: SplitExperts) -> tuple[Rows, Journey]:
    """Rows of this device's choices, and their way to the experts."""
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
