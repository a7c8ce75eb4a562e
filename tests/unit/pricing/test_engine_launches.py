"""Launches of dense layers by count of Megatron-Core's code, instead of one for each operator of the graph."""

from dataclasses import replace

import pytest

from hardware_profiles import load_profile, load_software
from planner.graph.projections import joined_projections
from planner.pricing.operator_price import price_operator
from planner.sharding.mesh import build_mesh
from planner.sharding.rules import rule_of
from tests.unit.search.cases import traced

MACHINE = load_profile("h100-80gb").with_devices(1)


def launches(model: str, *, counted: bool, dropout: bool = False) -> dict[str, tuple[int, int]]:
    """Launches of every operator of a model on one device, forward and backward."""
    graph = traced(model)
    software = replace(
        load_software("megatron"), engine_launches=counted, host=1.0, hidden_dropout="fused" if dropout else "none"
    )
    cluster, found = MACHINE.with_software(software), dict[str, tuple[int, int]]()
    joined = joined_projections(graph)
    for op in graph.operators:
        rule = replace(rule_of(graph, op), joins_projection=counted and op.name in joined)
        types = ([graph.types[n] for n in op.operands], [graph.types[n] for n in op.results if n is not None])
        graded = [name in graph.differentiable for name in op.operands]
        prices = price_operator(rule, [()], *types, graded, build_mesh(cluster, ()), cluster)
        there, back = (float(seconds[0]) / cluster.device.host_latency for seconds in prices.host)
        found[op.name] = round(there), round(back)
    return found


def of_block(model: str, block: str, *, counted: bool, dropout: bool = False) -> tuple[int, int]:
    """Launches of a block, forward and backward."""
    found = launches(model, counted=counted, dropout=dropout)
    inside = [counts for name, counts in found.items() if f".{block}." in f".{name}".replace("/", ".")]
    return sum(there for there, _ in inside), sum(back for _, back in inside)


def test_queries_keys_and_values_are_one_product() -> None:
    """And so are a gate and what it multiplies."""
    joined = joined_projections(traced("llama-4"))
    assert {name.rpartition("/")[0].rpartition(".")[2] for name in joined} == {"k_proj", "v_proj", "up_proj"}


def test_a_block_of_llama_launches_what_megatron_does() -> None:
    """Forward: two norms, four products, two rotations, attention, the gate, two sums. Backward: two kernels and an
    addition to main_grad for each norm; two for each product; one for each rotation, the gate and each sum, two for
    attention."""
    assert of_block("llama-4", "1", counted=True) == (12, 6 + 8 + 2 + 1 + 2 + 2)


@pytest.mark.parametrize(("dropout", "added"), [(False, 2), (True, 4)])
def test_a_block_of_gpt_adds_up_gradients_of_biases(dropout: bool, added: int) -> None:
    """Each of four products sums the gradient of its bias and adds it to main_grad; norms have biases, too."""
    assert of_block("gpt-3", "1", counted=True, dropout=dropout) == (10, 8 + 4 * 4 + 1 + 2 + added)
