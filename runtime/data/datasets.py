"""The batches of a run: synthetic, or read from a dataset that the user's factory makes.

Synthetic batches are the same on every rank, for the same seed and step. They are modelled on the example of rank 0,
because a factory may draw a different example on every rank. Integers are drawn below the bound of their input where it
is known, else from the values of the example; floating point values are standard normal. Only shapes, types and ranges
are realistic: a model can learn nothing from them but the bias of its output.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset, default_collate

from planner.errors import RequestError
from planner.models.imported import imported_factory
from planner.models.zoo import BuiltModel
from planner.plan.plan import Plan
from runtime.data.loading import BatchLoader, loader
from runtime.data.tokens import SUFFIXES, TokensDataset
from runtime.parameters.initial_values import from_first
from runtime.processes.rank import At
from runtime.run_settings import RunSettings
from runtime.step.arguments import Arguments
from runtime.step.training_step import TrainingStep

_SEED_STRIDE = 1_000_003  # a prime: different seeds and steps below it never share a stream


def synthetic_batches(
    built: BuiltModel, plan: Plan, device: torch.device, seed: int, first: int = 0
) -> Iterator[Arguments]:
    """Endless global batches like the example of a model; the `first` ones are skipped. Collective, because ranks send
    the example over the `device`."""
    example = Arguments(args=tuple(built.args), kwargs=built.kwargs)
    tensors = [tensor if tensor.is_meta else from_first(tensor, device).cpu() for tensor in example.tensors()]
    for number in count(first):
        drawn = synthetic_batch(
            tensors,
            batch=built.batch,
            samples=plan.training.global_batch,
            bounds=built.bounds,
            seed=seed,
            step=number,
        )
        yield example.with_tensors(drawn)


@dataclass(kw_only=True)
class DatasetBatches:
    """The samples that a rank reads from a dataset, epoch after epoch, and the position in it. Make it with
    `dataset_batches`.

    Iteration gives for every step the samples that this rank reads, and the whole batch where it is needed. It has no
    end and never goes back: a batch whose step was not made is not read again.
    """

    own: BatchLoader
    full: BatchLoader | None

    def __iter__(self) -> Iterator[tuple[Arguments, Arguments | None]]:
        read = map(_one, self.own.endless())
        if self.full is None:
            return ((given, given) for given in read)
        return zip(read, map(_one, self.full.endless()), strict=True)

    def state(self) -> dict[str, Any]:
        """The position after the last batch that was returned, as `BatchLoader.state`: the same on every rank."""
        return self.own.state()


def dataset_batches(
    settings: RunSettings,
    step: TrainingStep,
    *,
    position: Mapping[str, Any] | None,
    dtype: str,
    whole: bool,
    at: At = lambda what: None,
) -> DatasetBatches:
    """The batches of this rank from a `position` on, as `DatasetBatches.state` gave it; by default from the end of the
    samples on which the step has trained. With `whole`, also the whole batches. `at` is told when samples before the
    position are read again.

    Floating point values become `dtype`, as those of the example did. Raises RequestError for a factory that gives no
    dataset, for a dataset that makes no batch, and for a position in other data.
    """
    assert settings.dataset is not None
    dataset = load_dataset(settings.dataset, step.plan.model.sequence_length)
    own = _opened(dataset, settings, step, dtype, full_batch=settings.full_batch)
    full = None
    if whole and own.own is not None:
        full = _opened(dataset, settings, step.plan, dtype, full_batch=True)
    for batches in (own,) if full is None else (own, full):
        batches.at = at
        if position is None:
            batches.go_on(step.rank.samples)
        else:
            batches.load_state(position)
    return DatasetBatches(own=own, full=full)


def evaluation_batches(
    settings: RunSettings, step: TrainingStep, *, dtype: str, whole: bool
) -> tuple[BatchLoader, BatchLoader | None]:
    """The batches of this rank from the evaluation dataset, in the dataset's order; each iteration reads it once. With
    `whole`, also the whole batches, where they differ.

    Raises RequestError for a factory that gives no dataset, and for a dataset that makes no batch.
    """
    assert settings.evaluate is not None
    dataset = load_dataset(settings.evaluate, step.plan.model.sequence_length, "--evaluate")
    ordered = replace(settings, shuffle=False)
    own = _opened(dataset, ordered, step, dtype, full_batch=settings.full_batch)
    if not whole or own.own is None:
        return own, None
    return own, _opened(dataset, ordered, step.plan, dtype, full_batch=True)


def _opened(
    dataset: Dataset[Any], settings: RunSettings, step: TrainingStep | Plan, dtype: str, *, full_batch: bool
) -> BatchLoader:
    return loader(
        dataset,
        step,
        shuffle=settings.shuffle,
        seed=settings.seed,
        full_batch=full_batch,
        workers=settings.workers,
        collate=Converting(getattr(torch, dtype)),
    )


@dataclass(frozen=True, slots=True)
class Converting:
    """torch's collate function, followed by a cast of floating point values. It is sent to the workers."""

    dtype: torch.dtype

    def __call__(self, samples: list[Any]) -> Any:
        """A batch of samples. Raises RequestError where some samples have other tensors."""
        names = [set(sample) for sample in samples if isinstance(sample, Mapping)]
        lacking = sorted(set.union(*names) - set.intersection(*names)) if names else []
        if lacking:
            raise RequestError(
                f"only some samples of the dataset have '{lacking[0]}', but a plan is for samples that are alike; give"
                " it to every sample, such as a blank image whose tokens have labels of -100"
            )
        try:
            batch = default_collate(samples)
        except (RuntimeError, TypeError) as error:
            raise RequestError(f"samples of the dataset do not stack: {error}; pad or cut them to one shape") from error
        return pytree.tree_map(self._converted, batch)

    def _converted(self, leaf: Any) -> Any:
        return leaf.to(self.dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _one(batch: Any) -> Arguments:
    return Arguments(args=(batch,), kwargs={})


def load_dataset(reference: str, sequence_length: int | None = None, option: str = "--dataset") -> Dataset[Any]:
    """The dataset that `package.module:factory` makes, from the import path or the current folder; or the windows of a
    token file. Raises RequestError."""
    if Path(reference).suffix in SUFFIXES:
        if sequence_length is None:
            raise RequestError(f"{option} {reference}: the model of the plan has no sequences, and takes no tokens")
        return TokensDataset(reference, sequence_length)
    if ":" not in reference or "/" in reference or reference.partition(":")[0].endswith(".py"):
        raise RequestError(
            f"{option} {reference}: write package.module:factory, with dots and without .py, or a file of"
            " tokens, .npy or .bin"
        )
    factory = imported_factory(reference, option, RequestError)
    try:
        dataset = factory()
    except Exception as error:
        raise RequestError(f"{option} {reference} raised {type(error).__name__}: {error}") from error
    if not (isinstance(dataset, IterableDataset) or hasattr(dataset, "__getitem__")):
        raise RequestError(f"{option} {reference} must return a dataset; it returned {type(dataset).__name__}")
    return dataset  # type: ignore[no-any-return]


def synthetic_batch(
    examples: Sequence[torch.Tensor],
    *,
    batch: int,
    samples: int,
    bounds: Sequence[int | None],
    seed: int,
    step: int,
) -> list[torch.Tensor]:
    """Tensors like the examples, whose leading dim `batch` becomes `samples`; other leading dims stay as they are.

    `bounds` has for each example the exclusive upper bound of its integers, or None. Floating point numbers are normal,
    or between 0 and 1 where those of the example are. CPU tensors, drawn by a separate generator.
    """
    generator = torch.Generator().manual_seed(seed * _SEED_STRIDE + step)
    pairs = zip(examples, bounds, strict=True)
    return [_like(example, batch, samples, bound, generator) for example, bound in pairs]


def _like(
    example: torch.Tensor, batch: int, samples: int, bound: int | None, generator: torch.Generator
) -> torch.Tensor:
    shape = list(example.shape)
    if shape and shape[0] == batch:
        shape[0] = samples
    if example.is_floating_point():
        return _numbers_like(example, shape, generator).to(example.dtype)
    if bound is not None and example.dtype != torch.bool:
        return torch.randint(bound, shape, generator=generator).to(example.dtype)
    values = example.cpu().flatten()
    return values[torch.randint(values.numel(), shape, generator=generator)]


def _numbers_like(example: torch.Tensor, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Normal numbers. Where the example's numbers are between 0 and 1 and differ (probabilities, labels of a binary
    cross entropy), numbers between 0 and 1; where it has only 0 and 1, also only those."""
    if example.is_meta or example.numel() == 0:
        return torch.randn(shape, generator=generator)
    least, most = float(example.min()), float(example.max())
    if not 0 <= least < most <= 1:
        return torch.randn(shape, generator=generator)
    drawn = torch.rand(shape, generator=generator)
    return drawn.round() if bool((example == example.round()).all()) else drawn
