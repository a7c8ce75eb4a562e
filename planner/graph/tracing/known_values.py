"""Values that a model's code computes from its own literals and from numbers, while it is traced without data.

    grid = torch.tensor([[1, 32, 32]]).repeat(len(images), 1)      images of known sizes, in patches
    lengths = grid.prod(-1).tolist()                               asked for: answered
    places = torch.cat([positions(*each) for each in grid.tolist()])   ─ + a weight: a constant of the graph
    x[order]                                                       rows in a known order, within each sample

Values that depend on nothing else are computed a second time, on the host, with data. Code that asks for them gets an
answer: sizes, branches and loops are those of this example, as the lengths of its sequences are. Where such values meet
tensors without data, they become a constant of the graph if literals or joins (`cat`, `stack`, assigned elements) took
part; values that are only counted (`arange`) stay operators.

Where a constant has the same elements for each sample, as it has where samples are alike, the graph keeps those of one
sample, and repeats them. So a plan can have other micro-batches, and devices the constants of their own samples. An
order of rows that stays within the samples is kept as that of one sample, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from planner.graph.tracing.known_tensors import KnownTensors, Writes, written

_MOST = 2**22
"""Elements of the largest tensor that is computed: masks of queries x keys of a long sequence are larger."""

_LITERALS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_COUNTED = frozenset(
    {torch.arange, torch.zeros, torch.ones, torch.full, torch.linspace, torch.eye, torch.tril_indices,
     torch.triu_indices, torch.scalar_tensor}
)  # fmt: skip
_JOINS = frozenset(
    {torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack, torch.Tensor.__setitem__,
     torch.block_diag}
)  # fmt: skip
_READS = frozenset(
    {torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__,
     torch.Tensor.__index__, torch.Tensor.__contains__, torch.Tensor.numpy, torch.equal, torch.Tensor.equal,
     torch.allclose, torch.Tensor.allclose, torch.is_nonzero, torch.Tensor.is_nonzero}
)  # fmt: skip
_SIZED_BY_VALUES = frozenset(
    {torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere, torch.unique, torch.Tensor.unique,
     torch.unique_consecutive, torch.Tensor.unique_consecutive, torch.masked_select, torch.Tensor.masked_select,
     torch.repeat_interleave, torch.Tensor.repeat_interleave, torch.bincount, torch.Tensor.bincount}
)  # fmt: skip
"""Functions whose number of result elements depends, or may depend, on the values of operands."""
_GETS = frozenset({torch.Tensor.__getitem__})
_SELECTS = frozenset({torch.index_select, torch.Tensor.index_select})
_REPEATS = frozenset({torch.repeat_interleave, torch.Tensor.repeat_interleave})
_ALIKE = "planner_trace.call"


@dataclass(frozen=True, slots=True)
class _Known:
    """A tensor with values; `fixed` where literals or joins took part, so that it may become a constant."""

    value: torch.Tensor
    fixed: bool


class KnownValues(TorchFunctionMode):
    """While active, tensors made from literals and numbers have values, for an example of `samples` samples."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self._samples = samples
        self._writes = Writes()  # to tensors without known values: a known tensor that is written is known again
        self._known = KnownTensors[_Known](self._writes)
        self._entered = WeakTensorKeyDictionary()

    def content(self, tensor: torch.Tensor) -> Any:
        """The values of a tensor as lists of numbers; None where they are not known."""
        known = self._known.said(tensor)
        if known is None:
            return None
        with _beside_the_trace():
            return known.value.tolist()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        operands = [leaf for leaf in pytree.tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
        if not operands:
            return self._made(func, args, given)
        known = [self._known.said(operand) for operand in operands]
        if not any(known):
            return self._writes.call(func, args, given)
        if str(func).startswith(_ALIKE):
            return self._handed_on(func(*args, **given), known)
        return self._computed(func, args, given, known) if all(known) else self._met(func, args, given, operands)

    def _note(self, made: Any, values: Any, fixed: bool) -> Any:
        leaves, known = pytree.tree_leaves(made), pytree.tree_leaves(values)
        for leaf, value in zip(leaves, known, strict=True):
            alike = isinstance(leaf, torch.Tensor) and isinstance(value, torch.Tensor) and leaf.shape == value.shape
            if alike and value.numel() <= _MOST:
                self._known.say(leaf, _Known(value, fixed))
        return made

    def _handed_on(self, made: Any, known: Sequence[_Known | None]) -> Any:
        """A marker of blocks returns what it was given (`planner.graph.tracing.repeats`)."""
        for each, fact in zip(made, known, strict=True):
            if fact is not None:
                self._known.say(each, fact)
        return made

    def _made(self, func: Any, args: Any, given: dict[str, Any]) -> Any:
        """A tensor that is made of nothing but numbers."""
        made = func(*args, **given)
        if func not in _LITERALS and func not in _COUNTED:
            return made
        leaf = made if isinstance(made, torch.Tensor) else None
        if leaf is None or leaf.numel() > _MOST or given.get("out") is not None:
            return made
        return self._note(made, _on_host(func, args, given), func in _LITERALS)

    def _computed(self, func: Any, args: Any, given: dict[str, Any], known: Sequence[Any]) -> Any:
        """The result of a function of known values alone."""
        if func in _READS:
            found = self._evaluated(func, args, given)
            return found.copy() if func is torch.Tensor.numpy else found  # writes to the original would not be seen
        fixed = any(each.fixed for each in known) or func in _JOINS
        if func in _COUNTED and given.get("out") is None:  # arange(lengths.sum())
            args, given = pytree.tree_map(self._as_number, (args, given))
            return self._note(func(*args, **given), _on_host(func, args, given), fixed)
        if func in _SIZED_BY_VALUES or (func in _GETS and _masks(args)) or (func is torch.where and len(args) == 1):
            made = self._evaluated(func, args, given)
            return pytree.tree_map(lambda value: self._lifted(value, args[0].device), made)
        made = func(*args, **given)
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(made)):
            if getattr(func, "__name__", "") == "__set__":  # tensor.data = other
                self._writes.note(args[0])
            if func is torch.Tensor.__setitem__:
                self._evaluated(func, args, given)
                self._known.say(args[0], _Known(known[0].value, True))
            return made
        if sum(leaf.numel() for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)) > _MOST:
            return made
        with _beside_the_trace():
            state = torch.get_rng_state()
        values = self._evaluated(func, args, given)
        with _beside_the_trace():
            draws = not torch.equal(state, torch.get_rng_state())
        if draws:  # random numbers differ in every step
            torch.set_rng_state(state)
            self._writes.note(*written(func, args, given))
            return made
        return self._note(made, values, fixed)

    def _met(self, func: Any, args: Any, given: dict[str, Any], operands: Sequence[torch.Tensor]) -> Any:
        """A call with known values and tensors without data."""
        if func in _REPEATS:
            args, given = _as_numbers_of_rows(self, func, args, given)
        if func in _GETS | _SELECTS:
            made = self._rows_in_order(func, args, given)
            if made is not None:
                return made
        changed = written(func, args, given)
        entered = {id(each): self._entering(each) for each in operands if all(each is not one for one in changed)}

        def replaced(leaf: Any) -> Any:
            return entered.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf

        new_args, new_given = pytree.tree_map(replaced, (args, given))
        return self._writes.call(func, new_args, new_given)

    def _entering(self, operand: torch.Tensor) -> torch.Tensor:
        """A known tensor as the graph holds it where it meets other tensors."""
        known = self._known.said(operand)
        if known is None or not known.fixed or not known.value.dim():
            return operand
        found = self._entered.get(operand)  # type: ignore[no-untyped-call]
        version = known.value._version
        if found is None or found[1] != version:
            found = self._of_samples(known.value, operand.device), version
            self._entered[operand] = found
        return found[0]  # type: ignore[no-any-return]

    def _of_samples(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The values of one sample, repeated for each, where all samples have the same; else all values."""
        dim = _repeated_dim(value, self._samples)
        if dim is None:
            return self._lifted(value, device)
        with _beside_the_trace():
            first = value.narrow(dim, 0, value.shape[dim] // self._samples).contiguous()
        one = self._lifted(first, device)
        return one.unsqueeze(dim).expand(*one.shape[:dim], self._samples, *one.shape[dim:]).flatten(dim, dim + 1)

    def _rows_in_order(self, func: Any, args: Any, given: dict[str, Any]) -> torch.Tensor | None:
        """Rows of a tensor without data in a known order that stays within each sample; None for other calls."""
        source, order = _picked(func, args, given)
        known = None if order is None else self._known.said(order)
        if known is None or not known.fixed or self._known.said(source) is not None:
            return None
        one = _order_within(known.value, self._samples, source.shape[0])
        if one is None:
            return None
        rows = source.reshape(self._samples, -1, *source.shape[1:])
        return rows.index_select(1, self._lifted(one, source.device)).flatten(0, 1)

    def _lifted(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A constant of the graph with these values."""
        with _beside_the_trace():
            kept = value.clone()  # the graph keeps the value of now, whatever is written to it later
        made: torch.Tensor = torch.ops.aten.lift_fresh_copy.default(kept).to(device)
        self._known.say(made, _Known(value, True))
        return made

    def _evaluated(self, func: Any, args: Any, given: dict[str, Any]) -> Any:
        values = pytree.tree_map(
            lambda leaf: self._known.said(leaf).value if isinstance(leaf, torch.Tensor) else leaf,  # type: ignore[union-attr]
            (args, given),
        )
        return _on_host(func, *values)

    def _as_number(self, leaf: Any) -> Any:
        return self.content(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _as_numbers_of_rows(mode: KnownValues, func: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A call of `repeat_interleave` on a tensor without data, with the number of result elements given."""
    repeats = args[1] if len(args) > 1 else given.get("repeats")
    counts = mode.content(repeats) if isinstance(repeats, torch.Tensor) else None
    if isinstance(counts, list) and given.get("output_size") is None:
        given = {**given, "output_size": sum(counts)}
    return args, given


def _on_host(func: Any, args: Any, given: Mapping[str, Any]) -> Any:
    """The result of a function on tensors with values, computed outside of the trace."""

    def on_host(leaf: Any) -> Any:
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    args, given = pytree.tree_map(on_host, (args, dict(given)))
    if given.get("device") is not None:
        given = {**given, "device": torch.device("cpu")}
    args = tuple("cpu" if isinstance(each, str) and each.startswith("meta") else each for each in args)
    with _beside_the_trace():
        return func(*args, **given)


@contextmanager
def _beside_the_trace() -> Iterator[None]:
    """While active, nothing is traced."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _masks(args: Any) -> bool:
    """Whether a tensor is indexed by a mask."""
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in pytree.tree_leaves(args[1:]))


def _picked(func: Any, args: Any, given: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
    """The tensor that rows are picked from, and their numbers; None for other calls."""
    if func in _SELECTS:
        dim = args[1] if len(args) > 1 else given.get("dim")
        order = args[2] if len(args) > 2 else given.get("index")
        return args[0], order if dim == 0 else None
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    whole = all(one is Ellipsis or one == slice(None) for one in index[1:] if not isinstance(one, torch.Tensor))
    plain = whole and isinstance(index[0], torch.Tensor) and not any(isinstance(one, torch.Tensor) for one in index[1:])
    return args[0], index[0] if plain and index[0].dtype != torch.bool else None


def _repeated_dim(value: torch.Tensor, samples: int) -> int | None:
    """The first dim along which a tensor is the same for each sample; None where there is none, or all is the same."""
    with _beside_the_trace():
        if samples < 2 or not value.numel() or bool((value == value.flatten()[0]).all()):
            return None
        for dim, extent in enumerate(value.shape):
            if extent % samples == 0:
                parts = value.reshape(*value.shape[:dim], samples, extent // samples, *value.shape[dim + 1 :])
                if bool((parts == parts.narrow(dim, 0, 1)).all()):
                    return dim
    return None


def _order_within(order: torch.Tensor, samples: int, rows: int) -> torch.Tensor | None:
    """The row numbers of one sample, if every sample has its own rows in the same order; else None."""
    if samples < 2 or order.dim() != 1 or rows % samples or order.numel() % samples:
        return None
    with _beside_the_trace():
        within = order.view(samples, -1) - torch.arange(samples)[:, None] * (rows // samples)
        own = bool((within == within[:1]).all()) and 0 <= int(within.min()) <= int(within.max()) < rows // samples
        return within[0].contiguous() if own else None
