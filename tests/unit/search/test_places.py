"""Tables outside of the devices in a search: what is saved, what it costs, and what cannot be."""

from dataclasses import replace

import pytest

from hardware_profiles import Cluster, load_profile
from planner.api.searching import search
from planner.errors import InfeasibleError, RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.graph.placed import Placed
from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.binding.bind import bind
from planner.plan.outline import model_reference
from planner.plan.plan import Plan
from planner.plan.prediction.predict import predict
from planner.sharding.update import Update
from planner.strategy_search.analysis.advice import changes
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import FREE, Pinned
from tests.distributed import plans
from tests.refusals import refused

HOST: Placed = (("tables.*", "host"),)
SERVERS: Placed = (("tables.*", "servers"),)
KAGGLE = "dlrm-kaggle"


@pytest.fixture(scope="module")
def kaggle() -> tuple[OperatorGraph, int]:
    model = build_model(KAGGLE, dtype="float32")
    return trace(model.module, model.args), model.batch


def planned(
    kaggle: tuple[OperatorGraph, int], placed: Placed, cluster: Cluster | None = None, pinned: Pinned = FREE
) -> Plan:
    machine = load_profile("h100-80gb").with_devices(2) if cluster is None else cluster
    graph, batch = kaggle
    found = search(
        graph,
        machine,
        batch=batch,
        global_batch=64,
        precision="fp32",
        update=Update(buckets="none", placed=placed),
        pinned=pinned,
        simplicity=0.0,
    )
    return found.plan


@pytest.mark.parametrize("placed", [HOST, SERVERS], ids=["host", "servers"])
def test_tables_elsewhere_take_no_memory_of_the_devices(kaggle: tuple[OperatorGraph, int], placed: Placed) -> None:
    graph, _ = kaggle
    tables = sum(graph.types[p.name].nbytes for p in graph.parameters if p.name.startswith("tables"))
    plan = planned(kaggle, placed)
    memory = dict(plan.prediction.memory)
    every = sum(graph.types[p.name].nbytes for p in graph.parameters)
    assert memory["weights"] + memory["gradients"] + memory["optimizer state"] <= 4 * (every - tables)
    assert every - tables < tables / 100
    offloaded = dict(plan.prediction.offloaded)
    assert offloaded == ({"host": pytest.approx(3 * tables / 2)} if placed is HOST else {})  # weight and two moments


@pytest.mark.cases(1)
@pytest.mark.parametrize("placed", [(("tables.2.*", "host"), *SERVERS), HOST, SERVERS], ids=["both", "host", "servers"])
def test_search_and_prediction_price_them_alike(kaggle: tuple[OperatorGraph, int], placed: Placed) -> None:
    """The gap compares the bound of the search with what is predicted of its plan, whose host launches ahead."""
    plan = planned(kaggle, placed)
    assert 0 < plan.provenance.gap < 0.1
    again = predict(bind(plan, *kaggle), load_profile("h100-80gb").with_devices(2))
    assert again.objective_seconds == pytest.approx(plan.prediction.objective_seconds, rel=1e-9)


def test_the_optimizer_of_a_plan_updates_the_rows(kaggle: tuple[OperatorGraph, int]) -> None:
    plan, machine = planned(kaggle, HOST), load_profile("h100-80gb").with_devices(2)
    adam, sgd = (
        dict(predict(bind(replace(plan, training=replace(plan.training, optimizer=name)), *kaggle), machine).time)
        for name in ("adamw", "sgd")
    )
    assert sgd["communication"] < adam["communication"]
    lamb = replace(plan, training=replace(plan.training, optimizer="lamb"))
    with refused(RequestError, "place", "no lamb", "adamw or sgd"):
        predict(bind(lamb, *kaggle), machine)


@pytest.mark.parametrize("placed", [HOST, SERVERS], ids=["host", "servers"])
def test_the_link_of_an_unknown_host_is_not_free(kaggle: tuple[OperatorGraph, int], placed: Placed) -> None:
    plan, machine = planned(kaggle, placed), load_profile("h100-80gb").with_devices(2)
    with refused(RequestError, "place", "h100-80gb", "section [host]"):
        predict(bind(plan, *kaggle), replace(machine, host=None))


def test_more_samples_move_more_rows(kaggle: tuple[OperatorGraph, int]) -> None:
    cluster, seconds = load_profile("h100-80gb").with_devices(1), []
    for samples in (1024, 4096, 16384):
        found = search(
            kaggle[0], cluster, batch=kaggle[1], global_batch=samples, precision="fp32", update=Update(placed=HOST),
            pinned=Pinned(micro_batches=1), simplicity=0.0,
        )  # fmt: skip
        seconds.append(dict(found.plan.prediction.time)["communication"])
    assert seconds[0] < seconds[1] < seconds[2] < 16 * seconds[0]


def test_what_the_hosts_have_no_room_for_does_not_fit() -> None:
    """Tables of 89.5 GiB with two moments each, and 256 GiB of the host for each of its devices."""
    model = build_model("dlrm-terabyte", dtype="float32")
    given = (trace(model.module, model.args), model.batch)
    with refused(InfeasibleError, "h100-80gb", "256.0 GiB"):
        planned(given, HOST, load_profile("h100-80gb").with_devices(1))
    assert planned(given, HOST).prediction.peak_bytes < 10e9


@pytest.mark.slow
@pytest.mark.thorough
def test_what_does_not_fit_is_told_to_fit_with_tables_elsewhere() -> None:
    model = build_model("dlrm-terabyte", dtype="float32")
    graph = trace(model.module, model.args)
    request = SearchRequest(
        graph=graph, batch=model.batch,
        model=model_reference(graph, name="dlrm-terabyte", sequence_length=None, batch=model.batch),
        cluster=load_profile("h100-80gb").with_devices(2), global_batch=64, precision="fp32",
    )  # fmt: skip
    texts = [change.text for change in changes(request)]
    assert "tables on the host (--place 'tables.*.weight=host')" in texts


@pytest.mark.parametrize(
    ("decided", "facts"),
    [
        (
            {"optimizer": "lamb"},
            ("lamb", "adamw", "sgd"),
        ),
        ({"update": Update(placed=(("tables.*", "moon"),))}, ("place", "moon", "host", "servers")),
        ({"update": Update(placed=HOST, clip_norm=1.0)}, ("place", "none")),
    ],
)
def test_what_cannot_be_decided_together(
    kaggle: tuple[OperatorGraph, int], decided: dict[str, object], facts: tuple[object, ...]
) -> None:
    graph, batch = kaggle
    settings = {"update": Update(placed=HOST), **decided}
    with refused(RequestError, *facts):
        search(graph, "h100-80gb", devices=2, batch=batch, **settings)  # type: ignore[arg-type]


WORDS: Placed = (("model.embed_tokens.*", "host"),)


def found_with(model: str, placed: Placed, pinned: Pinned, **settings: object) -> Plan:
    machine = load_profile("h100-80gb").with_devices(4)
    return search(
        plans.traced(model), machine, batch=plans.BATCH, global_batch=16,
        update=Update(buckets="none", placed=placed), pinned=pinned, simplicity=0.0, **settings,
    ).plan  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.slow
def test_the_first_stage_of_a_pipeline_has_the_tables() -> None:
    """All exact solvers find the same, the prediction prices it alike, and what is left open is as good as the best of
    all that can be decided."""
    objectives = {}
    for pipeline in (1, 2, 4):
        pinned = Pinned(pipeline=pipeline, virtual_stages=1, micro_batches=2)
        plan = found_with("llama4", WORDS, pinned)
        assert plan.provenance.gap < 0.3  # launches take longest here
        judged = predict(bind(plan, plans.traced("llama4"), plans.BATCH), load_profile("h100-80gb").with_devices(4))
        assert judged.objective_seconds == pytest.approx(plan.prediction.objective_seconds, rel=1e-9)
        objectives[pipeline] = plan.prediction.objective_seconds
    for algorithm in ("exhaustive", "ilp"):
        other = found_with("llama4", WORDS, Pinned(pipeline=4, virtual_stages=1, micro_batches=2), search=algorithm)
        assert other.prediction.objective_seconds == pytest.approx(objectives[4], rel=0.1)
    free = found_with("llama4", WORDS, Pinned(virtual_stages=1, micro_batches=2))
    assert free.prediction.objective_seconds <= min(objectives.values()) * 1.1


def test_a_table_that_later_stages_would_read_takes_one_stage() -> None:
    late: Placed = (("late.*", "host"),)
    assert found_with("late-table", late, Pinned(micro_batches=2)).pipeline == 1
    assert found_with("late-table", (("tokens.*", "host"),), Pinned(pipeline=2)).pipeline == 2
    with refused(RequestError, "pipeline = 2", "late/embedding"):
        found_with("late-table", late, Pinned(pipeline=2))


@pytest.mark.parametrize(
    ("pinned", "facts"),
    [
        (Pinned(schedule="pipedream"), ("schedule = pipedream", "1f1b")),
        (Pinned(slices=2), ("slices = 2",)),
        (Pinned(slices=0), ("slices = 0",)),
    ],
)
def test_schedules_that_rows_do_not_follow(pinned: Pinned, facts: tuple[object, ...]) -> None:
    with refused(RequestError, *facts):
        found_with("llama4", WORDS, pinned)


def test_a_machine_without_a_host_is_told(kaggle: tuple[OperatorGraph, int]) -> None:
    cluster = replace(load_profile("h100-80gb").with_devices(2), host=None)
    with refused(RequestError, "h100-80gb", "[host]"):
        planned(kaggle, HOST, cluster)
