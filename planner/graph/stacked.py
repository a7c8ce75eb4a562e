"""Models that take samples packed one behind the other, called on samples that are stacked: what a plan cuts.

    StackedSamples     pixel_values b p d      position_ids b 3 s     image_grid_thw b i 3    input_ids b s
    the model          pixel_values (b p) d    position_ids 3 b s     image_grid_thw (b i) 3  input_ids b s

A dataset of samples, stacked as torch's `default_collate` does it, is such a batch where every sample has as much of
everything. Values that the model takes sizes from, as those of `image_grid_thw`, are the same for each sample, and are
known before the model is called.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from planner.errors import ModelError


@torch.library.custom_op("planner::expected", mutates_args=())
def expected(x: torch.Tensor, given: torch.Tensor, wanted: Sequence[int], name: str) -> torch.Tensor:
    """B X values, where each of B K `given` rows is the K `wanted` numbers. Else a run stops; on accelerators nothing
    waits, the device stops with an assertion."""
    same = given == torch.tensor(wanted, dtype=given.dtype, device=given.device)
    torch._assert_async(
        same.all(),
        f"{name}: a sample has other values than the {list(wanted)} that the model was planned with; give samples of"
        " these sizes, or plan with others",
    )
    return x.clone()


@expected.register_fake
def _(x: torch.Tensor, given: torch.Tensor, wanted: Sequence[int], name: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return gradient, None, None, None


expected.register_autograd(_backward)


@final
class StackedSamples(nn.Module):
    """A model that is called by keyword, with samples in the first dim of every tensor.

    `packed` are the arguments whose samples the model takes one behind the other in its first dim, `second` those whose
    samples it takes in the second dim. `known` has integers of one sample by the name of an argument, as nested lists;
    the model takes them packed: they are its sizes, and a plan is for these. A batch may have them, and is refused
    where they are others, or may leave them out.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        packed: Sequence[str] = (),
        second: Sequence[str] = (),
        known: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        for name, rows in (known or {}).items():
            if not isinstance(rows, list | tuple):
                raise ModelError(
                    f"known: '{name}' is a {type(rows).__name__}; give lists of integers ({name}.tolist())"
                )
        self.model, self.packed, self.second, self.known = model, tuple(packed), tuple(second), dict(known or {})

    def forward(self, **batch: Any) -> Any:
        """What the model returns of a batch. Raises ModelError for one without a tensor that is to be packed."""
        for name in (*self.packed, *self.second):
            if name not in batch:
                raise ModelError(f"the batch has no '{name}', which is packed; it has {', '.join(batch)}")
        first = next(
            name for name, value in batch.items() if isinstance(value, torch.Tensor) and name not in self.known
        )
        like = batch[first]
        for name, rows in self.known.items():
            values = torch.tensor(rows, dtype=torch.long, device=like.device)
            if name in batch:
                numbers = torch.tensor(rows).flatten().tolist()
                checked = torch.ops.planner.expected(
                    batch[first].reshape(len(like), -1), batch[name].reshape(len(like), -1), numbers, name
                )
                batch[first] = checked.reshape(like.shape)
            batch[name] = values.repeat(len(like), *(1 for _ in values.shape[1:]))
        batch |= {name: batch[name].flatten(0, 1) for name in self.packed}
        batch |= {name: batch[name].transpose(0, 1) for name in self.second}
        return self.model(**batch)
