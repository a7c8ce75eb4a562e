"""The fitted numbers of profiles, named, with units."""

import pytest

from hardware_profiles import compose, fitted_parameters, load_profile, profile_names


@pytest.mark.parametrize("name", profile_names())
def test_every_fitted_number_of_a_profile_has_a_unit_and_a_meaning(name: str) -> None:
    cluster = load_profile(name)
    found = fitted_parameters(cluster)
    parts = {one.part for one in found}
    assert {"kernels", "class matmul", "class optimizer"} <= parts
    for level in cluster.levels:
        assert {f"{level.name} {protocol.name}" for protocol in level.protocols} <= parts
    assert all(one.unit and one.meaning and one.source for one in found)
    keys = [fact.key for fact in cluster.facts if fact.key.startswith(("device.matmul", "device.attention"))]
    assert len([one for one in found if one.part.startswith(("matmul", "attention"))]) == len(keys)


def test_values_are_those_of_the_file() -> None:
    found = {(one.part, one.name): one for one in fitted_parameters(load_profile("h100-80gb"))}
    setup = found["node nvlink_sharp", "setup"]
    assert (setup.value, setup.unit, setup.kind) == (22.5, "µs", "fitted")
    assert found["matmul bf16", "feed"].unit == "GB/s"
    assert found["older attention", "flash2"].unit == "times"
    assert {name for part, name in found if part == "kernels"} == {"launch_latency", "host_latency", "misaligned"}
    assert "kernels_gemm.csv" in found["matmul bf16", "compute"].source


def test_a_composed_machine_has_the_protocols_of_its_levels() -> None:
    parts = {one.part for one in fitted_parameters(compose("h100-80gb", "node,rack=4,cluster"))}
    assert {"node simple", "rack simple", "cluster simple"} <= parts
