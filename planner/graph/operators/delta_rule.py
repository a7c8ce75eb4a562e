"""The gated delta rule: linear attention whose state decays, and corrects the value that it holds for a key (Yang et
al. 2024, arXiv 2412.06464; with a decay for each channel of the keys Kimi Linear, arXiv 2510.26692).

    S_t = S_{t-1} a_t + b_t k_t (v_t - k_t^T S_{t-1} a_t)^T        o_t = S_t^T q_t / sqrt(D)        a_t = exp(decay_t)

Steps are taken in chunks of C. In each chunk a triangular system gives what all its steps write (c: the sum of decays
since the chunk began; everything in float32 at least):

    (I + tril(b k k^T exp(c_i - c_j), -1)) [u, w] = [b v, b k exp(c)]         n = u - w S
    o = q exp(c) S + tril(q k^T exp(c_i - c_j)) n                             S <- S exp(c_C) + (k exp(c_C - c))^T n

It is one operator, `planner::gated_delta_rule`, known to torch once this module is imported: heads, samples and the
columns of values are independent of each other, steps are not. Only its operands are kept for the backward pass, which
computes it once more. On GPUs the kernels of flash-linear-attention compute it where that is installed.

    B batch, S steps, G heads of keys, H heads of values (H / G share a key), D and E head dims, N chunks of C steps
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from planner.graph.operators import state_kernels
from planner.graph.operators.recomputed import Kernel, computed_again, recomputed
from planner.graph.tracing.scans import CHUNK

_LEAST = 1e-6
"""Added to the square of a length."""


def composed(
    query_BSGD: torch.Tensor,
    key_BSGD: torch.Tensor,
    value_BSHE: torch.Tensor,
    decay: torch.Tensor,
    beta_BSH: torch.Tensor,
    normalised: bool = False,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """What each step reads, B S H E, from a state that begins with zeros. `decay` is the logarithm of the share of the
    state that remains, B S H, or B S H D; with `normalised` queries and keys are scaled to length 1."""
    return _delta_rule((query_BSGD, key_BSGD, value_BSHE, decay, beta_BSH), normalised, chunk)


def _delta_rule(given: Sequence[torch.Tensor], normalised: bool, chunk: int) -> torch.Tensor:
    query, key, value, decay, beta = given
    steps, dtype = query.shape[1], query.dtype
    chunk = min(chunk, steps)
    each = value.shape[2] // key.shape[2]
    shared = (one.repeat_interleave(each, dim=2) if each > 1 else one for one in (query, key))
    q, k, v, g, b = (_in_chunks(one, chunk) for one in (*shared, value, decay, beta.unsqueeze(-1)))
    if normalised:
        q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + _LEAST) for one in (q, k))
    q = q * q.shape[-1] ** -0.5
    sums = (g if decay.dim() == key.dim() else g.squeeze(-1)).cumsum(3)
    state = v.new_zeros((*v.shape[:2], k.shape[-1], v.shape[-1]))
    read: list[torch.Tensor] = []
    if sums.dim() < k.dim():  # one decay for all channels: the inside of all chunks is computed at once
        given = (q, k, sums.unsqueeze(-1), *_inside(q, k, v, b, sums))
        for here_q, here_k, since, *inside in _chunk_by_chunk(given):
            made, state = _across(state, here_q, here_k, since, inside)
            read.append(made)
    else:
        for pieces in _chunk_by_chunk((q, k, v, b, sums)):
            made, state = _kept_by_chunk(state, pieces)
            read.append(made)
    joined = torch.stack(read, dim=2).flatten(2, 3)[:, :, :steps]
    return joined.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)


def _in_chunks(tensor: torch.Tensor, chunk: int) -> torch.Tensor:
    """B S H ... as B H N C ..., in float32 at least, with zeros behind the last step."""
    wide = tensor.transpose(1, 2).to(torch.promote_types(tensor.dtype, torch.float32))
    wide = wide if wide.dim() > 3 else wide.unsqueeze(-1)
    more = -wide.shape[2] % chunk
    wide = F.pad(wide, (0, 0, 0, more)) if more else wide
    return wide.reshape(*wide.shape[:2], -1, chunk, wide.shape[-1])


def _chunk_by_chunk(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors of each chunk, B H C ..., from B H N C .... They are unbound at once: the gradient of a single index
    is a whole tensor of zeros, which would make the backward pass quadratic in the number of chunks."""
    return zip(*(one.unbind(2) for one in tensors), strict=True)


def _inside(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor, sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For chunks ... C D: what steps read of the steps of their chunk, ... C C; u and w, ... C E and ... C D."""
    chunk = q.shape[-2]
    later = torch.ones((chunk, chunk), dtype=torch.bool, device=q.device).triu(1)
    if sums.dim() < k.dim():
        between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
        reads, writes = (one @ k.transpose(-1, -2) * between for one in (q, k * b))
        since = sums.unsqueeze(-1)
    else:
        between = (sums.unsqueeze(-2) - sums.unsqueeze(-3)).masked_fill(later.unsqueeze(-1), -torch.inf).exp()
        turned = k.unsqueeze(-3) * between
        reads, writes = ((one.unsqueeze(-2) * turned).sum(-1) for one in (q, k * b))
        since = sums
    both = torch.cat((v * b, k * b * since.exp()), dim=-1)
    solved = torch.linalg.solve_triangular(writes, both, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    return reads, u, w


def _across(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, since: torch.Tensor, inside: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the steps of a chunk read, B H C E, and the state behind it; `since`, B H C 1 or B H C D."""
    reads, u, w = inside
    new = u - w @ state
    read = (q * since.exp()) @ state + reads @ new
    last = since[:, :, -1:]
    left = state * last.exp().transpose(-1, -2)
    return read, left + (k * (last - since).exp()).transpose(-1, -2) @ new


def _kept_by_chunk(state: torch.Tensor, pieces: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk with a decay for each channel. It is computed alone, because its C C D products live meanwhile."""

    def compute(state: torch.Tensor, *pieces: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, _, _, sums = pieces
        return _across(state, q, k, sums, _inside(*pieces))

    made: tuple[torch.Tensor, torch.Tensor] = computed_again(compute, state, *pieces)
    return made


gated_delta_rule = recomputed(
    "planner::gated_delta_rule",
    composed,
    like=2,
    kernel=Kernel(package="fla", call=state_kernels.gated_delta_rule),
)
