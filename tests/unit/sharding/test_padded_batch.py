"""Samples of weight zero at the end of a batch: the graph computes what the model does without them."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from planner.errors import RequestError
from planner.graph.operator_graph import Argument, OperatorGraph, TorchConstant, ValueRef
from planner.graph.trace import trace
from planner.plan.plan import Training
from planner.plan.samples import parts_fault
from planner.sharding.padded_batch import SAMPLE_WEIGHTS, sample_weights, with_sample_weights
from planner.sharding.rescale import rescale_batch
from planner.sharding.update import Update
from tests.refusals import refused


class Losses(nn.Module):
    """Losses of every kind; `kind` names another one, or what looks at samples otherwise."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.table, self.head, self.kind = nn.Embedding(11, 4), nn.Linear(4, 11), kind
        self.norm = nn.BatchNorm1d(4) if kind == "norm" else None

    def forward(self, tokens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        if self.norm is not None:
            x = self.norm(x.flatten(0, 1)).view_as(x)
        if self.kind == "largest":
            x = x * x.amax(dim=0, keepdim=True)
        if self.kind == "turned":
            return nn.functional.cross_entropy(self.head(x.transpose(0, 1)).flatten(0, 1), tokens.t().flatten())
        if self.kind == "negatives":  # every sample is a class of the others
            pairs = x.mean(1) @ self.head(x).mean(1)[:, :4].t()
            return nn.functional.cross_entropy(pairs, tokens[:, 0])
        if self.kind == "shaped":
            return x.square().mean().reshape(1)
        logits = self.head(x)
        words = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        odds = nn.functional.nll_loss(logits.log_softmax(-1).flatten(0, 1), tokens.flatten())
        pairs = nn.functional.mse_loss(x.sum(-1), values) + nn.functional.smooth_l1_loss(x[..., 0], values)
        wanted = nn.functional.binary_cross_entropy_with_logits(x[:, 0, 1], values[:, 0].sigmoid(), reduction="sum")
        balance = x.mean(dim=(0, 1)) * x.sigmoid().sum(dim=0).mean(dim=0)  # of two means the product is no mean
        return words + odds + pairs + wanted + balance.sum()


def example(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    tokens = torch.randint(0, 11, (samples, 3), generator=generator)
    return tokens, torch.randn(samples, 3, generator=generator)


def test_a_padded_batch_has_the_loss_and_gradients_of_its_samples() -> None:
    torch.manual_seed(1)
    module = Losses()
    graph = rescale_batch(with_sample_weights(trace(module, example(2)), 2), 2, 8)
    tokens, values = example(5)
    padded = [torch.cat([one, one[-1:].expand(3, 3)]) for one in (tokens, values)]
    loss = computed(graph, module, [*padded, torch.tensor(sample_weights(5, 3))])
    plain = module(tokens, values)
    torch.testing.assert_close(loss, plain)
    parameters = list(module.parameters())
    found, wanted = (torch.autograd.grad(one, parameters) for one in (loss, plain))
    torch.testing.assert_close(found, wanted)


def test_a_loss_of_one_element_keeps_its_shape() -> None:
    module = Losses("shaped")
    graph = rescale_batch(with_sample_weights(trace(module, example(2)), 2), 2, 8)
    padded = [torch.cat([one, one[-1:].expand(3, 3)]) for one in example(5)]
    loss = computed(graph, module, [*padded, torch.tensor(sample_weights(5, 3))])
    torch.testing.assert_close(loss, module(*example(5)))


def test_micro_batches_with_fewer_samples_count_as_much_less() -> None:
    module = Losses()
    graph = rescale_batch(with_sample_weights(trace(module, example(2)), 2), 2, 4)
    tokens, values = example(7)
    whole = [torch.cat([one, one[-1:]]) for one in (tokens, values)]
    given = list(zip(*(one.split(4) for one in (*whole, torch.tensor(sample_weights(7, 1)))), strict=True))
    losses = [computed(graph, module, part).item() for part in given]
    parts = [module(tokens[first:last], values[first:last]).item() for first, last in ((0, 4), (4, 7))]
    assert sum(losses) / 2 == pytest.approx((4 * parts[0] + 3 * parts[1]) / 7, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("norm", "norm/_native_batch_norm_legit_functional"),
        ("turned", "inside of another loop"),
        ("negatives", "has samples for its classes"),
    ],
)
def test_what_looks_at_several_samples_is_refused(kind: str, word: str) -> None:
    with refused(RequestError, "pad batch", word):
        with_sample_weights(trace(Losses(kind), example(2)), 2)


def test_the_largest_of_a_batch_is_refused() -> None:
    with refused(RequestError, "amax"):
        with_sample_weights(trace(Losses("largest"), example(2)), 2)


def test_every_micro_batch_has_a_sample_of_the_batch() -> None:
    training = Training(
        global_batch=13, micro_batches=2, precision="fp32", optimizer="sgd", update=Update(padding_samples=3)
    )
    assert (training.padded_batch, training.part, training.parts) == (16, 8, (8, 5))
    assert parts_fault(2, 13, 3) is None
    for count in (3, 8):
        fault = parts_fault(count, 13, 3)
        assert fault is not None
        assert fault.value == str(count)
    fault = parts_fault(6, 13, 3)
    assert fault is not None
    assert fault.hint.endswith(" is 4")  # not 8, of which one would have nothing


def computed(graph: OperatorGraph, module: nn.Module, given: object) -> torch.Tensor:
    """The loss of a graph on the weights of a module, operator by operator."""
    held: dict[str, torch.Tensor] = dict(module.named_parameters())
    held.update(zip(graph.inputs, given, strict=True))  # type: ignore[call-overload]
    assert graph.inputs[-1] == SAMPLE_WEIGHTS
    for op in graph.operators:
        space, name, overload = op.op.split(".")
        call = getattr(getattr(getattr(torch.ops, space), name), overload)
        made = call(*(_value(one, held) for one in op.arguments), **{k: _value(v, held) for k, v in op.keywords})
        results = made if isinstance(made, tuple | list) else (made,)
        held.update((name, value) for name, value in zip(op.results, results, strict=True) if name is not None)
    return held[graph.loss]


def _value(argument: Argument, held: Mapping[str, torch.Tensor]) -> object:
    if isinstance(argument, ValueRef):
        return held[argument.name]
    if isinstance(argument, TorchConstant):
        return torch.device("cpu") if argument.kind == "device" else getattr(torch, argument.name)
    return [_value(one, held) for one in argument] if isinstance(argument, tuple) else argument
