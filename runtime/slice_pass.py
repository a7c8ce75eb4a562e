"""What the operators of one slice of the sequence may know of the other slices of their micro-batch."""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch

from runtime.sliced_attention import Past


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePass:
    """Slice `number` of `count`. `counted` are this rank's targets of all slices over which the loss is a mean, divided
    by `count`: so the loss of the micro-batch is the mean of those of its slices. `pasts` are shared by the slices."""

    number: int
    count: int
    pasts: MutableMapping[str, Past]
    counted: torch.Tensor | None = None

    def past_of(self, operator: str) -> Past:
        """Keys and values of an attention operator."""
        if operator not in self.pasts:
            self.pasts[operator] = Past(self.count)
        return self.pasts[operator]
