"""Clusters composed from profiles: what is asked for is there, all else stays, and the text says it all."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware_profiles import (
    Cluster,
    LevelChoice,
    TopologyError,
    compose,
    load_profile,
    parse_levels,
    profile_names,
    with_network,
)

H100, GB200 = load_profile("h100-80gb"), load_profile("gb200-186gb")


def shape(cluster: Cluster) -> list[tuple[str, int | None, float, float]]:
    """Name, fan-out, GB/s and oversubscription of the levels."""
    return [(one.name, one.fan_out, one.bandwidth / 1e9, one.oversubscription) for one in cluster.levels]


def test_every_word_of_a_level() -> None:
    found = compose(H100, "node=4@300,rack=8@50,cluster=16@25/2")
    assert shape(found) == [("node", 4, 300, 1), ("rack", 8, 50, 1), ("cluster", 16, 25, 2)]
    assert (found.devices, found.with_devices(512).devices) == (4, 512)
    with pytest.raises(TopologyError, match="at most 512"):
        found.with_devices(516)


def test_what_is_left_out_is_the_profiles() -> None:
    found = compose(H100, "node,rack=4,cluster@25")
    assert shape(found) == [("node", 8, 450, 1), ("rack", 4, 50, 1), ("cluster", None, 25, 1)]
    assert found.levels[0] == H100.levels[0]
    assert found.levels[2].protocols == found.levels[1].protocols == H100.levels[1].protocols


def test_a_level_that_is_not_named_is_not_there() -> None:
    assert shape(compose(GB200, "rack=16")) == [("rack", 16, 900, 1)]
    assert shape(compose(H100, "cluster@12.5")) == [("cluster", None, 12.5, 1)]


def test_a_new_level_is_like_the_next_one_outwards() -> None:
    inside = compose(GB200, "tray=4,rack=18,cluster").levels[0]
    assert (inside.bandwidth, inside.in_network) == (GB200.levels[0].bandwidth, GB200.levels[0].in_network)
    outside = compose(H100, "node,cluster=64,region@1").levels[2]
    assert (outside.fan_out, outside.protocols) == (None, H100.levels[1].protocols)


def test_naming_the_levels_as_they_are_is_the_profile_itself() -> None:
    for name in profile_names():
        profile = load_profile(name)
        same = compose(profile, ",".join(level.name for level in profile.levels))
        assert (same, same.composition, same.digest()) == (profile, "", profile.digest())


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ("", "'' is not a level; write NAME=COUNT@GB_PER_S/OVERSUBSCRIPTION"),
        ("node=8;cluster", "'node=8;cluster' is not a level"),
        ("node=8@fast", "'node=8@fast' is not a level"),
        ("node=-8", "'node=-8' is not a level"),
        ("node=1,cluster", "level node=1: a level joins 2 or more; leave it out"),
        ("node@0,cluster", "level node has a bandwidth of 0 GB/s; it is above 0"),
        ("node,cluster/0.5", "oversubscription 0.5; it is 1 or more"),
        ("node,node", "one name stands twice"),
        ("nodes=8,cluster", "h100-80gb has no level called nodes; did you mean node?"),
        ("cluster=4,node", "h100-80gb has node, cluster, innermost first; name them so"),
        (
            "node,rack,cluster",
            "level rack: h100-80gb does not say how many node units are in one; say it, as in rack=4",
        ),
        ("node,cluster,pod=2", "level cluster: h100-80gb does not say how many node units are in one"),
        ("board,cluster", "level board: h100-80gb does not say how many devices are in one"),
    ],
)
def test_what_does_not_read_says_what_to_write(levels: str, message: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(message)):
        compose(H100, levels)


def test_counts_of_other_units_must_be_said() -> None:
    with pytest.raises(TopologyError, match="does not say how many tray units are in one; say it, as in rack=4"):
        compose(GB200, "tray=4,rack,cluster")
    with pytest.raises(TopologyError, match="does not say how many tray units are in one"):
        compose(GB200, "tray=4,rack")


def test_a_mesh_of_another_size_needs_its_bandwidth() -> None:
    ascend = load_profile("ascend-910b-64gb")
    with pytest.raises(TopologyError, match=r"a mesh of direct links.*as in node=4@100"):
        compose(ascend, "node=4,cluster")
    with pytest.raises(TopologyError, match="a mesh of direct links"):
        with_network(ascend, devices_per_node=4)
    assert compose(ascend, "node=4@84,cluster").levels[0].network == "mesh"
    assert with_network(ascend, devices_per_node=4, bandwidth={"node": 84e9}).levels[0].bandwidth == 84e9


def test_a_profile_is_composed_once() -> None:
    with pytest.raises(TopologyError, match="composed already, of node=4@450,cluster@50; compose the profile itself"):
        compose(compose(H100, "node=4,cluster"), "node=2,cluster")


def test_published_networks() -> None:
    omni_path = with_network(load_profile("a100-40gb"), bandwidth={"cluster": 4 * 100e9 / 8 / 8})
    assert shape(omni_path) == [("node", 8, 300, 1), ("cluster", None, 6.25, 1)]
    assert omni_path.composition == "node=8@300,cluster@6.25"
    before, after = load_profile("a100-40gb").levels[1], omni_path.levels[1]
    assert (after.protocols, after.efficiency, after.latency) == (before.protocols, before.efficiency, before.latency)
    assert shape(with_network(H100, devices_per_node=4)) == [("node", 4, 450, 1), ("cluster", None, 50, 1)]
    assert shape(with_network(H100, devices_per_node=1)) == [("cluster", None, 50, 1)]
    assert with_network(H100) == with_network(H100, devices_per_node=8, bandwidth={"cluster": 50e9}) == H100


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"bandwidth": {"rack": 1e9}}, "h100-80gb has no level called rack; its levels are node, cluster"),
        ({"bandwidth": {"node": 0.0}}, "level node has a bandwidth of 0 GB/s; it is above 0"),
        ({"bandwidth": {"node": float("nan")}}, "bandwidth of nan"),
        ({"devices_per_node": 0}, "devices_per_node is 0; it is 1 or more"),
    ],
)
def test_networks_that_cannot_be(network: dict[str, object], message: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(message)):
        with_network(H100, **network)  # type: ignore[arg-type]


def test_numbers_that_were_asked_for_say_so_and_others_keep_their_source() -> None:
    facts = {fact.key: fact for fact in compose(H100, "node,rack=4,cluster@25").facts}
    assert facts["level.0.bandwidth_gb_per_s"].source.startswith("NVIDIA H100 datasheet")
    assert (facts["level.1.fan_out"].value, facts["level.1.fan_out"].kind) == (4, "assumed")
    assert facts["level.1.bandwidth_gb_per_s"].source.startswith("NVIDIA DGX H100")
    assert facts["level.2.bandwidth_gb_per_s"].source == "asked for: node=8@450,rack=4@50,cluster@25"
    assert facts["level.2.protocol.0.setup_us"].value == facts["level.1.protocol.0.setup_us"].value
    assert len(facts) == len(compose(H100, "node,rack=4,cluster@25").facts)


BANDWIDTHS = st.none() | st.floats(1e6, 1e13)
OVER = st.none() | st.floats(1, 64)


@given(
    st.sampled_from(profile_names()),
    st.lists(st.tuples(st.integers(2, 64), BANDWIDTHS, OVER), min_size=1, max_size=3),
    st.floats(1e6, 1e13),
)
def test_the_text_makes_the_same_machine_again(
    name: str, inner: list[tuple[int, float | None, float | None]], bandwidth: float
) -> None:
    """Whatever was composed and however often its network was changed."""
    profile = load_profile(name)
    new = [
        LevelChoice(name=f"x{at}", fan_out=count, bandwidth=rate or 1e9, oversubscription=over)
        for at, (count, rate, over) in enumerate(inner)
    ]
    last = profile.levels[-1].name
    composed = compose(profile, [*new, LevelChoice(name=last, bandwidth=bandwidth)])
    for cluster in (composed, with_network(composed, bandwidth={last: bandwidth / 3}, devices_per_node=1)):
        again = compose(profile, cluster.composition)
        assert (again.levels, again.digest()) == (cluster.levels, cluster.digest())
        assert parse_levels(cluster.composition)[-1].bandwidth == again.levels[-1].bandwidth
