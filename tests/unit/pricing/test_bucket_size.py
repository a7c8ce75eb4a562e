"""The size of a bucket follows from the latency and the bandwidth of the links."""

from dataclasses import replace

import pytest

from costmodels import collective_time
from hardware_profiles import load_profile, load_software
from hardware_profiles.units import KIB
from planner.pricing.bucket_size import LATENCY_SHARE, auto_bucket, sized
from planner.sharding.mesh import build_mesh
from planner.sharding.update import PLAIN, Update

CLUSTER = load_profile("h100-80gb").with_devices(64)


@pytest.mark.parametrize("mesh", [(8,), (2,), (4, 8)])
def test_latency_is_a_small_share_of_a_bucket_and_not_of_half_of_one(mesh: tuple[int, ...]) -> None:
    built = build_mesh(CLUSTER, mesh)
    size = auto_bucket(built, CLUSTER)

    def share(nbytes: float) -> float:
        shares = []
        for axis in built.axes:
            group = CLUSTER.group(axis.size, axis.stride)
            whole = float(collective_time("all_reduce", nbytes, group))
            slope = float(collective_time("all_reduce", 2**31, group) - collective_time("all_reduce", 2**30, group))
            shares.append(1 - slope / 2**30 * nbytes / whole)
        return max(shares)

    assert share(size) <= LATENCY_SHARE < share(size / 2)


def test_links_that_start_later_ask_for_more() -> None:
    slow = replace(
        CLUSTER,
        levels=tuple(
            replace(one, protocols=tuple(replace(p, setup=8 * p.setup, latency=8 * p.latency) for p in one.protocols))
            for one in CLUSTER.levels
        ),
    )
    mesh = build_mesh(CLUSTER, (2,))
    assert auto_bucket(mesh, slow) == 8 * auto_bucket(mesh, CLUSTER)


def test_nothing_moves_on_one_device() -> None:
    assert auto_bucket(build_mesh(CLUSTER.with_devices(1), ()), CLUSTER) == 64 * KIB


def test_only_auto_is_replaced() -> None:
    mesh = build_mesh(CLUSTER, (64,))
    assert sized(Update(buckets="auto"), mesh, CLUSTER).buckets == auto_bucket(mesh, CLUSTER)
    assert sized(Update(buckets=7), mesh, CLUSTER) == Update(buckets=7)


@pytest.mark.parametrize("shards", [1, 3, 2**40])
def test_all_gradients_of_a_small_model_fill_half_of_one(shards: int) -> None:
    """In a bucket that they fill to a hundredth their one message would count as a hundredth of one."""
    mesh = build_mesh(CLUSTER, (64,))
    auto = auto_bucket(mesh, CLUSTER)
    size = sized(Update(), mesh, CLUSTER, auto / shards).bucket_size
    assert size == max(auto // (2 if shards == 3 else shards), 64 * KIB)
    assert size >= auto / shards


def test_auto_leaves_software_its_own_buckets_and_a_single_device_none() -> None:
    mesh = build_mesh(CLUSTER, (64,))
    nemo = replace(CLUSTER, software=load_software("nemo"))
    assert sized(Update(), mesh, nemo) == PLAIN
    assert sized(Update(), build_mesh(CLUSTER.with_devices(1), ()), CLUSTER.with_devices(1)) == PLAIN


@pytest.mark.parametrize("profile", ["cpu", "h100-80gb", "ascend-910b-64gb", "a100-80gb"])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_one_message_takes_no_longer_than_its_members_by_themselves(profile: str, kind: str) -> None:
    """So that a plan is never slower for its buckets."""
    cluster = load_profile(profile).with_devices(16)
    sizes = [float(2**power) for power in range(8, 29, 2)]
    for size, stride in ((2, 1), (2, 8), (8, 1), (16, 1)):
        group = cluster.group(size, stride)
        for one in sizes:
            for other in sizes:
                apart = collective_time(kind, one, group) + collective_time(kind, other, group)
                assert collective_time(kind, one + other, group) <= apart * (1 + 1e-9)
