"""States that are shared out by whole parameters: who owns what, and what is sent."""

from dataclasses import replace

import pytest

from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.layout.parameter_owners import broadcasts_of, owners_of
from planner.plan.layout.shared_parameters import shared_parameters
from planner.plan.prediction.predict import predict, stage_costs
from tests.distributed import plans
from tests.unit.search.cases import cluster_of


def bound_by(kind: str, *sizes: int, buckets: int | str = "none", by: str = "parameters") -> BoundPlan:
    plan = plans.hand_plan(kind, "llama", plans.mesh_of(*sizes))
    update = replace(plan.training.update, zero_by=by, buckets=buckets)
    training = replace(plan.training, update=update)
    return bind(replace(plan, training=training), plans.traced("llama"), plans.BATCH)


def test_owners_are_balanced_and_the_middle_device_is_the_fullest() -> None:
    bound = bound_by("whole", 3)
    owners = owners_of(bound, bound.parameters)
    numel = {name: bound.graph.types[name].numel for name in bound.parameters}
    assert owners.keys() == numel.keys()
    loads = [sum(n for name, n in numel.items() if owners[name].at((place,))) for place in range(3)]
    assert sum(loads) == sum(numel.values())
    assert max(loads) == loads[1] <= max(4 / 3 * sum(loads) / 3, max(numel.values()))


def test_only_copies_along_axes_that_sum_have_an_owner() -> None:
    """On a tensor axis weights are cut, and norms are copies."""
    bound = bound_by("megatron", 2, 2)
    owners = owners_of(bound, bound.parameters)
    assert {owner.axes for name, owner in owners.items() if "norm" in name} == {(0,)}
    assert {owner.axes for owner in owners.values()} == {(0,)}
    assert owners_of(bound_by("megatron", 2, 2, by="slices"), bound.parameters) == {}
    assert owners_of(bound_by("zero1", 4), bound.parameters) == {}


@pytest.mark.parametrize("buckets", ["none", 4096])
def test_servers_cost_hosts_what_devices_keep_otherwise(buckets: int | str) -> None:
    """The fullest device of both is the same, and so is what it keeps: moments, and on a host a master of its own and
    the gradients that were pushed."""
    cluster = cluster_of("cpu", 4)
    owned, served = (
        stage_costs(bound_by("whole", 4, by=by, buckets=buckets), cluster)[0] for by in ("parameters", "servers")
    )
    assert served.memory["optimizer state"] == 0.0
    assert served.offloaded["host"] == pytest.approx(2 * owned.memory["optimizer state"])
    kinds = [{sent.message.kind for sent in one.messages if sent.phase == "update"} for one in (owned, served)]
    assert kinds == [{"all_reduce", "broadcast"}, {"reduce", "broadcast"}]


def test_a_shared_parameter_has_its_server_at_one_place() -> None:
    plan = plans.hand_plan("whole", "gpt4", plans.mesh_of(2), stages=(2, 2))
    update = replace(plan.training.update, zero_by="servers")
    bound = bind(replace(plan, training=replace(plan.training, update=update)), plans.traced("gpt4"), plans.BATCH)
    (shared,) = shared_parameters(bound)
    places = {
        owners_of(bound, held)[shared].place
        for held in ({shared, *(n for n in bound.parameters if ".0." in n)}, {shared, *bound.parameters}, {shared})
    }
    assert places == {(1,)}


@pytest.mark.parametrize("buckets", ["none", 4096, ((("*proj*"), 1),)])
def test_every_weight_is_broadcast_once_by_its_owner(buckets: int | str) -> None:
    bound = bound_by("whole", 2, 2, buckets=buckets)
    owners = owners_of(bound, bound.parameters)
    sent = broadcasts_of(bound, owners)
    assert sorted(name for one in sent for name in one.names) == sorted(bound.parameters)
    for one in sent:
        assert {owners[name] for name in one.names} == {one.owner}
        assert one.nbytes == sum(bound.graph.types[name].nbytes for name in one.names)
        assert [message.axis for message in one.messages] == [0, 1]
    if isinstance(buckets, int):
        assert all(one.nbytes <= buckets for one in sent if len(one.names) > 1)
        assert any(len(one.names) > 1 for one in sent)


def test_the_fullest_device_keeps_what_it_owns() -> None:
    cluster = cluster_of("cpu", 3)
    whole, owned = (
        stage_costs(bound_by("whole", 3, by=by), cluster)[0].memory["optimizer state"]
        for by in ("slices", "parameters")
    )
    bound = bound_by("whole", 3)
    owners = owners_of(bound, bound.parameters)
    mine = sum(bound.graph.types[name].numel for name, owner in owners.items() if owner.at((1,)))
    assert owned == pytest.approx(whole * mine / sum(bound.graph.types[name].numel for name in owners))
    time = dict(predict(bound, cluster).time)
    assert time["weight gathering"] > 0.0
