"""Known values, marks and pieces where a model's code changes them, draws, or has them partly: the graph computes what
the model does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.errors import ModelError
from planner.graph.operator_graph import OperatorGraph, TorchConstant, ValueRef
from planner.graph.torch_operators import resolve
from planner.graph.trace import trace
from planner.graph.tracing.on_meta import on_meta

Code = Callable[[nn.Linear, Tensor], Tensor]


class _Module(nn.Module):
    def __init__(self, code: Code) -> None:
        super().__init__()
        self.linear, self.code = nn.Linear(4, 4), code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.linear, x)


def literal(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device)


def computed(graph: OperatorGraph, module: nn.Module, *given: Tensor) -> Tensor:
    """What the operators of a graph make of inputs."""
    values: dict[str, Any] = dict(module.named_parameters()) | graph.constants
    values |= dict(zip(graph.inputs, given, strict=True))

    def value(argument: Any) -> Any:
        if isinstance(argument, ValueRef):
            return values[argument.name]
        if isinstance(argument, TorchConstant):
            return torch.device("cpu") if argument.kind == "device" else getattr(torch, argument.name)
        return [value(each) for each in argument] if isinstance(argument, tuple) else argument

    for op in graph.operators:
        if op.op == "planner.identity":
            made = value(op.arguments[0])
        else:
            made = resolve(op.op)(*map(value, op.arguments), **{key: value(each) for key, each in op.keywords})
        results = made if isinstance(made, tuple | list) else (made,)
        values |= {name: one for name, one in zip(op.results, results, strict=False) if name is not None}
    loss: Tensor = values[graph.loss]
    return loss


def adds_up(linear: nn.Linear, x: Tensor) -> Tensor:
    """What is counted is read before it is changed."""
    known, out = literal([0.0, 0.0, 0.0, 1.0], x), torch.zeros((), device=x.device)
    for step in range(3):
        out = out + (linear(x) + known).sin().sum() * (step + 1)
        known += 1
    return out * known.tolist()[0]


def sets_a_part(linear: nn.Linear, x: Tensor) -> Tensor:
    known = literal([1.0, 2.0, 3.0, 4.0], x)
    first = (linear(x) * known).sum()
    part = known[:2]
    part += 5
    return first + (linear(x) * known).sum() * known.tolist()[0]


def writes_unknown(linear: nn.Linear, x: Tensor) -> Tensor:
    known = literal([1.0, 2.0, 3.0, 4.0], x)
    scale = known.tolist()[0]
    torch.add(linear.bias.detach(), 1.0, out=known)
    return (linear(x) * (known * 2)).sum() * scale


def writes_a_view(linear: nn.Linear, x: Tensor) -> Tensor:
    """What shares its memory with what nobody knows any more is not known either."""
    known, first = literal([1.0, 2.0, 3.0, 4.0], x), linear.bias.detach()[:1]
    part = known[:1]
    part += first
    return (linear(x) * known).sum() * literal([3.0], x).tolist()[0]


def is_none_of_both(linear: nn.Linear, x: Tensor) -> Tensor:
    """`^=` of masks is a change that PyTorch does not count while a model is traced."""
    marks = literal([1.0, 0.0, 0.0, 1.0], x) > literal([0.5], x).tolist()[0]
    first = (linear(x) * marks).sum()
    marks ^= linear.bias.detach() > 0
    return first + (linear(x) * marks).sum()


CHANGED: dict[str, Code] = {
    "adds up": adds_up,
    "sets a part": sets_a_part,
    "writes what is unknown": writes_unknown,
    "writes a view": writes_a_view,
    "is none of both": is_none_of_both,
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_changed_later_was_another_value_before(name: str) -> None:
    torch.manual_seed(0)
    module, x = _Module(CHANGED[name]), torch.randn(2, 4)
    try:
        graph = trace(on_meta(module), (x,))
    except ModelError:
        assert name == "writes what is unknown"
        return
    torch.testing.assert_close(computed(graph, module, x), module(x))


@pytest.mark.parametrize(
    "draw", [lambda known: F.dropout(known, 0.5), torch.rand_like, lambda known: known.clone().uniform_()]
)
def test_what_is_drawn_is_no_known_value(draw: Callable[[Tensor], Tensor]) -> None:
    """It is another one in every step; drawing it for the trace would move the numbers of the caller, too."""

    def code(linear: nn.Linear, x: Tensor) -> Tensor:
        known = literal([1.0, 2.0, 3.0, 4.0], x)
        return (linear(x) * draw(known)).sum() * known.tolist()[0]

    module, before = on_meta(_Module(code)), torch.get_rng_state()
    try:
        graph = trace(module, (torch.ones(2, 4),))
    except ModelError:
        return
    finally:
        assert torch.equal(torch.get_rng_state(), before)
    assert {op.op for op in graph.operators} & {
        "aten.dropout.default",
        "aten.native_dropout.default",
        "aten.rand_like.default",
        "aten.uniform.default",
    }


def test_running_statistics_of_literals_change() -> None:
    def code(linear: nn.Linear, x: Tensor) -> Tensor:
        mean, spread = literal([0.0] * 4, x), literal([1.0] * 4, x)
        F.batch_norm(linear(x), mean, spread, training=True)
        return (linear(x) * mean).sum() * spread.tolist()[0]

    module, x = _Module(code), torch.randn(2, 4)
    try:
        graph = trace(on_meta(module), (x,))
    except ModelError:
        return
    torch.testing.assert_close(computed(graph, module, x), module(x))


@pytest.mark.parametrize("change", ["mask", "view"])
def test_targets_of_a_mask_that_changes_are_no_padded_rows(change: str) -> None:
    """The lengths count what the mask was before: PyTorch reads targets by them, one behind the other."""

    class Spoken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            scores = self.linear(x).log_softmax(-1).transpose(0, 1)
            seen = labels > 2
            lengths = seen.sum(-1)
            part = seen if change == "mask" else seen[:, :1]
            part ^= (labels > 3)[:, : part.shape[1]]
            spoken = labels.masked_select(seen)
            return F.ctc_loss(scores, spoken, torch.full((2,), 6, device=x.device), lengths)

    with pytest.raises(ModelError, match="ctc_loss"):
        trace(on_meta(Spoken()), (torch.randn(2, 6, 4), torch.ones(2, 3, dtype=torch.long)))


class _Marks(nn.Module):
    """Rows of image tokens, by a mask that is written into after it was used, or copied."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.kind = nn.Embedding(8, 4), kind

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        marks = ids < 2
        rows, wide = self.embed(ids), marks.unsqueeze(-1)
        if self.kind == "copied":
            wide = marks.clone()
            wide = wide.logical_xor_(ids < 4).unsqueeze(-1)
        if self.kind == "wide":
            wide = marks.unsqueeze(-1).expand(-1, -1, 4).clone()
            wide ^= (ids < 4)[..., None]
        rows = rows.masked_scatter(wide, features)
        return (rows * torch.arange(4, device=ids.device)).sum()


@pytest.mark.parametrize("kind", ["plain", "copied", "wide"])
def test_marks_that_are_written_into_are_others(kind: str) -> None:
    torch.manual_seed(0)
    module, ids, features = _Marks(kind), torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]]), torch.randn(4, 4)
    graph = trace(on_meta(module), (ids, features))
    torch.testing.assert_close(computed(graph, module, ids, features), module(ids, features))


def test_pieces_of_which_some_have_a_mask_stay_apart() -> None:
    def code(linear: nn.Linear, x: Tensor) -> Tensor:
        rows = linear(x).reshape(1, 1, -1, 4)
        hidden = torch.zeros(1, 1, 4, 4, device=x.device).masked_fill(linear.weight > 0, -1.0)
        pieces = rows.split(4, dim=2)
        made = [
            F.scaled_dot_product_attention(each, each, each, hidden if at % 2 else None, 1e-7).transpose(1, 2)
            for at, each in enumerate(pieces)
        ]
        return torch.cat(made, 1).square().sum()

    torch.manual_seed(0)
    module, x = _Module(code), torch.randn(2, 8, 4)
    graph = trace(on_meta(module), (x,))
    calls = [op for op in graph.operators if op.op == "aten.scaled_dot_product_attention.default"]
    assert len(calls) == 4


def test_at_one_sample_nothing_is_a_piece() -> None:
    """Every first dim is 1 then: rows of a batch of two were treated one way, and those of one another way."""

    def code(linear: nn.Linear, x: Tensor) -> Tensor:
        halves = zip(linear(x).chunk(2, -1), x.chunk(2, -1), strict=True)
        return torch.cat([one * other for one, other in halves], -1).sum()

    module = _Module(code)
    one, two = ([op.op for op in trace(on_meta(module), (torch.ones(n, 6, 4),)).operators] for n in (1, 2))
    assert one == two


def test_marks_within_a_map_over_samples() -> None:
    """As masks of transformers are made; there a tensor stands for many, and has no memory of its own."""

    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            seen = torch.vmap(lambda each: each.unsqueeze(-1).clone())(x > 0)
            return (self.linear(x)[..., None] * seen).sum()

    module, x = Mapped(), torch.randn(2, 3, 4)
    torch.testing.assert_close(computed(trace(on_meta(module), (x,)), module, x), module(x))
