"""The network of a row: devices that NVLink joins, and nodes of another size than those of the profile."""

from pathlib import Path

import pytest

from hardware_profiles import TopologyError, load_profile
from planner.errors import RequestError
from planner.validation.stack.network import network_of, stated_bandwidth
from tests.unit.validation.runs import machine, one


@pytest.mark.parametrize(
    ("profile", "devices", "changes", "joined"),
    [
        ("gb200-186gb", 64, {}, 64),
        ("gb200-186gb", 128, {}, 64),
        ("gb200-186gb", 72, {}, 72),
        ("gb300-288gb", 144, {}, 72),
        ("gb200-186gb", 96, {}, 48),
        ("gb200-186gb", 64, {"intra_bw": "NVL36"}, 32),
        ("gb200-186gb", 8, {"devices_per_node": "4"}, 64),
        ("h100-80gb", 64, {"devices_per_node": "4"}, 4),
        ("h100-80gb", 64, {"devices_per_node": "8"}, 8),
        ("a100-80gb", 64, {"devices_per_node": "16"}, 16),
        ("h100-80gb", 4, {"devices_per_node": "4"}, 8),  # none leaves the node
        ("v100-32gb", 64, {"devices_per_node": "4"}, 4),
    ],
)
def test_devices_that_are_joined(
    tmp_path: Path, profile: str, devices: int, changes: dict[str, str], joined: int
) -> None:
    notes: list[str] = []
    cluster = network_of(one(tmp_path, profile=profile, **changes), devices, notes)
    assert cluster.devices_per_node == joined
    assert cluster.with_devices(devices).devices == devices
    assert bool(notes) == (joined not in (8, 64)), notes


def test_four_v100_of_a_node_share_all_their_links(tmp_path: Path) -> None:
    """Two of another size are refused: nobody says how many links join them."""
    notes: list[str] = []
    cluster = network_of(one(tmp_path, profile="v100-32gb", devices_per_node="4"), 64, notes)
    assert cluster.levels[0].bandwidth == network_of(one(tmp_path, profile="v100-32gb"), 64, []).levels[0].bandwidth
    assert "all NVLinks of a V100 go to the three others of its node" in notes
    with pytest.raises(TopologyError, match="mesh of direct links"):
        network_of(one(tmp_path, profile="v100-32gb", devices_per_node="2"), 64, [])


def test_sixteen_v100_of_a_node_are_joined_by_switches(tmp_path: Path) -> None:
    notes: list[str] = []
    cluster = network_of(one(tmp_path, profile="v100-32gb", devices_per_node="16"), 128, notes)
    assert (cluster.levels[0].fan_out, cluster.levels[0].bandwidth) == (16, 150e9)
    assert "all NVLinks of a V100 go to NVSwitch, which joins 16 (DGX-2)" in notes


def test_peers_wait_longer_over_efa(tmp_path: Path) -> None:
    usual, efa = (
        network_of(one(tmp_path, profile="h100-80gb", inter_bw=text), 64, [])
        for text in ("3200Gb/s per node", "3200Gb/s EFA per node")
    )
    assert efa.levels[-1].bandwidth == usual.levels[-1].bandwidth == 50e9
    for before, after in zip(usual.levels[-1].protocols, efa.levels[-1].protocols, strict=True):
        assert round(after.latency - before.latency, 9) == (52e-6 if after.serves == "peers" else 0)
    assert usual.levels[0] == efa.levels[0]


def test_nodes_of_one_device_have_the_network_alone(tmp_path: Path) -> None:
    cluster = network_of(one(tmp_path, devices_per_node="1"), 4, [])
    assert [level.name for level in cluster.levels] == ["cluster"]


def test_devices_that_fill_no_domain_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="73 devices do not fill NVLink domains of 72"):
        network_of(one(tmp_path, profile="gb200-186gb"), 73, [])


@pytest.mark.parametrize(("devices", "node", "noted"), [(64, "", True), (64, "8", True), (8, "", False)])
def test_a_network_that_is_not_read_is_noted(tmp_path: Path, devices: int, node: str, noted: bool) -> None:
    """Whether or not the row says how many devices a node has, the profile knows it."""
    notes: list[str] = []
    network_of(one(tmp_path, profile="a100-80gb", inter_bw="50GB/s", devices_per_node=node), devices, notes)
    wanted = ["network as the profile has it: inter_bw '50GB/s' says no bandwidth of a device or a node"]
    assert notes == (wanted if noted else [])


@pytest.mark.parametrize(
    ("text", "per_device"),
    [
        ("8x200Gb/s HDR IB per node (Selene, published)", 25e9),
        ("4 Omni-Path links per node (published); 100Gb/s each (standard)", 6.25e9),
        ("400Gb/s per GPU (standard)", 50e9),
        ("400Gb/s RDMA per GPU (published)", 50e9),
        ("1600 Gbps node-node interconnect (RoCE)", 25e9),
        ("800Gb/s per node (vTrain config)", 12.5e9),
        ("3200Gb/s EFA per node", 50e9),
        ("3.2Tbps RoCE per node", 50e9),
        ("8x400Gbps per node", 50e9),
        ("8 x 400 Gbit/s NDR per node", 50e9),
        ("8x200Gb/s HDR IB", 25e9),
        ("2x200Gb/s per GPU", 50e9),
        ("12.5 Gb/s per NPU", 1.5625e9),
        ("400Gb/s NIC inter-node", None),
        ("400Gbps (published)", 6.25e9),
        ("200Gbps (published)", None),
        ("n/a (single node)", None),
        ("", None),
    ],
)
def test_networks_as_stated(tmp_path: Path, text: str, per_device: float | None) -> None:
    found = one(tmp_path, inter_bw=text, devices_per_node="8")
    assert stated_bandwidth(found) == per_device
    cluster, notes = machine(tmp_path, devices=16, inter_bw=text, devices_per_node="8")
    expected = load_profile("a100-80gb").levels[-1].bandwidth if per_device is None else per_device
    assert cluster.levels[-1].bandwidth == pytest.approx(expected)
    assert ("network as the row states it" in notes) == (per_device is not None)
    unclear = text not in ("", "n/a (single node)") and per_device is None
    assert any(note.startswith("network as the profile has it") for note in notes) == unclear


def test_links_inside_a_node(tmp_path: Path) -> None:
    cluster, _ = machine(tmp_path, intra_bw="NVLink, 4 inter-gpu connects per GPU (published)")
    assert cluster.levels[0].bandwidth == 100e9


def test_power_limits(tmp_path: Path) -> None:
    limited, notes = machine(tmp_path, profile="h100-80gb", other_flags="power limit 500W")
    assert limited.device.power_share == pytest.approx(5 / 7)
    assert "a power limit of 500 of 700 W" in notes
    assert machine(tmp_path, profile="h100-80gb", device="H100-SXM (700W)")[0].device.power_share == 1
    with pytest.raises(RequestError, match="says nothing of its board"):
        machine(tmp_path, profile="gb200-186gb", notes="power cap 900 W")
