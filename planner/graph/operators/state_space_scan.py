"""The scan of a state-space model with one decay for each head (Mamba-2; Dao and Gu 2024, "Transformers are SSMs",
arXiv 2405.21060).

    S_t = S_{t-1} exp(w_t a) + w_t b_t x_t^T        y_t = S_t^T c_t + d x_t        w_t = softplus(step_t + bias)

Steps are taken in chunks of C (section 6; m: the sum of w a since the chunk began; everything in float32 at least):

    y = tril(c b^T exp(m_i - m_j)) w x + exp(m) c S + d x
    S <- S exp(m_C) + (exp(m_C - m) b)^T w x

It is one operator, `planner::state_space_scan`, known to torch once this module is imported: samples, heads with their
groups and the columns of x are independent of each other, steps are not. Only its operands are kept for the backward
pass, which computes it once more, chunk by chunk, as the kernels of mamba-ssm do.

    B batch, S steps, H heads of P, G groups that share b and c of N (H / G = R heads each), C steps of a chunk
"""

import math

import torch
import torch.nn.functional as F

from planner.graph.operators import state_kernels
from planner.graph.operators.recomputed import Kernel, computed_again, recomputed


def composed(
    x_BSHP: torch.Tensor,
    step_BSH: torch.Tensor,
    a_H: torch.Tensor,
    b_BSGN: torch.Tensor,
    c_BSGN: torch.Tensor,
    d_H: torch.Tensor | None,
    bias_H: torch.Tensor | None,
    softplus: bool,
    least: float,
    most: float | None,
    chunk: int,
) -> torch.Tensor:
    """What each step reads, B S H P, from a state that begins with zeros. Steps are bounded by `least` and `most`."""
    wide = torch.promote_types(x_BSHP.dtype, torch.float32)
    few = [None if one is None else one.to(wide) for one in (a_H, d_H, bias_H)]
    batch, _, heads, width = x_BSHP.shape
    groups, size = b_BSGN.shape[2:]

    def compute(
        state: torch.Tensor,  # B G N (R P)
        x: torch.Tensor,
        step: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        a: torch.Tensor,
        d: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, step, b, c = (one.to(wide) for one in (x, step, b, c))
        step = step if bias is None else step + bias
        step = F.softplus(step) if softplus else step
        if (least, most) != (0.0, None) or not softplus:
            step = step.clamp(least, math.inf if most is None else most)
        sums = (step * a).cumsum(1)
        by_head, last = sums.transpose(1, 2), sums[:, -1:]
        later = torch.ones(2 * (x.shape[1],), dtype=torch.bool, device=x.device).triu(1)
        between = (by_head.unsqueeze(-1) - by_head.unsqueeze(-2)).masked_fill(later, -math.inf).exp()
        pairs = c.transpose(1, 2) @ b.permute(0, 2, 3, 1)  # B G C C
        moved = x * step.unsqueeze(-1)
        seen = (pairs.unsqueeze(2) * between.view(batch, groups, -1, *later.shape)).flatten(1, 2) @ moved.transpose(
            1, 2
        )
        before = (c.transpose(1, 2) @ state).transpose(1, 2).reshape(x.shape)
        read = seen.transpose(1, 2) + before * sums.exp().unsqueeze(-1)
        read = read if d is None else read + x * d.unsqueeze(-1)
        written = (moved * (last - sums).exp().unsqueeze(-1)).view(batch, x.shape[1], groups, -1).transpose(1, 2)
        left = state.view(batch, groups, size, -1, width) * last.exp().view(batch, groups, 1, -1, 1)
        return read.to(x_BSHP.dtype), left.flatten(3) + b.permute(0, 2, 3, 1) @ written

    state = x_BSHP.new_zeros((batch, groups, size, heads // groups * width), dtype=wide)
    made: list[torch.Tensor] = []
    # Unbound at once: the gradient of a single slice is a whole tensor of zeros.
    for pieces in zip(*(torch.split(one, chunk, dim=1) for one in (x_BSHP, step_BSH, b_BSGN, c_BSGN)), strict=True):
        read, state = computed_again(compute, state, *pieces, *few)
        made.append(read)
    return torch.cat(made, dim=1)


state_space_scan = recomputed(
    "planner::state_space_scan", composed, kernel=Kernel(package="mamba_ssm", call=state_kernels.state_space_scan)
)
