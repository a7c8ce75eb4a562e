"""What is priced is what is emitted: kind, axis and bytes of every message of a training step, as multisets.

The runtime runs one rank of each stage of a plan on made-up neighbours; `stage_costs` lists the messages that the same
plan is charged for, from which its seconds of communication are summed. `NOT_PRICED` has all that the runtime sends
beside them. It is compared exactly: what stands there and is no longer sent, or is priced now, fails as well.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest

from hardware_profiles import Cluster, load_profile
from planner.plan.bind import BoundPlan, bind, stage_of_operators
from planner.plan.plan import ModelReference, Plan
from planner.plan.predict import TIME_PER_STEP, stage_costs
from planner.pricing import RedistributionPricer
from planner.search.search import SearchRequest, search
from planner.search.space import FREE, Pinned
from planner.sharding.layout import PARTIAL
from tests.contract.one_rank import Messages, one_rank
from tests.distributed import plans


def emitted(model: str, plan: Plan, stage: int) -> Messages:
    """What a rank sends and receives in a step."""
    with one_rank(model, plan, plans.traced(model), stage) as (step, recorder):
        step(*plans.inputs(model))
        return recorder.messages(step.place)


def cluster_of(plan: Plan) -> Cluster:
    return load_profile("cpu").with_devices(plan.cluster.devices)


def priced(bound: BoundPlan, stage: int) -> Messages:
    """What a step is charged for."""
    found: Messages = Counter()
    for (part, message), times in stage_costs(bound, cluster_of(bound.plan))[stage].messages.items():
        steps = 1 if part in TIME_PER_STEP else bound.plan.training.micro_batches
        found[message.kind, message.axis, message.nbytes] += times * steps
    return found


def loss_of_every_micro_batch(bound: BoundPlan, stage: int) -> Messages:
    """4 bytes, summed over the axes where the loss is partial, so that every rank of the last stage knows it."""
    if stage != len(bound.plan.stages) - 1:
        return Counter()
    plan, maker = bound.plan, bound.operators[bound.graph.producer[bound.graph.loss]]
    axes = [axis for axis, placement in enumerate(maker.layouts.results[0].forward) if placement == PARTIAL]
    parts = plan.training.micro_batches
    return Counter({("all_reduce", axis, 4.0): parts for axis in axes if plan.mesh.sizes[axis] > 1})


def loss_of_the_step(bound: BoundPlan, stage: int) -> Messages:
    """4 bytes, handed on from the last stage to all others."""
    return Counter({("all_reduce", None, 4.0): 1} if len(bound.plan.stages) > 1 else {})


def inputs_loaded_elsewhere(bound: BoundPlan, stage: int) -> Messages:
    """An input that is loaded in one layout and read in another. The search loads inputs as they are read, so this
    is met in plans by hand only; inputs are integers and small."""
    pricer = RedistributionPricer(mesh=bound.plan.mesh, cluster=cluster_of(bound.plan))
    stages = stage_of_operators(bound)
    found: Messages = Counter()
    for at, op in enumerate(bound.operators):
        for name, wanted in zip(op.operator.operands, op.layouts.operands, strict=True):
            if name in bound.inputs and stages[at] == stage:
                for message in pricer.route(bound.graph.types[name], bound.inputs[name], wanted.forward).messages:
                    found[message.kind, message.axis, message.nbytes] += bound.plan.training.micro_batches
    return found


NOT_PRICED: tuple[Callable[[BoundPlan, int], Messages], ...] = (
    loss_of_every_micro_batch,
    loss_of_the_step,
    inputs_loaded_elsewhere,
)


@dataclass(frozen=True, kw_only=True)
class Hand:
    """A plan of tests/distributed/plans.py: by hand, or at random from a seed."""

    model: str
    kind: str | int
    mesh: tuple[int, ...]
    settings: Mapping[str, object] = field(default_factory=dict)

    def __call__(self) -> Plan:
        mesh = plans.mesh_of(*self.mesh)
        if isinstance(self.kind, int):
            return plans.random_plan(self.model, mesh, self.kind, **self.settings)
        return plans.hand_plan(self.kind, self.model, mesh, **self.settings)  # type: ignore[arg-type]

    def __str__(self) -> str:
        settings = "-".join(f"{key}={value}" for key, value in self.settings.items())
        return "-".join(filter(None, (self.model, str(self.kind), "x".join(map(str, self.mesh)), settings)))


def eager_cluster(devices: int, memory: float) -> Cluster:
    """Links without latency between slow devices, so that it pays to split models as small as these."""
    cluster = load_profile("cpu").with_devices(devices)
    device = replace(cluster.device, memory=memory, reserved=0.0, allocator_slack=0.0, launch_latency=0.0)
    levels = tuple(
        replace(level, bandwidth=1e12, protocols=tuple(replace(p, setup=0.0, latency=0.0) for p in level.protocols))
        for level in cluster.levels
    )
    return replace(cluster, device=device, levels=levels)


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The best plan on some devices with so many bytes of memory each."""

    model: str
    devices: int
    memory: float = 1e9
    pinned: Pinned = FREE

    def __call__(self) -> Plan:
        graph = plans.traced(self.model)
        reference = ModelReference(
            reference=self.model,
            sequence_length=plans.SEQUENCE,
            parameters=graph.parameter_count(),
            fingerprint=graph.fingerprint(),
        )
        request = SearchRequest(
            graph=graph,
            batch=plans.BATCH,
            model=reference,
            cluster=eager_cluster(self.devices, self.memory),
            global_batch=plans.BATCH,
            precision="fp32",
            pinned=self.pinned,
        )
        return search(request).plan

    def __str__(self) -> str:
        return f"searched-{self.model}-{self.devices}-{self.memory:.0f}-{self.pinned.pipeline}"


FULL = {"recomputation": "full"}
KEEPING = {"recomputation": "selective", "kept": ("scaled_dot_product_attention", "linear")}
SOME = {"recomputation": ("full", "none"), "kept": ()}
TWO_PARTS = {"micro_batches": 2}
FOUR_STAGES = {"stages": (1, 1, 1, 1), "micro_batches": 4}
PLANS = (
    Hand(model="llama", kind="megatron", mesh=(2, 2)),
    Hand(model="llama", kind="megatron", mesh=(2, 4), settings={**TWO_PARTS, **FULL}),
    Hand(model="llama", kind="megatron", mesh=(4, 4)),
    *(
        Hand(model=model, kind=kind, mesh=(2, 2), settings=settings)
        for model in ("llama", "gpt")
        for kind in ("zero1", "zero2", "zero3")
        for settings in ({}, FULL, KEEPING, SOME)
    ),
    Hand(model="gpt", kind="zero1", mesh=(2,), settings=TWO_PARTS),
    Hand(model="llama4", kind="megatron", mesh=(2, 2), settings={"stages": (1, 2, 1), **TWO_PARTS}),
    Hand(model="gpt4", kind="zero3", mesh=(1,), settings={**FOUR_STAGES, **FULL}),
    Hand(model="gpt4", kind="zero1", mesh=(2,), settings={"stages": (2, 2), **TWO_PARTS}),  # tied embeddings
    *(
        Hand(model=model, kind=seed, mesh=mesh, settings=settings)
        for seed, (model, mesh, settings) in enumerate(
            [
                ("llama", (2, 2), {}),
                ("gpt", (2, 2), {}),
                ("llama", (2, 4), {}),
                ("gpt", (4, 2), {}),
                ("llama", (16,), {}),
                ("gpt", (4, 4), FULL),
                ("llama", (2, 4), FULL),
                ("gpt", (2, 2), {**TWO_PARTS, **FULL}),
                ("llama", (1, 4), TWO_PARTS),
                ("assorted", (2, 2), {}),
                ("assorted", (4,), {}),
                ("llama4", (2, 2), {"stages": (1, 3), **TWO_PARTS}),
                ("gpt4", (2, 2), {"stages": (1, 2, 1), **TWO_PARTS}),
                ("gpt4", (4,), {**FOUR_STAGES, **FULL}),
                ("llama", (2, 2), {**TWO_PARTS, **KEEPING}),
                ("gpt", (2, 4), {**SOME}),
                ("gpt4", (2,), {**FOUR_STAGES, **KEEPING}),
                ("resnet", (2, 2), {**TWO_PARTS, **FULL}),
                ("dlrm", (2, 2), TWO_PARTS),
            ]
        )
    ),
    Searched(model="llama", devices=4),
    Searched(model="llama", devices=16, pinned=Pinned(mesh=(4, 4))),
    Searched(model="gpt", devices=8, pinned=Pinned(mesh=(2, 4), recompute="full")),
    Searched(model="llama", devices=4, memory=2e5, pinned=Pinned(mesh=(2, 2))),
    Searched(model="gpt4", devices=8, pinned=Pinned(pipeline=2, mesh=(2, 2))),
)


@pytest.mark.parametrize("make", PLANS, ids=str)
def test_what_is_priced_is_emitted(make: Hand | Searched) -> None:
    plan = make()
    bound = bind(plan, plans.traced(make.model), plans.BATCH)
    for stage in range(len(plan.stages)):
        expected = priced(bound, stage)
        for explained in NOT_PRICED:
            expected += explained(bound, stage)
        found = emitted(make.model, plan, stage)
        assert found == expected, f"stage {stage}: sent {found - expected} unpriced, priced {expected - found} unsent"
        assert sum(found.values()) > 1


def test_everything_that_is_not_priced_is_met() -> None:
    """An explanation that explains nothing goes."""
    met = set()
    for make in PLANS:
        if isinstance(make, Hand):
            bound = bind(make(), plans.traced(make.model), plans.BATCH)
            stages = range(len(bound.plan.stages))
            met |= {explained for explained in NOT_PRICED if any(explained(bound, stage) for stage in stages)}
    assert met == set(NOT_PRICED)


def test_the_seconds_are_those_of_the_messages() -> None:
    """No time is charged for moving data that no message stands for, and none is listed for nothing."""
    quiet = Hand(model="llama", kind="zero1", mesh=(1,))
    (cost,) = stage_costs(bind(quiet(), plans.traced("llama"), plans.BATCH), cluster_of(quiet()))
    moving = ("communication", "parameter gathering", "stage transfer", "gradient reduction", "weight gathering")
    assert not cost.messages
    assert all({**cost.micro_batch, **cost.once}[part] == 0.0 for part in moving)
