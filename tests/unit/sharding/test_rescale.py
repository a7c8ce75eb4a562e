"""A graph at another batch must be the graph that a fresh trace at that batch gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from planner.errors import RequestError
from planner.graph.blocks import share_values
from planner.graph.kinds import find_blocks
from planner.graph.operator_graph import OperatorGraph, TensorType
from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.sharding import rescale
from planner.sharding.rescale import rescale_batch
from tests.refusals import refused

WIDTH = 6


class Net(nn.Module):
    """A linear layer and whatever `body` does with it."""

    def __init__(self, body: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(32, WIDTH)
        self.register_buffer("positions", torch.arange(5))
        self.body = body

    def forward(self, *args: Any) -> torch.Tensor:
        return self.body(self, *args)


def of_batch(body: Callable[..., torch.Tensor], batch: int) -> OperatorGraph:
    """Inputs: floats (batch, 5, WIDTH)."""
    return trace(Net(body), (torch.ones(batch, 5, WIDTH),))


def merged(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Batch and sequence in one dim, with every spelling of the shape."""
    flat = m.linear(x.reshape(-1, WIDTH)).view(x.shape[0] * 5, WIDTH)
    return flat.view(x.shape[0], 5, -1).flatten(0, 1).unflatten(0, (-1, 5)).unflatten(0, (x.shape[0], 1)).mean()


def sequence_first(m: Any, x: torch.Tensor) -> torch.Tensor:
    """(s b): the batch is the inner loop of the merged dim."""
    flat = m.linear(x.transpose(0, 1).flatten(0, 1)).relu() * 2
    return flat.unflatten(0, (5, -1)).transpose(0, 1).softmax(-1).mean()


def expanded(m: Any, x: torch.Tensor) -> torch.Tensor:
    gate = m.linear(x)[..., :1].expand(x.shape[0], -1, WIDTH)
    return (m.linear(x) * gate + m.linear.bias.expand(5, -1) + m.table(m.positions)).mean()


def attended(m: Any, x: torch.Tensor) -> torch.Tensor:
    q = m.linear(x).unflatten(-1, (2, 3)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, q * 2, q, is_causal=True)
    scores = (q @ q.transpose(-1, -2)).masked_fill(x[:, :1, :1].unsqueeze(1) > 0, -1.0)
    return mixed.mean() + scores.softmax(dim=-1).sum(dim=(0, -1)).mean()


def joined(m: Any, x: torch.Tensor) -> torch.Tensor:
    parts = m.linear(x).split(2, dim=-1)
    both = torch.stack([torch.cat((parts[0], parts[1]), dim=1), torch.cat((parts[2], parts[0]), dim=1)], dim=2)
    return both.amax(dim=-1).permute(2, 0, 1).select(0, 1).mean()


def made_for_the_batch(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (m.linear(x) * torch.ones(x.shape[0], 1, 1)).mean()


def expanded_to_the_batch(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat((m.linear.bias.expand(x.shape[0], 1, -1), m.linear(x)), dim=1).mean()


def tiled(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat((m.linear.bias.view(1, 1, -1).repeat(x.shape[0], 1, 1), m.linear(x)), dim=1).mean()


def masked_by_numbers(m: Any, x: torch.Tensor) -> torch.Tensor:
    """As libraries make masks: numbers of the samples look into what they were told about each."""
    batch, keys = torch.arange(x.shape[0])[:, None, None, None], torch.arange(2, 7)[None, None, None, :] - 2
    seen = (x[..., 0] > 0)[batch, keys] & (keys >= 0).expand(x.shape[0], 1, 5, 5)
    heads = m.linear(x).unflatten(-1, (2, 3)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=seen.expand(x.shape[0], -1, 5, 5)).mean()


def positions_of_each(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Numbers of the samples look into what was itself made for the batch."""
    places = torch.arange(5).unsqueeze(0).expand(x.shape[0], -1)
    return (m.linear(x) + m.table(places[torch.arange(x.shape[0])])).mean()


BODIES = (merged, sequence_first, expanded, attended, joined)
SPELLED = (made_for_the_batch, expanded_to_the_batch, tiled, masked_by_numbers, positions_of_each)


@pytest.mark.cases(7, 6)
@pytest.mark.parametrize(("old", "new"), [(2, 4), (2, 6), (4, 2), (6, 4), (3, 3), (2, 3)])
@pytest.mark.parametrize("body", [*BODIES, *SPELLED])
def test_equals_a_fresh_trace(body: Callable[..., torch.Tensor], old: int, new: int) -> None:
    assert rescale_batch(of_batch(body, old), old, new) == of_batch(body, new)


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny"])
def test_zoo_equals_a_fresh_trace(name: str, batch: int) -> None:
    built = build_model(name, dtype="bfloat16")
    tokens = torch.zeros(batch, built.sequence_length, dtype=torch.int64, device="meta")
    rescaled = rescale_batch(trace(built.module, built.args), built.batch, batch)
    fresh = trace(built.module, (tokens, tokens))
    assert rescaled.operators == fresh.operators
    assert without_strides(rescaled) == without_strides(fresh)
    if batch > 1:
        assert rescaled == fresh


@pytest.mark.cases(0, 2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit-tiny", "resnet-tiny", "dlrm-tiny", "wide-deep-tiny"])
def test_models_without_a_sequence_equal_a_fresh_trace(name: str) -> None:
    built = build_model(name, dtype="float32")
    more = pytree.tree_map(lambda tensor: torch.cat([tensor] * 3), built.args)
    assert rescale_batch(trace(built.module, built.args), built.batch, 3 * built.batch) == trace(built.module, more)


def test_bags_of_one_length_are_rescaled() -> None:
    def graph(batch: int) -> OperatorGraph:
        bags = nn.EmbeddingBag(32, WIDTH, mode="mean")
        return trace(Bags(bags), (torch.zeros(batch, 3, dtype=torch.int64),))

    assert [op.op for op in graph(2).operators] == ["planner.embedding_bag", "aten.mean.default"]
    assert rescale_batch(graph(2), 2, 6) == graph(6)


class Bags(nn.Module):
    """The mean over all bags."""

    def __init__(self, bags: nn.EmbeddingBag) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.bags(*args).mean()
        return result


def test_bags_of_different_lengths_stay_flat() -> None:
    given = torch.zeros(7, dtype=torch.int64), torch.tensor([0, 3])
    graph = trace(Bags(nn.EmbeddingBag(32, WIDTH)), given)
    assert graph.operators[0].operands == ("bags.weight", "args_0", "args_1")
    with refused(RequestError, "embedding_bag", "offset0"):
        rescale_batch(graph, 2, 4)


def without_strides(graph: OperatorGraph) -> dict[str, TensorType]:
    """At batch 1 a transposed tensor may count as contiguous: the one thing in which a rescaled graph differs."""
    return {name: TensorType(shape=t.shape, dtype=t.dtype) for name, t in graph.types.items()}


def test_a_size_that_is_spelled_late_sends_nobody_back_to_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep models spell the batch in every layer; each operator is followed a few times, whatever their number."""

    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        for width in range(1, 13):  # unlike each other, else what is known of one holds for the next
            x = x + torch.zeros(x.shape[0], 5, width).sum(-1, keepdim=True) * m.linear(x)
        return x.mean()

    graph, followed = of_batch(body, 4), list[str]()
    propagate = rescale._Growths._propagate

    def counted(self: Any, rule: Any, op: Any, growths: Any) -> None:
        followed.append(op.name)
        propagate(self, rule, op, growths)

    monkeypatch.setattr(rescale._Growths, "_propagate", counted)
    assert rescale_batch(graph, 4, 6) == of_batch(body, 6)
    assert len(followed) < 2 * len(graph.operators)


def test_down_to_one() -> None:
    """Batch 1 can be reached wherever the fresh trace does not treat the dim of extent 1 in its own way."""
    for body in BODIES:
        rescaled, fresh = rescale_batch(of_batch(body, 2), 2, 1), of_batch(body, 1)
        assert [op.op for op in rescaled.operators] == [op.op for op in fresh.operators]
        assert without_strides(rescaled) == without_strides(fresh)


def test_there_and_back() -> None:
    for body in BODIES:
        graph = of_batch(body, 2)
        assert rescale_batch(rescale_batch(graph, 2, 6), 6, 2) == graph


def test_inputs_of_another_leading_extent_stay() -> None:
    body = lambda m, x, scale: (m.linear(x) * scale).mean()  # noqa: E731
    graph = trace(Net(body), (torch.ones(4, 5, WIDTH), torch.ones(5, 1)))
    rescaled = rescale_batch(graph, 4, 8)
    assert [rescaled.types[name].shape for name in rescaled.inputs] == [(8, 5, WIDTH), (5, 1)]


def test_commutes_with_sharing_of_values() -> None:
    built = build_model("llama-tiny", dtype="float32")
    graph = trace(built.module, built.args)
    first = share_values(rescale_batch(graph, 2, 8), find_blocks(rescale_batch(graph, 2, 8)))
    shared, blocks = share_values(graph, find_blocks(graph))
    assert (rescale_batch(shared, 2, 8), blocks) == first


def weight_per_sample(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (m.linear(x) * m.table.weight[:4, None, :]).mean()


def weights_by_number(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (m.linear(x) * m.linear.bias[torch.arange(x.shape[0])][:, None, None]).mean()


def over_the_batch(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x).softmax(dim=0).mean()


def some_of_the_batch(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x)[:2].mean()


def pairs_of_samples(m: Any, x: torch.Tensor) -> torch.Tensor:
    flat = m.linear(x).flatten(1).mean(1, keepdim=True)
    return (flat @ flat.transpose(0, 1)).flatten().mean()


def glued(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat((m.linear(x), x), dim=0).mean()


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        (weight_per_sample, ("mul", "d0")),
        (weights_by_number, ("index", 0, "linear.bias")),
        (over_the_batch, ("softmax", "d0")),
        (some_of_the_batch, ("slice", "in0")),
        (pairs_of_samples, ("flatten_2",)),
        (glued, ("cat", "in0")),
    ],
)
def test_models_whose_batch_cannot_be_changed(body: Callable[..., torch.Tensor], facts: tuple[object, ...]) -> None:
    with refused(RequestError, *facts):
        rescale_batch(of_batch(body, 4), 4, 8)


def test_batch_of_one_cannot_be_raised() -> None:
    with refused(RequestError, "linear/linear", 1):
        rescale_batch(of_batch(lambda m, x: m.linear(x).mean(), 1), 1, 4)


def test_a_batch_that_leaves_fractions() -> None:
    """Eight samples in four groups of two: six samples would be three groups, five two and a half."""
    body = lambda m, x: m.linear(x).unflatten(0, (-1, 2)).mean()  # noqa: E731
    assert rescale_batch(of_batch(body, 8), 8, 6) == of_batch(body, 6)
    with refused(RequestError, "unflatten", "(4, 2, 5, 6)", "(5/2, 2, 5, 6)"):
        rescale_batch(of_batch(body, 8), 8, 5)
