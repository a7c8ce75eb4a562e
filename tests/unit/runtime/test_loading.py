"""Which samples a rank reads, in which order, and what is refused."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import runtime
from planner.errors import RequestError
from planner.plan.plan import Plan
from planner.sharding.layout import REPLICATE, shard
from runtime.inputs import LocalBatch
from runtime.training_step import TrainingStep
from tests.contract.one_rank import one_rank
from tests.distributed import plans


class Rows(Dataset[Any]):
    """Tokens that name their sample; notes which samples were read."""

    def __init__(self, count: int = 19) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(number)
        place = torch.arange(plans.SEQUENCE)
        return (place + number) % plans.VOCABULARY, (place + number + random.randrange(2)) % plans.VOCABULARY


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (Rows()[number] for number in range(9))


def plan_of(load: tuple[Any, ...] = (shard(0), shard(1)), **settings: object) -> Plan:
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of(2, 2), micro_batches=2, **settings)
    return replace(plan, inputs=tuple((name, load) for name, _ in plan.inputs))


@pytest.mark.parametrize("load", [(shard(0), shard(1)), (REPLICATE, shard(0)), (shard(0), REPLICATE)], ids=str)
def test_own_samples_are_the_pieces_of_the_whole_batch(load: tuple[Any, ...]) -> None:
    """Bit by bit, with what the dataset draws; the rank reads no sample that it does not hold."""
    with one_rank("llama", plan_of(load), plans.traced("llama")) as (step, _):
        rows = Rows()
        own = runtime.loader(rows, step, shuffle=True, seed=3, full_batch=False)
        whole = runtime.loader(Rows(), step, shuffle=True, seed=3)
        rows.read.clear()
        for local, batch in zip(own, whole, strict=True):
            assert isinstance(local, LocalBatch)
            one, other = step.inputs_of(local), step.inputs_of(batch)
            for part in range(2):
                assert one(part).keys() == other(part).keys() == {"args_0", "args_1"}
                assert all(torch.equal(one(part)[name], other(part)[name]) for name in one(part))
        assert len(rows.read) == 4 * 2 * len(step.pieces.own)
        assert len(step.pieces.own) == 1, "of the two samples of a micro-batch"


def test_a_stage_whose_operators_read_no_input_reads_no_sample() -> None:
    plan = plans.hand_plan("zero1", "llama4", plans.mesh_of(1), micro_batches=2, stages=(1, 1, 1, 1))
    with one_rank("llama4", plan, plans.traced("llama4"), stage=1) as (step, _):
        for full in (True, False):
            rows = Rows()
            batches = list(runtime.loader(rows, step, full_batch=full))
            assert [batch.parts for batch in batches] == [({}, {})] * 4
            assert rows.read == [], "the step was prepared before"
    with one_rank("llama4", plan, plans.traced("llama4"), stage=3) as (step, _):
        assert step.pieces.reads == {"args_1"}, "the labels"


def test_epochs_differ_where_samples_are_shuffled() -> None:
    def order(epoch: int, **settings: Any) -> list[int]:
        rows = Rows()
        batches = runtime.loader(rows, plan_of(), **settings)
        batches.set_epoch(epoch)
        assert len(list(batches)) == len(batches) == 4
        return rows.read

    assert order(0) == order(1) == list(range(16))
    assert sorted(order(0, shuffle=True)) != order(0, shuffle=True) == order(0, shuffle=True)
    assert len({tuple(order(epoch, shuffle=True, seed=seed)) for epoch in (0, 1) for seed in (0, 1)}) == 4


def test_what_a_dataset_draws_depends_on_seed_epoch_and_sample_only() -> None:
    class Drawing(Rows):
        def __getitem__(self, number: int) -> Any:
            return torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))])

    def drawn(shuffle: bool, epoch: int, workers: int = 0) -> set[tuple[float, ...]]:
        batches = runtime.loader(Drawing(16), plan_of(), shuffle=shuffle, workers=workers)
        batches.set_epoch(epoch)
        return {tuple(row.tolist()) for batch in batches for row in batch}

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert drawn(False, 0) == drawn(True, 0) == drawn(True, 0, workers=1)
    assert not drawn(False, 0) & drawn(False, 1)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize(
    ("dataset", "settings", "words"),
    [
        (Rows(3), {}, "the 3 samples of Rows make no global batch: the plan takes 4"),
        (Rows(9), {"drop_last": False}, "9 samples of Rows make 2 global batches of 4 and leave 1"),
        (Rows(), {"full_batch": False}, "give the step, not its plan"),
        (Stream(), {"full_batch": False}, "full_batch=False: Stream is an iterable dataset"),
        (Stream(), {"shuffle": True}, "shuffle=True: Stream is an iterable dataset"),
    ],
    ids=["short", "left over", "plan", "stream in pieces", "shuffled stream"],
)
def test_what_cannot_be_read_is_refused(dataset: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        runtime.loader(dataset, plan_of(), **settings)
    assert words in str(caught.value)


def test_too_few_samples_for_the_steps() -> None:
    with pytest.raises(RequestError, match="make 4 global batches of 4, and 5 steps take 5; ask for 4 steps"):
        runtime.loader(Rows(), plan_of()).steps(5)
    batches = runtime.loader(Stream(), plan_of()).steps(3)
    assert next(batches)[0].shape == (4, plans.SEQUENCE)
    next(batches)
    with pytest.raises(RequestError, match=r"ended in step 3 of 3: it has fewer than 12 samples.*ask for 2 steps"):
        next(batches)


def test_a_dataset_prepares_the_step() -> None:
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of())
    step: TrainingStep = runtime.parallelize(plans.build("llama"), plan, device=torch.device("cpu"))
    with pytest.raises(RequestError, match="has not been traced yet"):
        step.full_parameters()
    batches = runtime.loader(Rows(), step)
    assert "lm_head.weight" in step.full_parameters()
    losses = [step(batch) for batch in batches]
    assert (step.steps, step.loss) == (4, losses[-1])
