"""What a prediction for a CPU has that others have not: a process launches what it computes itself; and what weights
cost that autograd gathers once more when it unpacks them."""

from dataclasses import replace
from itertools import pairwise

import pytest

from hardware_profiles import Cluster, load_profile, load_software
from planner.graph.operator_graph import TensorType
from planner.plan.prediction.predict import predict, stage_costs
from planner.plan.prediction.walk.stage_cost import GATHERING, REDUCING
from planner.pricing.parameter_price import Pricers, price_parameter
from planner.sharding.mesh import build_mesh
from planner.sharding.stored import legal_stored
from planner.sharding.update import Update
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.search import search
from tests.unit.search.cases import cluster_of, request_of

CPU, GPU = cluster_of("cpu", 2), cluster_of("h100-80gb", 2)
SHARDED = Pinned(data=2, zero=3, micro_batches=2, interleave=2, recompute="none")


def with_host(cluster: Cluster, seconds: float) -> Cluster:
    return replace(cluster, device=replace(cluster.device, host_latency=seconds))


def test_launches_come_on_top_of_kernels() -> None:
    """Of every operator, however long its kernel; on a device beside a host long kernels hide them."""
    pinned = Pinned(data=2, zero=0, micro_batches=1, recompute="none")
    bound = search(request_of("llama-4", CPU, 4, pinned=pinned, update=Update(buckets="none"))).bound
    each = 1e-3  # longer than any kernel of it
    steps, passes = [], []
    for seconds in (0.0, each, 2 * each):
        (cost,) = stage_costs(bound, with_host(CPU, seconds))
        passes.append(cost.micro_batch["forward"] + cost.micro_batch["backward"])
        steps.append(predict(bound, with_host(CPU, seconds)).step_seconds)
        assert cost.ahead == 0, "nothing is launched ahead"
    assert steps[1] - steps[0] == pytest.approx(steps[2] - steps[1])
    launches = [(more - less) / each / load_software("pytorch").host for less, more in pairwise(passes)]
    assert launches[0] == pytest.approx(launches[1])
    assert launches[0] == pytest.approx(round(launches[0])), "a whole number of them"
    assert launches[0] > 100, "of four blocks in both passes"


def test_a_host_that_waits_for_kernels_takes_turns_with_them() -> None:
    """A step takes longer by every launch, as on a device that is its own host."""
    pinned = Pinned(data=2, zero=0, micro_batches=2, recompute="none")
    bound = search(request_of("llama-4", GPU, 4, pinned=pinned, update=Update(buckets="none"))).bound
    blocking = replace(GPU, software=replace(GPU.software, waits_for_kernels=True))
    each = 1e-3  # longer than any kernel of it
    passes = {}
    for machine in (GPU, blocking):
        for seconds in (0.0, each):
            (cost,) = stage_costs(bound, with_host(machine, seconds))
            passes[machine, seconds] = cost.micro_batch["forward"] + cost.micro_batch["backward"] - cost.ahead
    assert passes[blocking, 0.0] == pytest.approx(passes[GPU, 0.0])
    launches = (passes[blocking, each] - passes[blocking, 0.0]) / each / GPU.software.host
    assert launches == pytest.approx(round(launches)), "a whole number of them"
    assert passes[blocking, each] > passes[GPU, each]


def test_a_launch_adds_up_gradients_of_another_dtype() -> None:
    """With what adds them up where the device launches it, and apart where a host does."""
    stored = legal_stored((64, 32), (2,), True)[:1]
    for machine in (CPU, GPU):
        mesh, each = build_mesh(machine, (2,)), machine.device.host_latency * machine.software.host
        prices = [
            price_parameter(
                TensorType(shape=(64, 32), dtype="bfloat16"), True, stored, "bf16", "adamw", Pricers.of(mesh, one)
            )
            for one in (with_host(machine, 0.0), machine)
        ]
        added, apart = (
            float(getattr(prices[1], name)[0] - getattr(prices[0], name)[0]) for name in ("accumulation", "launches")
        )
        assert (added, apart) == pytest.approx((each, 0.0) if machine is CPU else (0.0, each))


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_weights_that_autograd_gathers_again_are_waited_for(machine: Cluster) -> None:
    """It asks for a saved weight when it needs it, and goes on when it is there; other micro-batches cover the way of
    weights forward, and of gradients."""
    update = Update(buckets="none", gathers="each")
    bound = search(request_of("llama-4", machine, 16, pinned=SHARDED, update=update)).bound
    (cost,) = stage_costs(bound, machine)
    (chunk,), share = cost.chunks, machine.device.overlapped
    gathered, reduced = cost.micro_batch[GATHERING], cost.micro_batch[REDUCING]
    assert 0 < share <= 1
    assert chunk.backward.sent == pytest.approx(share * reduced)
    assert chunk.forward.sent < 0.7 * share * gathered
    assert chunk.forward.sent > 0.3 * share * gathered
    others = replace(machine, software=replace(machine.software, name="another"))
    (elsewhere,) = stage_costs(bound, others)
    assert elsewhere.chunks[0].backward.sent > chunk.backward.sent


def test_the_packaged_profile_of_a_cpu_has_a_host() -> None:
    device = load_profile("cpu").device
    assert device.in_line
    assert device.host_latency > device.launch_latency
    assert not load_profile("h100-80gb").device.in_line
