"""Weights that come ahead set out while the block before theirs runs, and gradients land while the next one's backward
pass does: the order of what one rank does, on made-up neighbours."""

import gc
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch

from planner.plan.binding.bind import bind
from planner.plan.layout.segments import segments_by_stage
from planner.plan.plan import Plan
from planner.plan.prediction.memory import live as live_memory
from planner.plan.prediction.memory.chunks import STATES, WEIGHTS
from planner.plan.schedule import relays
from planner.sharding.mesh import Mesh
from planner.sharding.stored import StoredParameter
from planner.sharding.update import Update
from runtime.comm.async_collectives import Flight
from runtime.executor import executor
from runtime.executor.block_gathers import Gathered
from runtime.executor.instruction import Instruction
from runtime.executor.prefetch import Prefetch
from runtime.observer import Observer
from tests.contract.one_rank import one_rank
from tests.distributed import plans

BLOCK = re.compile(r"layers\.(\d+)\.")


class Blocks(Observer):
    """Writes down the blocks as their operators run."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def operands(self, instruction: Instruction, operands: Sequence[torch.Tensor]) -> None:
        found = BLOCK.search(instruction.bound.operator.name)
        if found and f"run {found[1]}" != next((e for e in reversed(self._events) if e.startswith("run")), None):
            self._events.append(f"run {found[1]}")


def block_of(way: Gathered) -> str:
    found = BLOCK.search(way.bundle.names[0])
    return found[1] if found else "head"


@contextmanager
def written_down() -> Iterator[list[str]]:
    """The order in which weights set out and land, gradients set out and land, and blocks run."""
    events: list[str] = []
    start, land, send, take = Gathered.start, Gathered.landed, Gathered.send_back, Prefetch.take

    def starting(way: Gathered) -> None:
        if way._coming is None:
            events.append(f"out {block_of(way)}")
        start(way)

    def landing(way: Gathered, room: Callable[[], list[torch.Tensor]] | None = None) -> list[torch.Tensor]:
        found = land(way, room)
        events.append(f"there {block_of(way)}")
        return found

    def sending(way: Gathered, gradients: Sequence[torch.Tensor]) -> Flight:
        events.append(f"reduce {block_of(way)}")
        return send(way, gradients)

    def taking(trip: Prefetch, way: Gathered, flight: Flight) -> None:
        events.append(f"reduced {block_of(way)}")
        take(trip, way, flight)

    with (
        patch.object(Gathered, "start", starting),
        patch.object(Gathered, "landed", landing),
        patch.object(Gathered, "send_back", sending),
        patch.object(Prefetch, "take", taking),
    ):
        yield events


def plan_of(gathers: str, kind: str = "zero3", sizes: tuple[int, ...] = (2,), **settings: object) -> Plan:
    plan = plans.hand_plan(kind, "llama4", plans.mesh_of(*sizes), **{"micro_batches": 1, **settings})
    return replace(plan, training=replace(plan.training, update=Update(buckets="none", gathers=gathers)))


def order(plan: Plan) -> list[str]:
    with written_down() as events, one_rank("llama4", plan, plans.traced("llama4"), 0) as (step, _):
        batch = plans.inputs("llama4", samples=plan.training.global_batch)
        step.prepare(*batch)
        step.rank.observer = Blocks(events)
        step.accumulate(*batch)
    return events


FORWARD = (
    *("out 0", "there 0", "out 1", "run 0", "there 1", "out 2", "run 1"),
    *("there 2", "out 3", "run 2", "there 3", "out head", "run 3", "there head"),
)


def test_a_block_is_fetched_while_the_one_before_it_runs() -> None:
    assert order(plan_of("ahead")) == [
        *FORWARD,
        *("out head", "there head", "out 3", "reduce head"),
        *("there 3", "out 2", "reduced head", "reduce 3"),
        *("there 2", "out 1", "reduced 3", "reduce 2"),
        *("there 1", "out 0", "reduced 2", "reduce 1"),
        *("there 0", "reduced 1", "reduce 0", "reduced 0"),
    ]


BACK = (
    *("there head", "out 3", "reduce head"),
    *("there 3", "out 2", "reduced head", "reduce 3"),
    *("there 2", "out 1", "reduced 3", "reduce 2"),
    *("there 1", "out 0", "reduced 2", "reduce 1"),
)


def test_the_next_micro_batch_fetches_under_the_last_block_of_the_one_before() -> None:
    """And what that reduced last lands when the first blocks of the next one have been entered: only the first gather
    of a step is waited for, and the last reduction."""
    assert (
        order(plan_of("ahead", micro_batches=2))
        == [
            *FORWARD,
            "out head",
            *BACK,
            *("there 0", "out 0", "reduced 1", "reduce 0"),  # of the next micro-batch
            *("reduced 0", "there 0", "out 1", "run 0"),
            *FORWARD[4:],
            "out head",
            *BACK,
            *("there 0", "reduced 1", "reduce 0", "reduced 0"),
        ]
    )


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zb_h1", 1)])
def test_every_pass_of_a_pipeline_but_the_first_finds_its_weights_on_their_way(schedule: str, virtual: int) -> None:
    """Under any schedule, on a rank in front and on the last one."""
    stages = (1,) * 4 if virtual == 2 else (2, 2)
    plan = plan_of("ahead", stages=stages, virtual_stages=virtual, micro_batches=4, schedule=schedule)
    started = list[bool]()
    land = Gathered.landed

    def landing(way: Gathered, room: Callable[[], list[torch.Tensor]] | None = None) -> list[torch.Tensor]:
        started.append(way._coming is not None)
        return land(way, room)

    for stage in (0, 1):
        with patch.object(Gathered, "landed", landing), one_rank("llama4", plan, plans.traced("llama4"), stage) as one:
            one[0].accumulate(*plans.inputs("llama4"))
    assert len(started) >= 2 * 4 * 4, "of two stages, four micro-batches, two blocks, forward and back"
    assert all(started)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v", "dualpipe_v"])
def test_gradients_land_though_the_last_pass_of_a_step_has_none(schedule: str) -> None:
    """Rank 0 ends with the stage of block 0, whose weights are whole on every rank; before it came another one."""

    def store(name: str, shape: tuple[int, ...], mesh: Mesh) -> StoredParameter:
        if "layers.0." in name or "embed" in name:
            return plans.store_zero1(name, shape, mesh, whole=True)
        return plans.store_zero3(name, shape, mesh)

    plan = plans.make_plan(
        "llama4", plans.mesh_of(2), plans.on_samples, store, plans.load_samples,
        stages=(1,) * 4, virtual_stages=2, micro_batches=4, global_batch=8, schedule=schedule,
    )  # fmt: skip
    update = Update(buckets="none", gathers="ahead")
    found = order(replace(plan, training=replace(plan.training, update=update)))
    (stage,) = {event.removeprefix("reduce ") for event in found if event.startswith("reduce ")} - {"head"}
    assert found.count(f"reduced {stage}") == found.count(f"reduce {stage}") >= 4


def test_without_a_flush_every_pass_waits_for_its_first_weights() -> None:
    """They are other ones by then."""
    plan = plan_of("ahead", stages=(2, 2), micro_batches=4, schedule="pipedream")
    assert not relays(plan)


def test_a_block_that_is_computed_again_fetches_the_one_before_it() -> None:
    assert order(plan_of("ahead", recomputation="full")) == [
        *FORWARD,
        *("out head", "there head", "out 3", "reduce head"),
        *("there 3", "out 2", "reduced head", "reduce 3"),  # it ran last
        *("there 2", "out 1", "run 2", "reduced 3", "reduce 2"),
        *("there 1", "out 0", "run 1", "reduced 2", "reduce 1"),
        *("there 0", "run 0", "reduced 1", "reduce 0", "reduced 0"),
    ]


def test_all_gradients_of_a_block_are_on_their_way_while_the_one_before_it_is_differentiated() -> None:
    """Some weights of these blocks are cut along the other axis too, and travel by themselves: three messages a
    block."""
    found = [event for event in order(plan_of("ahead", "outer", (2, 2))) if event.startswith("reduce")]
    behind = [event for event in found if "head" not in event]
    blocks = ["3", "2", "1", "0"]
    wanted = [f"reduce {blocks[0]}"] * 3
    for before, block in pairwise(blocks):
        wanted += [f"reduced {before}"] * 3 + [f"reduce {block}"] * 3
    assert behind == [*wanted, *["reduced 0"] * 3]


@pytest.mark.parametrize("gathers", ["block", "ahead"])
def test_nothing_is_left_of_a_micro_batch(gathers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[weakref.ref[Prefetch]]()

    class Noted(Prefetch):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            made.append(weakref.ref(self))

    monkeypatch.setattr(executor, "Prefetch", Noted)
    plan = plan_of(gathers, stages=(2, 2), micro_batches=2)
    with one_rank("llama4", plan, plans.traced("llama4"), 0) as (step, _):
        step.accumulate(*plans.inputs("llama4"))
        gc.collect()
    assert len(made) == 2
    assert not any(trip() for trip in made)


@pytest.mark.parametrize("recomputation", ["none", "full"])
def test_by_block_everything_is_waited_for(recomputation: str) -> None:
    found = order(plan_of("block", recomputation=recomputation))
    for before, after in pairwise(found):
        if before.startswith("out"):
            assert after == before.replace("out", "there")
    assert sum(event.startswith("out") for event in found) == 10
    assert not any(event.startswith("reduced") for event in found)


def test_the_account_of_memory_has_the_same_weights_on_their_way() -> None:
    """While a section computes forward, those of the next one that gathers any have set out, and none beyond; under the
    last those of the pass back."""
    plan = plan_of("ahead")
    bound = bind(plan, plans.traced("llama4"), plans.BATCH)
    seen: dict[int, tuple[tuple[int, bool], ...]] = {}
    moving = list[int]()
    compute = live_memory.Chunk._compute

    def computing(chunk: Any, at: int, *given: Any) -> Any:
        sections = chunk.tensors.segments
        moving[:] = [n for n in range(len(sections)) if any(one.there.moves for one in sections[n].gathers)]
        number = next(n for n, segment in enumerate(sections) if at in segment.operators)
        seen.setdefault(number, tuple(sorted(chunk.coming)))
        return compute(chunk, at, *given)

    with patch.object(live_memory.Chunk, "_compute", computing):
        live_memory.live_memory(bound, 0, {WEIGHTS: 0.0, STATES: 0.0})
    assert len(moving) == 5  # four blocks and the head
    last = max(moving)
    assert seen == {number: tuple((n, False) for n in moving if n > number)[:1] or ((last, True),) for number in seen}


@pytest.mark.parametrize(
    ("kind", "model", "gathers", "alone"),
    [
        ("sequence_zero3", "llama", "ahead", ["model.norm.weight", "lm_head.weight"]),
        ("sequence_zero3", "llama", "block", []),
        ("zero3", "llama-one", "ahead", ["model.norm.weight"]),  # whose head is its embedding
    ],
    ids=str,
)
def test_a_weight_that_nothing_goes_with_sets_out_by_itself(
    kind: str, model: str, gathers: str, alone: list[str]
) -> None:
    """While the block before it computes; none does before the blocks, where nothing computes yet."""
    plan = plans.hand_plan(kind, model, plans.mesh_of(*((4,) if kind == "zero3" else (2, 2))))
    plan = replace(plan, training=replace(plan.training, update=Update(buckets="none", gathers=gathers)))
    (stage,) = segments_by_stage(bind(plan, plans.traced(model), plans.BATCH))
    assert [name for one in stage[-1].gathers if len(one.names) == 1 for name in one.names] == alone
    assert stage[0].gathers == ()
