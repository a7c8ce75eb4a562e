"""Rows of a sequence that a mask marks, such as the places of image tokens: as many in every sample.

    embeddings.masked_scatter(mask[..., None], features)        features b n h in the place of what is marked
    x[mask], x[mask] = y                                        the same rows read, and written

The number of marks is data, and so would be the shape of x[mask]. In a batch whose samples are alike it is the number
of features of a sample, which the first call tells. So samples stay apart, while PyTorch numbers the marks of the whole
batch:

    marked_ranks(mask, n)  b s -> b s              the number of each mark among the marks of its sample
    marked_places(mask, n) b s -> b n              the positions of the marks of each sample
    picked_rows            b n h, b s -> b s h     rows of each sample by such numbers

A sample with another number of marks stops a run. A model that runs without a plan accepts it, as long as all samples
together have as many marks as there are features.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from planner.graph.tracing.known_tensors import KnownTensors, Writes

Tensor = torch.Tensor

_SCATTERS = frozenset({torch.masked_scatter, torch.Tensor.masked_scatter})
_SAME = frozenset({torch.Tensor.to, torch.Tensor.expand, torch.Tensor.expand_as, torch.Tensor.unsqueeze,
                   torch.unsqueeze, torch.Tensor.squeeze, torch.squeeze, torch.Tensor.__getitem__,
                   torch.Tensor.bool, torch.Tensor.contiguous, torch.Tensor.clone, torch.Tensor.detach})  # fmt: skip
"""Functions that may return the same marks, once for each element of a row."""


def _check(mask: Tensor, count: int) -> None:
    torch._assert_async(
        (mask.sum(1) == count).all(),
        f"a sample does not have {count} marked positions, as its features are (image tokens of a sequence, with one"
        " image of one size in each sample): samples of a batch must be alike",
    )


@torch.library.custom_op("planner::marked_ranks", mutates_args=())
def marked_ranks(mask: Tensor, count: int) -> Tensor:
    """For B S marks the number of each among the marks of its sample, from 0; unmarked places get any number below
    `count`, each equally often. Stops where a sample has not `count` marks."""
    _check(mask, count)
    others = torch.arange(mask.shape[1], device=mask.device) % max(1, count)
    return torch.where(mask, mask.cumsum(1) - 1, others)


@marked_ranks.register_fake
def _(mask: Tensor, count: int) -> Tensor:
    return mask.new_empty(mask.shape, dtype=torch.int64)


@torch.library.custom_op("planner::marked_places", mutates_args=())
def marked_places(mask: Tensor, count: int) -> Tensor:
    """B N places of the `count` marks of every sample, in ascending order. Stops where a sample has another number."""
    _check(mask, count)
    return (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :count].contiguous()


@marked_places.register_fake
def _(mask: Tensor, count: int) -> Tensor:
    return mask.new_empty((mask.shape[0], count), dtype=torch.int64)


@torch.library.custom_op("planner::picked_rows", mutates_args=())
def picked_rows(rows: Tensor, numbers: Tensor) -> Tensor:
    """Those of B N H rows that have the B S numbers of each sample, B S H."""
    return rows.gather(1, _wide(numbers, rows))


@picked_rows.register_fake
def _(rows: Tensor, numbers: Tensor) -> Tensor:
    return rows.new_empty((*numbers.shape, rows.shape[2]))


@torch.library.custom_op("planner::picked_rows_backward", mutates_args=())
def picked_rows_backward(gradient: Tensor, numbers: Tensor, count: int) -> Tensor:
    """The gradient of B count H rows."""
    found = gradient.new_zeros((gradient.shape[0], count, gradient.shape[2]))
    return found.scatter_add_(1, _wide(numbers, gradient), gradient)


@picked_rows_backward.register_fake
def _(gradient: Tensor, numbers: Tensor, count: int) -> Tensor:
    return gradient.new_empty((gradient.shape[0], count, gradient.shape[2]))


def _wide(numbers: Tensor, rows: Tensor) -> Tensor:
    return numbers.unsqueeze(2).expand(-1, -1, rows.shape[2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, numbers = inputs
    ctx.count = rows.shape[1]
    ctx.save_for_backward(numbers)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return picked_rows_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.count), None


picked_rows.register_autograd(_backward, setup_context=_keep)


class MarkedRows(TorchFunctionMode):
    """While active, rows that a mask B S marks are found sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self._writes = Writes()
        self._marks = KnownTensors[Tensor](self._writes)  # the marks B S that masks B S or B S H repeat
        self._counts = KnownTensors[int](self._writes)  # how many marks each sample has, for marks B S

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in _SCATTERS and not given:
            made = self._scattered(*args)
            if made is not None:
                return made
        if func is torch.Tensor.__getitem__:
            made = self._read(*args)
            if made is not None:
                return made
        if func is torch.Tensor.__setitem__ and self._write(*args):
            return None
        result = self._writes.call(func, args, given)
        if func in _SAME and isinstance(result, Tensor) and result.dtype == torch.bool and result is not args[0]:
            marks = self._of(args[0])
            if marks is not None and _repeats(func, args, result, marks):
                self._marks.say(result, marks, marks)
        return result

    def _of(self, mask: Any) -> Tensor | None:
        """The marks B S that a mask repeats."""
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            return None
        found = self._marks.said(mask)
        return mask if found is None and mask.dim() == 2 else found

    def _scattered(self, x: Any, mask: Any, source: Any) -> Tensor | None:
        marks = self._of(mask)
        if marks is None or x.dim() != 3 or x.shape[:2] != marks.shape or source.dtype != x.dtype:
            return None
        count, over = divmod(source.numel(), marks.shape[0] * x.shape[2])
        if over or count > marks.shape[1] or mask.shape[2:] not in ((1,), x.shape[2:]):
            return None
        self._counts.say(marks, count)
        return _written(x, marks, source, count)

    def _marked(self, x: Any, index: Any) -> tuple[Tensor, int] | None:
        """The marks by which rows of a tensor are picked, and how many each sample has."""
        first, *others = index if isinstance(index, tuple) and index else (index,)
        if not isinstance(first, Tensor) or any(one is not Ellipsis and one != slice(None) for one in others):
            return None
        marks = self._of(first) if first.dim() == 2 and x.shape[:2] == first.shape and x.dim() in (2, 3) else None
        count = None if marks is None else self._counts.said(marks)
        return None if marks is None or count is None else (marks, count)

    def _read(self, x: Any, index: Any) -> Tensor | None:
        found = self._marked(x, index)
        if found is None:
            return None
        places: Tensor = torch.ops.planner.marked_places(*found)
        read: Tensor = torch.ops.planner.picked_rows(x, places) if x.dim() == 3 else x.gather(1, places)
        return read.flatten(0, 1)

    def _write(self, x: Any, index: Any, values: Any) -> bool:
        found = self._marked(x, index)
        wanted = None if found is None else (x.shape[0] * found[1], *x.shape[2:])
        if found is None or x.dim() != 3 or not isinstance(values, Tensor) or tuple(values.shape) != wanted:
            return False
        if values.dtype != x.dtype:  # PyTorch refuses it
            return False
        x.copy_(_written(x, found[0], values, found[1]))
        self._writes.note(x)
        return True


def _written(x: Tensor, marks: Tensor, source: Tensor, count: int) -> Tensor:
    """B S H rows, with the source's rows, B count H, where there are marks."""
    ranks: Tensor = torch.ops.planner.marked_ranks(marks, count)
    rows = source.reshape(x.shape[0], count, x.shape[2])
    picked: Tensor = torch.ops.planner.picked_rows(rows, ranks)
    return torch.where(marks.unsqueeze(2), picked, x)


def _repeats(func: Any, args: Any, result: Tensor, marks: Tensor) -> bool:
    """Whether a result has the marks B S, or B S H with H times the same."""
    if result.shape[:2] != marks.shape or result.dim() > 3:
        return False
    if func in (torch.Tensor.expand, torch.Tensor.expand_as):  # a new dim stands in front
        return bool(result.dim() == args[0].dim())
    if func is not torch.Tensor.__getitem__:
        return True
    *others, last = args[1] if isinstance(args[1], tuple) and args[1] else (args[1],)
    return (last is None or isinstance(last, int)) and all(one is Ellipsis or one == slice(None) for one in others)
