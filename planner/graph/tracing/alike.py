"""Which blocks are alike: modules of one list that cannot tell themselves apart.

A block is described by everything its forward can read: class, plain attributes, and the types of parameters and
buffers, of itself and of every module in it, together with the modes of torch it is called under. Blocks with equal
descriptions compute the same on equal arguments. A block with anything that cannot be compared for sure (hooks,
objects, tensors as plain attributes, tensors or methods that belong to another object) is alike to nothing. A global
variable that changes between two calls is not seen.

Modules of transformers know which layer they belong to (`layer_idx`), because caches of keys and values ask for it. The
number is left out of a description; so the second and the last block of a run of such modules are traced as well, and
compared with the first (`planner.graph.tracing.repeats`).
"""

import contextlib
import dataclasses
import enum
import functools
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from planner.graph.tracing.ordered_sets import MODULE_STATE, OrderedSet

_SHORTEST_RUN = 3
_NUMBER = "layer_idx"
_PLAIN = bool | int | float | complex | str | bytes | torch.dtype | torch.device | torch.layout | torch.memory_format
_SAME_EVERYWHERE = type | enum.Enum | torch._ops.OpOverload | torch._ops.OpOverloadPacket


class NotAlikeError(Exception):
    """Blocks that looked alike are not, and must be traced in full; `block` is one of them, where it is known."""

    block: str | None = None


@contextlib.contextmanager
def of_block(path: str) -> Iterator[None]:
    """While active, a NotAlikeError gets the path of this block."""
    try:
        yield
    except NotAlikeError as error:
        error.block = error.block or path
        raise


def alike_runs(module: nn.Module) -> Iterator[tuple[str, ...]]:
    """Alike blocks of every ModuleList and Sequential in their order, outermost lists first. They need not be
    neighbours: layers that look at all tokens may come after several that look back through a window."""
    covered: list[str] = []
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    parts = [part for _, part in (*tensors, *module.named_modules(remove_duplicate=False))]
    uses = Counter(map(id, parts))
    for path, owner in module.named_modules():
        if not isinstance(owner, nn.ModuleList | nn.Sequential) or any(f"{path}.".startswith(f"{c}.") for c in covered):
            continue
        kinds: list[tuple[object, list[str]]] = []
        for name, child in owner.named_children():
            found = _description_or_none(child, uses)
            if found is None:
                continue
            alike = next((paths for kind, paths in reversed(kinds) if kind == found), None)
            if alike is None:
                kinds.append((found, alike := []))
            alike.append(f"{path}.{name}" if path else name)
        for _, alike in kinds:
            if len(alike) >= _SHORTEST_RUN:
                covered.extend(alike)
                yield tuple(alike)


def _description_or_none(block: nn.Module, uses: Counter[int]) -> object:
    """The description; None for a container that nobody calls, for a block with a part that other blocks have too, and
    where there is none."""
    parts = [*block.modules(), *block.parameters(), *block.buffers()]
    if isinstance(block, nn.ModuleList | nn.ModuleDict) or any(uses[id(part)] > 1 for part in parts):
        return None
    try:
        return description(block)
    except NotAlikeError:
        return None


def description(block: nn.Module) -> object:
    """All that the forward of a block can read, in a form that can be compared. Raises NotAlikeError where there is
    none."""
    parts: list[object] = [_modes()]
    for path, module in block.named_modules():
        state = {key: value for key, value in module.__dict__.items() if not _is_stand_in(value)}
        if "forward" in state or any(value for key, value in state.items() if key.endswith("_hooks")):
            raise NotAlikeError(f"{path or 'the block'} has hooks or a forward of its own")
        left_out = {*MODULE_STATE, _NUMBER} if _has_number(module) else MODULE_STATE
        plain = {key: frozen(value) for key, value in state.items() if key not in left_out}
        tensors = [
            (name, tensor if tensor is None else (*tensor_description(tensor), tensor.requires_grad))
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
        ]
        parts.append((path, type(module), module.training, sorted(plain.items()), tensors))
    return parts


def knows_its_number(block: nn.Module) -> bool:
    """Whether a block, or a module in it, knows which of the layers it belongs to."""
    return any(map(_has_number, block.modules()))


def _has_number(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.") and isinstance(module.__dict__.get(_NUMBER), int)


def _is_stand_in(value: object) -> bool:
    """Whether this is the stand-in forward of a block while its model is traced (see
    `planner.graph.tracing.repeats`)."""
    return getattr(value, "__module__", None) == "planner.graph.tracing.repeats"


def _modes() -> object:
    """Modes of torch that change what a call does."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    casts = [torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in devices]
    return torch.get_default_dtype(), casts


def tensor_description(tensor: torch.Tensor) -> tuple[object, ...]:
    """All of a tensor but its content."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def frozen(value: Any) -> object:
    """`value` in a form that is equal for values that act alike at this moment. Raises NotAlikeError for other
    values."""
    if value is None or isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, _SAME_EVERYWHERE) or (isinstance(value, types.BuiltinFunctionType) and _unbound(value)):
        return value
    if type(value) in (tuple, list):
        return type(value), [frozen(item) for item in value]
    if type(value) in (set, frozenset, OrderedSet):
        return isinstance(value, set), sorted(repr(frozen(item)) for item in value)
    if type(value) is dict:
        return [(frozen(key), frozen(item)) for key, item in value.items()]
    if dataclasses.is_dataclass(value):
        return type(value), [frozen(_read(value, item.name)) for item in dataclasses.fields(value)]
    if isinstance(value, functools.partial):
        return frozen(value.func), frozen(value.args), frozen(value.keywords)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, frozen(value.__defaults__), frozen(value.__kwdefaults__), frozen(cells)
    raise NotAlikeError(f"a {type(value).__name__} cannot be compared")


def _read(value: Any, name: str) -> Any:
    """A field. Its owner may refuse to read it: configs of Gemma 4 refuse fields that differ between layers."""
    try:
        return getattr(value, name)
    except Exception as error:
        raise NotAlikeError(f"{name} of a {type(value).__name__} cannot be read") from error


def _unbound(function: types.BuiltinFunctionType) -> bool:
    return function.__self__ is None or isinstance(function.__self__, types.ModuleType | type)
