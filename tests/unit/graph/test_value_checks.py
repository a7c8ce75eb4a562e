"""What is asked of values, by PyTorch's own code or to raise an error, has no answer while a model is traced, and none
is needed."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn.modules import transformer

from planner.errors import ModelError
from planner.graph.operator_graph import Operator
from planner.graph.trace import trace
from tests.refusals import refused


class _Encoder(nn.Module):
    """Layers that are given a mask, without a word of what kind it is."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.encoder(x, mask=mask).square().mean()


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.decoder(x, x, tgt_mask=later).square().mean()


class _Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        found = Categorical(logits=made)
        apart = kl_divergence(Normal(made, made.exp()), Normal(0.0, 1.0)).mean()
        return apart - found.log_prob(x[..., 0].long()).mean() - found.entropy().mean()


KINDS = {_Encoder: ["causal"] * 2, _Decoder: ["causal", "full"] * 2}
"""What each attention shows: a mask that operators make is found to be causal, without being compared."""


def _causal(op: Operator) -> str:
    return "causal" if op.arguments[5:6] == (True,) or dict(op.keywords).get("is_causal") is True else "full"


@pytest.mark.parametrize("model", [_Encoder, _Decoder, _Policy])
def test_a_model_whose_values_are_checked_is_traced(model: type[nn.Module]) -> None:
    with torch.device("meta"):
        built, example = model(), torch.ones(2, 4, 8)
    graph = trace(built, (example,))
    assert graph.loss in graph.differentiable
    attention = [op for op in graph.operators if op.op == "aten.scaled_dot_product_attention.default"]
    assert ["mask" if len(op.operands) == 4 else _causal(op) for op in attention] == KINDS.get(model, [])


def test_values_are_checked_again_after_a_trace() -> None:
    before = transformer._detect_is_causal_mask
    trace(_Policy(), (torch.ones(2, 4, 8),))
    assert transformer._detect_is_causal_mask is before
    with pytest.raises(ValueError, match="scale"):
        Normal(0.0, -1.0)


class Checked(nn.Module):
    """Checks of values that only raise, as models of transformers have them."""

    def __init__(self, how: str, classes: int = 5) -> None:
        super().__init__()
        self.linear, self.how, self.classes = nn.Linear(8, classes), how, classes

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        match self.how:
            case "if":
                if labels is not None and labels.max() >= self.classes:
                    raise ValueError("a label is too large")
            case "if not":
                if not (labels < self.classes).all() or not torch.all(labels >= 0):
                    raise ValueError("a label is too large or too small")
            case "over lines":
                if (
                    labels.max() >= self.classes
                    or labels.min() < 0
                ):  # fmt: skip
                    raise ValueError("a label is too large or too small")
            case "assert":
                assert (labels < self.classes).all(), "a label is too large"
                assert not (labels < 0).any(), "a label is too small"
            case "check":
                torch._check((labels == 1).sum().item() == x.shape[1])
            case "caught":
                try:
                    assert (labels < self.classes).all()
                except AssertionError:
                    labels = labels % self.classes
            case "suppressed":
                with torch.no_grad(), contextlib.suppress(AssertionError):
                    assert (labels < self.classes).all()
                    labels = labels + 1
            case "mixed":
                if (labels < 0).all() and not (labels > 0).all():
                    raise ValueError("either")
            case "branch":
                if labels.max() >= self.classes:
                    labels = labels % self.classes
            case "both":
                if labels.max() >= self.classes:
                    labels = labels % self.classes
                    raise ValueError("a label is too large")
        return nn.functional.cross_entropy(self.linear(x), labels)


LABELS = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize("how", ["if", "if not", "over lines", "assert", "check"])
def test_checks_that_only_raise_are_passed(how: str) -> None:
    graph = trace(Checked(how), (torch.randn(4, 8), LABELS))
    assert [op.op for op in graph.operators] == ["aten.linear.default", "aten.cross_entropy_loss.default"]


class Clamped(nn.Module):
    """What has overflowed is bounded, as layers of DETR have it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        overflowed = {
            "all": lambda: not torch.isfinite(x).all(),
            "any": lambda: x.isinf().any() or torch.any(torch.isnan(x)),
            "some": lambda: not torch.isfinite(x).any(),
        }[self.how]()
        return (x.clamp(-9.0, 9.0) if overflowed else x).square().mean()


@pytest.mark.parametrize("how", ["all", "any"])
def test_numbers_are_finite(how: str) -> None:
    graph = trace(Clamped(how), (torch.randn(4, 8),))
    assert [op.op for op in graph.operators] == ["aten.linear.default", "aten.square.default", "aten.mean.default"]


@pytest.mark.parametrize("how", ["branch", "both", "mixed", "caught", "suppressed"])
def test_other_branches_on_values_are_refused(how: str) -> None:
    with refused(ModelError, "torch.where"):
        trace(Checked(how), (torch.randn(4, 8), LABELS))


def test_whether_some_number_is_finite_is_refused() -> None:
    with refused(ModelError, "tensor"):
        trace(Clamped("some"), (torch.randn(4, 8),))


class OtherNumbers(nn.Module):
    """Numbers that are not finite on purpose, or a mask of those that are that says something else since."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        match self.how:
            case "mask":
                asked = torch.isinf(torch.zeros_like(x).masked_fill(hidden, float("-inf"))).any()
            case "input":
                asked = torch.isnan(x).any()
            case _:
                asked = torch.isfinite(made)
                asked &= hidden
                asked = asked.all()
        return (made.clamp(-9.0, 9.0) if asked else made).square().mean()


@pytest.mark.parametrize("how", ["mask", "input", "changed"])
def test_other_numbers_are_not_taken_as_finite(how: str) -> None:
    with refused(ModelError, "torch.where"):
        trace(OtherNumbers(how), (torch.randn(4, 8), torch.ones(4, 8, dtype=torch.bool)))


def test_numbers_are_finite_in_blocks_that_are_traced_once() -> None:
    graph = trace(nn.Sequential(*(ClampedBlock() for _ in range(4)), Clamped("all")), (torch.randn(4, 8),))
    assert [op.op for op in graph.operators] == ["aten.linear.default"] * 5 + [
        "aten.square.default",
        "aten.mean.default",
    ]


class ClampedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x.clamp(-9.0, 9.0) if not torch.isfinite(x).all() else x


class Filled(nn.Module):
    """As many samples as a tensor says are changed in place."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        made, count = self.linear(x) * 2, hidden.sum().item()
        torch._check(count >= 0)
        torch._check(count <= 4)
        if self.how == "filled":
            made[:count] = 0.0
        else:
            made[:count].mul_(2.0)
        return made.square().mean()


@pytest.mark.parametrize("how", ["filled", "changed"])
def test_what_is_written_to_a_number_of_samples_is_not_left_out(how: str) -> None:
    with refused(ModelError, "reads a number out of a tensor"):
        trace(Filled(how), (torch.randn(4, 8), torch.ones(2, dtype=torch.bool)))


class Named(nn.Module):
    """Operands by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        factor = torch.as_tensor(data=2.0, device=x.device)
        return (self.linear(x) * torch.sum(input=hidden, dim=1, keepdim=True) * factor * torch.all(input=hidden)).mean()


def test_operands_may_be_given_by_name() -> None:
    graph = trace(Named(), (torch.randn(4, 8), torch.ones(4, 8, dtype=torch.bool)))
    assert {"aten.sum.dim_IntList", "aten.all.default"} <= {op.op for op in graph.operators}
