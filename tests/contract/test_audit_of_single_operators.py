"""Audits of steps in which a single operator is what most lives beside."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
import runtime
from hardware_profiles import load_profile
from planner.graph.trace import trace
from planner.models.composed_attention import composed_attention
from planner.plan.plan import SLACK

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def audited(module: nn.Module, given: tuple[torch.Tensor, ...], samples: int = 2) -> runtime.StageAudit:
    """The only stage of a plan for one CPU."""
    graph = trace(module, given)
    plan = planner.search(graph, "cpu", batch=samples, devices=1, precision="fp32").plan
    (stage,) = runtime.audit(plan, graph, samples, load_profile("cpu"))
    return stage


def nearest(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """How far from a row of a table, found by products that have no backward pass."""
    table = torch.eye(64, device=x.device)
    return F.mse_loss(x, F.embedding((x @ table).argmax(-1), table))


class Net(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.first, self.step = nn.Linear(4, 64), step

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.step(self.first(x), target)


STEPS: dict[str, Step] = {
    "running sums": lambda x, _: x.cumsum(1).mean(),
    "square roots": lambda x, _: x.sigmoid().rsqrt().mean(),
    "products that make indices": nearest,
    "a target": lambda x, target: F.mse_loss(x.tanh(), target),
    "differences": lambda x, _: (x - x.roll(1, 1)).mean(),
    "differences from": lambda x, _: torch.rsub(x.roll(1, 1), x).mean(),
    "quotients": lambda x, _: (x.tanh() / x.sigmoid()).mean(),
    "quotients by rows": lambda x, _: (x.tanh() / x.mean(-1, keepdim=True)).mean(),
    "rows in quotients": lambda x, _: (x.mean(-1, keepdim=True) / x.sigmoid()).mean(),
    "the larger": lambda x, _: torch.maximum(x.tanh(), x.sigmoid()).mean(),
    "the larger of rows": lambda x, _: torch.maximum(x.tanh(), x.mean(-1, keepdim=True)).mean(),
    "chosen rows": lambda x, target: torch.where(target > 0, x.tanh(), x.mean(-1, keepdim=True)).mean(),
    "products of pairs": lambda x, _: (x.tanh()[:, :, None] * x.sigmoid()[:, None]).mean(),
    "differences of pairs": lambda x, _: (x[:, :, None] - x.roll(1, 1)[:, None]).mean(),
    "gathered rows": lambda x, _: x.gather(1, x[:, :2].argsort(1)).mean(),
    "picked rows": lambda x, _: x[:, torch.arange(3, device=x.device)].mean(),
    "selected rows": lambda x, _: x.index_select(1, torch.arange(3, device=x.device)).mean(),
    "largest rows": lambda x, _: x.topk(2, 1)[0].mean(),
    "products with a number": lambda x, _: (x * x.mean()).mean(),
    "products without elements": lambda x, _: x.mean() + (x[:, :0] @ x.transpose(1, 2)).sum(),
    "differences of neighbours": lambda x, _: x.diff(dim=1).mean(),
    "numbers within bounds": lambda x, _: x.clamp(-1.0, 1.0).mean(),
    "scores of two classes": lambda x, target: F.binary_cross_entropy_with_logits(x, target.sigmoid()),
    "logarithms of sums": lambda x, _: x.logsumexp(-1).mean(),
    "angles": lambda x, _: torch.atan2(x, x.roll(1, 1)).mean(),
    "products of all": lambda x, _: x.sigmoid().prod(-1).mean(),
    "products over no elements": lambda x, _: x.mean() + (x[..., :0] @ x[..., :0].transpose(1, 2)).sum(),
}


class Turned(nn.Module):
    """Linear layers of what does not lie in order: each makes and keeps a copy of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = nn.Linear(4, 64), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.first(x).relu().transpose(1, 2)
        return (self.one(turned).sin() + self.other(turned).cos()).mean()


class Three(nn.Module):
    """Linear layers of one tensor, whose gradients are summed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(4, 64), nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.first(x)
        one, other, third = (layer(shared) for layer in self.layers)
        return (one + other + third).mean()


class Summed(nn.Module):
    """The gradient of what is summed is a view; a linear layer copies it where its leading dims do not lie as one."""

    def __init__(self, step: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.step = nn.Linear(4, 64), nn.Linear(64, 64), step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(self.layer(self.first(x)))


OF_OTHER_SHAPES: dict[str, Step] = {
    "transforms": lambda x, _: torch.fft.rfft(x, dim=1).abs().mean(),
    "cosines": lambda x, _: F.cosine_similarity(x[:, 1:], x[:, :-1], dim=-1).mean(),
    "determinants": lambda x, _: torch.linalg.slogdet(x.unflatten(-1, (8, 8)) + torch.eye(8, device=x.device))[
        1
    ].mean(),
}


@pytest.mark.parametrize("step", OF_OTHER_SHAPES)
def test_what_lives_while_rules_found_by_trial_go_back(step: str) -> None:
    module, given = Net(OF_OTHER_SHAPES[step]), (torch.randn(2, 64, 4), torch.randn(2, 64, 64))
    stage = audited(module, given)
    assert stage.predicted_peak == pytest.approx(stage.peak, rel=0.02)


SUMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda x: x.sum(),
    "each sample": lambda x: x.flatten(1).sum(1).sin().sum(),
    "each head": lambda x: x.unflatten(-1, (4, 16)).transpose(1, 2).sum(-1).sin().sum(),
    "twice": lambda x: x.sum() + x.sum(-1).square().sum(),
}


@pytest.mark.parametrize("step", SUMS)
def test_gradients_of_sums(step: str) -> None:
    module, given = Summed(SUMS[step]), (torch.randn(2, 64, 4),)
    stage = audited(module, given)
    assert not stage.unequal
    assert stage.predicted_peak == pytest.approx(stage.peak, rel=0.01)


class Steps(nn.Module):
    """A recurrent layer: what inputs add to the gates lives forward, what steps keep goes as the backward pass does."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 16), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.first(x))[0].mean()


@pytest.mark.cases(1)
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: type[nn.RNNBase], both: bool) -> None:
    given = (torch.randn(8, 24, 4),)
    module = Steps(kind(16, 32, batch_first=True, bidirectional=both))
    stage = audited(module, given, samples=8)
    assert not stage.unequal
    assert stage.predicted_peak == pytest.approx(stage.peak, rel=0.03)


class Heads(nn.Module):
    """Attention as a module, whose products of queries, keys and values are joined, turned, and cut apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(4, 64), nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, _ = self.attention(*[self.first(x)] * 3)
        return found.sin().mean()


@pytest.mark.parametrize(("make", "tokens"), [(Turned, 8), (Three, 64), (Heads, 64)])
def test_copies_that_are_made_and_not_made(make: type[nn.Module], tokens: int) -> None:
    module, given = make(), (torch.randn(2, tokens, 4),)
    stage = audited(module, given)
    assert not stage.unequal
    assert stage.predicted_peak == pytest.approx(stage.peak, rel=0.01)


class Sinks(nn.Module):
    """Attention with sinks under a mask of which only its numbers are known."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sinks = nn.Linear(4, 64), nn.Parameter(torch.randn(16))
        self.register_buffer("seen", torch.rand(64, 64) > 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.first(x).unflatten(-1, (16, 4)).transpose(1, 2)
        return composed_attention(heads, heads, heads, self.sinks, self.seen).sin().mean()


def test_scores_of_attention_with_sinks_live_while_it_runs() -> None:
    """Three tensors of them, before there are gradients, which are counted beside them."""
    module, given = Sinks(), (torch.randn(2, 64, 4),)
    stage = audited(module, given)
    assert not stage.unequal
    assert stage.peak <= stage.predicted_peak <= 1.1 * stage.peak


@pytest.mark.parametrize("step", STEPS)
def test_live_memory_is_as_predicted(step: str) -> None:
    module, given = Net(STEPS[step]), (torch.randn(2, 8, 4), torch.randn(2, 8, 64))
    stage = audited(module, given)
    assert not stage.unequal
    assert stage.predicted_peak == pytest.approx(stage.peak, rel=0.02)


@pytest.mark.parametrize(
    ("optimizer", "update"),
    [("lamb", {}), ("lamb", {"moment_dtype": "bf16"}), ("lamb", {"master_weights": False}), ("sgd", {})],
)
def test_updates_widen_and_free_as_predicted(optimizer: str, update: dict[str, object]) -> None:
    """Of a matrix beside which nothing else counts."""
    module, given = nn.Sequential(nn.Linear(512, 512), Loss()).bfloat16(), (torch.randn(2, 512).bfloat16(),)
    traced = planner.trace(module, args=given, precision="bf16")
    plan = planner.search(traced, "cpu", devices=1, global_batch=2, optimizer=optimizer, update=update).plan
    (stage,) = runtime.audit(plan, traced.graph, 2, load_profile("cpu"))
    assert stage.predicted_peak == pytest.approx(stage.peak, rel=0.01)
    stated = sum(nbytes for name, nbytes in plan.prediction.memory if name != SLACK)
    assert stage.peak <= stated * 1.01


class Loss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().square().mean()
