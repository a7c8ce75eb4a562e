"""The CTC loss as an operator of ours computes what PyTorch's does, and runs without data."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.errors import ModelError
from planner.graph.operators.ctc import CTC, ctc_loss, sums, sums_backward
from planner.graph.trace import trace
from planner.graph.tracing.whole_losses import WholeLosses
from planner.sharding.rule import FactorKind
from planner.sharding.rules import rule_of
from tests.refusals import refused

STEPS, LENGTHS = torch.tensor([9, 7, 2]), torch.tensor([4, 2, 4])  # of the last sample there is no alignment
TARGETS = torch.randint(1, 6, (3, 4), generator=torch.Generator().manual_seed(0))


def scores() -> torch.Tensor:
    return torch.randn(9, 3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_losses_and_gradients_are_those_of_pytorch(reduction: str, zero_infinity: bool) -> None:
    found = []
    for loss in (ctc_loss, F.ctc_loss):
        leaf = scores().requires_grad_()
        made = loss(leaf.log_softmax(-1), TARGETS, STEPS, LENGTHS, reduction=reduction, zero_infinity=zero_infinity)
        made.sum().backward()
        found.append((made.detach(), leaf.grad))
    torch.testing.assert_close(*(losses for losses, _ in found))
    torch.testing.assert_close(*(gradients for _, gradients in found), equal_nan=True)


def test_a_single_sample_has_no_dim_of_samples() -> None:
    given = scores()[:, 0].log_softmax(-1), TARGETS[0], STEPS[0], LENGTHS[0]
    for reduction in ("none", "mean"):
        torch.testing.assert_close(ctc_loss(*given, reduction=reduction), F.ctc_loss(*given, reduction=reduction))


class _Packed(nn.Module):
    """Targets one behind the other, as models of transformers give them."""

    def __init__(self, lengths: str = "") -> None:
        super().__init__()
        self.linear, self.lengths = nn.Linear(6, 6), lengths

    def forward(self, x: torch.Tensor, labels: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        known = (labels != -100) & (labels != 0)
        lengths = (labels != -100 if self.lengths == "of others" else known).sum(0 if self.lengths == "columns" else -1)
        if self.lengths == "changed":
            lengths.clamp_(max=1)
        scores = self.linear(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, labels.masked_select(known), steps, lengths, zero_infinity=True)


LABELS = torch.tensor([[1, 2, -100, 3], [0, 4, 5, -100], [2, 0, 2, 1]])


def test_targets_one_behind_the_other_are_rows() -> None:
    module, x = _Packed().double(), scores().transpose(0, 1)
    with WholeLosses():
        loss = module(x, LABELS, STEPS)
    wanted = module(x, LABELS, STEPS)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0.0)
    parameters = list(module.parameters())
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), torch.autograd.grad(wanted, parameters))


def test_a_trace_of_them_has_the_operator() -> None:
    with torch.device("meta"):
        module = _Packed()
    graph = trace(module, (scores().float().transpose(0, 1).contiguous(), LABELS, STEPS))
    calls = [op.op for op in graph.operators]
    assert CTC in calls
    assert "aten.masked_select.default" not in calls


@pytest.mark.parametrize("lengths", ["of others", "columns", "changed"])
def test_targets_of_other_lengths_are_refused(lengths: str) -> None:
    with refused(ModelError, "aten._ctc_loss.Tensor", "S"):
        trace(_Packed(lengths), (scores().float().transpose(0, 1).contiguous(), LABELS[:, :3], STEPS))


class _Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(6, 6), nn.CTCLoss(zero_infinity=True)

    def forward(
        self, x: torch.Tensor, targets: torch.Tensor, steps: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        return self.loss(self.linear(x).log_softmax(-1).transpose(0, 1), targets, steps, lengths)


def test_a_trace_has_the_operator_whose_samples_can_be_split() -> None:
    with torch.device("meta"):
        module = _Speech()
    graph = trace(module, (scores().float().transpose(0, 1).contiguous(), TARGETS, STEPS, LENGTHS))
    (op,) = (op for op in graph.operators if op.op == CTC)
    rule = rule_of(graph, op)
    assert [(each.name, each.extent) for each in rule.factors if each.kind is not FactorKind.BLOCKED] == [("n", 3)]
    extents = {each.name: each.extent for each in rule.factors}
    scratch = sum(
        each.coefficient * extents["t"] * extents["n"] * (extents["s"] if len(each.factors) > 2 else 1)
        for each in rule.scratch
    )
    backward = sums_backward(torch.zeros(3), scores().float(), TARGETS)
    assert scratch == sum(one.nbytes for one in backward) == 2 * sums(scores().float(), TARGETS).nbytes
