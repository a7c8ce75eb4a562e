"""From a batch in any form to the inputs of a graph.

    step(tokens, labels)   step((tokens, labels))   step({"labels": ..., "tokens": ...})   step(tokens=..., labels=...)

All four mean one call of `forward(tokens, labels)`. A graph names its inputs after the form of the model's call at
planning: `args_0`, `args_1_mask` for positional arguments, `tokens` or `tokens_mask` for keywords. So a batch is bound
to the signature of `forward` and converted to that form, and mappings are put into the order of planning: names and
structure must match, the order of a dict need not.
"""

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.errors import RequestError
from planner.graph.tracing.examples import with_samples

_POSITION = re.compile(r"args_(\d+)(?:_|$)")
_NO_NAME = re.compile(r"[^a-zA-Z0-9]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """One call of the model, in the form in which it was planned."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def leaves(self) -> list[tuple[str, Any]]:
        """Path and value of every leaf, in the order in which tracing numbers the tensors."""
        found = pytree.tree_flatten_with_path((self.args, dict(self.kwargs)))[0]
        return [(pytree.keystr(path), leaf) for path, leaf in found]

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for _, leaf in self.leaves() if isinstance(leaf, torch.Tensor)]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> "Arguments":
        """The same call with other tensors."""
        leaves, spec = pytree.tree_flatten((self.args, dict(self.kwargs)))
        rest = iter(tensors)
        filled = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return Arguments(args=tuple(args), kwargs=kwargs)

    def without_values(self) -> "Arguments":
        """The same call with tensors that take no memory."""
        return self.with_tensors([tensor.to("meta") for tensor in self.tensors()])

    def samples(self, count: int) -> "Arguments":
        """An example with `count` samples: of tensors with the leading dim of the first tensor the first samples, or
        tensors without data where there are fewer. Raises RequestError where no tensor has a leading dim."""
        leading = next((tensor.shape[0] for tensor in self.tensors() if tensor.dim()), None)
        if leading is None:
            raise RequestError("the batch has no tensor with a dim for the samples")
        args, kwargs = with_samples((self.args, dict(self.kwargs)), leading, count)
        return Arguments(args=tuple(args), kwargs=kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """How a module is called: only this is kept of it, so that its weights can be freed."""

    name: str
    signature: inspect.Signature


def forward_of(module: nn.Module) -> Forward:
    return Forward(name=type(module).__name__, signature=inspect.signature(module.forward))


def arguments_of(forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str]) -> Arguments:
    """The call of a module that a batch means, in the form that gave the inputs these names.

    A single argument that is a mapping, a tuple or a list is unpacked, if `forward` can be called with its parts.
    Raises RequestError where `forward` cannot be called with the batch.
    """
    forms = [*_unpacked(args, kwargs), (args, dict(kwargs))]
    faults = []
    for form_args, form_kwargs in forms:
        try:
            bound = forward.signature.bind(*form_args, **form_kwargs)
        except TypeError as error:
            faults.append(error)
            continue
        return _in_form(bound, names)
    # a mapping or a tuple most likely holds the arguments, so its error is the one to report
    raise RequestError(f"the batch does not fit {forward.name}.forward{forward.signature}: {faults[0]}")


def _unpacked(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    if len(args) != 1 or kwargs:
        return []
    (batch,) = args
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        return [((), dict(batch))]
    return [(tuple(batch), {})] if isinstance(batch, tuple | list) else []


def _in_form(bound: inspect.BoundArguments, names: Sequence[str]) -> Arguments:
    """The call with the same number of positional arguments as at planning, and keywords in their order."""
    kinds = {name: parameter.kind for name, parameter in bound.signature.parameters.items()}
    wanted = 1 + max((int(found[1]) for name in names if (found := _POSITION.match(name))), default=-1)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    if wanted > len(bound.args):
        bound.apply_defaults()  # an omitted argument between others
    for name, value in bound.arguments.items():
        if kinds[name] is inspect.Parameter.VAR_POSITIONAL:
            args += value
        elif kinds[name] is inspect.Parameter.VAR_KEYWORD:
            kwargs.update(value)
        elif kinds[name] is inspect.Parameter.KEYWORD_ONLY or len(args) >= wanted:
            kwargs[name] = value
        else:
            args.append(value)
    return Arguments(
        args=tuple(_ordered(value, f"args_{place}", names) for place, value in enumerate(args)),
        kwargs={key: _ordered(kwargs[key], key, names) for key in sorted(kwargs, key=lambda key: _first(key, names))},
    )


def _ordered(value: Any, prefix: str, names: Sequence[str]) -> Any:
    """`value` with every mapping in it as a dict in the order of the inputs."""
    if isinstance(value, Mapping):
        below = {key: f"{prefix}_{_NO_NAME.sub('_', str(key))}" for key in value}
        keys = sorted(value, key=lambda key: _first(below[key], names))
        return {key: _ordered(value[key], below[key], names) for key in keys}
    if type(value) in (list, tuple):
        return type(value)(_ordered(item, f"{prefix}_{place}", names) for place, item in enumerate(value))
    return value


def _first(prefix: str, names: Sequence[str]) -> float:
    """Position of the first input that `prefix` names, or that is a part of it; infinite where there is none."""
    places = (at for at, name in enumerate(names) if name == prefix or name.startswith(f"{prefix}_"))
    return next(places, math.inf)


@dataclass(frozen=True, kw_only=True)
class InputMatcher:
    """Finds the inputs of a graph in a batch. `pattern` is the call with which the graph was traced, or the first
    call."""

    forward: Forward
    names: tuple[str, ...]
    pattern: Arguments

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """A batch in the form in which the model was planned."""
        return arguments_of(self.forward, args, kwargs, self.names)

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a batch by the names of the inputs. Raises RequestError where its structure, or a value that
        is not a tensor, differs from tracing."""
        for form in (*_unpacked(args, kwargs), (args, kwargs)):
            tensors: list[torch.Tensor] = []
            if _as_known(form, (self.pattern.args, self.pattern.kwargs), tensors):  # already in order
                return dict(zip(self.names, tensors, strict=True))
        given = self.arguments(args, kwargs)
        found, known = given.leaves(), dict(self.pattern.leaves())
        for place, leaf in found:
            if place not in known:
                raise RequestError(f"the batch has {_place(place)}, with which the model was not traced")
            _check_constant(place, leaf, known[place])
        places = {place for place, _ in found}
        missing = [place for place in known if place not in places]
        if missing:
            raise RequestError(f"the batch lacks {_place(missing[0])}, with which the model was traced")
        return dict(zip(self.names, given.tensors(), strict=True))


def matcher(forward: Forward, names: tuple[str, ...], pattern: Arguments) -> InputMatcher:
    """A matcher for a graph with these inputs. Raises RequestError where the call has another number of tensors."""
    count = len(pattern.tensors())
    if count != len(names):
        raise RequestError(f"the model was traced with {len(names)} input tensors, this batch has {count}")
    return InputMatcher(forward=forward, names=names, pattern=pattern.without_values())


def _as_known(given: Any, known: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether the given arguments have the same structure of tuples, lists and dicts as the known ones, with tensors
    and equal constants in the same positions; appends their `tensors`. Other types are not searched."""
    if isinstance(given, torch.Tensor):
        tensors.append(given)
        return isinstance(known, torch.Tensor)
    kind = type(given)
    if kind is not type(known):
        return False
    if kind is dict:
        return list(given) == list(known) and all(_as_known(given[key], known[key], tensors) for key in known)
    if kind in (tuple, list):
        return len(given) == len(known) and all(map(_as_known, given, known, repeat(tensors)))
    return kind in (bool, int, float, str, type(None)) and bool(given == known)


def _check_constant(place: str, leaf: Any, known: Any) -> None:
    tensor = isinstance(leaf, torch.Tensor)
    if tensor != isinstance(known, torch.Tensor):
        raise RequestError(
            f"{_place(place)} is {'a tensor' if tensor else _short(leaf)}, and was"
            f" {_short(known) if tensor else 'a tensor'} when the model was traced"
        )
    if not tensor and leaf != known:
        raise RequestError(
            f"{_place(place)} is {_short(leaf)}, and was {_short(known)} when the model was traced, which a plan keeps;"
            " plan again"
        )


def _short(value: object) -> str:
    """A value as it was written, where that is short; an array, by its type."""
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"a value of type {type(value).__name__}"


def _place(path: str) -> str:
    """A readable form of the path `[1]['mask']` in a flattened call."""
    return f"the argument {path[3:]}" if path.startswith(("[0]", "[1]")) else path
