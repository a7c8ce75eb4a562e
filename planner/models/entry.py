"""What the zoo says about a model, and what building one gives."""

from dataclasses import dataclass
from typing import Any

TRACE_BATCH = 2  # samples in the example that a zoo model is traced with; plans rescale it

SAMPLES_PER_DEVICE = 4
"""Of a step, where nobody says: sequences, and samples of which nothing is known."""

IMAGES_PER_DEVICE = 32
"""The same of images: Goyal et al. 2017 (arXiv 1706.02677), section 2."""

Dimension = int | bool | float | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooEntry:
    """A named model: family, dimensions, what it was published as, and the samples of a step on each device where
    nobody says."""

    family: str
    dimensions: tuple[tuple[str, Dimension], ...]
    source: str
    samples_per_device: int = SAMPLES_PER_DEVICE

    @property
    def sequence_length(self) -> int | None:
        """Tokens of a sample; None for a model whose samples are no sequences."""
        known = dict(self.dimensions).get("sequence_length")
        return known if isinstance(known, int) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A module, the arguments of a call that returns its loss, and for each tensor among them the number that its
    integers stay below (None: no integers)."""

    module: Any
    args: tuple[Any, ...]
    bounds: tuple[int | None, ...]
