"""A check that a graph has the types that PyTorch gives: its operators are applied to tensors without data."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from planner.errors import ModelError, PlannerError
from planner.graph.call import Call, Typed, typed_call
from planner.graph.operator_graph import Operator, OperatorGraph, TensorType, TorchConstant
from planner.graph.torch_operators import resolve
from planner.graph.tracing.exported import tensor_type

_SPACE = "aten."
_CUTS: Mapping[str, str | None] = {
    "aten.split.Tensor": "split_size",
    "aten.chunk.default": "chunks",
    "aten.unbind.int": None,
}
"""Operators that make as many tensors as an argument says, and which argument (None: the extent of the dim)."""

_KINDS = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def check_applied(graph: OperatorGraph, allowed: Container[str]) -> None:
    """Raise ModelError, naming the operator, where a PyTorch operator that is `allowed` makes other results of its
    operands than the graph says, or cannot be applied to them. Other operators are not applied, equal calls once."""
    known: set[tuple[Call, tuple[bool, ...]]] = set()
    for op in graph.operators:
        if not op.op.startswith(_SPACE) or op.op not in allowed:
            continue
        call = typed_call(graph, op), tuple(name is None for name in op.results)
        if call not in known:
            known.add(call)
            _check(op, call[0], tuple(None if name is None else graph.types[name] for name in op.results))


def _check(op: Operator, call: Call, said: tuple[TensorType | None, ...]) -> None:
    if _pieces(call) > len(said):
        raise ModelError(f"operator '{op.name}': {op.op} makes more results than the {len(said)} that are listed")
    made_by = resolve(op.op)
    arguments = [_torch_argument(argument) for argument in call.arguments]
    keywords = {key: _torch_argument(argument) for key, argument in call.keywords}
    try:
        with torch.no_grad():
            made = made_by(*arguments, **_without_memory(made_by, arguments, keywords))
    except PlannerError:
        raise
    except Exception as error:  # PyTorch's kernels may raise anything for the numbers of a file
        first = str(error).strip().partition("\n")[0]
        raise ModelError(f"operator '{op.name}': {op.op} cannot be applied to its operands: {first}") from error
    results = made if isinstance(made, tuple | list) else (made,)
    found = tuple(tensor_type(one) if isinstance(one, torch.Tensor) else None for one in results)
    if [_shape_of(one) for one in found] != [_shape_of(one) for one in said]:
        raise ModelError(f"operator '{op.name}': {op.op} makes {_text(found)}, and {_text(said)} is written down")


def _without_memory(
    made_by: torch._ops.OpOverload, given: Sequence[object], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """The keywords of a call whose result takes no memory: a result that can be made on any device is made on "meta",
    whatever device the call names. Raises TypeError where an argument in the position of a device is none."""
    named = [argument.name for argument in made_by._schema.arguments]
    if "device" not in named:
        return dict(keywords)
    meta, place = torch.device("meta"), named.index("device")
    others = {key: value for key, value in keywords.items() if key != "pin_memory"}
    if place >= len(given):
        return others | {"device": meta}
    if given[place] != meta:  # every device is read as meta
        raise TypeError("what is given by position in place of a device is none")
    return others


def _pieces(call: Call) -> int:
    """How many tensors a call cuts one into, at least; 0 where it does not cut. No list of 2**40 is made to count."""
    if call.op not in _CUTS or not call.operands:
        return 0
    shape, said = call.operands[0].shape, _CUTS[call.op]
    size = 1 if said is None else call.argument(1, said, 1)
    place = call.argument(1 if said is None else 2, "dim", 0)
    if not isinstance(place, int) or not -len(shape) <= place < len(shape) or not isinstance(size, int):
        return 0  # PyTorch says what is wrong
    extent = shape[place]
    return min(size, extent) if call.op == "aten.chunk.default" else -(-extent // max(size, 1))


def _shape_of(found: TensorType | None) -> object:
    return None if found is None else (found.shape, found.dtype)


def _text(found: Sequence[TensorType | None]) -> str:
    return ", ".join("nothing" if one is None else f"{one.dtype} {list(one.shape)}" for one in found)


def _torch_argument(argument: Typed) -> Any:
    """The argument as PyTorch takes it. Strides change no shape and no dtype, so that tensors are contiguous."""
    if isinstance(argument, TensorType):
        return torch.empty(argument.shape, dtype=getattr(torch, argument.dtype), device="meta")
    if isinstance(argument, TorchConstant):
        return _constant(argument)
    if isinstance(argument, tuple):
        return [_torch_argument(item) for item in argument]
    return argument


def _constant(argument: TorchConstant) -> Any:
    """The object of torch that a constant names. Raises ModelError where there is none of its kind."""
    if argument.kind == "device":
        return torch.device("meta")
    found = getattr(torch, argument.name, None)
    if argument.kind not in _KINDS or not isinstance(found, _KINDS[argument.kind]):
        raise ModelError(f"torch has no {argument.kind} '{argument.name}'")
    return found
