"""What a plan leaves free for the error of its peak."""

from dataclasses import replace

import pytest

import planner
from costmodels import planned_memory
from hardware_profiles import Cluster, load_profile, load_software, software_facts
from planner.cli.values import parse_margin
from planner.errors import InfeasibleError, RequestError
from planner.strategy_search.job import machine_from, with_memory_margin
from tests.refusals import refused


def small(nbytes: float) -> Cluster:
    cluster = load_profile("cpu")
    return replace(cluster, device=replace(cluster.device, memory=nbytes))


@pytest.mark.slow
@pytest.mark.thorough
def test_the_upper_end_of_the_peak_fits() -> None:
    full = planner.search("llama-tiny", small(2**30), devices=2, memory_margin=0.0).plan.prediction
    assert full.high_peak_bytes == full.peak_bytes
    tight = small(full.peak_bytes)
    left = planner.search("llama-tiny", tight, devices=2, memory_margin=0.02).plan.prediction
    assert left.high_peak_bytes == pytest.approx(1.02 * left.peak_bytes)
    assert 1.02 * left.peak_bytes <= tight.device.memory
    with refused(InfeasibleError, "a margin of 50.0%", "memory_margin"):
        planner.search("llama-tiny", tight, devices=2, memory_margin=0.5)


def test_the_margin_is_that_of_the_stack_unless_it_is_given() -> None:
    for name in ("pytorch", "nemo", "megatron"):
        software = load_software(name)
        assert software.peak_low < 1 < software.peak_high
        (fact,) = (one for one in software_facts(name) if one.key == "peak_high")
        assert (fact.value, fact.kind) == (software.peak_high, "fitted")
    cluster = load_profile("h100-80gb").with_software(load_software("nemo"))
    assert planned_memory(cluster.device, cluster.software) == cluster.device.memory / load_software("nemo").peak_high
    assert with_memory_margin(cluster, 0.25).software.peak_high == 1.25
    with refused(RequestError, "memory_margin", -0.1):
        with_memory_margin(cluster, -0.1)


def test_a_machine_built_in_python_has_the_margin_of_its_stack() -> None:
    """As a profile by its name has it; a margin that is given, 0 too, is kept."""
    bare = load_profile("cpu")
    assert (bare.software.peak_low, bare.software.peak_high) == (1.0, 1.0)
    assert machine_from(bare).software == load_software("pytorch") == machine_from("cpu").software
    nemo = machine_from(bare.with_software(replace(bare.software, name="nemo")))
    assert nemo.software.peak_high == load_software("nemo").peak_high
    given = with_memory_margin(machine_from(bare), 0.0)
    assert machine_from(given).software.peak_high == 1.0
    assert with_memory_margin(machine_from(bare), 0.25).software.peak_high == 1.25
    found = planner.search("llama-tiny", bare, devices=2).plan.prediction
    assert found.high_peak_bytes == pytest.approx(load_software("pytorch").peak_high * found.peak_bytes)


def test_a_margin_is_a_share() -> None:
    assert (parse_margin("5%"), parse_margin("0.05"), parse_margin("0")) == (0.05, 0.05, 0.0)
    for text in ("5 GiB", "-1%", "150%", "much"):
        with refused(RequestError, "--memory-margin", text):
            parse_margin(text)
