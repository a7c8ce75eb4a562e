"""The plain module drops what its graph drops, or says that it cannot."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.errors import ModelError
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from runtime.ops.randomness import Draw, dropping
from runtime.step.same_dropout import SameDropout
from runtime.step.training_step import parallelize
from tests.distributed import plans
from tests.refusals import refused


class Drops(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.first, self.second = nn.Dropout(p), nn.Dropout1d(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x * self.weight) + 1)
        return F.dropout(x, p=0.2, training=self.training).sum()


X = torch.randn(4, 8, 8)


def planned_loss(module: nn.Module, graph: OperatorGraph, x: tuple[torch.Tensor, ...]) -> float:
    """The loss of four samples by a plan for one process, with the seed 2."""
    plan = plans.plan_of_one("drops", graph, samples=4)
    cpu = torch.device("cpu")
    step = parallelize(module, plan, example=x, traced=graph, device=cpu, seed=2, check_layouts=False)
    return float(step.accumulate(*x))


def test_the_same_calls_drop_the_same_and_others_something_else() -> None:
    module = Drops()
    operators = dropping(trace(module, (X,)))
    assert [op.name for op in operators] == ["first/dropout", "second/feature_dropout", "dropout"]
    losses = []
    for draw in (Draw(), Draw(), Draw(step=1), Draw(micro_batch=1), Draw(seed=1)):
        with SameDropout(operators, draw):
            losses.append(float(module(X).detach()))
    assert losses[0] == losses[1]
    assert len(set(losses)) == 4


@pytest.mark.parametrize(("function", "dims"), [(F.dropout1d, 2), (F.dropout1d, 3), (F.dropout2d, 4), (F.dropout3d, 4)])
def test_channels_with_and_without_samples(function: Callable[..., torch.Tensor], dims: int) -> None:
    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (function(x * self.weight, 0.5) * torch.arange(x.numel()).view(x.shape)).sum()

    x = (torch.ones(4, 8, 4, 4)[(0,) * (4 - dims)],)
    graph = trace(Channels(), x)
    found = planned_loss(Channels(), graph, x)
    with SameDropout(dropping(graph), Draw(seed=2)):
        assert float(Channels()(*x).detach()) == found


def kept_by_timm(x: torch.Tensor, p: float) -> torch.Tensor:
    kept = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1 - p)
    return x * kept.div_(1 - p)


WAYS = {
    "in place": lambda x, p: F.dropout(x.clone(), p, inplace=True),
    "channels in place": lambda x, p: F.dropout2d(x.clone(), p, inplace=True),
    "timm": kept_by_timm,
    "by hand": lambda x, p: x * torch.bernoulli(torch.ones_like(x), 1 - p),
    "by names": lambda x, p: x * torch.bernoulli(input=torch.ones_like(x), p=1 - p, generator=None),
    "method": lambda x, p: x * torch.ones_like(x).bernoulli(p=1 - p),
}


@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_bernoulli_are_those_of_the_plan(way: str) -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (WAYS[way](x * self.weight, 0.1) * torch.arange(x.numel()).view(x.shape)).sum()

    x = (torch.ones(4, 8, 4, 4),)
    graph = trace(Draws(), x)
    assert len(dropping(graph)) == 1
    found = planned_loss(Draws(), graph, x)
    with SameDropout(dropping(graph), Draw(seed=2)):
        assert float(Draws()(*x).detach()) == pytest.approx(found, rel=1e-5)
    with SameDropout(dropping(graph), Draw(seed=3)):
        assert float(Draws()(*x).detach()) != pytest.approx(found, rel=1e-3)


class Attends(nn.Module):
    """Attention of PyTorch's module, whose dropout (the default of `nn.TransformerEncoderLayer`) is in one function."""

    def __init__(self, *, weights: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.pool = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
        self.wanted = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        pooled, weights = self.pool(x[:, :1], x, x, need_weights=self.wanted)
        return (pooled * torch.arange(8)).sum() + (weights.square().sum() if self.wanted else 0)


@pytest.mark.parametrize("weights", [False, True])
def test_multihead_attention_drops_what_its_graph_drops(weights: bool) -> None:
    torch.manual_seed(0)
    module = Attends(weights=weights)
    x = torch.randn(4, 6, 8)
    graph = trace(module, (x,))
    assert len(dropping(graph)) == 5
    found = planned_loss(module, graph, (x,))
    torch.manual_seed(0)
    plain = Attends(weights=weights)
    with SameDropout(dropping(graph), Draw(seed=2)):
        assert float(plain(x).detach()) == pytest.approx(found, rel=1e-5)
    with SameDropout(dropping(graph), Draw(seed=3)):
        assert float(plain(x).detach()) != pytest.approx(found, rel=1e-3)


def test_nothing_is_dropped_in_evaluation() -> None:
    module = Drops().eval()
    assert dropping(trace(module, (X,))) == ()
    with SameDropout((), Draw()):
        assert float(module(X).detach()) == float((X + 1).sum())


@pytest.mark.parametrize(
    ("graph", "module", "facts"),
    [
        (Drops(), Drops(0.4), ("p = 0.4", "first/dropout", 0.5)),
        (Drops().eval(), Drops(), ("p = 0.5", 0)),
        (
            Drops(),
            Drops().eval(),
            (0, 3, "first/dropout"),
        ),
    ],
)
def test_calls_that_do_not_match_are_refused(graph: nn.Module, module: nn.Module, facts: tuple[object, ...]) -> None:
    operators = dropping(trace(graph, (X,)))
    with refused(ModelError, *facts, "--no-check"), SameDropout(operators, Draw()):
        module(X)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences_that_drop_are_refused_and_others_are_left_alone(kind: type[nn.Module]) -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 5, 4), torch.tensor([5, 3]), batch_first=True)
    with SameDropout((), Draw()):
        dropping, plain = kind(4, 4, 2, dropout=0.5), kind(4, 4, 2)
        assert plain(packed)[0].data.shape == (8, 4)
        assert dropping.eval()(packed)[0].data.shape == (8, 4)
        with refused(ModelError, "pad sequences to one length"):
            dropping.train()(packed)
