"""Which samples a rank reads, in which order, and what is refused."""

import errno
import json
import os
import pickle
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import runtime
from planner.errors import RequestError
from planner.plan.plan import Plan
from planner.sharding.layout import REPLICATE, shard
from runtime.data.datasets import Converting, load_dataset
from runtime.step.inputs import LocalBatch
from runtime.step.training_step import TrainingStep
from tests.contract.one_rank import one_rank
from tests.distributed import plans
from tests.refusals import refused


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


class Numbers(Dataset[Any]):
    """As many samples as a corpus of tokens has."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor(number)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_of_many_samples_takes_little_memory(shuffle: bool) -> None:
    """It was a list of lists: 50 bytes per sample in every process, made before the first batch."""
    batches = iter(runtime.loader(Numbers(), plan_of(), shuffle=shuffle))
    tracemalloc.start()
    try:
        assert len(set(next(batches).tolist())) == plan_of().training.global_batch
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()


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
        (Rows(3), {}, "the 3 samples of Rows are less than a global batch of 4"),
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


@pytest.mark.parametrize("first", [0, 1])
def test_samples_that_are_not_alike_are_refused(first: int) -> None:
    text, seen = {"tokens": torch.zeros(4)}, {"tokens": torch.zeros(4), "pixels": torch.zeros(2, 2)}
    batch = Converting(torch.bfloat16)([seen, seen])
    assert {name: (each.dtype, tuple(each.shape)) for name, each in batch.items()} == {
        "tokens": (torch.bfloat16, (2, 4)),
        "pixels": (torch.bfloat16, (2, 2, 2)),
    }
    with refused(RequestError, "'pixels'", "blank image"):
        Converting(torch.float32)([seen, text][:: 1 - 2 * first])
    with refused(RequestError, "pad or cut them to one shape", [4], [5]):
        Converting(torch.float32)([text, {"tokens": torch.zeros(5)}])


def test_a_dataset_prepares_the_step() -> None:
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of())
    step: TrainingStep = runtime.parallelize(plans.build("llama"), plan, device=torch.device("cpu"))
    with refused(RequestError, "parallelize"):
        step.full_parameters()
    batches = runtime.loader(Rows(), step)
    assert "lm_head.weight" in step.full_parameters()
    losses = [step(batch) for batch in batches]
    assert (step.steps, step.loss) == (4, losses[-1])


def batches_of(samples: int, micro_batches: int = 1) -> Plan:
    """A plan that takes so many samples in a step."""
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of())
    return replace(plan, training=replace(plan.training, global_batch=samples, micro_batches=micro_batches))


@pytest.mark.cases(1)
@pytest.mark.parametrize("workers", [0, 1])
def test_who_goes_on_from_a_position_reads_what_would_have_come(workers: int) -> None:
    """Under another plan too, and whatever workers have read ahead."""

    def read(batches: Any, count: int) -> list[int]:
        return [int(row) for _, (tokens, _) in zip(range(count), batches, strict=False) for row in tokens[:, 0]]

    def opened(plan: Plan) -> Any:
        return runtime.loader(Rows(24), plan, shuffle=True, seed=2, workers=workers)

    unbroken = read(opened(batches_of(4)).endless(), 12)
    first = opened(batches_of(4))
    begun = read(first.endless(), 2)
    state = json.loads(json.dumps(first.state()))
    assert state == {"epoch": 0, "samples": 8, "seed": 2, "shuffle": True, "count": 24}
    for plan, steps in ((batches_of(4), 10), (batches_of(2), 20), (batches_of(8, 2), 5)):
        again = opened(plan)
        again.load_state(state)
        assert begun + read(again.endless(), steps) == unbroken, "two epochs, each in its own order"
        assert again.state() == {**state, "epoch": 1, "samples": 24}
    done = opened(batches_of(4))
    done.load_state({**state, "samples": 24})
    assert list(done) == [], "that epoch is over"
    assert len(list(done)) == 6, "and may be begun again"


def test_a_position_in_a_stream() -> None:
    first = runtime.loader(Stream(), batches_of(2))
    batches = iter(first)
    next(batches)
    second = runtime.loader(Stream(), batches_of(3))
    second.load_state(first.state())
    assert [batch[0][:, 0].tolist() for batch in second] == [[2, 3, 4], [5, 6, 7]]
    with refused(RequestError, "workers=2", "Stream"):
        runtime.loader(Stream(), batches_of(3), workers=2)
    with refused(RequestError, "Stream", "epoch 0"):
        next(runtime.loader(Stream(), batches_of(10)).endless())


@pytest.mark.parametrize("workers", [0, 1])
def test_every_batch_of_a_stream_that_is_read_again_is_progress(workers: int) -> None:
    batches, said = runtime.loader(Stream(), batches_of(2), workers=workers), list[str]()
    batches.load_state({"epoch": 0, "samples": 5, "seed": 0, "shuffle": False, "count": None})
    batches.at = said.append
    assert [batch[0][:, 0].tolist() for batch in batches] == [[5, 6], [7, 8]]
    assert said == ["reading 2 of 5 samples again", "reading 4 of 5 samples again"]


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"seed": 3}, ("seed", 3, 0)),
        ({"shuffle": True}, ("shuffle", True, False)),
        ({"count": 20}, ("samples", 20, 19)),
        ({"samples": -1}, ("samples", "samples")),
        ({"epoch": "1"}, ("epoch", "epoch")),
        ({"more": 1}, ("more",)),
    ],
    ids=str,
)
def test_a_position_in_other_data_is_refused(changes: dict[str, Any], facts: tuple[object, ...]) -> None:
    batches = runtime.loader(Rows(), plan_of())
    with refused(RequestError, *facts):
        batches.load_state({**batches.state(), **changes})


class Turning(Stream):
    """A stream that is another one in every epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        rows = list(super().__iter__())
        return iter(rows[self.epoch :] + rows[: self.epoch])


@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_of_a_stream(workers: int) -> None:
    """It is told which epoch it is, and who goes on in the second reads that one again, not the first."""

    def opened() -> Any:
        return runtime.loader(Turning(), batches_of(2), workers=workers)

    def read(batches: Any, count: int) -> list[int]:
        return [int(row) for _, (tokens, _) in zip(range(count), batches, strict=False) for row in tokens[:, 0]]

    whole = read(opened().endless(), 7)
    assert whole == [0, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6], "what is left over is left out"
    first, again = opened(), opened()
    begun = read(first.endless(), 5)
    again.load_state(first.state())
    assert begun + read(again.endless(), 2) == whole
    assert again.state() == {"epoch": 1, "samples": 6, "seed": 0, "shuffle": False, "count": None}


def test_a_file_of_tokens(tmp_path: Path) -> None:
    tokens = np.arange(70_000, 70_022, dtype=np.int32)
    np.save(tmp_path / "tokens.npy", tokens)
    rows = runtime.TokensDataset(tmp_path / "tokens.npy", 5)
    assert len(rows) == 4, "the fifth has no last label"
    assert [part.tolist() for part in rows[1]] == [tokens[5:10].tolist(), tokens[6:11].tolist()]
    assert rows[3][0].dtype == torch.int64
    with pytest.raises(IndexError):
        rows[4]
    (tokens % 1000).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    plain = load_dataset(str(tmp_path / "tokens.bin"), 5)
    assert isinstance(plain, runtime.TokensDataset)
    assert plain[0][1].tolist() == [1, 2, 3, 4, 5]
    assert pickle.loads(pickle.dumps(plain))[2][0].tolist() == [10, 11, 12, 13, 14]
    assert len(pickle.dumps(plain)) < 1000, "workers open the file themselves"


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        ("none.npy", None, (os.strerror(errno.ENOENT),)),
        ("short.bin", np.zeros(5, np.uint16).tobytes(), (5, 5, 6)),
        ("odd.bin", b"abc", (3, "uint16", 2)),
        ("text.npy", b"hello", ()),
        ("float.npy", np.zeros(9), ("float64", "(9,)")),
    ],
)
def test_what_is_no_file_of_tokens(tmp_path: Path, name: str, content: Any, facts: tuple[object, ...]) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with refused(RequestError, path, *facts):
        runtime.TokensDataset(path, 5)
    with refused(RequestError, f"--dataset {path}"):
        load_dataset(str(path))


def test_a_sample_seeds_no_generator_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seeded = runtime.loader(Rows(), plan_of()), list[int]()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    next(iter(made))
    assert seeded == [], "the program's own random numbers on a device go on"
