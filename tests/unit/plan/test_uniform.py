"""Blocks stand for each other only where they need the same gradients and nobody reads out of their midst."""

from dataclasses import replace

import pytest

from planner.graph.blocks import NO_BLOCKS, share_values
from planner.graph.kinds import find_blocks
from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.binding.bind import prepare
from planner.plan.binding.uniform import uniform_blocks
from tests.unit.search.cases import traced


def test_equal_blocks_stay_one_run() -> None:
    graph, blocks = share_values(traced("llama-4"), find_blocks(traced("llama-4")))
    assert blocks.count == 4
    assert uniform_blocks(graph, blocks) == blocks


def test_no_blocks_stay_none() -> None:
    assert uniform_blocks(traced("perceptron"), NO_BLOCKS) is NO_BLOCKS


@pytest.mark.parametrize(
    ("model", "all_blocks", "alike"),
    [
        ("chain-from-input", 5, 4),  # the inputs need no gradient, so neither does what the first block reads
        ("skips", 3, 0),  # the end reads all blocks
    ],
)
def test_what_differs_is_left_out(model: str, all_blocks: int, alike: int) -> None:
    found = find_blocks(traced(model))
    assert found.count == all_blocks
    blocks = prepare(traced(model))[1]
    assert blocks.count == alike
    if alike:
        shared = share_values(traced(model), found)[1]
        assert blocks.borders == shared.borders[1:]


def test_frozen_and_trained_halves_are_told_apart() -> None:
    graph, blocks = prepare(traced("residual-frozen-half"))
    names = {op.module for op in graph.operators[blocks.start : blocks.stop]}
    trained = [name for name in graph.differentiable if name in graph.parameter_names]
    assert blocks.count == 3
    ups = {name for name in names if name.startswith("ups.")}
    assert len(ups) == 3
    assert all(f"{name}.weight" not in trained for name in ups) or all(f"{name}.weight" in trained for name in ups)


def test_two_blocks_that_need_different_gradients_are_of_two_kinds() -> None:
    graph = traced("chain-from-input")
    run = find_blocks(graph)
    pair = run.part(0, 2)
    assert pair.kinds == (0, 0)
    assert uniform_blocks(graph, pair) == replace(pair, kinds=(0, 1))
    assert uniform_blocks(graph, run.part(0, 1)) == NO_BLOCKS


def test_two_layers_with_adapters_are_blocks() -> None:
    """Embeddings are frozen, so only the second layer needs the gradient of its input."""
    model = build_model("llama-tiny+num_layers=2+lora=4", dtype="float32")
    blocks = prepare(trace(model.module, model.args, model.kwargs))[1]
    assert blocks.kinds == (0, 1)
    assert len(blocks.operators(0)) == len(blocks.operators(1))
