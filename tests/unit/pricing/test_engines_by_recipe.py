"""What recipes of engines do to prices: rows that are sent once, fused kernels of experts, sinks, windows, copies."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels import AttentionShape, ExpertsShape, collective_time, experts_backward_time, experts_time
from hardware_profiles import Cluster, load_profile, load_software
from planner.pricing.inner_messages import InnerMessage, inner_hidden, inner_messages, inner_seconds
from planner.pricing.kernels.attention import _windowed
from planner.pricing.kernels.call import KernelCall
from planner.pricing.kernels.seconds import kernel_seconds
from planner.pricing.message import Message
from planner.pricing.redistribution_price import Pricers
from planner.sharding.mesh import Mesh, build_mesh
from planner.sharding.rule import Rule, named_strategy
from planner.sharding.rules import rule_of
from tests.unit.pricing.test_experts import RULE as EXPERTS
from tests.unit.search.cases import traced

CLUSTER = load_profile("h100-80gb").with_devices(16)


def product_rule() -> Rule:
    graph = traced("llama-tiny")
    rules = (rule_of(graph, operator) for operator in graph.operators)
    return next(rule for rule in rules if rule.op_class == "matmul")


def run_by(name: str, devices: int = 16) -> Cluster:
    return CLUSTER.with_software(load_software(name)).with_devices(devices)


@pytest.mark.parametrize(("devices", "units"), [(8, 8), (16, 2)])
def test_a_token_goes_once_to_each_device_or_node_of_its_experts(devices: int, units: int) -> None:
    """Of k independent choices among n units n (1 - (1 - 1/n)^k) are different."""
    cluster, rule = run_by("nemo", devices), EXPERTS
    mesh = build_mesh(cluster, (devices,))
    message = InnerMessage(message=Message(kind="all_to_all", axis=0, nbytes=1e9), forward=1, backward=1)
    chosen = rule.factors[rule.index["k"]].extent
    share = units * (1 - (1 - 1 / units) ** chosen) / chosen
    wanted = collective_time("all_to_all", 1e9 * share, cluster.group(devices, 1))
    assert inner_seconds(rule, message, mesh, cluster) == pytest.approx(float(wanted))
    assert inner_seconds(rule, message, mesh, run_by("megatron", devices)) > wanted


def test_a_dispatcher_that_gathers_moves_tokens_whatever_they_choose() -> None:
    """Gathered are the tokens of all devices, and their results are reduce-scattered."""
    own = run_by("megatron", 8)
    cluster = own.with_software(replace(own.software, dispatcher="allgather"))
    mesh = build_mesh(cluster, (8,))
    message = InnerMessage(message=Message(kind="all_to_all", axis=0, nbytes=1e9), forward=1, backward=1)
    chosen = EXPERTS.factors[EXPERTS.index["k"]].extent
    gathered = 8 * 1e9 / chosen
    wanted = [collective_time(kind, gathered, cluster.group(8, 1)) for kind in ("all_gather", "reduce_scatter")]
    assert inner_seconds(EXPERTS, message, mesh, cluster) == pytest.approx(float(sum(wanted)) / 2)
    weights = replace(message, message=replace(message.message, kind="all_reduce"))
    assert inner_seconds(EXPERTS, weights, mesh, cluster) == inner_seconds(EXPERTS, weights, mesh, own)


@pytest.mark.parametrize(("name", "devices", "sizes"), [("megatron", 8, (4, 2)), ("nemo", 16, (2, 4, 2))])
def test_an_exchange_along_several_axes_is_one_among_all_their_devices(
    name: str, devices: int, sizes: tuple[int, ...]
) -> None:
    """Our own runtime sends rows along one axis after the other."""
    engine, own = run_by(name, devices), CLUSTER.with_devices(devices)
    flat, cut = build_mesh(engine, (devices,)), build_mesh(engine, sizes)

    def rows(mesh: Mesh, cluster: Cluster) -> list[float]:
        sent = inner_messages(EXPERTS, (EXPERTS.index["e@b"],) * len(mesh.axes), mesh)
        return [inner_seconds(EXPERTS, one, mesh, cluster) for one in sent if one.message.kind == "all_to_all"]

    assert len(rows(cut, engine)) > len(rows(flat, engine)) > 0
    assert sum(rows(cut, engine)) == pytest.approx(sum(rows(flat, engine)))
    assert sum(rows(cut, own)) > 1.1 * sum(rows(flat, own))


@pytest.mark.parametrize("name", ["megatron", "mindspeed"])
def test_devices_with_parts_of_the_same_experts_exchange_each_its_own_rows(name: str) -> None:
    """Megatron-Core's dispatcher: an all-to-all of the rows of one device, and after it the devices gather rows. The
    plan gathers each token once already. Our own runtime exchanges what it has gathered: all rows on each device."""
    engine, own = run_by(name, 32), CLUSTER.with_devices(32)
    mesh, chosen = build_mesh(engine, (4, 8)), EXPERTS.factors[EXPERTS.index["k"]].extent
    strategy = named_strategy(EXPERTS, ("e@b", "f"), "experts")
    sent = [one for one in inner_messages(EXPERTS, strategy, mesh) if one.backward]
    assert len(sent) == 2  # rows and their weights
    for one in sent:
        nbytes, (far, near) = one.message.nbytes, (engine.group(4, 8), engine.group(8, 1))
        gathered = [float(collective_time(kind, nbytes, near)) for kind in ("all_gather", "reduce_scatter")]
        wanted = float(collective_time("all_to_all", nbytes / 8, far)) + (1 - 1 / chosen) * sum(gathered) / 2
        assert inner_seconds(EXPERTS, one, mesh, engine) == pytest.approx(wanted)
        assert inner_seconds(EXPERTS, one, mesh, own) == pytest.approx(
            float(collective_time("all_to_all", nbytes, own.group(4, 8)))
        )


def test_the_exchange_of_experts_is_hidden_from_container_2606_on() -> None:
    rule = EXPERTS
    assert inner_hidden(rule, run_by("nemo")) == 0.0
    assert inner_hidden(rule, run_by("nemo-2606")) == 0.5
    assert inner_hidden(replace(rule, op_class="matmul"), run_by("nemo")) == load_software("nemo").hidden.tensor


def test_fused_kernels_of_experts_neither_cast_nor_activate_apart() -> None:
    device = load_profile("gb300-288gb").device
    shape = ExpertsShape(tokens=8192.0, choices=8.0, experts=16.0, width=768.0, hidden=2048.0, added=True)
    fused = replace(shape, fused=True)
    for dtype in ("fp8", "bf16"):
        assert experts_time(fused, dtype, device) < experts_time(shape, dtype, device)
        backward = [experts_backward_time(one, dtype, device, rows=True, weights=True) for one in (fused, shape)]
        assert backward[0] < backward[1]


def test_a_window_leaves_its_share_of_causal_work() -> None:
    """Counted pair by pair."""
    shape = AttentionShape(
        batch=1.0, heads=1.0, key_heads=1.0, queries=64.0, keys=64.0, head_dim=8.0, value_dim=8.0, causal=True
    )
    for window in (1, 16, 64, 100):
        seen = sum(min(window, query + 1) for query in range(64)) / sum(query + 1 for query in range(64))
        assert float(_windowed(shape, window)) == pytest.approx(seen, abs=0.02)


def test_fsdp2_copies_what_it_gathers_and_weights_in_fp8_are_half_as_long() -> None:
    def gathered(cluster: Cluster) -> tuple[float, float]:
        pricers = Pricers.of(build_mesh(cluster, (8,)), cluster)
        return (
            pricers.parameters.message_seconds("all_gather", 0, 1e9),
            pricers.activations.message_seconds("all_gather", 0, 1e9),
        )

    copying = run_by("fsdp-compiled", 8)
    bare = copying.with_software(replace(copying.software, copies_out=False))
    (with_copies, activations), (without, same) = gathered(copying), gathered(bare)
    copied = 2e9 / (CLUSTER.device.memory_bandwidth * CLUSTER.device.efficiency("copy").bandwidth)
    assert with_copies - without == pytest.approx(copied, rel=0.01)
    assert activations == same
    nemo = run_by("nemo", 8)
    narrow = nemo.with_software(replace(nemo.software, products="fp8"))
    assert gathered(narrow)[0] == pytest.approx(gathered(nemo)[0] / 2, rel=0.02)
    assert gathered(narrow)[1] == gathered(nemo)[1]


def test_torch_copies_what_tensor_parallel_devices_gather_and_scatter_along_the_sequence() -> None:
    """`torch.cat` of chunks in `all_gather_tensor` and `reduce_scatter_tensor`; there is none in an all-reduce."""

    def message(cluster: Cluster, kind: str) -> float:
        return Pricers.of(build_mesh(cluster, (8,)), cluster).activations.message_seconds(kind, 0, 1e9)

    copying = run_by("fsdp-compiled", 8)
    bare = copying.with_software(replace(copying.software, rearranges=False))
    copied = 2e9 / (CLUSTER.device.memory_bandwidth * CLUSTER.device.efficiency("copy").bandwidth)
    for kind in ("all_gather", "reduce_scatter"):
        assert message(copying, kind) - message(bare, kind) == pytest.approx(copied, rel=0.01)
    assert message(copying, "all_reduce") == message(bare, "all_reduce")


def test_inputs_of_products_in_fp8_are_gathered_in_fp8() -> None:
    """Half of the message and of its copy; what is scattered has 16 bits all the same."""
    wide = run_by("fsdp-compiled", 8)
    fp8 = wide.with_software(replace(wide.software, products="fp8", gathers_inputs_narrow=True))
    activations = [Pricers.of(build_mesh(one, (8,)), one).activations for one in (wide, fp8)]
    whole, half = (one.message_seconds("all_gather", 0, 1e9) for one in activations)
    assert half == pytest.approx(whole / 2, rel=0.02)
    same = [one.message_seconds("reduce_scatter", 0, 1e9) for one in activations]
    assert same[0] == same[1]
    bf16 = wide.with_software(replace(wide.software, gathers_inputs_narrow=True))
    assert Pricers.of(build_mesh(bf16, (8,)), bf16).activations.message_seconds("all_gather", 0, 1e9) == whole


def test_rows_scaled_one_by_one_keep_a_share_of_what_fp8_saves() -> None:
    rule = product_rule()
    extents = np.array([[float(factor.extent) for factor in rule.factors]])
    moved = np.array([1e6])

    def seconds(products: str, gained: float) -> float:
        software = replace(load_software("fsdp-compiled"), products=products, gained=gained)
        one = np.ones(1)
        call = KernelCall(
            rule=rule, extents=extents, dtype="bf16", device=CLUSTER.device, software=software, graded=(0, 1),
            flops=one, moved=moved, moved_backward=moved, hops=one, uneven=one,
        )  # fmt: skip
        return float(sum(part[0] for part in kernel_seconds(call)))

    wide, narrow, half = seconds("", 1.0), seconds("fp8", 1.0), seconds("fp8", 0.5)
    assert half == pytest.approx((wide + narrow) / 2)
    assert seconds("", 0.5) == wide
