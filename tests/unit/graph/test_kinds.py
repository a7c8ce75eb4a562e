"""Blocks of several kinds are found where they hand on the same values, and only there."""

import pytest
import torch
from torch import nn

from planner.graph.blocks import share_values
from planner.graph.kinds import find_blocks, lanes
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.binding.bind import prepare
from planner.strategy_search.request.folding import fold

WIDTH = 8


class Block(nn.Module):
    """A layer with a residual: "a" with a norm, "b" without; "w" hands on twice the width."""

    def __init__(self, letter: str) -> None:
        super().__init__()
        self.letter = letter
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x) if self.letter == "a" else x).relu()


class Net(nn.Module):
    """Blocks in a list; the end may read what a block in the middle made."""

    def __init__(self, letters: str, reads: int | None = None, before: nn.Module | None = None) -> None:
        super().__init__()
        self.before = before
        self.blocks = nn.ModuleList(Block(letter) for letter in letters)
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2.0 if self.before is None else self.before(x)
        made = []
        for block in self.blocks:
            x = block(x)
            made.append(x)
        return (x if self.reads is None else x + made[self.reads]).pow(2).mean()


def graph_of(letters: str, reads: int | None = None, before: nn.Module | None = None) -> OperatorGraph:
    return trace(Net(letters, reads, before), (torch.ones(2, WIDTH),))


@pytest.mark.parametrize(
    ("letters", "kinds"),
    [
        ("aaaa", (0, 0, 0, 0)),
        ("bbaaa", (0, 0, 1, 1, 1)),
        ("baaa", (0, 1, 1, 1)),
        ("aaab", (0, 0, 0, 1)),
        ("ababab", (0, 1, 0, 1, 0, 1)),
        ("aabbba", (0, 0, 1, 1, 1, 0)),
    ],
)
def test_neighbours_in_the_list_are_blocks_too(letters: str, kinds: tuple[int, ...]) -> None:
    graph = graph_of(letters)
    blocks = find_blocks(graph)
    assert blocks.kinds == kinds
    assert [graph.operators[at].module.split(".")[:2] for at in blocks.borders[:-1]] == [
        ["blocks", str(number)] for number in range(len(letters))
    ]
    assert lanes(graph, blocks) is not None


class Repeated(Net):
    """Each layer is called twice, one time after the other (MobileLLM), or one layer every time (ALBERT)."""

    def __init__(self, letters: str, *, all_of_one: bool) -> None:
        super().__init__(letters)
        layers = [self.blocks[0] if all_of_one else self.blocks[at // 2] for at in range(len(letters))]
        self.blocks = nn.ModuleList(layers)


@pytest.mark.parametrize(("all_of_one", "each"), [(False, 2), (True, 1)])
def test_layers_that_share_weights_are_one_block_where_blocks_have_their_own(all_of_one: bool, each: int) -> None:
    graph = trace(Repeated("aaaaaa", all_of_one=all_of_one), (torch.ones(2, WIDTH),))
    blocks = find_blocks(graph)
    assert blocks.kinds == (0,) * (6 // each)
    assert [graph.operators[at].module.split(".")[1] for at in blocks.borders[:-1]] == [
        str(number) for number in range(0, 6, each)
    ]


def test_what_the_end_reads_in_the_midst_is_no_border() -> None:
    """The first two blocks are left out: the end reads what the second one makes."""
    assert find_blocks(graph_of("bbaaa")).count == 5
    assert find_blocks(graph_of("bbaaa", reads=1)).count == 3


def test_another_width_at_the_entrance_is_no_block() -> None:
    """What enters the first block of a list must be what blocks hand on."""

    class Widening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH), *(Block("a") for _ in range(3))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.cat((x, x), -1)
            for block in self.blocks:
                x = block(x)
            return x.pow(2).mean()

    assert find_blocks(trace(Widening(), (torch.ones(2, WIDTH),))).kinds == (0, 0, 0)


def test_a_template_has_one_block_of_each_kind_and_twins_at_its_end() -> None:
    graph, blocks = prepare(graph_of("bbaaa"))
    template = fold(graph, blocks)
    assert [len(held) for held in template.held] == [len(blocks.operators(first)) for first in blocks.firsts]
    (twin,) = template.twins
    assert (twin in template.held[1], template.twins[twin] in template.held[0]) == (True, True)
    assert template.makers == (template.twins[twin],)
    assert template.pipelines
    assert sum(template.times(at) for at in range(len(template.graph.operators))) == len(graph.operators)


def test_a_weight_of_all_blocks_is_named_where_no_pipeline_can_be_cut() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x).relu() * self.scale
            return x.pow(2).mean()

    graph, blocks = prepare(trace(Shared(), (torch.ones(2, WIDTH),)))
    template = fold(graph, blocks)
    assert template.blocks.count > 1
    assert (template.shared_by_blocks, template.pipelines) == ("scale", False)


@pytest.mark.parametrize(("letters", "passing", "crossing"), [("abab", "ab", "b"), ("aaaa", "a", "a")])
def test_stages_hand_on_what_was_made_before_the_blocks(letters: str, passing: str, crossing: str) -> None:
    """Each kind reads a table of its own, as local and global positions of Gemma 3; that of the last reaches all."""

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x * table)

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Layer(WIDTH, WIDTH, bias=letter == "a") for letter in letters])

        def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            x, tables = x * 2.0, {"a": places.float().cos(), "b": places.float().sin()}
            for letter, block in zip(letters, self.blocks, strict=True):
                x = block(x, tables[letter])
            return x.pow(2).mean()

    graph, blocks = prepare(trace(Placed(), (torch.ones(2, WIDTH), torch.zeros(2, WIDTH, dtype=torch.int64))))
    template = fold(graph, blocks)
    assert template.pipelines

    def tables(names: tuple[str, ...]) -> set[str]:
        makers = {"cos": "a", "sin": "b"}
        ops = [template.graph.operators[template.graph.producer[name]].name for name in names]
        return {letter for name in ops for word, letter in makers.items() if word in name}

    assert (tables(template.passing), tables(template.crossing)) == (set(passing), set(crossing))


@pytest.mark.slow
@pytest.mark.thorough
def test_the_loss_of_routers_is_a_lane_of_its_own() -> None:
    """Dense blocks of DeepSeek hand it on too, so that stages can end behind each of them."""
    built = build_model("deepseek-tiny", dtype="float32")
    graph = trace(built.module, built.args)
    shared, blocks = share_values(graph, find_blocks(graph))
    assert blocks.kinds == (0, 0, 1, 1, 1)
    found = lanes(shared, blocks)
    assert found is not None
    assert [len(places) for places in found] == [2, 2]


def test_equal_tensors_of_a_prepared_graph_are_one_object() -> None:
    graph, _ = prepare(graph_of("aaa"))
    objects = {id(tensor) for tensor in graph.types.values()}
    assert len(objects) == len(set(graph.types.values())) < len(graph.types)
