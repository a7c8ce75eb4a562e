"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864): pairs of elements of a head that are rotated.

    (a, b) -> (a cos - b sin, b cos + a sin)

The pairs are the two halves of a head (Llama), or neighbours (GPT-J); some models read neighbours and write halves
(DeepSeek-V3, GLM-5). `planner::rotary` is one operator of the graph. Where it is called, PyTorch decomposes it into the
operators that models write: what runs, what autograd keeps and what `torch.compile` sees is as without it.
"""

import torch

_LIBRARY = torch.library.Library("planner", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMA = (
    "rotary(Tensor x, Tensor cos, Tensor sin, bool from_pairs, bool to_pairs, int start, int size, bool once,"
    " int? heads) -> Tensor"
)


def rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    from_pairs: bool,
    to_pairs: bool,
    start: int,
    size: int,
    once: bool,
    heads: int | None,
) -> torch.Tensor:
    """x with the elements start ... start + size - 1 of its last dim rotated; the others pass.

    The pairs are neighbours in x if `from_pairs`, else halves; likewise in the result. Tables are
    broadcast to x; they lack its dim `heads`, if there is one. Their last dim has each angle twice, in the order of
    the result, or it begins with each angle once. All tensors have one dtype."""
    if once:
        cos, sin = (table[..., : size // 2] for table in (cos, sin))
    if heads is not None:
        cos, sin = cos.unsqueeze(heads), sin.unsqueeze(heads)
    if size == x.shape[-1]:
        return _turned(x, cos, sin, from_pairs, to_pairs)
    before, inside, behind = torch.split(x, [start, size, x.shape[-1] - start - size], dim=-1)
    turned = _turned(inside, cos, sin, from_pairs, to_pairs)
    return torch.cat([part for part in (before, turned, behind) if part.shape[-1]], dim=-1)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, from_pairs: bool, to_pairs: bool) -> torch.Tensor:
    if cos.shape[-1] != x.shape[-1]:
        first, second = _parts(x, from_pairs)
        return _joined(first * cos - second * sin, second * cos + first * sin, to_pairs)
    if from_pairs and not to_pairs:
        x = x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
    first, second = _parts(x, to_pairs)
    return x * cos + _joined(-second, first, to_pairs) * sin


def _parts(x: torch.Tensor, pairs: bool) -> tuple[torch.Tensor, ...]:
    return (x[..., 0::2], x[..., 1::2]) if pairs else x.chunk(2, dim=-1)


def _joined(first: torch.Tensor, second: torch.Tensor, pairs: bool) -> torch.Tensor:
    return torch.stack((first, second), dim=-1).flatten(-2) if pairs else torch.cat((first, second), dim=-1)


_LIBRARY.define(_SCHEMA)  # type: ignore[no-untyped-call]
_LIBRARY.impl("rotary", rotary, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
