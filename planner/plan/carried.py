"""The traced graph of a model, as text that a plan file carries where the zoo does not have the model.

So anyone who has only the file of a plan for a model of their own can show, verify, price, explain and export the plan:
nothing is imported. The text is JSON, compressed and in base64: `graph_text` writes it, `carried_graph` reads it.

The text may come from anyone. Its form is exact, sizes are limited before anything is unpacked, and every value has one
producer and a type. Every operator of PyTorch is applied to the types of its operands, on tensors without data, so that
the graph is as tracing makes one. Only operators of the table of sharding rules are applied, all of which are
pure; an operator whose rule was found by trial is not applied, and its types are believed. Whatever executes a graph (a
run, an audit, a proof of rules) asks the person for the model (`planner.plan.binding.model_of`).
"""

import base64
import binascii
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from hardware_profiles.foreign import ForeignTextError, decoded, parse_json
from planner.errors import ModelError, PlanFileError
from planner.graph.operator_graph import (
    DTYPE_BYTES,
    Argument,
    Cut,
    Operator,
    OperatorGraph,
    Parameter,
    TensorType,
    TorchConstant,
    ValueRef,
)

LONGEST = 8 * 2**20
"""Characters of the text in a plan file."""
_UNPACKED = 64 * 2**20
"""Most bytes of the unpacked text."""
_NUMBERS = 2**48
"""Most elements of a tensor."""


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


_CONSTANTS = ("dtype", "device", "layout", "memory_format")
_INFINITE = ("inf", "-inf", "nan")
_WORD = re.compile(r"[a-z][a-z0-9_:]{0,39}")
_DEEPEST = 8  # nested lists in an argument

_Extent = Annotated[int, Field(ge=0, le=_NUMBERS)]
_Type = tuple[Annotated[list[_Extent], Field(max_length=32)], str, bool]
_OperatorName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}(\.[A-Za-z_][A-Za-z0-9_]{0,99}){1,2}$")]


class _Operator(_Form):
    name: str
    op: _OperatorName
    arguments: list[Any]
    keywords: list[tuple[str, Any]]
    results: list[str | None]
    module: str


class _Graph(_Form):
    batch: Annotated[int, Field(ge=1, le=2**31)]
    sequence_length: Annotated[int, Field(ge=1, le=2**31)] | None
    types: dict[str, _Type]
    inputs: list[str]
    parameters: list[tuple[str, list[str], bool]]
    cuts: dict[str, tuple[str, int, int, int]] = {}
    buffers: list[str]
    operators: list[_Operator]
    loss: str
    updates: list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A graph as it was traced with `batch` samples and sequences of `sequence_length` tokens (None: no sequences).
    `only_batch` says why the model computes with that batch alone (None: it computes with any, or nobody asked).
    `notes` say what of a config is not in the model."""

    graph: OperatorGraph
    batch: int
    sequence_length: int | None
    only_batch: str | None = None
    notes: tuple[str, ...] = ()


def graph_text(graph: OperatorGraph, *, batch: int, sequence_length: int | None) -> str | None:
    """The text of a graph; None where it is too long to be read again, or has names that no plan file may have."""
    content = {
        "batch": batch,
        "sequence_length": sequence_length,
        "types": {name: [list(t.shape), t.dtype, t.contiguous] for name, t in graph.types.items()},
        "inputs": graph.inputs,
        "parameters": [[p.name, p.aliases, p.trainable] for p in graph.parameters],
        **({"cuts": {name: astuple(cut) for name, cut in graph.cuts.items()}} if graph.cuts else {}),
        "buffers": graph.buffers,
        "operators": [_operator_content(op) for op in graph.operators],
        "loss": graph.loss,
        "updates": graph.updates,
    }
    plain = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    text = base64.b64encode(zlib.compress(plain, 9)).decode()
    long = len(text) > LONGEST or len(plain) > _UNPACKED
    return None if long or any(not one.isprintable() for one in _texts(graph)) else text


def carried_graph(text: str) -> Carried:
    """The graph in a text of `graph_text`; its inverse. Raises PlanFileError for a text without a graph."""
    found = own_graph(text)
    _check_types(found.graph)
    return found


def own_graph(text: str) -> Carried:
    """The same for a text that only this program could write: its types are believed, so PyTorch is not needed.
    Raises PlanFileError."""
    try:
        plain = _unpacked(text)
        parse_json(decoded(plain))
        form = _Graph.model_validate_json(plain)
    except ForeignTextError as error:
        raise _fault(str(error)) from error
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][:4]) or "the text"
        raise _fault(f"{place}: {first['msg']}") from error
    known: dict[TensorType, TensorType] = {}  # one object for equal types: blocks share theirs
    types = ((name, _type_of(name, *given)) for name, given in form.types.items())
    graph = OperatorGraph(
        types={name: known.setdefault(tensor, tensor) for name, tensor in types},
        inputs=tuple(form.inputs),
        parameters=tuple(
            Parameter(name=n, aliases=tuple(a), trainable=t, cut=_cut_of(form.cuts.get(n)))
            for n, a, t in form.parameters
        ),
        buffers=tuple(form.buffers),
        operators=tuple(_operator_of(op) for op in form.operators),
        loss=form.loss,
        updates=tuple(form.updates),
    )
    _check_values(graph)
    return Carried(graph=graph, batch=form.batch, sequence_length=form.sequence_length)


def _fault(what: str) -> PlanFileError:
    return PlanFileError(f"model.graph: {what}; undo the edit, plan again, or give the model with --model")


def _unpacked(text: str) -> bytes:
    if len(text) > LONGEST:
        raise _fault(f"it has {len(text):,} characters, {LONGEST:,} are read")
    try:
        packed, unpacking = base64.b64decode(text, validate=True), zlib.decompressobj()
        plain = unpacking.decompress(packed, _UNPACKED)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise _fault(f"cannot be unpacked: {error}") from error
    if unpacking.unconsumed_tail or not unpacking.eof:
        raise _fault(f"is cut off, or longer than the {_UNPACKED:,} bytes that are read")
    return plain


def _operator_content(op: Operator) -> dict[str, Any]:
    return {
        "name": op.name,
        "op": op.op,
        "arguments": [_argument_content(argument) for argument in op.arguments],
        "keywords": [[key, _argument_content(argument)] for key, argument in op.keywords],
        "results": op.results,
        "module": op.module,
    }


def _operator_of(form: _Operator) -> Operator:
    return Operator(
        name=form.name,
        op=form.op,
        arguments=tuple(_argument_of(argument) for argument in form.arguments),
        keywords=tuple((key, _argument_of(argument)) for key, argument in form.keywords),
        results=tuple(form.results),
        module=form.module,
    )


def _argument_content(argument: Argument) -> Any:
    if isinstance(argument, ValueRef):
        return {"value": argument.name}
    if isinstance(argument, TorchConstant):
        return {argument.kind: argument.name}
    if isinstance(argument, tuple):
        return [_argument_content(item) for item in argument]
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"float": repr(argument)}
    return argument


def _argument_of(content: Any, depth: int = 0) -> Argument:
    if isinstance(content, list) and depth < _DEEPEST:
        return tuple(_argument_of(item, depth + 1) for item in content)
    if isinstance(content, dict) and len(content) == 1:
        ((kind, name),) = content.items()
        if kind == "value" and isinstance(name, str):
            return ValueRef(name)
        if kind == "float" and name in _INFINITE:
            return float(name)
        if kind in _CONSTANTS and isinstance(name, str) and _WORD.fullmatch(name):
            return TorchConstant(kind, name)
    if content is None or isinstance(content, bool | str):
        return content
    if isinstance(content, float) and math.isfinite(content):
        return content
    if isinstance(content, int) and -(2**63) <= content < 2**63:
        return content
    raise _fault(f"an operator has the argument {str(content)[:80]!r}")


def _type_of(name: str, shape: list[int], dtype: str, contiguous: bool) -> TensorType:
    if dtype not in DTYPE_BYTES:
        raise _fault(f"value '{name}': there is no dtype '{dtype}'")
    if math.prod(shape) > _NUMBERS:
        raise _fault(f"value '{name}': a tensor of shape {tuple(shape)} has more than 2**48 elements")
    return TensorType(shape=tuple(shape), dtype=dtype, contiguous=contiguous)


def _cut_of(said: tuple[str, int, int, int] | None) -> Cut | None:
    if said is None:
        return None
    of, dim, start, length = said
    return Cut(of=of, dim=dim, start=start, length=length)


def _check_cuts(graph: OperatorGraph) -> None:
    """Check that the parameters that are parts of one weight follow each other in it, along one of their dims."""
    ends: dict[str, tuple[int, int, tuple[int, ...]]] = {}
    for name, cut in graph.cuts.items():
        shape = graph.types[name].shape
        other = (*shape[: cut.dim], *shape[cut.dim + 1 :])
        dim, end, rest = ends.get(cut.of, (cut.dim, 0, other))
        fits = 0 <= cut.dim < len(shape) and shape[cut.dim] == cut.length > 0
        if not fits or (cut.dim, cut.start, other) != (dim, end, rest) or cut.of in graph.types:
            raise _fault(f"parameter '{name}' is no part of '{cut.of}' behind the one before it")
        ends[cut.of] = cut.dim, cut.start + cut.length, rest


def _texts(graph: OperatorGraph) -> Iterator[str]:
    """Names and texts, which are written into reports and files of engines."""
    yield from graph.types
    for parameter in graph.parameters:
        yield from (parameter.in_module, *parameter.aliases)
    for op in graph.operators:
        yield from (op.name, op.module, *(key for key, _ in op.keywords))
        yield from (text for text in (*op.arguments, *dict(op.keywords).values()) if isinstance(text, str))


def _check_values(graph: OperatorGraph) -> None:
    """Check that names can be printed, that every value has a type and one producer before its readers, and that the
    loss is a scalar that can be trained."""
    if strange := [text for text in _texts(graph) if not text.isprintable()]:
        raise _fault(f"the text {strange[0][:80]!a} has a control character")
    given = [*graph.inputs, *(parameter.name for parameter in graph.parameters), *graph.buffers]
    made = [name for op in graph.operators for name in op.results if name is not None]
    twice = [name for name, count in Counter([*given, *made]).items() if count > 1]
    twice += [name for name, count in Counter(op.name for op in graph.operators).items() if count > 1]
    if twice:
        raise _fault(f"'{twice[0]}' is there twice")
    if untyped := {*given, *made} ^ set(graph.types):
        raise _fault(f"value '{min(untyped)}' has no type, or a type and no producer")
    known = set(given)
    for op in graph.operators:
        if missing := [name for name in op.operands if name not in known]:
            raise _fault(f"operator '{op.name}' reads '{missing[0]}', which nothing before it makes")
        known.update(name for name in op.results if name is not None)
    if graph.loss not in made or graph.types[graph.loss].shape or graph.loss not in graph.differentiable:
        raise _fault(f"the loss '{graph.loss}' is no scalar that depends on a trainable parameter")
    if changed := [name for pair in graph.updates for name in pair if name not in known]:
        raise _fault(f"a buffer gets the content '{changed[0]}', which nothing makes")
    _check_cuts(graph)


def _check_types(graph: OperatorGraph) -> None:
    """Check that the results of PyTorch's operators have the types in the text."""
    from planner.graph.applied import check_applied
    from planner.sharding.rules import RULES

    try:
        check_applied(graph, RULES)
    except ModelError as error:
        raise _fault(str(error)) from error
