"""Laws that every cost obeys, whatever the numbers: an error here would send a search the wrong way."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import (
    COLLECTIVES,
    affine_pieces,
    bubble_fraction,
    collective_lower_bound,
    collective_time,
    in_flight,
    operator_time,
    optimizer_time,
    peak_memory,
    step_time,
    usable_memory,
)
from hardware_profiles import OP_CLASSES, Cluster, Device, Group, Level, Protocol, Span, load_profile, profile_names

KINDS = st.sampled_from(sorted(COLLECTIVES))
MESSAGES = st.just(0.0) | st.floats(min_value=1e-3, max_value=1e13)  # a part of 5e-324 bytes would be none
AMOUNTS = st.floats(min_value=0, max_value=1e18)
BANDWIDTHS = st.floats(min_value=1e8, max_value=1e12)
LATENCIES = st.floats(min_value=0, max_value=1e-3)
SHARES = st.floats(min_value=0.01, max_value=1)
DEVICES = st.sampled_from(profile_names()).map(lambda name: load_profile(name).device)
ULPS = 1e-12


OWN = st.just(0.0) | st.floats(0, 3)
LIBRARIES = (  # names of protocols, and what they serve
    (("simple", "all"),),
    (("low latency", "all"), ("simple", "all")),
    (("low latency", "rings"), ("simple", "rings"), ("peer", "peers")),
)


def protocols(name: str, serves: str = "all") -> st.SearchStrategy[Protocol]:
    return st.builds(
        Protocol,
        name=st.just(name),
        setup=LATENCIES,
        latency=LATENCIES,
        efficiency=SHARES,
        own=OWN,
        serves=st.just(serves),
    )


@st.composite
def level(draw: st.DrawFn, library: tuple[tuple[str, str], ...], *, innermost: bool, outermost: bool) -> Level:
    mesh = innermost and not outermost and draw(st.booleans())
    return Level(
        name=f"level {draw(st.integers(0, 9))}",
        fan_out=None if outermost else 8,
        network="mesh" if mesh else "switch",
        bandwidth=draw(BANDWIDTHS),
        protocols=tuple(draw(protocols(name, serves)) for name, serves in library),
        in_network=draw(st.none() | protocols("in network")),
        oversubscription=draw(st.just(1.0) | st.floats(1, 16)),
    )


@st.composite
def groups(draw: st.DrawFn, least: int = 1) -> Group:
    library = draw(st.sampled_from(LIBRARIES))
    depth = draw(st.integers(least, 3))
    spans = [
        Span(level=draw(level(library, innermost=i == 0, outermost=i == depth - 1)), count=draw(st.integers(2, 8)))
        for i in range(depth)
    ]
    return Group(spans=tuple(spans))


def with_level(group: Group, index: int, level: Level) -> Group:
    spans = list(group.spans)
    spans[index] = replace(spans[index], level=level)
    return Group(spans=tuple(spans))


@given(KINDS, MESSAGES, groups())
def test_never_below_the_lower_bound(kind: str, message: float, group: Group) -> None:
    bound = collective_lower_bound(kind, message, group)
    assert bound >= 0
    assert collective_time(kind, message, group) >= bound * (1 - ULPS)


@given(KINDS, MESSAGES, st.integers(1, 64), groups())
def test_parts_of_a_message_never_take_less_than_the_whole(kind: str, message: float, parts: int, group: Group) -> None:
    whole = collective_time(kind, message, group)
    assert whole <= parts * collective_time(kind, message / parts, group) * (1 + ULPS)


@given(KINDS, MESSAGES, groups())
def test_pieces_are_those_that_are_the_least_somewhere(kind: str, message: float, group: Group) -> None:
    """Leaving out what is never the least changes no time; what is left has a message at which it is the least."""
    served = "peers" if kind in ("all_to_all", "send_recv") else "rings"
    protocols = group.spans[0].level.protocols
    chosen = [
        algorithm(group, index)
        for algorithm in COLLECTIVES[kind]
        for index, one in enumerate(protocols)
        if one.serves in ("all", served)
    ]
    least = min(piece[0] + piece[1] * message for piece in chosen if piece is not None)
    assert message == 0 or collective_time(kind, message, group) == pytest.approx(least)
    pieces = affine_pieces(kind, group)
    turns = [(after[0] - before[0]) / (before[1] - after[1]) for before, after in pairwise(pieces)]
    assert turns == sorted(turns)


@pytest.mark.slow
@given(KINDS, MESSAGES, MESSAGES, groups())
def test_monotone_and_concave_in_the_message(kind: str, one: float, other: float, group: Group) -> None:
    one, other = sorted((one, other))
    assert collective_time(kind, one, group) <= collective_time(kind, other, group) * (1 + ULPS)
    both = collective_time(kind, one + other, group)
    assert both <= (collective_time(kind, one, group) + collective_time(kind, other, group)) * (1 + ULPS)


@given(KINDS, MESSAGES, groups(), st.data())
def test_a_slower_link_is_never_faster(kind: str, message: float, group: Group, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(group.spans) - 1))
    before, slower = group.spans[index].level, data.draw(SHARES)
    worse = replace(before, bandwidth=before.bandwidth * slower)
    fuller = replace(before, oversubscription=before.oversubscription / slower)
    later = replace(
        before, protocols=tuple(replace(p, latency=p.latency + data.draw(LATENCIES)) for p in before.protocols)
    )
    time = collective_time(kind, message, group)
    assert collective_time(kind, message, with_level(group, index, worse)) >= time * (1 - ULPS)
    assert collective_time(kind, message, with_level(group, index, fuller)) >= time * (1 - ULPS)
    assert collective_time(kind, message, with_level(group, index, later)) >= time * (1 - ULPS)


@given(KINDS, MESSAGES)
def test_one_rank_is_free(kind: str, message: float) -> None:
    assert collective_time(kind, message, Group(spans=())) == 0


@given(MESSAGES, groups())
def test_all_reduce_is_at_most_reduce_scatter_and_all_gather(message: float, group: Group) -> None:
    parts = collective_time("reduce_scatter", message, group) + collective_time("all_gather", message, group)
    assert collective_time("all_reduce", message, group) <= parts * (1 + ULPS)


@given(groups(), st.integers(2, 8))
def test_ring_all_reduce_is_reduce_scatter_and_all_gather(group: Group, count: int) -> None:
    own_part_is_free = tuple(replace(one, own=0.0) for one in group.spans[0].level.protocols)
    flat = replace(group.spans[0].level, in_network=None, protocols=own_part_is_free)
    ring = Group(spans=(Span(level=flat, count=count),))
    message = 1e18  # so large that latencies vanish
    parts = collective_time("reduce_scatter", message, ring) + collective_time("all_gather", message, ring)
    assert collective_time("all_reduce", message, ring) == pytest.approx(parts, rel=1e-6)


@pytest.mark.slow
@pytest.mark.thorough
@given(KINDS, groups(least=2))
def test_a_hierarchy_is_never_faster_per_byte_than_its_fastest_level_alone(kind: str, group: Group) -> None:
    inner = replace(group.spans[0].level, network="switch", fan_out=64**3)
    spans = [Span(level=inner, count=group.spans[0].count)]
    for span in group.spans[1:]:  # a network at most as fast as the inner one, and no better at reducing
        slow = replace(
            span.level,
            bandwidth=min(span.level.bandwidth, inner.bandwidth),
            protocols=inner.protocols,
            in_network=inner.in_network,
            oversubscription=max(span.level.oversubscription, inner.oversubscription),
        )
        spans.append(replace(span, level=slow))
    flat = Group(spans=(Span(level=inner, count=group.size),))
    nested = Group(spans=tuple(spans))
    slope, flat_slope = affine_pieces(kind, nested)[-1][1], affine_pieces(kind, flat)[-1][1]
    assert slope >= flat_slope * (1 - ULPS)


@given(KINDS, st.lists(MESSAGES, max_size=5), groups())
def test_arrays_equal_numbers(kind: str, messages: list[float], group: Group) -> None:
    times = collective_time(kind, np.array(messages), group)
    assert list(times) == pytest.approx([collective_time(kind, message, group) for message in messages])


@given(st.sampled_from(OP_CLASSES), AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS, DEVICES)
def test_work_takes_time(
    op_class: str, flops: float, bytes_moved: float, more: float, most: float, device: Device
) -> None:
    def time(flops: float, bytes_moved: float) -> float:
        return operator_time(op_class=op_class, flops=flops, bytes_moved=bytes_moved, dtype="bf16", device=device)

    base = time(flops, bytes_moved)
    assert base >= device.launch_latency > 0
    assert base >= max(flops / device.peak("bf16"), bytes_moved / device.memory_bandwidth) * (1 - ULPS)
    assert time(flops + more, bytes_moved + most) >= base
    worse = replace(device, memory_bandwidth=device.memory_bandwidth / 2)
    slower = operator_time(op_class=op_class, flops=flops, bytes_moved=bytes_moved, dtype="bf16", device=worse)
    assert slower >= base


@given(AMOUNTS, AMOUNTS, DEVICES)
def test_optimizer_is_monotone_in_parameters(one: float, other: float, device: Device) -> None:
    one, other = sorted((one, other))
    assert 0 <= optimizer_time(one, "bf16", "adamw", device) <= optimizer_time(other, "bf16", "adamw", device)


@given(AMOUNTS, AMOUNTS, AMOUNTS, DEVICES)
def test_peak_memory_bounds_what_is_used(persistent: float, saved: float, transient: float, device: Device) -> None:
    peak = peak_memory(persistent, saved, transient, device)
    assert peak >= persistent + saved + transient
    total = persistent + saved + transient
    if not math.isclose(total, usable_memory(device)):
        assert (peak <= device.memory) == (total <= usable_memory(device))


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=8), st.integers(1, 64))
def test_pipeline_step_is_bounded_by_its_work(stages: list[float], micro_batches: int) -> None:
    once = [0.0] * len(stages)
    time = step_time(stages, once, micro_batches)
    assert time >= micro_batches * max(stages) * (1 - ULPS)
    assert time >= sum(stages) * (1 - ULPS)
    assert time <= micro_batches * sum(stages) * (1 + 1e-9)
    assert -1e-9 <= bubble_fraction(stages, micro_batches) < 1
    held = [in_flight(stage, len(stages), micro_batches) for stage in range(len(stages))]
    assert held == sorted(held, reverse=True)
    assert held[-1] == 1


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Cluster, int, int]:
    cluster = load_profile(draw(st.sampled_from(profile_names()))).with_devices(4096)
    size = draw(st.integers(1, 256))
    stride = draw(st.integers(1, 4096 // size))
    return cluster, size, stride


@given(meshes())
@settings(max_examples=200)
def test_groups_keep_their_size_and_never_share_more_than_they_do(mesh: tuple[Cluster, int, int]) -> None:
    cluster, size, stride = mesh
    group = cluster.group(size, stride)
    assert group.size == size
    node = cluster.devices_per_node
    if node is not None and group.spans and group.spans[0].level == cluster.levels[0]:
        together = group.spans[0].count
        for base in range(0, min(stride, 8)):
            for block in range(0, size, together):
                members = [base + (block + i) * stride for i in range(together)]
                assert len({member // node for member in members}) == 1
