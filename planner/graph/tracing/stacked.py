"""Models that take samples packed one behind the other, called on stacked samples, which a plan can cut.

    StackedSamples     pixel_values b p d      position_ids b 3 s     image_grid_thw b i 3    input_ids b s
    the model          pixel_values (b p) d    position_ids 3 b s     image_grid_thw (b i) 3  input_ids b s

torch's `default_collate` makes such a batch from a dataset of samples, if every sample has equal amounts of
everything. Values from which the model takes sizes, such as `image_grid_thw`, are the same for each sample, and are
known before the model is called.
"""

import difflib
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.errors import ModelError, unknown_name

PREFIX = "model."
"""The prefix of the names of weights, before the names in the model."""

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

_MEANT = 0.8
"""How similar an unknown name must be to an argument of the model to count as a typo: others may go to `**kwargs`."""


@torch.library.custom_op("planner::expected", mutates_args=())
def expected(x: torch.Tensor, given: torch.Tensor, wanted: Sequence[int], name: str) -> torch.Tensor:
    """B X values, checked that each of B K `given` rows is the K `wanted` numbers. Else a run stops; on accelerators
    the check does not synchronise: the device stops with an assertion."""
    same = given == torch.tensor(wanted, device=given.device)
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
    the model takes them packed. The model reads sizes from them, and a plan is for these sizes. A batch may have them,
    and is refused where they differ, or may leave them out.

    Raises ModelError for a name that the model does not take or that is said twice, and for `known` that is not made
    of integers.
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
        said = {"packed": packed, "second": second, "known": known or {}}
        _check_names(model, said)
        self.model, self.packed, self.second = model, tuple(packed), tuple(second)
        self.known = {name: _integers(name, rows) for name, rows in (known or {}).items()}

    def forward(self, **batch: Any) -> Any:
        """What the model returns for a batch. Raises ModelError for a batch without a tensor that is to be packed, and
        for tensors of other shapes than samples have."""
        first, samples = self._first(batch)
        for name, numbers in self.known.items():
            values = torch.tensor(numbers, device=batch[first].device)
            if name in batch:
                batch[first] = _checked(batch[first], batch[name], name, tuple(values.shape), numbers)
            batch[name] = values.repeat(samples, *(1 for _ in values.shape[1:]))
        batch |= {name: batch[name].flatten(0, 1) for name in self.packed}
        batch |= {name: batch[name].transpose(0, 1) for name in self.second}
        return self.model(**batch)

    def _first(self, batch: Mapping[str, Any]) -> tuple[str, int]:
        """A tensor that the model reads, on which known values are checked, and the number of samples."""
        for name in (*self.packed, *self.second):
            if name not in batch:
                raise ModelError(f"the batch has no '{name}', which is packed; it has {', '.join(batch)}")
            if not isinstance(batch[name], torch.Tensor) or batch[name].dim() < 2:
                raise ModelError(f"the batch: '{name}' is {_told(batch[name])}; stack the samples, B x ...")
        tensors = {name: each for name, each in batch.items() if isinstance(each, torch.Tensor) and each.dim()}
        first = next((name for name in (*self.packed, *tensors) if name not in self.known), None)
        if first is None:
            raise ModelError("the batch has no tensor beside what is known: nobody can tell how many samples it has")
        samples = len(tensors[first])
        for name, each in tensors.items():
            if len(each) != samples:
                raise ModelError(
                    f"the batch: '{name}' has {len(each)} samples in its first dim, '{first}' has {samples}; stack the"
                    " samples of every tensor, B x ..."
                )
        return first, samples


def _check_names(model: nn.Module, said: Mapping[str, Collection[str]]) -> None:
    parameters = inspect.signature(model.forward).parameters.values()
    taken = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    others = any(each.kind is each.VAR_KEYWORD for each in parameters)
    before: dict[str, str] = {}
    for kind, names in said.items():
        if isinstance(names, str):
            raise ModelError(f"{kind}: '{names}' is a text; give a list of names, ['{names}']")
        for name in names:
            if name in before:
                raise ModelError(f"'{name}' is in {before[name]} and in {kind}; say it once: known values are packed")
            if name not in taken and (not others or difflib.get_close_matches(name, taken, cutoff=_MEANT)):
                raise ModelError(f"{kind}: {unknown_name(f'argument of {type(model).__name__}', name, taken)}")
            before[name] = kind


def _integers(name: str, rows: Any) -> list[Any]:
    """The known values of a sample."""
    if not isinstance(rows, list | tuple):
        raise ModelError(f"known: '{name}' is a {type(rows).__name__}; give lists of integers ({name}.tolist())")
    try:
        values = torch.tensor(rows, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"known: '{name}' is no table of integers: {error}; give lists of equal lengths") from error
    if not values.numel():
        raise ModelError(f"known: '{name}' has no numbers; leave it out where samples have nothing of the kind")
    if values.dtype != torch.int64:
        raise ModelError(f"known: '{name}' has numbers of {values.dtype}; only integers are sizes")
    found: list[Any] = values.tolist()
    return found


def _checked(x: torch.Tensor, given: Any, name: str, shape: tuple[int, ...], numbers: list[Any]) -> torch.Tensor:
    """X, after a check that the samples have these known values."""
    if not isinstance(given, torch.Tensor) or given.shape[1:] != shape or given.dtype not in _INTEGERS:
        raise ModelError(
            f"the batch: '{name}' is {_told(given)}; a sample has integers of shape {shape}, as `known` says, and"
            f" the batch {(len(x), *shape)}"
        )
    wanted = pytree.tree_leaves(numbers)
    checked = torch.ops.planner.expected(x.reshape(len(x), -1), given.reshape(len(x), -1), wanted, name)
    return checked.reshape(x.shape)  # type: ignore[no-any-return]


def _told(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
