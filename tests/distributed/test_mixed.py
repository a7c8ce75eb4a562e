"""A plan for several kinds of devices computes what the whole model does: the kinds matter for its price alone."""

from dataclasses import replace
from typing import Any

from hardware_profiles import Cluster, MixedCluster
from planner.plan.file import dump_plan, parse_plan
from planner.strategy_search.request.space import Pinned
from tests.distributed.searched import eager_cluster, searched_plan

TOLERANCE = 1e-5


def kind(name: str, speed: float) -> Cluster:
    """Two devices that are so many times as fast as others."""
    cluster = eager_cluster(2, 1e9)
    peaks = tuple((dtype, peak * speed) for dtype, peak in cluster.device.peak_flops)
    bandwidth = cluster.device.memory_bandwidth * speed
    kernels = tuple((dtype, None) for dtype, _ in cluster.device.matmul_kernels)
    device = replace(
        cluster.device,
        name=name,
        peak_flops=peaks,
        memory_bandwidth=bandwidth,
        matmul_kernels=kernels,
        host_latency=cluster.device.host_latency / speed,
    )
    return replace(cluster, name=name, device=device)


def test_a_plan_for_two_kinds_of_devices_computes_the_same(pool: Any) -> None:
    machine = MixedCluster(groups=(kind("slow", 1.0), kind("fast", 4.0)), bandwidth=1e12)
    pinned = Pinned(pipeline=2, mesh=(2,), micro_batches=2)
    plan = searched_plan("llama4", 4, pinned=pinned, machine=machine)
    held = {stage.group: stage.blocks for stage in plan.stages}
    assert held["fast"] > held["slow"]
    assert parse_plan(dump_plan(plan)) == plan
    for errors in pool.run("tasks_models", "parity", "llama4", [dump_plan(plan)]):
        assert max(errors) < TOLERANCE, errors
