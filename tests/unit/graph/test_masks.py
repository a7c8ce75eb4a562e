"""Masks that attention is given, kept as what they say: recognised in every form that people write, and no other."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.graph.operator_graph import OperatorGraph
from planner.graph.rewriting.masks import MASKED_ATTENTION
from planner.graph.torch_operators import resolve
from planner.graph.trace import trace
from planner.models.composed_attention import composed_attention

BATCH, LENGTH, HEADS = 3, 16, 2
Mask = Callable[[Tensor, Tensor], Tensor]


class Attends(nn.Module):
    """Attention under a mask that is made of the numbers of tokens and of their documents."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.embed, self.mask = nn.Embedding(32, 8), mask

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        split = self.embed(tokens).view(*tokens.shape, HEADS, -1).transpose(1, 2)
        mask = self.mask(torch.arange(tokens.shape[1], device=tokens.device), documents)
        mixed: Tensor = F.scaled_dot_product_attention(split, split, split, attn_mask=mask)
        return mixed.square().mean()


def graph(mask: Mask) -> OperatorGraph:
    numbers = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    return trace(Attends(mask), (numbers, numbers))


def causal(at: Tensor) -> Tensor:
    return at[:, None] >= at[None, :]


def near(at: Tensor, back: int) -> Tensor:
    return at[:, None] - at[None, :] <= back


def one_chunk(at: Tensor, size: int) -> Tensor:
    return (at // size)[:, None] == (at // size)[None, :]


def one_document(documents: Tensor) -> Tensor:
    return documents[:, None, :, None] == documents[:, None, None, :]


def breaks(positions: Tensor, wanted: int = 1) -> Tensor:
    """Documents by positions that start anew, as transformers finds them."""
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != wanted).cumsum(-1)


def breaks_ahead(positions: Tensor) -> Tensor:
    """One number ahead of the documents."""
    return (torch.diff(positions, append=positions[:, -1:] + 1, dim=-1) != 1).cumsum(-1)


def by_positions(at: Tensor, positions: Tensor, window: int | None = None) -> Tensor:
    """Causal by the positions of queries and keys, which are looked up at their indices."""
    samples = torch.arange(len(positions), device=at.device)[:, None, None, None]
    query = positions[samples, at[None, None, :, None]]
    key = positions[samples, at[None, None, None, :]]
    return key <= query if window is None else (key <= query) & (key > query - window)


def of_all(at: Tensor, numbers: Tensor) -> Tensor:
    """Positions that no document interrupts."""
    return (at + 0)[None].expand(len(numbers), -1)


def counted_anew(at: Tensor, positions: Tensor) -> Tensor:
    """Causal in each document, by positions that start anew."""
    return by_positions(at, positions) & one_document(breaks(positions))


def blocks_of(at: Tensor, count: int) -> Tensor:
    """Blocks along the diagonal, each with two bounds there and two back."""
    shown = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for number in range(count):
        low, high = at >= number, at < number + 2
        shown = shown | (low & high)[:, None] & (low & high)[None, :]
    return shown


def numbered(shown: Tensor) -> Tensor:
    return torch.zeros(shown.shape, device=shown.device).masked_fill(~shown, float("-inf"))


KINDS: dict[str, tuple[Mask, dict[str, object]]] = {
    "window": (lambda at, _: causal(at) & near(at, 4), {"back": 4, "ahead": 0}),
    "both ways": (
        lambda at, _: (at[:, None] - at[None, :] < 3) & (at[None, :] - at[:, None] < 5),
        {"back": 2, "ahead": 4},
    ),
    "numbers": (lambda at, _: numbered(causal(at) & near(at, 4)), {"back": 4, "ahead": 0}),
    "where": (
        lambda at, _: torch.where(causal(at) & near(at, 4), 0.0, torch.finfo(torch.float32).min),
        {"back": 4, "ahead": 0},
    ),
    "two triangles": (
        lambda at, _: torch.ones(len(at), len(at), dtype=torch.bool).tril().triu(-4),
        {"back": 4, "ahead": 0},
    ),
    "sum of masks": (
        lambda at, _: torch.full((len(at), len(at)), float("-inf")).triu(1) + numbered(near(at, 4)),
        {"back": 4, "ahead": 0},
    ),
    "prefix": (lambda at, _: causal(at) | (at < 5)[None, :], {"ahead": 0, "prefix": 5}),
    "chunks": (lambda at, _: causal(at) & one_chunk(at, 6), {"ahead": 0, "chunk": 6}),
    "windows in chunks of documents": (
        lambda at, documents: (causal(at) & near(at, 4) & one_chunk(at, 6)) & one_document(documents),
        {"back": 4, "ahead": 0, "chunk": 6, "documents": True},
    ),
    "documents": (lambda _, documents: one_document(documents), {"documents": True}),
    "causal documents": (
        lambda at, documents: numbered(causal(at)[None, None] & one_document(documents)),
        {"ahead": 0, "documents": True},
    ),
    "counted documents": (
        lambda at, tokens: causal(at)[None, None] & one_document((tokens == 7).cumsum(1)),
        {"ahead": 0, "documents": True},
    ),
    "positions of one document": (
        lambda at, numbers: (
            by_positions(at, of_all(at, numbers), 5) & one_document(breaks(of_all(at, numbers))).squeeze(1)[:, None]
        ),
        {"back": 4, "ahead": 0},
    ),
    "positions of documents": (
        counted_anew,
        {"ahead": 0, "documents": True},
    ),
    "expanded positions of documents": (
        lambda at, positions: by_positions(at, positions.expand(BATCH, -1)) & one_document(breaks(positions)),
        {"ahead": 0, "documents": True},
    ),
    "windows of positions of documents": (
        lambda at, positions: numbered(by_positions(at, positions, 5) & one_document(breaks(positions))),
        {"back": 4, "ahead": 0, "documents": True},
    ),
    "prefix in documents": (
        lambda at, documents: (causal(at) | (at[None, :] < 5)) & one_document(documents),
        {"ahead": 0, "prefix": 5, "documents": True},
    ),
    "padding": (
        lambda at, seen: causal(at)[None, None] & near(at, 4) & seen.bool()[:, None, None, :],
        {"back": 4, "ahead": 0, "seen": True},
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_mask_is_kept_as_what_it_says(name: str) -> None:
    mask, expected = KINDS[name]
    found = graph(mask)
    (attention,) = (op for op in found.operators if op.op == MASKED_ATTENTION)
    told = dict(attention.keywords)
    assert (told["back"], told["ahead"], told["prefix"]) == (
        expected.get("back"),
        expected.get("ahead"),
        expected.get("prefix", 0),
    )
    assert told.get("chunk") == expected.get("chunk")
    given = [argument is not None for argument in attention.arguments[3:]]
    assert given == [expected.get("documents", False), expected.get("seen", False)]
    assert not any(
        found.types[v].shape[-2] == LENGTH
        for v in found.types
        if found.types[v].shape[-1:] == (LENGTH,) and len(found.types[v].shape) > 2
    )


def test_a_mask_that_is_causal_alone_or_hides_nothing_is_none() -> None:
    kinds: tuple[tuple[Mask, bool], ...] = (
        (lambda at, _: causal(at), True),
        (lambda at, _: near(at, 99), False),
        (lambda at, _: causal(at) & one_chunk(at, LENGTH), True),
    )
    for mask, is_causal in kinds:
        (attention,) = (op for op in graph(mask).operators if "attention" in op.op)
        assert attention.op == "aten.scaled_dot_product_attention.default"
        assert attention.arguments[3:] == (None, 0.0, is_causal)


OTHERS: dict[str, Mask] = {
    "every second key": lambda at, _: causal(at) & ((at[:, None] + at[None, :]) > 3),
    "the first row of a triangle": lambda at, _: causal(at)[:1],
    "the chunk of the first query": lambda at, _: one_chunk(at, 4)[:1],
    "the first chunk": lambda at, _: (at // 4)[:1, None] == (at // 4)[None, :],
    "what is at the first position": lambda at, _: (at == at[:1])[None, :],
    "of the document of the first token": lambda _, documents: one_document(documents)[:, :, :1],
    "one of two": lambda at, _: (causal(at).int() + near(at, 4).int()) == 1,
    "not both": lambda at, _: (causal(at).int() + near(at, 4).int()) < 2,
    "many alternatives": lambda at, _: ~blocks_of(at, 12),
    "many alternatives in numbers": lambda at, _: torch.zeros(LENGTH, LENGTH).masked_fill(
        blocks_of(at, 12), float("-inf")
    ),
    "padding by finite numbers": lambda at, documents: torch.zeros(BATCH, 1, LENGTH, LENGTH).masked_fill(
        ~(causal(at) & (documents != 0)[:, None, None, :]), torch.finfo(torch.float32).min
    ),
    "a bias": lambda at, _: torch.where(causal(at), 0.0, -1.0),
    "slopes": lambda at, _: (at[None, :] - at[:, None]).float(),
    "other chunks": lambda at, _: causal(at) & ~one_chunk(at, 6),
    "chunks from the second position on": lambda at, _: causal(at) & one_chunk(at + 1, 6),
    "chunks of two sizes": lambda at, _: causal(at) & ((at // 6)[:, None] == (at // 3)[None, :]),
    "a prefix beside chunks": lambda at, _: (causal(at) & one_chunk(at, 6)) | (at < 5)[None, :],
    "not itself": lambda at, _: at[:, None] > at[None, :],
    "other documents": lambda at, documents: ~one_document(documents) | causal(at),
    "infinities": lambda at, _: (1 - causal(at).float()) * float("-inf"),
    "of other samples": lambda at, documents: documents[None, :1, :, None] == documents[None, :1, None, :],
    "positions of any documents": lambda at, positions: by_positions(at, positions),
    "positions of other documents": lambda at, positions: by_positions(at, positions) & one_document(positions // 4),
    "positions of breaks of two": lambda at, positions: (
        by_positions(at, positions) & one_document(breaks(positions, 2))
    ),
    "positions of documents a token ahead": lambda at, positions: (
        by_positions(at, positions) & one_document(breaks_ahead(positions))
    ),
    "positions from the end": lambda at, numbers: by_positions(at - 1, of_all(at, numbers)),
    "positions in 8 bits": lambda at, _: near(torch.arange(len(at), dtype=torch.uint8), 4),
    "positions counted in 16 bits": lambda at, _: causal(torch.ones(len(at), dtype=torch.bfloat16).cumsum(0)),
    "breaks of positions in 8 bits": lambda at, positions: counted_anew(at, positions.to(torch.uint8)),
    "padding alone": lambda _, seen: seen.bool()[:, None, None, :],
    "a number of each key": lambda _, documents: documents[:, None, None, :].float(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_mask_stays(name: str) -> None:
    (attention,) = (op for op in graph(OTHERS[name]).operators if "attention" in op.op)
    assert attention.op == "aten.scaled_dot_product_attention.default"
    assert len(attention.operands) == 4


class WithoutSinks(nn.Module):
    """What computes sinks, where some layers have none: heads of 8, values of 6, two heads share keys."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal, self.query, self.shared = causal, nn.Linear(8, 4 * 8), nn.Linear(8, 2 * (8 + 6))

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = self.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
        key, value = self.shared(x).unflatten(-1, (2, 14)).transpose(1, 2).split((8, 6), dim=-1)
        return query, key, value

    def forward(self, x: Tensor) -> Tensor:
        return composed_attention(*self.operands(x), None, None, self.causal, 0.5).square().mean()


@pytest.mark.parametrize("causal", [True, False])
def test_attention_without_sinks_and_cap_is_that_of_pytorch(causal: bool) -> None:
    model, x = WithoutSinks(causal), torch.randn(BATCH, LENGTH, 8)
    (attention,) = (op for op in trace(model, (x,)).operators if "attention" in op.op)
    assert attention.op == "aten.scaled_dot_product_attention.default"
    given = model.operands(x)
    found = resolve(attention.op)(*given, *attention.arguments[3:], **dict(attention.keywords))
    torch.testing.assert_close(found, composed_attention(*given, None, None, causal, 0.5))
