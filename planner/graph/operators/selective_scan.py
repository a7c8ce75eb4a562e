"""The scan of a state-space model with a decay for each channel and each element of its state (Mamba; Gu and Dao 2023,
arXiv 2312.00752, algorithm 2).

    h_t = h_{t-1} exp(w_t a) + w_t b_t x_t        y_t = (c_t h_t + d x_t) silu(z_t)        w_t = softplus(step_t + bias)

It is one operator, `planner::selective_scan`, known to torch once this module is imported: samples and channels are
independent of each other, steps are not. Steps are taken in chunks, and the steps of a chunk in a number of rounds that
is the logarithm of their number (Hillis and Steele 1986), in float32 at least. Only the operands are kept for the
backward pass, which computes it once more, chunk by chunk.

    B batch, D channels, S steps, N elements of the state of a channel, C steps of a chunk
"""

import torch
import torch.nn.functional as F

from planner.graph.operators import state_kernels
from planner.graph.operators.recomputed import Kernel, computed_again, recomputed

_CHUNK = 32


def composed(
    x_BDS: torch.Tensor,
    step_BDS: torch.Tensor,
    a_DN: torch.Tensor,
    b_BNS: torch.Tensor,
    c_BNS: torch.Tensor,
    d_D: torch.Tensor | None,
    z_BDS: torch.Tensor | None,
    bias_D: torch.Tensor | None,
    softplus: bool,
) -> torch.Tensor:
    """What each step reads, B D S, from a state that begins with zeros."""
    wide = torch.promote_types(x_BDS.dtype, torch.float32)
    a, d, bias = (None if one is None else one.to(wide) for one in (a_DN, d_D, bias_D))

    def compute(
        state: torch.Tensor,  # B D 1 N
        x: torch.Tensor,
        step: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        z: torch.Tensor | None,
        a: torch.Tensor,
        d: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, step, b, c = (one.to(wide) for one in (x, step, b, c))
        step = step if bias is None else step + bias.unsqueeze(-1)
        step = F.softplus(step) if softplus else step
        kept = (step.unsqueeze(-1) * a.unsqueeze(1)).exp()  # B D C N
        states = _summed(kept, (step * x).unsqueeze(-1) * b.transpose(1, 2).unsqueeze(1), state)
        read = (states * c.transpose(1, 2).unsqueeze(1)).sum(-1)
        read = read if d is None else read + x * d.unsqueeze(-1)
        read = read if z is None else read * F.silu(z.to(wide))
        return read.to(x_BDS.dtype), states[:, :, -1:].clone()  # a view would keep all of them

    state = x_BDS.new_zeros((*x_BDS.shape[:2], 1, a_DN.shape[1]), dtype=wide)
    made: list[torch.Tensor] = []
    given = [x_BDS, step_BDS, b_BNS, c_BNS] + ([] if z_BDS is None else [z_BDS])
    # Unbound at once: the gradient of a single slice is a whole tensor of zeros.
    for pieces in zip(*(torch.split(one, _CHUNK, dim=2) for one in given), strict=True):
        gate = () if z_BDS is not None else (None,)
        read, state = computed_again(compute, state, *pieces, *gate, a, d, bias)
        made.append(read)
    return torch.cat(made, dim=2)


def _summed(kept: torch.Tensor, added: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """h_t = kept_t h_{t-1} + added_t along dim 2: after k rounds each h has what the last 2^k steps added."""
    first, rest = added[:, :, :1] + kept[:, :, :1] * state, added[:, :, 1:]
    added, reach = torch.cat((first, rest), dim=2), 1
    while reach < kept.shape[2]:
        more = added[:, :, reach:] + kept[:, :, reach:] * added[:, :, :-reach]
        kept = torch.cat((kept[:, :, :reach], kept[:, :, reach:] * kept[:, :, :-reach]), dim=2)
        added, reach = torch.cat((added[:, :, :reach], more), dim=2), 2 * reach
    return added


selective_scan = recomputed(
    "planner::selective_scan", composed, kernel=Kernel(package="mamba_ssm", call=state_kernels.selective_scan)
)
