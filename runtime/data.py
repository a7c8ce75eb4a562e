"""Synthetic batches: the same on every rank, for the same seed and step.

Integers are drawn below the vocabulary where it is known, else from the values of the example; floating point
values are standard normal. Only shapes, types and ranges are realistic: a model can learn nothing from them but the
bias of its output.
"""

from collections.abc import Sequence

import torch

_SEED_STRIDE = 1_000_003  # a prime: seeds and steps do not meet in one stream below it


def synthetic_batch(
    examples: Sequence[torch.Tensor],
    *,
    batch: int,
    samples: int,
    vocabulary: int | Sequence[int | None] | None,
    seed: int,
    step: int,
) -> list[torch.Tensor]:
    """Tensors like the examples, whose leading dim `batch` becomes `samples`; other leading dims stay as they are.

    `vocabulary` bounds integers from above, those of all tensors or of each. CPU tensors, drawn by a generator of their
    own.
    """
    generator = torch.Generator().manual_seed(seed * _SEED_STRIDE + step)
    bounds = vocabulary if isinstance(vocabulary, Sequence) else [vocabulary] * len(examples)
    return [_like(example, batch, samples, bound, generator) for example, bound in zip(examples, bounds, strict=True)]


def _like(
    example: torch.Tensor, batch: int, samples: int, vocabulary: int | None, generator: torch.Generator
) -> torch.Tensor:
    shape = list(example.shape)
    if shape and shape[0] == batch:
        shape[0] = samples
    if example.is_floating_point():
        return torch.randn(shape, generator=generator).to(example.dtype)
    if vocabulary is not None and example.dtype != torch.bool:
        return torch.randint(vocabulary, shape, generator=generator).to(example.dtype)
    values = example.cpu().flatten()
    return values[torch.randint(values.numel(), shape, generator=generator)]
