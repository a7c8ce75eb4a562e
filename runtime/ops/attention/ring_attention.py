"""Ring attention: queries stay on their device, keys and values go round the ring (Liu et al. 2023, arXiv 2310.01889).

    hop          0        1        2        3            device 1 of 4; a hop's transfer overlaps with the attention to
    keys of      1   ->   0   ->   3   ->   2            the current piece
    result       y_1 ──+── y_0 ──+── y_3 ──+── y_2       joined by their log-sum-exps
    (`runtime.ops.attention.attention_pieces`)

In the backward pass keys and values go round once more, followed by their gradients, to which each device adds its
terms in float32 at least, until they are back on their own device. Saved tensors are queries, keys, values, the result
and its log-sum-exp; only the scores of a hop are recomputed.

Which queries attend to which keys in a causal ring depends on the positions of the pieces:

    contiguous   own: causal   earlier: all                             later: none
    zigzag       own: causal   earlier: all queries, 1st chunk of keys  later: 2nd chunk of queries, all keys

So in zigzag order (`planner.sharding.zigzag`) every hop of every device is the same work; in contiguous order the last
device does about twice the mean work.

    B batch, H heads, G heads of keys (H / G queries share one), Q queries, K keys, D and E head dims
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from planner.sharding.window import Run
from planner.sharding.zigzag import pieces_of_ring
from runtime.comm.ring import Round, around
from runtime.ops.attention.attention_pieces import Attended, Gradients, Hop, Scale, hops_of, scale_of
from runtime.ops.attention.biased_attention import wide_dtype
from runtime.ops.attention.hidden import Mask
from runtime.ops.kept_results import whole_call


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The devices of a ring, in the order of their group, and the positions of the sequence on them. The queries of
    this device share the key heads `heads`. With a `mask`, it decides by position what is seen, instead of `causal`."""

    group: dist.ProcessGroup
    place: int
    causal: bool
    zigzag: bool
    heads: slice = field(default_factory=lambda: slice(None))
    mask: Mask | None = None

    def hops(self, queries: int, keys: int, width: int = 1) -> tuple[tuple[Hop, ...], ...]:
        """The hops to compute for every transfer, with `queries` and `keys` positions per device; empty where nothing
        is computed. `width` is samples x heads."""
        size = self.group.size()
        return tuple(self._hops((self.place - hop) % size, queries, keys, width) for hop in range(size))

    def _hops(self, owner: int, queries: int, keys: int, width: int) -> tuple[Hop, ...]:
        """The hops with the keys of device number `owner`."""
        if self.mask is not None:
            return hops_of(self.mask, self.runs(queries, self.place), self.runs(keys, owner), width)
        everything = Hop(queries=slice(0, queries), keys=slice(0, keys), causal=self.causal and owner == self.place)
        if not self.causal or owner == self.place:
            return (everything,)
        if not self.zigzag:
            return (everything,) if owner < self.place else ()
        if owner < self.place:
            return (Hop(queries=slice(0, queries), keys=slice(0, keys // 2)),)
        return (Hop(queries=slice(queries // 2, queries), keys=slice(0, keys)),)

    def runs(self, length: int, owner: int) -> tuple[Run, ...]:
        """The positions of a device, for pieces of this length."""
        size = self.group.size()
        return pieces_of_ring(length * size, size, owner, self.zigzag)


def ring_attention(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKE: torch.Tensor,
    ring: Ring,
    scale: float | None = None,
    sinks_H: torch.Tensor | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """`scaled_dot_product_attention` of this device's queries to the keys of all devices, (B, H, Q, E). Collective
    along the ring, forward and backward."""
    scaled = scale_of(query_BHQD, scale, cap)
    return _RingAttention.apply(query_BHQD, key_BGKD, value_BGKE, sinks_H, ring, scaled)  # type: ignore[no-any-return, no-untyped-call]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        ring: Ring,
        scale: Scale,
    ) -> torch.Tensor:
        made = whole_call(lambda: _forward(query, key, value, sinks, ring, scale))
        ctx.ring, ctx.scale = ring, scale
        ctx.save_for_backward(query, key, value, sinks, *made)
        result: torch.Tensor = made[0]
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = _backward(gradients[0], ctx.saved_tensors, ctx.ring, ctx.scale)
        return (*found, None, None)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    ring: Ring,
    scale: Scale,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and its log-sum-exp over all hops. The first hop uses the device's own keys, some of which every query
    sees."""
    pieces = [key.contiguous(), value.contiguous()]
    turns = ring.hops(query.shape[2], key.shape[2], query.shape[0] * query.shape[1])
    seen = Attended(query, scale)
    for number, hops in enumerate(turns):
        coming = around(pieces, ring.group, ring.place) if number < len(turns) - 1 else None
        seen.see(hops, *(piece[:, ring.heads] for piece in pieces))
        if coming is not None:
            pieces = coming.wait()
    return seen.result(sinks)


def _backward(
    gradient: torch.Tensor, saved: tuple[Any, ...], ring: Ring, scale: Scale
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of this device's queries, keys, values and sinks. Saved are these tensors, the result and its
    log-sum-exp."""
    query, key, value, sinks, result, logarithm = saved
    pieces = [key.contiguous(), value.contiguous()]
    turns = ring.hops(query.shape[2], key.shape[2], query.shape[0] * query.shape[1])
    found, travelling = Gradients((gradient, query, result, logarithm), scale), None
    for number, hops in enumerate(turns):
        coming = around(pieces, ring.group, ring.place) if number < len(turns) - 1 else None
        made = found.of(hops, *(piece[:, ring.heads] for piece in pieces))
        travelling = _sent_on(travelling, made, ring, pieces)
        if coming is not None:
            pieces = coming.wait()
    assert travelling is not None
    of_key, of_value = travelling.wait()
    of_sinks = None if sinks is None else found.of_sinks(sinks)
    return found.of_query(), of_key.to(key.dtype), of_value.to(value.dtype), of_sinks


def _sent_on(
    travelling: Round | None,
    made: tuple[slice, tuple[torch.Tensor, torch.Tensor]] | None,
    ring: Ring,
    pieces: Sequence[torch.Tensor],
) -> Round:
    """Add this device's terms to the gradients of the keys and values that are here, and send them on behind these. At
    the first hop the gradients start here."""
    rows, terms = made if made is not None else (slice(0, 0), ())  # a hop may compute nothing
    if travelling is None and all(one.shape == piece.shape for one, piece in zip(terms, pieces, strict=True)):
        sums = [gradient.to(wide_dtype(gradient)).contiguous() for gradient in terms]
        return around(sums, ring.group, ring.place)
    sums = (
        [torch.zeros_like(piece, dtype=wide_dtype(piece)) for piece in pieces]
        if travelling is None
        else travelling.wait()
    )
    for total, gradient in zip(sums, terms, strict=False):
        total[:, ring.heads, rows].add_(gradient)
    return around(sums, ring.group, ring.place)
