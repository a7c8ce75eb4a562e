"""Clusters composed from profiles: what is asked for is there, all else stays, and the text says it all."""

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
from tests.refusals import refused

H100, GB200 = load_profile("h100-80gb"), load_profile("gb200-186gb")


def shape(cluster: Cluster) -> list[tuple[str, int | None, float, float]]:
    """Name, fan-out, GB/s and oversubscription of the levels."""
    return [(one.name, one.fan_out, one.bandwidth / 1e9, one.oversubscription) for one in cluster.levels]


def test_every_word_of_a_level() -> None:
    found = compose(H100, "node=4@300,rack=8@50,cluster=16@25/2")
    assert shape(found) == [("node", 4, 300, 1), ("rack", 8, 50, 1), ("cluster", 16, 25, 2)]
    assert (found.devices, found.with_devices(512).devices) == (4, 512)
    with refused(TopologyError, 512, 516):
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
    ("levels", "facts"),
    [
        ("", ("''", "NAME=COUNT@GB_PER_S/OVERSUBSCRIPTION")),
        ("node=8;cluster", ("'node=8;cluster'", "NAME=COUNT@GB_PER_S/OVERSUBSCRIPTION")),
        ("node=8@fast", ("'node=8@fast'", "NAME=COUNT@GB_PER_S/OVERSUBSCRIPTION")),
        ("node=-8", ("'node=-8'", "NAME=COUNT@GB_PER_S/OVERSUBSCRIPTION")),
        ("node=1,cluster", ("node=1", 2)),
        ("node@0,cluster", ("node", 0, "1,000,000")),
        ("node,cluster/0.5", ("cluster", 0.5, 1)),
        ("node,node", ("node, node",)),
        ("nodes=8,cluster", ("h100-80gb", "nodes", "node")),
        ("cluster=4,node", ("cluster, node", "h100-80gb", "node, cluster")),
        (
            "node,rack,cluster",
            ("rack", "h100-80gb", "node", "rack=4"),
        ),
        ("node,cluster,pod=2", ("cluster", "h100-80gb", "node", "cluster=4")),
        ("board,cluster", ("board", "h100-80gb", "devices", "board=4")),
    ],
)
def test_what_does_not_read_says_what_to_write(levels: str, facts: tuple[object, ...]) -> None:
    with refused(TopologyError, *facts):
        compose(H100, levels)


def test_counts_of_other_units_must_be_said() -> None:
    with refused(TopologyError, "rack", "tray", "rack=4"):
        compose(GB200, "tray=4,rack,cluster")
    with refused(TopologyError, "rack", "tray"):
        compose(GB200, "tray=4,rack")


def test_a_mesh_of_another_size_needs_its_bandwidth() -> None:
    ascend = load_profile("ascend-910b-64gb")
    with refused(TopologyError, "node=4@100"):
        compose(ascend, "node=4,cluster")
    with refused(TopologyError, "node", "node=4@100"):
        with_network(ascend, devices_per_node=4)
    assert compose(ascend, "node=4@84,cluster").levels[0].network == "mesh"
    assert with_network(ascend, devices_per_node=4, bandwidth={"node": 84e9}).levels[0].bandwidth == 84e9


def test_a_profile_is_composed_once() -> None:
    with refused(TopologyError, "node=4@450,cluster@50"):
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
    ("network", "facts"),
    [
        ({"bandwidth": {"rack": 1e9}}, ("h100-80gb", "rack", "node, cluster")),
        ({"bandwidth": {"node": 0.0}}, ("node", 0, "0.000001", "1,000,000")),
        ({"bandwidth": {"node": float("nan")}}, ("node", "nan", "0.000001")),
        ({"bandwidth": {"node": 450.0}}, ("node", "4.5e-07", "0.000001")),  # GB/s where bytes/s are meant
        ({"bandwidth": {"cluster": 50e18}}, ("cluster", "5e+10", "1,000,000")),
        ({"devices_per_node": 0}, ("devices_per_node", 0, 1)),
    ],
)
def test_networks_that_cannot_be(network: dict[str, object], facts: tuple[object, ...]) -> None:
    with refused(TopologyError, *facts):
        with_network(H100, **network)  # type: ignore[arg-type]


def test_numbers_that_were_asked_for_say_so_and_others_keep_their_source() -> None:
    facts = {fact.key: fact for fact in compose(H100, "node,rack=4,cluster@25").facts}
    assert facts["level.0.bandwidth_gb_per_s"].source.startswith("NVIDIA H100 datasheet")
    assert (facts["level.1.fan_out"].value, facts["level.1.fan_out"].kind) == (4, "assumed")
    assert facts["level.1.bandwidth_gb_per_s"].source.startswith("NVIDIA DGX H100")
    assert facts["level.2.bandwidth_gb_per_s"].source == "asked for: node=8@450,rack=4@50,cluster@25"
    assert facts["level.2.protocol.0.setup_us"].value == facts["level.1.protocol.0.setup_us"].value
    assert len(facts) == len(compose(H100, "node,rack=4,cluster@25").facts)


@pytest.mark.parametrize("levels", ["node=8@1e30,cluster", "node=8,cluster@1e-30", "node=8,cluster@50/1e12"])
def test_a_rate_that_no_link_has_is_refused(levels: str) -> None:
    with refused(TopologyError, "GB/s", "1,000,000"):
        compose(H100, levels)


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
