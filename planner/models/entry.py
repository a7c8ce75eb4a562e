"""What the zoo says about a model, and what building one gives."""

from dataclasses import dataclass
from typing import Any

TRACE_BATCH = 2  # samples in the example that a zoo model is traced with; plans rescale it

Dimension = int | bool | float | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooEntry:
    """A named model: family, dimensions, what it was published as, and its default samples of a step on each device,
    where they differ from those of other models with such inputs."""

    family: str
    dimensions: tuple[tuple[str, Dimension], ...]
    source: str
    samples_per_device: int | None = None

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
