"""Which layers are in fp8, and on which devices which recipes are."""

import pytest

from hardware_profiles import load_profile
from planner.errors import RequestError
from planner.graph.fp8 import Fp8
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import prepare
from planner.strategy_search.request.paying import paying
from tests.unit.search.cases import traced


def graph_of(name: str = "llama-4") -> OperatorGraph:
    return prepare(traced(name))[0]


def test_lines_of_32_are_refused_where_products_in_fp8_have_none() -> None:
    machine = load_profile("h100-80gb").with_devices(2)
    with pytest.raises(RequestError, match=r"mxfp8: NVIDIA H100.*Blackwell.*take tensorwise, rowwise.*blockwise"):
        paying(graph_of(), Fp8(recipe="mxfp8"), machine)


@pytest.mark.parametrize("profile", ["cpu", "a100-80gb"])
def test_devices_without_products_in_fp8_take_any_recipe(profile: str) -> None:
    """Who asks for fp8 there wants its numerics."""
    asked = Fp8(recipe="mxfp8")
    assert paying(graph_of(), asked, load_profile(profile).with_devices(2)) == asked
