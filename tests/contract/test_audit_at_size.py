"""What is predicted is emitted, at the published sizes of models: thirty-six plans for 8 to 2,048 devices, nothing
scaled down, without a device.

Every collective and every product of every pipeline rank is equal, operator by operator, and live memory is within two
percent and below what the plan states. Routers of experts give every device as many rows as any other. Buckets that
start in the backward pass let gradients go which the prediction still holds, so they stand here where most lives before
any bucket starts.

Of the largest models one pipeline rank of each kind is audited: the first, the last, and one for every sequence of
blocks.

Most take longer than ten seconds, so `make exhaustive` runs them all; CI audits smaller models (test_audit.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import pytest

import planner
from hardware_profiles import load_profile
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.plan import PRECISIONS, Group, Plan
from planner.sharding.update import PLAIN, Update
from planner.strategy_search.request.space import Pinned
from runtime import audit
from tests.long_lists import rarely

pytestmark = pytest.mark.thorough


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of the zoo, so many devices, and what is decided by hand."""

    model: str
    devices: int
    decided: Mapping[str, object] = field(default_factory=dict)
    update: Update = PLAIN
    optimizer: str = "adamw"
    precision: str = "bf16"
    profile: str = "h100-80gb"
    few: bool = False  # one pipeline rank of each kind

    def __str__(self) -> str:
        words = (f"{key}={value}" for key, value in self.decided.items())
        return "-".join((self.model, str(self.devices), *words))


def case(model: str, devices: int, update: Update = PLAIN, precision: str = "bf16", **decided: object) -> Case:
    return Case(model=model, devices=devices, decided=decided, update=update, precision=precision)


CLIPPED = Update(buckets="none", clip_norm=1.0)
BUCKETS = Update(clip_norm=1.0, buckets="auto")
SUMMED = Update(gradient_dtype="fp32", buckets=25_000_000)
WIDE = Update(buckets="none", gradient_dtype="fp32")
CASES = (
    case("dlrm-kaggle", 8, CLIPPED, data=8, zero=1, micro_batches=2),
    case("gpt3-6.7b", 32, CLIPPED, tensor=4, data=8, zero=3, sequence_parallel=True),
    case("wide-deep", 64, data=64, zero=3, micro_batches=2),
    case("llama8b", 1024, tensor=8, data=128, zero=3, sequence_parallel=True, micro_batches=2),
    case("llama8b", 8, data=8, zero=3, recompute="full", micro_batches=4),
    case("llama8b", 16, CLIPPED, pipeline=2, tensor=8, recompute="selective", micro_batches=4),
    case("gpt2-large", 8, BUCKETS, data=8, zero=0),
    case("vit-l16", 8, BUCKETS, data=8, zero=1, recompute="selective", micro_batches=2),
    case("vit-l16", 1024, SUMMED, data=1024, zero=2, micro_batches=1),
    case("resnet50", 8, data=8, zero=3, micro_batches=2),
    case("resnet50", 16, pipeline=2, mesh=(8,), micro_batches=4),
    case("resnet50", 128, BUCKETS, "fp32", data=128),
    case("dlrm-kaggle", 16),
    case("wide-deep", 128, CLIPPED, zero=2),
    case("mixtral-8x7b", 32, CLIPPED, tensor=4, data=8, expert=8, whole_experts=True, zero=1, recompute="selective"),
)
LONGER = (
    case("llama8b", 64),
    case("llama8b", 128, BUCKETS, data=128, zero=2, recompute="full"),
    case("gpt2-large", 8, zero=1),
    case("gpt2-large", 64, SUMMED, data=16, tensor=4, zero=2, micro_batches=2),
    case("gpt2-large", 16, pipeline=2, data=8, zero=1, micro_batches=4),
    case("gpt3-6.7b", 64, BUCKETS, pipeline=2, tensor=4, sequence_parallel=True, zero=2, recompute="full"),
    case("gpt3-6.7b", 512, zero=1, data=64, tensor=8, micro_batch=4),
    case("vit-l16", 16),
    case("vit-l16", 128, tensor=2, data=64, zero=3),
    case("vit-l16", 16, CLIPPED, pipeline=4, mesh=(4,), micro_batches=8),
    case("resnet50", 8, data=8, micro_batches=1),
    case("resnet50", 16, CLIPPED, data=16, zero=2, micro_batches=2, recompute="full"),
    case("resnet50", 256, WIDE, data=256, zero=1),
    case("dlrm-kaggle", 64, CLIPPED, data=64),
    case("dlrm-kaggle", 256, SUMMED),
    case("wide-deep", 8),
    case("mixtral-8x7b", 64),
    case("mixtral-8x7b", 64, pipeline=2, expert=8, zero=1, recompute="full"),
    case("qwen3-30b-a3b", 32, expert=8, data=32, zero=3, recompute="full"),
    Case(
        model="deepseek-v3",
        devices=2048,
        profile="h800-80gb",
        decided={"pipeline": 32, "mesh": (16, 4), "micro_batches": 128},  # as the search of all configurations finds it
        few=True,
    ),
    Case(model="llama405b", devices=1024, few=True),  # thirteen kinds of stages, two minutes
)
"""Of the same families, other sizes and degrees."""


@cache
def traced(model: str, precision: str) -> tuple[OperatorGraph, int]:
    """The graph of a model at its published size, on tensors without data, and the samples of its batch."""
    built = build_model(model, dtype=PRECISIONS[precision])
    return trace(built.module, built.args, built.kwargs), built.batch


def one_of_each(plan: Plan) -> list[int]:
    """The pipeline ranks of a plan that differ in what they compute, in any of their stages."""
    group_of = {
        block: group for group in plan.groups for block in range(group.first_block, group.first_block + group.blocks)
    }
    kinds: dict[tuple[object, ...], int] = {}
    for rank in range(plan.pipeline):
        held = []
        for number in plan.stages_of(rank):
            stage = plan.stages[number]
            blocks = range(stage.first_block, stage.first_block + stage.blocks)
            ends = (number == 0, number == len(plan.stages) - 1)
            held.append((ends, *(decisions(group_of[block]) for block in blocks)))
        kinds.setdefault(tuple(held), rank)
    return sorted(kinds.values())


def decisions(group: Group) -> tuple[object, ...]:
    """All that is decided for the blocks of a group, whatever their names."""
    kept = tuple(name in group.kept for name, _ in group.operators)
    strategies, stored = ((decided for _, decided in parts) for parts in (group.operators, group.parameters))
    return (group.recomputation, kept, *strategies, *stored)


@pytest.mark.cases(0, 6)
@pytest.mark.slow
@pytest.mark.parametrize("given", [*CASES, *rarely(LONGER)], ids=str)
def test_what_is_predicted_is_emitted_at_full_size(given: Case) -> None:
    graph, batch = traced(given.model, given.precision)
    cluster = load_profile(given.profile).with_devices(given.devices)
    found = planner.search(
        graph,
        cluster,
        batch=batch,
        precision=given.precision,
        update=given.update,
        pinned=Pinned(**given.decided),  # type: ignore[arg-type]
    )
    ranks = one_of_each(found.plan) if given.few else range(found.plan.pipeline)
    stages = [*audit(found.plan, graph, batch, cluster, ranks)]
    assert [stage.stage for stage in stages] == [*ranks]
    for stage in stages:
        assert stage.unequal == ()
        assert stage.memory_agrees, (stage.live, stage.predicted_live, stage.stated)
        assert stage.collectives
        assert {row.phase for row in stage.products} >= {"forward", "backward"}
