from dataclasses import replace

import numpy as np
import pytest

from costmodels import COLLECTIVES, CostModelError, affine_pieces, collective_lower_bound, collective_time
from hardware_profiles import Group, Level, Protocol, Span
from hardware_profiles.network import Serves
from tests.refusals import refused

US = 1e-6
GB = 1e9


def level(bandwidth: float, latency: float, *, bounded: bool, reduces: bool = False, network: str = "switch") -> Level:
    return Level(
        name="node" if bounded else "cluster",
        fan_out=8 if bounded else None,
        network=network,  # type: ignore[arg-type]
        bandwidth=bandwidth,
        protocols=(Protocol(name="simple", setup=10 * US, latency=latency, efficiency=1.0),),
        in_network=Protocol(name="sharp", setup=5 * US, latency=1 * US, efficiency=0.5) if reduces else None,
    )


def group(*spans: tuple[Level, int]) -> Group:
    return Group(spans=tuple(Span(level=one, count=count) for one, count in spans))


NODE = level(100 * GB, 1 * US, bounded=True)
NETWORK = level(10 * GB, 5 * US, bounded=False)
EIGHT = group((NODE, 8))
TWO_BY_FOUR = group((NODE, 4), (NETWORK, 2))
ONE = Group(spans=())


@pytest.mark.parametrize(
    ("kind", "steps", "share"),
    [
        ("all_reduce", 14, 2 * 7 / 8),
        ("all_gather", 7, 7 / 8),
        ("reduce_scatter", 7, 7 / 8),
        ("all_to_all", 7, 7 / 8),
        ("broadcast", 7, 1),
        ("send_recv", 1, 1),
    ],
)
def test_one_level_by_hand(kind: str, steps: int, share: float) -> None:
    message = 8 * GB
    assert collective_time(kind, message, EIGHT) == pytest.approx(10 * US + steps * US + share * message / (100 * GB))


def test_a_node_drives_all_its_ports() -> None:
    message = 8 * GB
    # one ring through 8 devices: 7/8 of the message leaves each node through 4 ports; 6 inner hops and 1 outer
    gather = 10 * US + 6 * 1 * US + 1 * 5 * US + 7 / 8 * message / (4 * 10 * GB)
    assert collective_time("all_gather", message, TWO_BY_FOUR) == pytest.approx(gather)
    # two nodes of a hierarchy exchange the message once: 2 (Q-1)/Q = 1; 2 (3 + 1) steps
    reduce = 10 * US + 2 * (3 * 1 * US + 1 * 5 * US) + message / (4 * 10 * GB)
    assert collective_time("all_reduce", message, TWO_BY_FOUR) == pytest.approx(reduce)
    # half of the peers are in the other node, each device through its own port
    exchange = 10 * US + 3 * 1 * US + 1 * 5 * US + 4 / 8 * message / (10 * GB)
    assert collective_time("all_to_all", message, TWO_BY_FOUR) == pytest.approx(exchange)
    assert collective_time("send_recv", message, TWO_BY_FOUR) == pytest.approx(15 * US + message / (10 * GB))
    assert collective_time("broadcast", message, TWO_BY_FOUR) == pytest.approx(18 * US + message / (4 * 10 * GB))


def test_nccl_broadcasts_and_reduces_to_one_device_along_rings_alone() -> None:
    kernels = replace(NETWORK.protocols[0], serves="rings")
    nccl = group((replace(NETWORK, protocols=(kernels,)), 64))
    for kind in ("broadcast", "reduce"):
        assert collective_time(kind, 1.0, group((NETWORK, 64))) == pytest.approx(10 * US + 6 * 5 * US, rel=1e-5)
        assert collective_time(kind, 1.0, nccl) == pytest.approx(10 * US + 63 * 5 * US, rel=1e-5)
    assert collective_time("all_reduce", 1.0, nccl) == collective_time("all_reduce", 1.0, group((NETWORK, 64)))


def over_nodes(nodes: int, serves: Serves = "rings", node: Level = NODE) -> Group:
    """Four devices in each node, whose kernels along rings serve `serves`: "rings" is NCCL."""
    levels = [replace(one, protocols=(replace(one.protocols[0], serves=serves),)) for one in (node, NETWORK)]
    return group((levels[0], 4), (levels[1], nodes))


def test_nccl_has_no_hierarchical_all_reduce() -> None:
    """Over four nodes 2 (N-1)/N of the message leave a node along the ring of all 16 devices, where an all-reduce
    between the four would send 2 (Q-1)/Q. Two nodes send it once, on a tree."""
    message = 100 * GB
    ring = 10 * US + 2 * (12 * 1 * US + 3 * 5 * US) + 2 * 15 / 16 * message / (4 * 10 * GB)
    assert collective_time("all_reduce", message, over_nodes(4)) == pytest.approx(ring)
    hierarchical = 10 * US + 2 * (3 * 1 * US + 3 * 5 * US) + 2 * 3 / 4 * message / (4 * 10 * GB)
    assert collective_time("all_reduce", message, over_nodes(4, "all")) == pytest.approx(hierarchical)
    tree = 10 * US + 2 * (3 * 1 * US + 1 * 5 * US) + message / (4 * 10 * GB)
    assert collective_time("all_reduce", message, over_nodes(2)) == pytest.approx(tree)
    parts = [collective_time(kind, message, over_nodes(4)) for kind in ("reduce_scatter", "all_gather")]
    assert collective_time("all_reduce", message, over_nodes(4)) == pytest.approx(sum(parts), rel=1e-4)


def test_an_nvls_tree_has_trees_between_nodes() -> None:
    """2 of the message through the ports of a node of eight, 1 of two; two log2 steps beside the switch's."""
    node = level(25 * GB, 1 * US, bounded=True, reduces=True)
    assert node.in_network is not None
    node = replace(node, in_network=replace(node.in_network, efficiency=1.0))
    for nodes, sends, steps in ((2, 1, 1), (8, 2, 3)):
        latency, load = affine_pieces("all_reduce", over_nodes(nodes, node=node))[-1]
        assert latency == pytest.approx((10 + 5 + 3 + 2 * steps * 5) * US)
        assert load == pytest.approx(max(1 / (1.0 * 25 * GB), sends / (4 * 10 * GB)))


def test_trees_win_on_small_messages_between_many_nodes() -> None:
    many = group((NETWORK, 64))
    assert collective_time("all_reduce", 1.0, many) == pytest.approx(10 * US + 2 * 6 * 5 * US, rel=1e-5)
    large = 100 * GB
    assert collective_time("all_reduce", large, many) == pytest.approx(
        10 * US + 126 * 5 * US + 2 * 63 / 64 * large / (10 * GB)
    )


def test_switches_that_reduce() -> None:
    node = level(100 * GB, 1 * US, bounded=True, reduces=True)
    switch = (10 + 5 + 7) * US, 1 / (0.5 * 100 * GB)
    assert affine_pieces("all_reduce", group((node, 8))) == (pytest.approx(switch), pytest.approx((24 * US, 1.75e-11)))
    assert collective_time("all_gather", 1 * GB, group((node, 8))) == collective_time("all_gather", 1 * GB, EIGHT)


def test_the_part_that_a_device_keeps_is_moved_too() -> None:
    """Its n-th counts for `own` of a sent one, at the ports of the devices and not at those of nodes."""
    node = replace(NODE, protocols=(replace(NODE.protocols[0], own=0.5),))
    message = 8 * GB
    steps = {"all_gather": 7, "reduce_scatter": 7, "all_to_all": 7, "all_reduce": 14}
    for kind, count in steps.items():
        time = collective_time(kind, message, group((node, 8)))
        assert time == pytest.approx(10 * US + count * US + (count + 0.5) / 8 * message / (100 * GB))
    far = group((node, 4), (NETWORK, 2))
    assert collective_time("all_gather", message, far) == collective_time("all_gather", message, TWO_BY_FOUR)


def test_kernels_that_send_between_peers_are_not_those_of_rings() -> None:
    ring = replace(NODE.protocols[0], name="ring", serves="rings")
    peer = replace(NODE.protocols[0], name="peer", serves="peers", setup=1 * US)
    members = group((replace(NODE, protocols=(ring, peer)), 8))
    for kind in COLLECTIVES:
        setup = 1 * US if kind in ("all_to_all", "send_recv") else 10 * US
        assert affine_pieces(kind, members)[0][0] == pytest.approx(affine_pieces(kind, EIGHT)[0][0] - 10 * US + setup)


def test_two_devices_of_a_mesh_have_one_link() -> None:
    mesh = level(70 * GB, 1 * US, bounded=True, network="mesh")
    time = collective_time("all_gather", 1 * GB, group((mesh, 2)))
    assert time == pytest.approx(11 * US + 0.5 * GB / (10 * GB))
    assert collective_time("send_recv", 1 * GB, group((mesh, 8))) == pytest.approx(11 * US + 1 * GB / (10 * GB))


@pytest.mark.parametrize("kind", sorted(COLLECTIVES))
def test_arrays_equal_numbers(kind: str) -> None:
    messages = np.array([[0.0, 1.0, 1e3], [1e6, 1e9, 1e12]])
    for members in (ONE, EIGHT, TWO_BY_FOUR):
        times = collective_time(kind, messages, members)
        assert times.shape == messages.shape
        singles = [collective_time(kind, float(message), members) for message in messages.flat]
        assert list(times.flat) == pytest.approx(singles)


@pytest.mark.parametrize("kind", sorted(COLLECTIVES))
def test_nothing_to_send_and_nobody_to_send_to_are_free(kind: str) -> None:
    assert collective_time(kind, 0.0, EIGHT) == 0
    assert collective_time(kind, 1e9, ONE) == 0
    assert collective_lower_bound(kind, 1e9, ONE) == 0
    assert affine_pieces(kind, ONE) == ()


def test_lower_bounds_by_hand() -> None:
    assert collective_lower_bound("all_reduce", 8 * GB, EIGHT) == pytest.approx(1.75 * 8 / 100)
    assert collective_lower_bound("all_reduce", 8 * GB, TWO_BY_FOUR) == pytest.approx(8 / 40)
    assert collective_lower_bound("all_gather", 8 * GB, TWO_BY_FOUR) == pytest.approx(0.5 * 8 / 40)
    assert collective_lower_bound("all_to_all", 8 * GB, TWO_BY_FOUR) == pytest.approx(0.5 * 8 / 10)
    assert collective_lower_bound("broadcast", 8 * GB, TWO_BY_FOUR) == pytest.approx(8 / 40)
    assert collective_lower_bound("send_recv", 8 * GB, TWO_BY_FOUR) == pytest.approx(8 / 10)


def test_unknown_kinds_raise() -> None:
    with refused(CostModelError, "all_broadcast", "all_gather", "all_reduce"):
        collective_time("all_broadcast", 1.0, EIGHT)
    with refused(CostModelError, "gossip"):
        collective_time("gossip", np.ones(2), ONE)
    with refused(CostModelError, "gossip"):
        collective_lower_bound("gossip", 1.0, EIGHT)


def test_negative_messages_raise() -> None:
    with refused(CostModelError, "all_reduce", -1.0):
        collective_time("all_reduce", -1.0, EIGHT)
    with refused(CostModelError, "all_gather", -2.0):
        collective_time("all_gather", np.array([1.0, -2.0]), EIGHT)
