"""The machine of a row, with the network and the power limit that the row states.

    inter_bw             bandwidth between nodes: "8x200Gb/s HDR IB per node", "400Gb/s per GPU", "3200Gb/s EFA"
    intra_bw             "4 inter-gpu connects": links of NVLink 3; "NVL36": devices of one NVLink domain
    devices_per_node     devices that are joined as a node, if the profile has another number

On machines named NVL72 the profile joins 64 of 72 devices, as jobs with powers of two do. Devices that are no multiple
of 64 are split into the fewest equal parts that fit a domain: 72 and 144 fill whole domains. There a node is a tray,
four devices inside a domain, and says nothing about links.
"""

import math
import re
from dataclasses import replace

from hardware_profiles import Cluster, TopologyError, load_profile, with_network
from planner.errors import RequestError
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions

NVL72 = ("gb200", "gb300")
"""Profiles whose devices are joined by NVLink across nodes."""

_PORTS = {"v100": 100, "a100": 200, "a800": 200, "h100": 400, "h800": 400, "h200": 400}
"""Gb/s of the fastest port per device that servers have; a larger bare number is that of a node."""

_NVLINK3 = 25e9  # bytes/s and direction of a link; NVIDIA A100 datasheet: 12 links, 600 GB/s in both directions
_GIGABIT = 1e9 / 8

_PARTS = r"(?i:nics?|gpus?|ports?|links?|hcas?|cards?|rails?) "
"""Words for parts of which a node may have several: a rate before them is that of one part."""

_NUMBER = r"(\d+(?:\.\d+)?)"
_TIMES = r"(?:(\d+)\s*[x×]\s*)?"
"""A rate, and how often it is there."""

_QUAD = 4
"""Devices of a V100 node in which all six NVLinks of each device go to the others, as those of eight do in a DGX-1: an
all-reduce on four of Jean Zay reaches 124 of 150 GB/s (bigscience-workshop/bigscience
experiments/bandwidth/n1_32gb_all_reduce_bench.txt)."""

_DGX2 = 16
"""Devices of a DGX-2, in which all six NVLinks of each V100 go to NVSwitches (NVIDIA DGX-2 datasheet, 2018: 2.4 TB/s of
bisection bandwidth, 150 GB/s for each device)."""

_EFA_STEP = 52e-6
"""Seconds that a step of NCCL's all-to-all takes longer over EFA. alltoall_perf of awslabs/awsome-distributed-ai
(micro-benchmarks/expert-parallelism/ep-backend-comparison at 95b939cd) moves 64 MiB at 45.1 and 40.4 GB/s on four and
eight nodes of p5, 94.0 and 74.0 on p6-b300, and long messages at 53.9, 51.1, 116.9 and 103.2, which are 0.83 to 0.92 of
the ports. The difference is 78, 49, 45 and 36 us for each other node; the mean."""


def machine_as_stated(row: Row, devices: int, notes: list[str]) -> Cluster:
    """The machine of a row's profile, with the network and power limit that the row states.

    Raises `HardwareProfileError`, RequestError.
    """
    return limited(row, network_of(row, devices, notes), notes)


def network_of(row: Row, devices: int, notes: list[str]) -> Cluster:
    """The machine of a row's profile, with the network that the row states. Raises `HardwareProfileError`."""
    cluster = load_profile(row.text("profile"))
    bandwidth = stated_bandwidth(row)
    outer, inner = cluster.levels[-1].name, cluster.levels[0].name
    stated = {}
    if bandwidth is not None and outer != inner:
        stated[outer] = bandwidth
    links = re.search(r"(\d+) inter-gpu connects", row.text("intra_bw"))
    if links:
        stated[inner] = int(links[1]) * _NVLINK3
    if stated:
        notes.append("network as the row states it")
    text, node = row.text("inter_bw"), row.integer("devices_per_node")
    usual = node or cluster.devices_per_node
    if bandwidth is None and text and not text.startswith("n/a") and usual is not None and devices > usual:
        notes.append(f"network as the profile has it: inter_bw '{text:.40}' says no bandwidth of a device or a node")
    joined = _joined(row, cluster, devices)
    if joined is not None:
        notes.append(f"{joined} devices are joined as one node")
    if joined in (_QUAD, _DGX2) and row.text("profile").startswith("v100") and inner not in stated:
        ends = "the three others of its node" if joined == _QUAD else "NVSwitch, which joins 16 (DGX-2)"
        notes.append(f"all NVLinks of a V100 go to {ends}")
        stated[inner] = cluster.levels[0].bandwidth
    found = with_network(cluster, bandwidth=stated, devices_per_node=joined) if stated or joined else cluster
    if mentions(row.text("inter_bw").lower(), r"\befa(?:v\d)?\b") and outer != inner:
        notes.append("all-to-all between nodes over EFA")
        return _over_efa(found)
    return found


def _over_efa(cluster: Cluster) -> Cluster:
    """The machine with an outer network by AWS's Elastic Fabric Adapter, on which peers wait longer for each other."""
    outer = cluster.levels[-1]
    slow = tuple(
        replace(one, latency=one.latency + _EFA_STEP) if one.serves == "peers" else one for one in outer.protocols
    )
    return replace(cluster, levels=(*cluster.levels[:-1], replace(outer, protocols=slow)))


def _joined(row: Row, cluster: Cluster, devices: int) -> int | None:
    """Devices of the innermost level if the profile has another number, else None. Raises TopologyError."""
    usual = cluster.devices_per_node
    if usual is None or len(cluster.levels) > 2:  # Ascend's nodes inside supernodes
        return None
    if row.text("profile").startswith(NVL72):
        named = re.search(r"\bnvl(\d{1,3})\b", f"{row.text('device')} {row.text('intra_bw')}".lower())
        domain = int(named[1]) if named else 72
        if devices <= min(usual, domain) or (devices % usual == 0 and domain > usual):
            return None
        return _equal_parts(devices, domain)
    node = row.integer("devices_per_node")
    return node if node not in (None, usual) and devices > min(usual, node or usual) else None


def _equal_parts(devices: int, domain: int) -> int:
    """Devices in each of the fewest equal parts that fit a domain.

    Raises TopologyError if domains would be less than half full: no such job is known.
    """
    part = max(size for size in range(1, domain + 1) if devices % size == 0)
    if 2 * part < domain:
        raise TopologyError(f"{devices} devices do not fill NVLink domains of {domain} evenly, nor half of each")
    return part


def stated_bandwidth(row: Row) -> float | None:
    """Bytes/s per device and direction between nodes; None if nothing is stated for certain.

    Texts are such as "8x200Gb/s HDR IB per node", "400Gb/s per GPU", "4 Omni-Path links per node; 100Gb/s each" or
    "800Gb/s per node". Several links without a word of whose they are count as those of a node.
    """
    text, node = _in_gigabits(row.text("inter_bw")), row.integer("devices_per_node") or 8
    per_gpu = re.search(rf"{_TIMES}{_NUMBER} Gb/s (?:[\w-]+ )?per (?:GPU|NPU|device)", text)
    if per_gpu:
        return int(per_gpu[1] or 1) * float(per_gpu[2]) * _GIGABIT
    several = re.search(rf"(\d+)\s*[x×]\s*{_NUMBER} Gb/s(?:.*per node|[\w ]*$)", text) or re.search(
        rf"(\d+) [\w-]+ links per node.*?{_NUMBER} Gb/s each", text
    )
    if several:
        return int(several[1]) * float(several[2]) * _GIGABIT / node
    whole = re.search(rf"{_NUMBER} Gb/s (?:(?!{_PARTS})[\w-]+ )?(?:per node|node-node|inter-?node)", text)
    if whole is None and (bare := re.match(rf"{_NUMBER} Gb/s(?: \(published\))?$", text)):
        chip = row.text("profile").partition("-")[0]
        whole = bare if float(bare[1]) > _PORTS.get(chip, math.inf) else None
    return float(whole[1]) * _GIGABIT / node if whole else None


def _in_gigabits(text: str) -> str:
    """The text with "3.2Tbps", "3200Gbps" and "3200 Gbit/s" as "3200 Gb/s"."""

    def spelled(found: re.Match[str]) -> str:
        return f"{float(found[1]) * (1000 if found[2] == 'T' else 1):g} Gb/s"

    return re.sub(rf"{_NUMBER}\s*([TG])b(?:it)?(?:/s(?:ec)?|ps)\b", spelled, text)


_BOARD_WATTS = {"a100": 400, "a800": 400, "h100": 700, "h800": 700, "h200": 700, "b200": 1000}
"""Power of an SXM board in W, by NVIDIA's datasheets."""

_WATTS = r"(?:power|tdp)[^;,\d]{0,20}(\d{3,4})\s?w(?:atts?)?\b|\b(\d{3,4})\s?w(?:atts?)? (?:power|cap|limit|tdp)"


def limited(row: Row, cluster: Cluster, notes: list[str]) -> Cluster:
    """The machine with the power limit that the row names. Raises RequestError if the board's power is unknown."""
    found = re.search(_WATTS, row.words("device", "other_flags", "notes"))
    if found is None or cluster.device.power_share < 1:
        return cluster
    watts, chip = int(found[1] or found[2]), row.text("profile").partition("-")[0]
    if chip not in _BOARD_WATTS:
        raise RequestError(f"a power limit of {watts} W, and profile {row.text('profile')} says nothing of its board")
    if watts >= _BOARD_WATTS[chip]:
        return cluster
    notes.append(f"a power limit of {watts} of {_BOARD_WATTS[chip]} W")
    return replace(cluster, device=replace(cluster.device, power_share=watts / _BOARD_WATTS[chip]))
