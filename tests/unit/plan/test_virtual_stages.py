"""What the prediction charges for virtual stages: the stages of a rank added up, and the way back to the first rank."""

import math
from dataclasses import replace

import pytest

from costmodels import collective_time, in_flight, in_flight_of_chunks, schedule_orders, simulate, step_time
from hardware_profiles import PYTORCH, Cluster, load_profile, load_software, software_names
from planner.graph.operator_graph import TensorType
from planner.plan.binding.bind import bind
from planner.plan.plan import Plan
from planner.plan.prediction.predict import predict, stage_costs
from planner.plan.prediction.step import ranks_seconds
from planner.plan.prediction.walk.stage_cost import StageCost, holders_of, tied_seconds, transfer_seconds
from planner.sharding.mesh import Mesh, MeshAxis
from tests.distributed import plans

PARTS = 2
SUMMED = ("forward", "backward", "communication", "parameter gathering", "recomputation")


def cluster_of(plan: Plan) -> Cluster:
    return load_profile("h100-80gb").with_devices(plan.cluster.devices)


def plain(model: str, **settings: object) -> Plan:
    """Four stages of one block on four ranks of 4 devices."""
    return plans.hand_plan("zero1", model, plans.mesh_of(4), stages=(1,) * 4, micro_batches=PARTS, **settings)


def dealt(plan: Plan) -> Plan:
    """The same four stages on two ranks."""
    cluster = replace(plan.cluster, devices=plan.cluster.devices // 2)
    return replace(plan, virtual_stages=2, schedule="interleaved_1f1b", cluster=cluster)


def costs_of(plan: Plan) -> tuple[StageCost, ...]:
    return stage_costs(bind(plan, plans.traced(plan.model.reference), plans.BATCH), cluster_of(plan))


@pytest.mark.parametrize("recomputation", ["none", "full", "selective"])
@pytest.mark.parametrize("model", ["llama4", "gpt4"])
def test_a_rank_is_the_sum_of_its_stages(model: str, recomputation: str) -> None:
    plan = plain(model, recomputation=recomputation, kept=("scaled_dot_product_attention",))
    four, two = costs_of(plan), costs_of(dealt(plan))
    for rank in range(2):
        stages = (four[rank], four[rank + 2])
        for part in SUMMED:
            assert two[rank].micro_batch[part] == pytest.approx(sum(cost.micro_batch[part] for cost in stages)), part
        assert two[rank].memory["transient"] == max(cost.memory["transient"] for cost in stages)


def test_what_a_host_launches_at_the_start_of_a_pass_lengthens_it() -> None:
    """Of every stage that a rank has."""
    plan = dealt(plain("gpt4"))
    cluster = cluster_of(plan)
    bound = bind(plan, plans.traced(plan.model.reference), plans.BATCH)
    started = cluster.with_software(replace(cluster.software, starts=(14, 2)))
    each = cluster.device.host_latency * cluster.software.host
    for before, after in zip(stage_costs(bound, cluster), stage_costs(bound, started), strict=True):
        for part, launches in (("forward", 14), ("backward", 2)):
            added = after.micro_batch[part] - before.micro_batch[part]
            assert added == pytest.approx(2 * launches * each), part
        for one, other in zip(before.chunks, after.chunks, strict=True):
            assert other.forward.work - one.forward.work == pytest.approx(14 * each)
            assert other.backward.work - one.backward.work == pytest.approx(2 * each)
    assert predict(bound, started).step_seconds > predict(bound, cluster).step_seconds


@pytest.mark.parametrize("model", ["llama4", "gpt4"])
def test_activations_are_those_of_the_micro_batches_in_flight_of_each_stage(model: str) -> None:
    plan = plain(model)
    four, two = costs_of(plan), costs_of(dealt(plan))
    for rank in range(2):
        live = in_flight_of_chunks(rank, 2, 2, PARTS)
        kept = [
            four[stage].memory["activations"] / in_flight(stage, 4, PARTS) * times
            for stage, times in zip((rank, rank + 2), live, strict=True)
        ]
        assert two[rank].memory["activations"] == pytest.approx(sum(kept))


def test_a_recomputed_rank_holds_one_block_at_a_time() -> None:
    """Of the two stages of a rank only one recomputes at a time: less than both would take alone."""
    plan = plain("llama4", recomputation="full")
    four, two = costs_of(plan), costs_of(dealt(plan))
    assert two[1].memory["activations"] < four[1].memory["activations"] + four[3].memory["activations"]


def test_transfers_go_round() -> None:
    """Values go on three times: to rank 1, back to rank 0, to rank 1. Gradients come back as often."""
    plan = dealt(plain("llama4"))
    cluster = cluster_of(plan)
    flow = 4 * plans.BATCH / PARTS * plans.SEQUENCE * plans.LLAMA.hidden_size
    for cost in costs_of(plan):
        sent = [sent.message.nbytes for sent in cost.messages.elements() if sent.part == "stage transfer"]
        one = transfer_seconds(flow, (cluster.group(2, plan.mesh.size),))
        assert sent == [flow] * 3
        assert cost.micro_batch["stage transfer"] == pytest.approx(3 * one)


def test_the_way_back_to_the_first_rank_is_as_long_as_the_pipeline() -> None:
    """Four ranks of 4 devices: one further is in the same node of 8, the way from the last to the first is not."""
    plan = plans.hand_plan("zero1", "llama8", plans.mesh_of(4), stages=(1,) * 8, micro_batches=1)
    plan = replace(
        plan,
        virtual_stages=2,
        schedule="interleaved_1f1b",
        training=replace(plan.training, micro_batches=4, global_batch=4 * plans.BATCH),
        cluster=replace(plan.cluster, devices=16),
    )
    cluster = cluster_of(plan)
    flow = 4.0 * plans.BATCH * plans.SEQUENCE * plans.LLAMA.hidden_size / 4
    near, far = (transfer_seconds(flow, (cluster.group(2, stride),)) for stride in (4, 12))
    assert far > near
    found = [cost.micro_batch["stage transfer"] for cost in costs_of(plan)]
    assert found == pytest.approx([2 * near + far, 4 * near, 4 * near, 2 * near + far])


def test_tied_parameters_are_summed_between_ranks_only() -> None:
    """The embedding of a GPT is on the first and on the last stage: ranks 0 and 3 of four, ranks 0 and 1 of two."""
    plan = plain("gpt4")
    cluster = cluster_of(plan)
    nbytes = 4.0 * plans.VOCABULARY * plans.GPT_CONFIG.hidden_size / 4
    for found, distance in ((plan, 3), (dealt(plan), 1)):
        tied = [
            (sent.message.kind, sent.message.nbytes)
            for sent in costs_of(found)[0].messages.elements()
            if sent.part == "gradient reduction" and sent.message.axis is None
        ]
        assert tied == [("all_reduce", nbytes)]
        assert tied_seconds(nbytes, (cluster.group(2, 4 * distance),)) > 0


def test_parameters_of_one_rank_are_held_once() -> None:
    """What two stages of a rank use is kept and updated once: here the blocks share their weights."""
    plan = dealt(plain("gpt4"))
    weights = sum(cost.memory["weights"] for cost in costs_of(plan))
    numel = plans.traced("gpt4").parameter_count() + plans.VOCABULARY * plans.GPT_CONFIG.hidden_size
    assert weights == 4 * numel  # whole on every device; the tied embedding on both ranks


def test_the_step_is_that_of_the_interleaved_schedule() -> None:
    plan = dealt(plain("llama4"))
    prediction = predict(bind(plan, plans.traced("llama4"), plans.BATCH), cluster_of(plan))
    per_part = [stage.micro_batch_seconds for stage in prediction.stages]
    once = [stage.once_seconds for stage in prediction.stages]
    assert len(per_part) == 2
    assert prediction.objective_seconds == pytest.approx(float(step_time(per_part, once, PARTS, 2)))
    costs = costs_of(plan)
    ranks = ranks_seconds([cost.chunks for cost in costs], [cost.once for cost in costs], "interleaved_1f1b")
    found = simulate(ranks, schedule_orders("interleaved_1f1b", 2, PARTS, virtual=2))
    assert prediction.step_seconds == pytest.approx(found.seconds)
    came = [sum(one.transfers for chunk in cost.chunks for one in chunk.passes) for cost in costs]  # is not waited for
    busy = [
        PARTS * (part - cost.ahead - transfers) + step
        for part, step, cost, transfers in zip(per_part, once, costs, came, strict=True)
    ]
    assert dict(prediction.time)["pipeline bubble"] == pytest.approx(found.seconds - max(busy))
    assert math.fsum(value for _, value in prediction.time) == pytest.approx(prediction.step_seconds)
    assert prediction.peak_bytes == max(stage.peak_bytes for stage in prediction.stages)


def test_what_several_hold_is_sent_in_parts() -> None:
    """Narayanan et al. 2021, section 4.1: a t-th from each of t devices, gathered over the links of a node. What no two
    hold is sent whole; software that waits for what it sends waits twice as often."""
    software = replace(PYTORCH, scatter_gather=True)
    cluster = load_profile("a100-80gb").with_devices(16).with_software(software)
    links, tensor = (cluster.group(2, 8),), TensorType(shape=(32, 1024, 1024), dtype="bfloat16")
    sizes = (("data", 2, 4), ("tensor", 4, 1))
    mesh = Mesh(axes=tuple(MeshAxis(name=name, size=n, stride=stride, bandwidth=1e9) for name, n, stride in sizes))
    held = tensor.nbytes / 2  # cut by data, whole on each of 4
    holders = holders_of(held, tensor, mesh, cluster)
    assert holders == cluster.group(4, 1)
    assert holders_of(held / 4, tensor, mesh, cluster) is None
    assert holders_of(held, tensor, mesh, cluster.with_software(PYTORCH)) is None
    gathered = float(collective_time("all_gather", held, holders))
    part = transfer_seconds(held / 4, links)
    assert transfer_seconds(held, links, software, holders) == pytest.approx(part + gathered)
    waits = replace(software, waits_to_send=True)
    assert transfer_seconds(held, links, waits, holders) == pytest.approx(2 * part + gathered)
    assert part + gathered < 0.5 * transfer_seconds(held, links)


def test_which_stacks_send_parts() -> None:
    parts = {name for name in software_names() if load_software(name).scatter_gather}
    assert parts == {"deepspeed", "megatron-2021"}
    assert {name for name in software_names() if load_software(name).waits_to_send} == {"deepspeed"}
