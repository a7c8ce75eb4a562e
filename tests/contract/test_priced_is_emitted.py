"""What is priced is what is emitted: kind, axis and bytes of every message of a training step, as multisets.

The runtime runs one rank of each stage of a plan on made-up neighbours; `stage_costs` lists the messages that the same
plan is charged for, from which its seconds of communication are summed. Only the loss, which everybody gets to know, is
listed at no price.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch

from hardware_profiles import Cluster, load_profile
from planner.graph.fp8 import Fp8
from planner.graph.trace import trace
from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.plan import Plan
from planner.plan.prediction.predict import stage_costs
from planner.plan.prediction.walk.stage_cost import GATHERING, REDUCING
from planner.sharding.update import PLAIN, Update, update_words
from planner.strategy_search.request.space import FREE, Pinned
from tests.contract.one_rank import Messages, one_rank
from tests.distributed import plans
from tests.distributed.searched import searched_plan


def emitted(model: str, plan: Plan, rank: int) -> Messages:
    """What a device of a pipeline rank sends and receives in a step."""
    with one_rank(model, plan, plans.traced(model), rank) as (step, recorder):
        step(*plans.inputs(model))
        return recorder.messages(step.place)


def cluster_of(plan: Plan) -> Cluster:
    return load_profile("cpu").with_devices(plan.cluster.devices)


def priced(bound: BoundPlan, rank: int) -> Messages:
    """What a step is charged for."""
    found: Messages = Counter()
    for sent, times in stage_costs(bound, cluster_of(bound.plan))[rank].messages.items():
        steps = 1 if sent.phase == "update" else bound.plan.training.micro_batches
        found[sent.message.kind, sent.message.axis, sent.message.nbytes] += times * steps
    return found


@dataclass(frozen=True, kw_only=True)
class Hand:
    """A plan of tests/distributed/plans.py: by hand, or at random from a seed."""

    model: str
    kind: str | int
    mesh: tuple[int, ...]
    settings: Mapping[str, object] = field(default_factory=dict)
    update: Update = PLAIN

    def __call__(self) -> Plan:
        mesh = plans.mesh_of(*self.mesh)
        if isinstance(self.kind, int):
            plan = plans.random_plan(self.model, mesh, self.kind, **self.settings)
        else:
            plan = plans.hand_plan(self.kind, self.model, mesh, **self.settings)  # type: ignore[arg-type]
        return replace(plan, training=replace(plan.training, update=self.update))

    def __str__(self) -> str:
        options = {**self.settings, **update_words(self.update)}
        settings = "-".join(f"{key}={value}" for key, value in options.items())
        return "-".join(filter(None, (self.model, str(self.kind), "x".join(map(str, self.mesh)), settings)))


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The best plan on some devices with so many bytes of memory each."""

    model: str
    devices: int
    memory: float = 1e9
    pinned: Pinned = FREE
    update: Update = PLAIN

    def __call__(self) -> Plan:
        return searched_plan(self.model, self.devices, memory=self.memory, pinned=self.pinned, update=self.update)

    def __str__(self) -> str:
        words = "".join(f"-{key}={value}" for key, value in update_words(self.update).items())
        return f"searched-{self.model}-{self.devices}-{self.memory:.0f}-{self.pinned.pipeline}{words}"


FULL = {"recomputation": "full"}
KEEPING = {"recomputation": "selective", "kept": ("scaled_dot_product_attention", "linear")}
SOME = {"recomputation": ("full", "none"), "kept": ()}
TWO_PARTS = {"micro_batches": 2}
LAMB = {"optimizer": "lamb"}
MUON = {"optimizer": "muon"}
DELAYED = Fp8(recipe="delayed", history=4)
CLIPPED = Update(clip_norm=1.0, buckets=4096)
FOUR_STAGES = {"stages": (1, 1, 1, 1), "micro_batches": 4}
PLANS = (
    Hand(model="llama", kind="megatron", mesh=(2, 2)),
    Hand(model="llama", kind="megatron", mesh=(2, 4), settings={**TWO_PARTS, **FULL}),
    Hand(model="llama", kind="megatron", mesh=(4, 4)),
    *(
        Hand(model="llama", kind=kind, mesh=(2, 2), settings=settings)
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
    *(
        Hand(model="llama", kind=kind, mesh=(2, 2), update=CLIPPED)
        for kind in ("megatron", "zero1", "zero2", "zero3", 3)
    ),
    Hand(model="gpt4", kind="zero1", mesh=(2,), settings={"stages": (2, 2), **TWO_PARTS, **LAMB}, update=CLIPPED),
    Hand(model="gpt", kind="zero2", mesh=(2, 2), settings=FULL, update=CLIPPED),
    Hand(model="llama", kind="zero1", mesh=(2,), settings={**TWO_PARTS, **FULL}, update=CLIPPED),
    Hand(model="llama", kind=5, mesh=(2, 4), settings=LAMB, update=Update(buckets=(4, 11))),
    Hand(model="gpt", kind="zero1", mesh=(2, 2), settings=LAMB, update=Update(buckets=(("*.attn.*", 0), ("*", 1)))),
    Hand(model="llama", kind="zero3", mesh=(4,), settings=LAMB),
    Hand(model="llama4", kind="megatron", mesh=(2, 2), settings={"stages": (2, 2), **TWO_PARTS, **MUON}),
    Hand(model="llama", kind="zero3", mesh=(2, 4), settings=MUON),
    Hand(model="mixture", kind="zero2", mesh=(2, 2), settings=MUON, update=CLIPPED),
    *(Hand(model="llama", kind=seed, mesh=(2, 2), update=Update(buckets=1000)) for seed in (8, 9)),
    Hand(model="sharing", kind="zero1", mesh=(2,), settings={"stages": (2, 2), **TWO_PARTS, "fp8": DELAYED}),
    Searched(model="llama", devices=4),
    Searched(model="gpt", devices=4, pinned=Pinned(mesh=(4,)), update=Update(buckets="auto", clip_norm=1.0)),
    Searched(model="llama", devices=16, pinned=Pinned(mesh=(4, 4))),
    Searched(model="gpt", devices=8, pinned=Pinned(mesh=(2, 4), recompute="full")),
    Searched(model="llama", devices=4, memory=2e5, pinned=Pinned(mesh=(2, 2))),
    Searched(model="gpt4", devices=8, pinned=Pinned(pipeline=2, mesh=(2, 2))),
)
MORE = [
    pytest.param(Hand(model="gpt", kind=kind, mesh=(2, 2), settings=settings), marks=pytest.mark.thorough)
    for kind in ("zero1", "zero2", "zero3")
    for settings in ({}, FULL, KEEPING, SOME)
]


@pytest.mark.cases(5, 24)
@pytest.mark.slow
@pytest.mark.parametrize("make", [*PLANS, *MORE], ids=str)
def test_what_is_priced_is_emitted(make: Hand | Searched) -> None:
    plan = make()
    bound = bind(plan, plans.traced(make.model), plans.BATCH)
    for rank in range(plan.pipeline):
        expected = priced(bound, rank)
        found = emitted(make.model, plan, rank)
        assert found == expected, f"rank {rank}: sent {found - expected} unpriced, priced {expected - found} unsent"
        assert sum(found.values()) > 1


def test_the_seconds_are_those_of_the_messages() -> None:
    """No time is charged for moving data that no message stands for, and none is listed for nothing."""
    quiet = Hand(model="llama", kind="zero1", mesh=(1,))
    (cost,) = stage_costs(bind(quiet(), plans.traced("llama"), plans.BATCH), cluster_of(quiet()))
    moving = ("communication", GATHERING, REDUCING, "stage transfer", "gradient reduction", "weight gathering")
    assert not cost.messages
    assert all({**cost.micro_batch, **cost.once}[part] == 0.0 for part in moving)


@pytest.mark.cases(2)
@pytest.mark.parametrize("word", ["mixed", "fp32", "parameter"])
@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
def test_gradients_are_sent_in_the_dtype_that_is_priced(kind: str, word: str) -> None:
    """In bfloat16, where the words differ: ZeRO-1 reduces once a step, the others in each micro-batch."""
    graph = trace(plans.build("llama").bfloat16(), plans.batch())
    plan = plans.hand_plan(kind, "llama", plans.mesh_of(2, 2), graph=graph)
    update = Update(gradient_dtype=word, buckets=2048)
    plan = replace(plan, training=replace(plan.training, precision="bf16", update=update))
    bound = bind(plan, graph, plans.BATCH)
    expected = priced(bound, 0)
    with one_rank("llama", plan, graph, dtype=torch.bfloat16) as (step, recorder):
        step(*plans.batch())
        found = recorder.messages(step.place)
    assert found == expected
    widths = {"mixed": (4, 2), "fp32": (4, 4), "parameter": (2, 2)}[word]
    sent = sum(nbytes * times for (name, axis, nbytes), times in found.items() if name == "reduce_scatter")
    elements = sum(parameter.numel() for parameter in plans.build("llama").parameters())
    assert sent == elements * widths[kind != "zero1"] * 1.5  # all on one axis, half of it on the other


def test_a_bucket_sends_what_its_members_would() -> None:
    """As many bytes in fewer messages, each not above the size of a bucket unless its only member is."""
    found = {}
    for buckets in ("none", 8192):
        plan = Hand(model="llama", kind="zero1", mesh=(4,), update=Update(buckets=buckets))()
        found[buckets] = emitted("llama", plan, 0)
    alone, together = (
        {kind: [n for (name, _, n), times in one.items() for _ in range(times) if name == kind] for kind in KINDS}
        for one in found.values()
    )
    for kind in KINDS:
        assert sum(alone[kind]) == sum(together[kind])
        assert len(together[kind]) < 0.7 * len(alone[kind])
        assert max(together[kind]) <= 8192


KINDS = ("reduce_scatter", "all_gather")
