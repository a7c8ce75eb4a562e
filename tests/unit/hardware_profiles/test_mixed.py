"""Groups of devices: how they are written, what goes together, over what they talk."""

from dataclasses import replace

import pytest

from costmodels import collective_time
from hardware_profiles import (
    MixedCluster,
    TopologyError,
    clusters_of_ranks,
    is_mixed,
    links_of_ranks,
    load_machine,
    load_mixed,
    load_profile,
)
from tests.refusals import refused

TWO = "h100-80gb:16,a100-80gb:8"


def test_the_name_is_the_text_that_makes_it() -> None:
    for text in (TWO, f"{TWO},between@12.5", "h100-80gb[node=8@450,cluster=4@25]:16,a100-80gb:8"):
        found = load_mixed(text)
        assert found.name == text
        assert load_mixed(found.name) == found
        assert found.digest() == load_mixed(text).digest() != load_mixed("h100-80gb:8,a100-80gb:8").digest()
    assert load_mixed(TWO).devices == 24


def test_a_profile_is_no_mixture() -> None:
    assert not is_mixed("h100-80gb")
    assert not is_mixed("a,b:8.toml")
    assert load_machine("h100-80gb") == load_profile("h100-80gb")


def test_ranks_are_on_the_groups_in_their_order() -> None:
    machine = load_mixed(TWO)
    assert [one.name for one in clusters_of_ranks(machine, 3)] == ["h100-80gb", "h100-80gb", "a100-80gb"]
    assert next(one.name for one in clusters_of_ranks(machine.ordered((1, 0)), 3)) == "a100-80gb"
    with refused(TopologyError, 2, 16, 8, 8, 3):
        clusters_of_ranks(machine, 2)


def seconds(machine: MixedCluster, one: int, other: int) -> float:
    links = links_of_ranks(machine, one, other, 3, 8)
    return max(float(collective_time("send_recv", 1e9, link)) for link in links)


def test_groups_talk_over_the_slower_network() -> None:
    machine = load_mixed(TWO)
    slower = load_profile("a100-80gb").with_devices(16)
    assert seconds(machine, 1, 2) == pytest.approx(float(collective_time("send_recv", 1e9, slower.group(2, 8))))
    assert seconds(machine, 0, 1) < seconds(machine, 1, 2) == seconds(machine, 2, 1)
    half = replace(machine, bandwidth=slower.levels[-1].bandwidth / 2)
    assert seconds(half, 1, 2) > 1.9 * seconds(machine, 1, 2)
    assert seconds(half, 0, 1) == seconds(machine, 0, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h100-80gb:8", "one group of devices; say --hardware h100-80gb --devices 8"),
        ("h100-80gb:8,a100-80gb", "'a100-80gb' is not a group of devices; groups are written PROFILE:DEVICES"),
        ("h100-80gb:8,h100-80gb:8", "all groups are h100-80gb: say --hardware h100-80gb --devices 16"),
        ("h100-80gb:8,cpu:8", "no backend of collectives connects"),
        ("h100-80gb:8,a100-80gb:12", "the nearest legal numbers are 8 and 16"),
        (f"{TWO},between@0", "between@0 is a bandwidth of 0 GB/s; links carry 0.000001 to 1,000,000 GB/s"),
        (f"{TWO},between@1e-30", "between@1e-30"),
        (f"{TWO},between@12500000000", "between@1.25e+10"),
        (f"{TWO},between@1,between@2", "between stands twice"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(TopologyError) as refused:
        load_mixed(text)
    assert words in str(refused.value)
