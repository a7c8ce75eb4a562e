"""Batches of a dataset for a plan: torch's DataLoader, with the samplers that a plan needs.

    full_batch=True     every rank reads the whole global batch; the step keeps its pieces
    full_batch=False    every rank reads only the samples of its pieces, micro-batch by micro-batch

Both give bit-identical training. The order of an epoch depends only on the seed and the epoch number. What a dataset
draws at random for a sample (from `random`, numpy or torch) depends only on these and the number of the sample. So it
does not matter which rank or worker reads a sample, or how often. Ranks with the same samples read identical values.

A plan takes whole global batches, so the incomplete last batch of an epoch is dropped.

The position of a loader is one small state (`BatchLoader.state`), counted in samples of the epoch. It is independent of
ranks, processes and batches: a run that resumes from it, under any plan, reads the samples that would have come next.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from planner.errors import RequestError
from planner.plan.plan import Plan
from runtime.data.data_position import DataPosition, position_of
from runtime.processes.rank import At
from runtime.step.inputs import InputPieces, LocalBatch
from runtime.step.training_step import TrainingStep

Collate = Callable[[list[Any]], Any]

_SEED_STRIDE = 1_000_003  # a prime: different seeds, epochs and samples below it never share a stream


def loader(
    dataset: Dataset[Any],
    step: TrainingStep | Plan,
    *,
    shuffle: bool = False,
    seed: int = 0,
    full_batch: bool = True,
    drop_last: bool = True,
    workers: int = 0,
    collate: Collate | None = None,
    pin_memory: bool | None = None,
) -> "BatchLoader":
    """The batches of a dataset whose items are the inputs of the model, one sample each.

    A map-style dataset needs `__len__`; with a step, an example is read from it if the model has not been traced yet
    (collective then). Every rank reads all of an iterable dataset (`full_batch`), in the dataset's own order, and it
    must give every rank the same items each time an epoch begins; if it has `set_epoch`, that is called with the epoch
    number. Pinned memory is used where there is an accelerator, unless `pin_memory` says otherwise.

    Raises RequestError for a dataset that is shorter than one global batch, for an incomplete last batch with
    `drop_last=False`, and for options that are impossible with an iterable dataset or without a step.
    """
    plan = step if isinstance(step, Plan) else step.plan
    made = BatchLoader(
        dataset=dataset,
        plan=plan,
        seed=seed,
        shuffle=shuffle,
        workers=workers,
        collate=default_collate if collate is None else collate,
        pin_memory=torch.accelerator.is_available() if pin_memory is None else pin_memory,
        own=None,
    )
    _check(made, full_batch=full_batch, drop_last=drop_last, with_step=isinstance(step, TrainingStep))
    if isinstance(step, TrainingStep) and not made.iterable:
        if not step.ready:
            step.prepare(made.example())
        if not full_batch or not step.pieces.reads:  # a stage that reads no input reads nothing
            made.own = _Own(step=step, pieces=step.pieces)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    """The loader for the samples that this rank alone reads."""

    step: TrainingStep
    pieces: InputPieces


@dataclass(kw_only=True)
class BatchLoader:
    """The global batches of one epoch after the other. Make it with `loader`.

    One iteration is one epoch; the same epoch is repeated until `set_epoch` sets another. `samples` counts the samples
    of the epoch that were returned. After `load_state` the next iteration begins at the saved position. `at` is told
    of every global batch of an iterable dataset that is read again up to there.
    """

    dataset: Dataset[Any]
    plan: Plan
    seed: int
    shuffle: bool
    workers: int
    collate: Collate
    pin_memory: bool
    own: _Own | None
    at: At = lambda what: None
    epoch: int = 0
    samples: int = 0
    _start: int = 0

    @property
    def iterable(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    def __len__(self) -> int:
        """Global batches in an epoch. Raises TypeError for an iterable dataset, as torch's DataLoader does."""
        return len(self.dataset) // self.plan.training.global_batch  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; where samples are shuffled it has another order."""
        if epoch != self.epoch:
            self.epoch, self.samples, self._start = epoch, 0, 0

    def go_on(self, samples: int) -> None:
        """Continue after training on `samples` samples, epoch by epoch, under this plan or another: the next iteration
        gives the rest of their epoch. Raises RequestError where they are not whole global batches."""
        size = self.plan.training.global_batch
        batches, over = divmod(samples, size)
        if over:
            raise RequestError(
                f"the {samples} samples trained so far are not a multiple of the global batch of {size}; continue with"
                f" a plan whose --global-batch divides {samples}"
            )
        self.epoch, left_out = (0, batches) if self.iterable else divmod(batches, len(self))
        self.samples = self._start = left_out * size

    def state(self) -> dict[str, Any]:
        """The position as plain JSON: after the last batch that was returned, without prefetched ones."""
        return asdict(self._position(self.epoch, self.samples))

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position, under this plan or another one. The samples of an iterable dataset are read
        again up to there. Raises RequestError for a state of another dataset, seed or order, and for anything that is
        no state."""
        position = position_of(state)
        position.check(self._position(position.epoch, position.samples))
        self.epoch, self.samples, self._start = position.epoch, position.samples, position.samples

    def endless(self) -> Iterator[Any]:
        """One epoch after the other, endlessly. Raises RequestError for an epoch without a batch."""
        while True:
            begun = self._start
            yield from self
            if self.samples == begun == 0:
                raise RequestError(f"{type(self.dataset).__name__} gave no batch in epoch {self.epoch}")
            self.set_epoch(self.epoch + 1)

    def _position(self, epoch: int, samples: int) -> DataPosition:
        count = None if self.iterable else len(self.dataset)  # type: ignore[arg-type]
        return DataPosition(epoch=epoch, samples=samples, seed=self.seed, shuffle=self.shuffle, count=count)

    def __iter__(self) -> Iterator[Any]:
        """Whole batches as the dataset gives them, or a `LocalBatch` with this rank's pieces: a step takes both."""
        start, self._start = self._start, 0
        self.samples = start
        return self._counting(self._from(start))

    def _counting(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.samples += self.plan.training.global_batch
            yield batch

    def _from(self, start: int) -> Iterator[Any]:
        """The batches of the epoch after its first `start` samples."""
        if self.own is not None:
            return self._local(self.own, start)
        if self.iterable:
            if isinstance(self.dataset, _Shuffled):
                self.dataset.set_epoch(self.epoch)
            return self._after(start)
        return iter(self._torch_loader(self._seeded(), batch_sampler=self._batches(start)))

    def _after(self, start: int) -> Iterator[Any]:
        """The batches of an iterable dataset after its first `start` samples."""
        size, skipped = self.plan.training.global_batch, 0
        rest = _Rest(self.dataset, start, size)
        for batch in self._torch_loader(rest, batch_size=size, drop_last=True, collate_fn=_CollateRest(self.collate)):
            if isinstance(batch, _Skipped):
                skipped += size
                self.at(f"reading {skipped} of {start} samples again")
            else:
                yield batch

    def example(self) -> Any:
        """A batch of as many samples as the model is traced with, from the start of a map-style dataset."""
        count = self.plan.model.batch
        if count is None:
            raise RequestError(
                "the plan does not say with how many samples its model was traced; plan again, or prepare the step with"
                " the example of planning: step.prepare(*args)"
            )
        seeded = self._seeded()
        return self.collate([seeded[number] for number in range(min(count, len(seeded)))])

    def _local(self, own: _Own, start: int) -> Iterator[LocalBatch]:
        """This rank's pieces of every micro-batch, read by this rank alone."""
        parts, samples = self.plan.training.micro_batches, own.pieces.own
        if not samples:
            yield from (LocalBatch(parts=({},) * (parts * self.plan.slices)) for _ in self._batches(start))
            return
        size = self.plan.training.part
        padding = self.plan.training.update.padding_samples
        batches = ([*batch, *[batch[-1]] * padding] for batch in self._batches(start))
        order = ([b[part * size + at] for at in samples] for b in batches for part in range(parts))
        read = iter(self._torch_loader(self._seeded(), batch_sampler=order))
        for _ in range(self._left(start)):
            pieces = []
            for part in range(parts):
                batch = next(read)
                pieces.extend(own.pieces.of_samples(own.step.matcher.inputs((batch,), {}), part))
            yield LocalBatch(parts=tuple(pieces))

    def _left(self, start: int) -> int:
        """The number of global batches left in the epoch after its first `start` samples."""
        return max(len(self.dataset) - start, 0) // self.plan.training.global_batch  # type: ignore[arg-type]

    def _batches(self, start: int) -> Iterator[list[int]]:
        """The samples of each global batch of the epoch after its first `start` samples, made one batch at a time: an
        order as Python numbers would take 36 bytes per sample in every process."""
        size, stop = self.plan.training.global_batch, start + self._left(start) * self.plan.training.global_batch
        if not self.shuffle:
            return (list(range(first, first + size)) for first in range(start, stop, size))
        generator = torch.Generator().manual_seed(self.seed * _SEED_STRIDE + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator)  # type: ignore[arg-type]
        return (order[first : first + size].tolist() for first in range(start, stop, size))

    def _seeded(self) -> "_Seeded":
        return _Seeded(dataset=self.dataset, seed=self.seed * _SEED_STRIDE + self.epoch)

    def _torch_loader(self, dataset: Any, **how: Any) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self.seed * _SEED_STRIDE + self.epoch)  # of the workers' own seeds
        usual = {"num_workers": self.workers, "collate_fn": self.collate, "pin_memory": self.pin_memory}
        return DataLoader(dataset, generator=generator, **{**usual, **how})


def _check(made: BatchLoader, *, full_batch: bool, drop_last: bool, with_step: bool) -> None:
    size = made.plan.training.global_batch
    if made.iterable:
        if not full_batch or made.shuffle:
            asked = "shuffle=True" if full_batch else "full_batch=False"
            raise RequestError(
                f"{asked}: {type(made.dataset).__name__} is an iterable dataset, whose samples have no index; every"
                " rank reads all of it in its own order. Leave that out, or give a map-style dataset"
            )
        if made.workers > 1:
            raise RequestError(
                f"workers={made.workers}: {type(made.dataset).__name__} is an iterable dataset, and each worker would"
                " read all of it; give 1, or a map-style dataset"
            )
        return
    if not hasattr(made.dataset, "__len__"):
        raise RequestError(f"{type(made.dataset).__name__} has no __len__; a map-style dataset needs one")
    if not full_batch and not with_step:
        raise RequestError("full_batch=False: what a rank reads depends on its rank; give the step, not its plan")
    if len(made) == 0:
        raise RequestError(
            f"{_samples_of(made.dataset)} are less than a global batch of {size}; give {size} or more, or plan for a"
            " smaller --global-batch"
        )
    over = len(made.dataset) % size
    if over and not drop_last:
        raise RequestError(
            f"drop_last=False: {_samples_of(made.dataset)} make {len(made)} global batches of {size} and leave {over},"
            " which a plan cannot take; leave those out, or add samples"
        )


def _samples_of(dataset: Dataset[Any]) -> str:
    count = len(dataset)  # type: ignore[arg-type]
    return f"the {count} samples of {type(dataset).__name__}"


@runtime_checkable
class _Shuffled(Protocol):
    """An iterable dataset that shuffles by the epoch number, as those of torch and Hugging Face do."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""


class _Skipped:
    """Stands for a sample that was read and dropped, or for a batch of them."""


class _Rest(IterableDataset[Any]):
    """An iterable dataset without its first samples, which are read and dropped. Whole batches of them are replaced, so
    that the process that waits for a worker sees progress."""

    def __init__(self, dataset: Any, start: int, size: int) -> None:
        self._dataset, self._start, self._size = dataset, start, size

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self._dataset)
        for _ in range(self._start // self._size):
            dropped = sum(1 for _ in itertools.islice(samples, self._size))
            if dropped < self._size:
                return
            yield from itertools.repeat(_Skipped(), self._size)
        yield from itertools.islice(samples, self._start % self._size, None)


@dataclass(frozen=True, slots=True)
class _CollateRest:
    """A collate function for the samples of a `_Rest`. It is sent to the workers."""

    collate: Collate

    def __call__(self, samples: list[Any]) -> Any:
        return samples[0] if isinstance(samples[0], _Skipped) else self.collate(samples)


@dataclass(frozen=True, kw_only=True)
class _Seeded(Dataset[Any]):
    """A dataset whose random draws for a sample do not depend on the process that reads it. The process's own
    generators are left as they were."""

    dataset: Dataset[Any]
    seed: int

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, number: int) -> Any:
        seed = (self.seed * _SEED_STRIDE + number) % 2**32
        plain, array = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            try:
                random.seed(seed)
                np.random.seed(seed)
                torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed those of devices too
                return self.dataset[number]
            finally:
                random.setstate(plain)
                np.random.set_state(array)
