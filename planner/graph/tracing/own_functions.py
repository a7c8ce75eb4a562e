"""Autograd functions of the user's as operators of the graph.

    class GeLU(torch.autograd.Function)      traced as     own.package_module_GeLU.<digest of its signature>
    GeLU.apply(x, 0.5)                                     (Tensor a0, float a1) -> Tensor

Export would trace through its forward and lose its backward. So while a module is traced, each call of such a function
becomes a call of an operator that is registered with PyTorch for it. Outside of a trace that operator is the
function itself, both passes; its sharding rule is found by trial (`planner.sharding.discover`). Every process that
executes the model has traced it, so it knows the operator too; a plan has only its name and its rule.
"""

import contextlib
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils.checkpoint import CheckpointFunction

from planner.errors import ModelError
from planner.graph.tracing.refusals import is_users

NAMESPACE = "own"
_REWRITE = (
    "write its forward in PyTorch operators and let autograd derive the rest, or make it an operator by"
    " torch.library.custom_op"
)
_APPLY = torch.autograd.Function.__dict__["apply"].__func__
_LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_FUNCTIONS: dict[str, Any] = {}
"""The function that an operator stands for, by the operator's name with and without its overload. If a model is built
again, it is the function that was traced last. Like PyTorch's own registry of operators, this is global."""


@contextlib.contextmanager
def own_functions_as_operators(module: nn.Module) -> Iterator[None]:
    """While active, an autograd.Function that is not torch's is called as an operator. Raises ModelError, naming the
    line of the call, for a function that cannot be called so."""
    original = torch.autograd.Function.__dict__["apply"]
    met: dict[str, Any] = {}

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:  # its forward switches gradients off, but its backward computes them all the same
            function, _, *rest = args
            return function(*rest)
        if cls.__module__.partition(".")[0] == "torch":
            return _APPLY(cls, *args, **kwargs)
        return _called(module, cls, args, kwargs, met)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _called(module: nn.Module, cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any], met: dict[str, Any]) -> Any:
    """A call of the function as a call of an operator; `met` has the functions met in this trace, by their names."""
    if met.setdefault(_stem(cls), cls) is not cls or not _may_follow(_FUNCTIONS.get(_stem(cls)), cls):
        why = "has the name of another one, which is a function of its own"
        raise _refused(module, cls, why, "give each a name, and pass what they differ in as an argument")
    _FUNCTIONS[_stem(cls)] = cls
    kinds = [_kind(argument) for argument in args]
    odd = next((argument for argument, kind in zip(args, kinds, strict=True) if not kind), None)
    if kwargs or odd is not None:
        what = "arguments by name" if kwargs else f"an argument of the type {type(odd).__name__}"
        raise _refused(module, cls, f"has {what}, which no operator takes", "pass tensors, numbers and lists of them")
    made, draws = _forward(module, cls, args)
    if draws:
        raise _refused(module, cls, f"draws random numbers by {draws}", "pass them in as inputs, or use nn.Dropout")
    results = made if isinstance(made, tuple) else (made,)
    if not all(isinstance(result, torch.Tensor) for result in results):
        raise _refused(module, cls, "returns what is no tensor", "return tensors alone")
    signature = ", ".join(f"{kind} a{at}" for at, kind in enumerate(kinds))
    returned = f"({', '.join(['Tensor'] * len(results))})" if isinstance(made, tuple) else "Tensor"
    operator = _operator(cls, f"({signature}) -> {returned}")
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def _kind(argument: Any) -> str:
    """The type of an argument as operators declare it; empty for types that operators cannot have."""
    if argument is None or isinstance(argument, torch.Tensor):
        return "Tensor" if argument is not None else "Tensor?"
    if isinstance(argument, list | tuple):
        found = {_kind(item) for item in argument}
        return f"{found.pop()}[]" if found in ({"int"}, {"Tensor"}, {"float"}) else ""
    return {bool: "bool", int: "int", float: "float", str: "str"}.get(type(argument), "")


def _forward(module: nn.Module, cls: Any, args: Sequence[Any]) -> tuple[Any, str]:
    """The result of the function for tensors without data, and the operator that draws random numbers, if any."""
    try:
        with torch.no_grad(), _disable_current_modes(), _Watched() as watched:  # type: ignore[no-untyped-call]
            given = pytree.tree_map_only(torch.Tensor, _without_data, list(args))
            made = _APPLY(cls, *given)
            returned = tuple(made) if isinstance(made, list) else made
            same = [one for one in pytree.tree_leaves(returned) if any(one is g for g in pytree.tree_leaves(given))]
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        why = f"cannot be run on tensors without data: {first}"
        raise _refused(module, cls, why, f"{_REWRITE}, with register_fake") from error
    if same:
        raise _refused(module, cls, "returns an argument, as it is or changed in place", "return a new tensor")
    return returned, watched.draws


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _stem(cls: Any) -> str:
    return re.sub(r"\W+", "_", f"{cls.__module__}_{cls.__qualname__}").strip("_")


def _may_follow(known: Any, cls: Any) -> bool:
    """Whether a function may replace one of its name that an earlier trace has met. It may not with the same code but
    other values around it, as a factory makes them, because the earlier model would then run with these values, too."""
    return known is None or all(
        _values(getattr(known, way)) == _values(getattr(cls, way))
        for way in ("forward", "backward")
        if getattr(known, way).__code__.co_code == getattr(cls, way).__code__.co_code
    )


def _values(function: Any) -> list[str]:
    """The values that a function reads from an enclosing function, as text."""
    return [repr(cell.cell_contents) for cell in function.__closure__ or ()]


def _operator(cls: Any, signature: str) -> Any:
    """The operator of a function with this signature, registered with PyTorch if it is not yet."""
    stem = _stem(cls)
    overload = "v" + hashlib.sha256(signature.encode()).hexdigest()[:8]
    name = f"{stem}.{overload}"
    if name not in _FUNCTIONS:
        _LIBRARY.define(name + signature)
        _LIBRARY.impl(name, lambda *args: _function(name, args), "CompositeExplicitAutograd")
        _LIBRARY.impl(name, lambda *args: _differentiable(name, args), "Autograd")
    _FUNCTIONS[name] = cls
    return getattr(getattr(getattr(torch.ops, NAMESPACE), stem), overload)


def _function(name: str, args: Sequence[Any]) -> Any:
    with torch.no_grad():
        return _APPLY(_FUNCTIONS[name], *args)


def _differentiable(name: str, args: Sequence[Any]) -> Any:
    """The function itself; while a trace is taken, one call."""
    traced = {"ProxyTorchDispatchMode", "FunctionalTensorMode"}
    if not traced.isdisjoint(type(mode).__name__ for mode in _get_current_dispatch_mode_stack()):
        stem, overload = name.split(".")
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(getattr(getattr(torch.ops, NAMESPACE), stem), overload)(*args)
    return _APPLY(_FUNCTIONS[name], *args)


class _Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether random numbers are drawn."""

    draws = ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            self.draws = str(function)
        return function(*args, **(kwargs or {}))


def _refused(module: nn.Module, cls: type, why: str, remedy: str) -> ModelError:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    at = f" (at {frame.f_code.co_filename}:{frame.f_lineno})" if frame is not None else ""
    return ModelError(f"{type(module).__name__} calls the autograd.Function {cls.__name__}{at}, which {why}; {remedy}")
