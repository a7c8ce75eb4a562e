import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from hardware_profiles import Cluster, Group, Level, Protocol, Span, TopologyError, UnknownKeyError, load_profile
from tests.refusals import refused

NODES = load_profile("h100-80gb").with_devices(1024)
PROTOCOL = Protocol(name="simple", setup=0.0, latency=1e-6, efficiency=1.0)


def level(name: str, fan_out: int | None, network: str = "switch") -> Level:
    return Level(name=name, fan_out=fan_out, network=network, bandwidth=1e9, protocols=(PROTOCOL,))  # type: ignore[arg-type]


def cluster(*levels: Level, devices: int) -> Cluster:
    return Cluster(name="test", device=NODES.device, levels=levels, devices=devices)


def shape(group: Group) -> list[tuple[str, int]]:
    return [(span.level.name, span.count) for span in group.spans]


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (1, 1, []),
        (1, 8, []),
        (8, 1, [("node", 8)]),
        (4, 2, [("node", 4)]),
        (16, 1, [("node", 8), ("cluster", 2)]),
        (16, 4, [("node", 2), ("cluster", 8)]),
        (8, 8, [("cluster", 8)]),
        (4, 16, [("cluster", 4)]),
        (6, 1, [("node", 2), ("cluster", 3)]),  # devices 6 to 11 have two in one node and four in the next
        (3, 1, [("cluster", 3)]),
        (4, 3, [("cluster", 4)]),
        (12, 2, [("node", 4), ("cluster", 3)]),
    ],
)
def test_group_counts_members_at_the_level_they_share(size: int, stride: int, expected: list[tuple[str, int]]) -> None:
    group = NODES.group(size, stride)
    assert shape(group) == expected
    assert group.size == size


def test_within_one_node_any_group_stays_inside() -> None:
    assert shape(NODES.with_devices(6).group(3, 2)) == [("node", 3)]


def test_group_of_three_levels() -> None:
    three = cluster(level("node", 4), level("rack", 4), level("pod", None), devices=64)
    assert shape(three.group(64, 1)) == [("node", 4), ("rack", 4), ("pod", 4)]
    assert shape(three.group(4, 16)) == [("pod", 4)]
    assert shape(three.group(8, 2)) == [("node", 2), ("rack", 4)]
    assert shape(three.group(6, 1)) == [("node", 2), ("pod", 3)]


def test_groups_are_cached() -> None:
    assert NODES.group(16, 4) is NODES.group(16, 4)


def test_group_beyond_the_devices_in_use() -> None:
    with refused(TopologyError, 4, 8, 24, "h100-80gb", 8):
        load_profile("h100-80gb").group(4, 8)


def test_group_needs_size_and_stride() -> None:
    with refused(TopologyError, "size 0", "stride 1"):
        NODES.group(0, 1)


def test_span_of_one_is_refused() -> None:
    with refused(TopologyError, 2, "[1]"):
        Group(spans=(Span(level=level("node", 8), count=1),))


def test_part_of_a_mesh_has_part_of_its_bandwidth() -> None:
    mesh = level("node", 8, "mesh")
    assert [Span(level=mesh, count=count).bandwidth for count in (8, 2)] == pytest.approx([1e9, 1e9 / 7])
    assert Span(level=level("node", 8), count=2).bandwidth == 1e9


@pytest.mark.parametrize("devices", [1, 3, 8, 16, 4096])
def test_with_devices(devices: int) -> None:
    assert NODES.with_devices(devices).devices == devices


def test_ragged_nodes_are_refused_with_the_nearest_numbers() -> None:
    with refused(TopologyError, 8, 20, 16, 24):
        NODES.with_devices(20)


def test_no_devices() -> None:
    with refused(TopologyError, "h100-80gb", 1, 0):
        NODES.with_devices(0)


def test_more_devices_than_the_hierarchy_holds() -> None:
    with refused(TopologyError, "test", 16, 20):
        cluster(level("node", 4), level("rack", 4), devices=4).with_devices(20)


@pytest.mark.parametrize(
    ("levels", "facts"),
    [
        ((), ("test",)),
        ((level("node", None), level("rack", 2)), ("node", "test", "outermost")),
        ((level("node", 1),), ("node", "test", "fan_out 1", 2)),
        ((level("node", None, "mesh"),), ("node", "test", "mesh", "fan_out")),
    ],
)
def test_impossible_levels(levels: tuple[Level, ...], facts: tuple[object, ...]) -> None:
    with refused(TopologyError, *facts):
        cluster(*levels, devices=2)


def test_levels_must_share_their_protocols() -> None:
    other = Protocol(name="tcp", setup=0.0, latency=1e-6, efficiency=1.0)
    outer = Level(name="cluster", fan_out=None, network="switch", bandwidth=1e9, protocols=(other,))
    with refused(TopologyError, "cluster", "['simple']"):
        cluster(level("node", 8), outer, devices=8)


def test_every_kind_of_collective_needs_a_protocol() -> None:
    rings = replace(PROTOCOL, serves="rings")
    with refused(TopologyError, "test", "peers"):
        cluster(replace(level("node", 8), protocols=(rings,)), devices=8)
    outer = replace(level("cluster", None), protocols=(rings,))
    with refused(TopologyError, "cluster", "['simple']"):
        cluster(level("node", 8), outer, devices=8)


def test_ports_are_owned_and_uplinks_are_shared() -> None:
    """Eight groups of one device a node have a port each; behind a 4:1 uplink each device has a quarter of its port."""
    racks = replace(level("rack", None), oversubscription=4.0)
    both = cluster(level("node", 8), replace(level("cluster", 4), bandwidth=5e8), racks, devices=256)
    own = [(span.level.name, span.bandwidth) for span in both.group(4, 8).spans]
    assert own == [("cluster", 5e8)]
    shared = [(span.level.name, span.bandwidth) for span in both.group(8, 32).spans]
    assert shared == [("rack", 1e9 / 4)]
    for wrong in (0.5, float("inf"), float("nan")):
        with refused(TopologyError, "rack", wrong, 1):
            cluster(level("node", 8), replace(racks, oversubscription=wrong), devices=8)


def test_fields_that_are_not_used_leave_the_digest_alone() -> None:
    """A profile that does not say them is the same as one that says what they are then."""
    fast, slow = (replace(level("node", 8), oversubscription=ratio) for ratio in (1.0, 2.0))
    assert cluster(fast, devices=8).digest() == cluster(level("node", 8), devices=8).digest()
    assert cluster(slow, devices=8).digest() != cluster(fast, devices=8).digest()


def test_unknown_dtype_and_op_class() -> None:
    with refused(UnknownKeyError, NODES.device.name, "int4", "bf16", "fp16"):
        NODES.device.peak("int4")
    with refused(UnknownKeyError, NODES.device.name, "convolution", "attention", "copy"):
        NODES.device.efficiency("convolution")


def test_level_reports_its_best_protocol() -> None:
    node = NODES.levels[0]
    assert node.latency == min(protocol.latency for protocol in node.protocols)
    assert node.efficiency == max(protocol.efficiency for protocol in node.protocols)


def test_digest_is_of_the_content() -> None:
    assert NODES.digest() == load_profile("h100-80gb").digest()
    assert NODES.digest() != load_profile("a100-80gb").digest()
    assert len(NODES.digest()) == 64


def test_hashes_survive_pickling_between_processes() -> None:
    code = (
        "import pickle, sys; from hardware_profiles import load_profile;"
        "c = load_profile('cpu').with_devices(4);"
        "sys.stdout.buffer.write(pickle.dumps((c, c.group(4, 1))))"
    )
    sent = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    there, group = pickle.loads(sent)
    here = load_profile("cpu").with_devices(4)
    assert there == here
    assert hash(there) == hash(here)
    assert {group} == {here.group(4, 1)}
