"""Weights of linear layers that hold several matrices are several parameters of the graph."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from planner.errors import PlanFileError
from planner.graph.operator_graph import Cut, OperatorGraph
from planner.graph.rewriting.fused_weights import with_fused_weights_apart
from planner.graph.trace import trace
from planner.plan.carried import carried_graph, graph_text
from tests.distributed.brought import fused

WIDTH = 6


class Read(nn.Module):
    """A linear layer of 3 x 6 outputs, and how they are read."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor], bias: bool = False) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.layer(x)).square().sum()


def parameters_of(read: Callable[[torch.Tensor], torch.Tensor], bias: bool = False) -> dict[str, tuple[int, ...]]:
    graph = with_fused_weights_apart(trace(Read(read, bias), (torch.randn(2, 4, WIDTH),)))
    return {one.name: graph.types[one.name].shape for one in graph.parameters}


def product(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return parts[0] * parts[1] + parts[2]


APART = {
    "chunk": lambda y: product(y.chunk(3, -1)),
    "split": lambda y: product(y.split(WIDTH, dim=2)),
    "slices": lambda y: product((y[..., :WIDTH], y[..., WIDTH:-WIDTH], y[..., -WIDTH:])),
    "view and unbind": lambda y: product(y.view(2, 4, 3, WIDTH).unbind(2)),
    "heads": lambda y: product(y.view(2, 4, 3, 2, 3).permute(2, 0, 3, 1, 4).unbind()),
    "select": lambda y: product(tuple(y.view(2, 4, 3, 2, 3).transpose(2, 3)[:, :, :, at] for at in range(3))),
    "a dim of one": lambda y: product(tuple(y.unflatten(-1, (3, WIDTH)).unsqueeze(0).transpose(0, -2).squeeze(-2))),
}


@pytest.mark.parametrize("read", APART.values(), ids=APART)
def test_each_matrix_is_a_parameter(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert parameters_of(read) == {f"layer.weight[{at}]": (WIDTH, WIDTH) for at in range(3)}


def test_the_bias_is_taken_apart_beside_the_weight() -> None:
    found = parameters_of(APART["chunk"], bias=True)
    assert [found[f"layer.bias[{at}]"] for at in range(3)] == [(WIDTH,)] * 3


class Turned(nn.Module):
    """A weight with its inputs first, as a parameter of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product((x @ self.weight).chunk(3, -1)).square().sum()


def test_a_weight_with_its_inputs_first_is_cut_along_its_last_dim() -> None:
    cuts = with_fused_weights_apart(trace(Turned(), (torch.randn(2, 4, WIDTH),))).cuts
    assert [(cut.dim, cut.start, cut.length) for cut in cuts.values()] == [(1, 0, 6), (1, 6, 6), (1, 12, 6)]


def test_matrices_of_several_sizes() -> None:
    found = parameters_of(lambda y: y.split([12, 3, 3], dim=-1)[0] + torch.cat(y.split([12, 3, 3], dim=-1)[1:] * 2, -1))
    assert [*found.values()] == [(12, WIDTH), (3, WIDTH), (3, WIDTH)]


WHOLE = {
    "a sum beside": lambda y: product(y.chunk(3, -1)) + y.sum(),
    "another border": lambda y: product(y.chunk(3, -1)).sum() + y[..., 3:9].sum(),
    "along a sequence": lambda y: product(y.chunk(4, 1)[:3]),
    "a part of it": lambda y: y[..., :WIDTH],
    "heads outermost": lambda y: product(y.view(2, 4, 2, 3, 3).unbind(3)),
    "the first part": lambda y: y.chunk(3, -1)[0],
    "two of three": lambda y: torch.mul(*y.view(2, 4, 3, WIDTH).unbind(2)[:2]),
    "single outputs": lambda y: torch.stack(y.unbind(-1)[::-1]).cumsum(0),
    "every second": lambda y: y[..., ::2],
}


@pytest.mark.parametrize("read", WHOLE.values(), ids=WHOLE)
def test_a_layer_that_is_read_in_another_way_stays_whole(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert parameters_of(read) == {"layer.weight": (3 * WIDTH, WIDTH)}


class Tied(nn.Module):
    """Two layers with one weight, or a weight that is read beside its layer."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.a, self.twice = nn.Linear(WIDTH, 2 * WIDTH, bias=False), twice
        self.b = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        if twice:
            self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.a(x).chunk(2, -1)
        return (first * second).sum() + (self.b(x) if self.twice else self.a.weight).square().sum()


@pytest.mark.parametrize("twice", [True, False])
def test_a_weight_with_other_readers_stays_whole(twice: bool) -> None:
    graph = with_fused_weights_apart(trace(Tied(twice=twice), (torch.randn(2, 4, WIDTH),)))
    assert "a.weight" in graph.parameter_names


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    module, args, _ = fused()
    return with_fused_weights_apart(trace(module, args))


def test_every_block_is_taken_apart_and_the_module_is_known(graph: OperatorGraph) -> None:
    for block in ("blocks.0", "blocks.1"):
        assert graph.cuts[f"{block}.attention.in_proj_bias[2]"].of == f"{block}.attention.in_proj_bias"
        sizes = [graph.cuts[f"{block}.queries_first.weight[{at}]"] for at in range(3)]
        of, hidden = f"{block}.queries_first.weight", sizes[0].length
        assert sizes[1:] == [
            Cut(of=of, dim=0, start=hidden, length=hidden // 2),
            Cut(of=of, dim=0, start=hidden * 3 // 2, length=hidden // 2),
        ]
        assert {f"{block}.gate_up.weight[{at}]" for at in range(2)} <= graph.parameter_names
    assert all(op.op not in ("aten.cat.default", "aten.unbind.int", "aten.chunk.default") for op in graph.operators)


def test_a_plan_file_keeps_where_the_parts_lie(graph: OperatorGraph) -> None:
    text = graph_text(graph, batch=4, sequence_length=16)
    assert text is not None
    assert carried_graph(text).graph.cuts == graph.cuts


@pytest.mark.parametrize("wrong", ["start", "dim", "length", "of"])
def test_parts_that_do_not_follow_each_other_are_refused(wrong: str, graph: OperatorGraph) -> None:
    from dataclasses import replace

    name = "blocks.0.queries_first.weight[1]"
    cut = replace(graph.cuts[name], **({"of": "head.weight"} if wrong == "of" else {wrong: 1}))
    changed = tuple(replace(one, cut=cut) if one.name == name else one for one in graph.parameters)
    text = graph_text(replace(graph, parameters=changed), batch=4, sequence_length=16)
    assert text is not None
    with pytest.raises(PlanFileError, match="is no part of"):
        carried_graph(text)
