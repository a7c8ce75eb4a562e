"""Traces alike blocks once: which blocks are alike, how a repeated call is announced, and how it is expanded
afterwards.

`announce` gives every block of a run a stand-in forward. The first block is traced between two markers. A block that is
called alike calls the operator `planner_trace.call`, which computes nothing; its results have the shapes of the first
block's. `expand` replaces each such call by a copy of the operators that were traced. See `trace` for the picture
and for what happens when blocks turn out not to be alike.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.graph.operator_graph import Operator, OperatorGraph, TensorType, substitute
from planner.graph.tracing.alike import (
    NotAlikeError,
    alike_runs,
    description,
    frozen,
    knows_its_number,
    of_block,
    tensor_description,
)
from planner.graph.tracing.hidden_parameters import AskedForError, HiddenParameters
from planner.graph.tracing.known_values import KnownValues

_CALL = "planner_trace.call.default"


@dataclass
class Template:
    """A block that was traced, what its call looked like, and the blocks that were called in the same way."""

    path: str
    inputs: tuple[object, ...]
    input_spec: Any
    outputs: tuple[Any, ...]
    output_spec: Any
    repeated: list[str] = field(default_factory=list)


@dataclass
class Run:
    """Alike blocks of one module list, and those of them that were traced: one for every way to call them, for example
    if the first block is given another dtype than all others. The blocks at `compared`, of the same list, are traced by
    themselves, and must turn out to be the same. Parameters of all but the first two are `hidden` from an export: the
    second is often called in another way."""

    paths: tuple[str, ...]
    compared: tuple[str, ...] = ()
    hidden: HiddenParameters = field(default_factory=lambda: HiddenParameters({}))
    block: object = None
    templates: list[Template] = field(default_factory=list)
    called: set[str] = field(default_factory=set)


@contextlib.contextmanager
def announce(
    module: nn.Module,
    known: KnownValues | None = None,
    besides: str | None = None,
    compared: bool = False,
    hide: bool = True,
) -> Iterator[tuple[Run, ...]]:
    """While active, only those blocks of each run in `module` compute that are called in a new way, possibly with
    other `known` values. Yields the runs (none: nothing repeats); the block `besides` forms no run. Blocks that
    were `compared` before are not compared again. With `hide`, parameters can be hidden."""
    blocks = dict(module.named_modules())
    alike = [paths for paths in alike_runs(module) if besides not in paths]
    runs = tuple(run for paths in alike if len((run := _run(paths, blocks, compared)).paths) > 1)
    with contextlib.ExitStack() as stack:
        if runs:
            stack.enter_context(_library())
        for run in runs:
            if hide:
                run.hidden = HiddenParameters({path: blocks[path] for path in run.paths[2:]})
            for path in run.paths:
                block = blocks[path]
                block.forward = _stand_in(run, path, block, known)
                stack.callback(block.__dict__.pop, "forward", None)
        yield runs


def _run(paths: tuple[str, ...], blocks: Mapping[str, nn.Module], compared: bool) -> Run:
    """The run of alike blocks. If blocks know their numbers, the second and the last are compared with the first,
    unless `compared` says that they were."""
    if compared or not knows_its_number(blocks[paths[0]]):
        return Run(paths=paths)
    return Run(paths=(paths[0], *paths[2:-1]), compared=(paths[1], paths[-1]))


@contextlib.contextmanager
def hidden(runs: Sequence[Run]) -> Iterator[None]:
    """While active, blocks that need not compute have no parameters."""
    with contextlib.ExitStack() as stack:
        for run in runs:
            stack.enter_context(run.hidden.hidden())
        yield


@contextlib.contextmanager
def model_runs(runs: Sequence[Run]) -> Iterator[None]:
    """While active, the model runs: it gets an AskedForError where it asks for hidden parameters."""
    with contextlib.ExitStack() as stack:
        for run in runs:
            stack.enter_context(run.hidden.model_runs())
        yield


@contextlib.contextmanager
def _library() -> Iterator[None]:
    """Define `planner_trace.call(tensors, path) -> tensors` for as long as a trace lasts."""
    library = torch.library.Library("planner_trace", "FRAGMENT")  # type: ignore[no-untyped-call]
    try:
        library.define("call(Tensor[] tensors, str path) -> Tensor[]")  # type: ignore[no-untyped-call]
        library.impl("call", _alike_tensors, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _alike_tensors(tensors: Sequence[torch.Tensor], path: str) -> list[torch.Tensor]:
    return [tensor.new_empty_strided(tensor.shape, tensor.stride()) for tensor in tensors]


def _marker(tensors: Sequence[torch.Tensor], path: str) -> list[torch.Tensor]:
    """One node of the traced graph whose results have the types of `tensors`."""
    return list(torch.ops.planner_trace.call(list(tensors), path)) if tensors else []


def _stand_in(run: Run, path: str, block: nn.Module, known: KnownValues | None) -> Callable[..., Any]:
    forward = block.forward

    @of_block(path)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if path in run.called:
            raise NotAlikeError(f"{path} is called twice")
        run.called.add(path)
        with run.hidden.shown(path):
            now = description(block)
        if run.templates and now != run.block:
            raise NotAlikeError(f"{path} differs from {run.templates[0].path}")
        run.block = now
        leaves, spec = pytree.tree_flatten((args, kwargs))
        inputs = tuple((_describe(leaf), _values(leaf, known)) for leaf in leaves)
        for template in run.templates:
            if spec == template.input_spec and inputs == template.inputs:
                return _repeat(template, path, leaves)
        if path in run.hidden:
            raise AskedForError(path)
        template = _template(path, forward, leaves, spec, inputs)
        if description(block) != run.block:
            raise NotAlikeError(f"{path} changes its attributes")
        run.templates.append(template)
        return pytree.tree_unflatten(template.outputs, template.output_spec)

    return stand_in


def _template(
    path: str, forward: Callable[..., Any], leaves: Sequence[Any], spec: Any, inputs: tuple[object, ...]
) -> Template:
    """The results of a block, traced between two markers."""
    tensors = iter(_marker([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], f"begin {path}"))
    given = [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(given, spec)
    results, output_spec = pytree.tree_flatten(forward(*args, **kwargs))
    left, left_spec = pytree.tree_flatten((args, kwargs))
    if left_spec != spec or any(a is not b for a, b in zip(left, given, strict=True)):
        raise NotAlikeError(f"{path} changes its arguments")
    marked = iter(_marker([leaf for leaf in results if isinstance(leaf, torch.Tensor)], f"end {path}"))
    outputs = tuple(next(marked) if _described_tensor(leaf) else leaf for leaf in results)
    return Template(path, inputs, spec, outputs, output_spec)


def _repeat(template: Template, path: str, leaves: Sequence[Any]) -> Any:
    """The results of a block that is called as another block was."""
    template.repeated.append(path)
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    outputs = [leaf for leaf in template.outputs if isinstance(leaf, torch.Tensor)]
    made = iter(_marker([*given, *outputs], f"repeat {path}")[len(given) :])
    return pytree.tree_unflatten(
        [next(made) if isinstance(leaf, torch.Tensor) else leaf for leaf in template.outputs], template.output_spec
    )


def _described_tensor(leaf: Any) -> bool:
    """Whether a result is a tensor. Raises NotAlikeError for an object that could hide a tensor."""
    _describe(leaf)
    return isinstance(leaf, torch.Tensor)


def _values(leaf: Any, known: KnownValues | None) -> object:
    """The values of a tensor, where they are known."""
    return known.content(leaf) if known is not None and isinstance(leaf, torch.Tensor) else None


def _describe(leaf: Any) -> object:
    return tensor_description(leaf) if isinstance(leaf, torch.Tensor) else frozen(leaf)


def expand(graph: OperatorGraph, runs: Sequence[Run]) -> OperatorGraph:
    """`graph` with every announced call replaced by the operators of the first block of its run.

    Raises NotAlikeError where a block is tied to the rest of the model by more than its arguments and results.
    """
    expansion = _Expansion(graph)
    for run in runs:
        for template in run.templates:
            with of_block(template.path):
                expansion.add(template)
    operators: list[Operator] = []
    for op in graph.operators:
        operators.extend((op,) if op.op != _CALL else expansion.copies.get(str(op.arguments[1]), ()))
    names = {name: _final(name, expansion.stand_for) for name in expansion.stand_for}
    operators = [op.reading(names) for op in operators]
    made = {*graph.inputs, *graph.parameter_names, *graph.buffers, *(r for op in operators for r in op.results if r)}
    types = {name: tensor for name, tensor in expansion.types.items() if name in made}
    if any(name not in made for op in operators for name in op.operands):
        raise NotAlikeError("a value inside of a block is used outside of it")
    return replace(
        graph,
        operators=tuple(operators),
        types=types,
        loss=_final(graph.loss, expansion.stand_for),
        updates=tuple(sorted((*graph.updates, *expansion.updates))),
    )


def check_compared(graph: OperatorGraph, runs: Sequence[Run]) -> None:
    """Raise NotAlikeError unless the blocks of an expanded graph that are to be compared equal the first."""
    for run in runs:
        for path in run.compared:
            if not any(_same(graph, template.path, path) for template in run.templates):
                with of_block(path):
                    raise NotAlikeError(f"{path} is not what {run.paths[0]} is")


def _same(graph: OperatorGraph, first: str, other: str) -> bool:
    """Whether two blocks have the same operators, on values of the same types."""
    names, held = dict[str, str](), {*graph.parameter_names, *graph.buffers}
    one, two = ([op for op in graph.operators if f"{op.module}.".startswith(f"{path}.")] for path in (first, other))
    same = len(one) == len(two)
    for a, b in zip(one, two, strict=False):
        values = [*zip(a.operands, b.operands, strict=False), *zip(_names(a.results), _names(b.results), strict=False)]
        for x, y in values:
            same &= names.setdefault(x, y) == y and graph.types[x] == graph.types[y]
            same &= x not in held or y == f"{other}{x[len(first) :]}"
        read = a.reading(names)
        same &= (read.op, read.arguments, read.keywords) == (b.op, b.arguments, b.keywords)
        same &= [r is None for r in a.results] == [r is None for r in b.results]
    return same


def _final(name: str, stand_for: Mapping[str, str]) -> str:
    while name in stand_for:
        name = stand_for[name]
    return name


class _Expansion:
    """Copies of first blocks, by the marker that they replace; the types of their values, the values in place of
    results of markers, and the buffers that copies change."""

    def __init__(self, graph: OperatorGraph) -> None:
        self._graph = graph
        self._at = {str(op.arguments[1]): i for i, op in enumerate(graph.operators) if op.op == _CALL}
        self._held = frozenset({*graph.parameter_names, *graph.buffers})
        self.copies: dict[str, list[Operator]] = {}
        self.stand_for: dict[str, str] = {}
        self.types: dict[str, TensorType] = dict(graph.types)
        self.updates: list[tuple[str, str]] = []

    def add(self, template: Template) -> None:
        first = template.path
        begin, end = self._marker(f"begin {first}"), self._marker(f"end {first}")
        body = self._graph.operators[self._at[f"begin {first}"] + 1 : self._at[f"end {first}"]]
        entering = _names(begin.results)
        if template.repeated:
            self._check_closed(first, body, entering, end)
            self._check_updates(first, body)
        for path in template.repeated:
            self._copy(first, path, body, entering, end)
        self.stand_for.update(zip(entering, begin.operands, strict=True))
        self.stand_for.update(zip(_names(end.results), end.operands, strict=True))

    def _marker(self, label: str) -> Operator:
        if label not in self._at:
            raise NotAlikeError(f"no tensor at '{label}'")
        return self._graph.operators[self._at[label]]

    def _check_closed(self, first: str, body: Sequence[Operator], entering: Sequence[str], end: Operator) -> None:
        """Check that operators of a block read only its arguments, its parameters and each other, and that no other
        operator reads their results."""
        inside = {*entering}
        for op in (*body, end):
            for name in op.operands:
                if name not in inside and not (name in self._held and name.startswith(f"{first}.")):
                    raise NotAlikeError(f"{first} reads {name}, which is neither its argument nor its parameter")
            if op is not end:
                inside.update(_names(op.results))
        members = {op.name for op in (*body, end)}
        for op in self._graph.operators:
            if op.name not in members and any(name in inside for name in op.operands):
                raise NotAlikeError(f"{op.name} reads a value inside of {first}")

    def _check_updates(self, first: str, body: Sequence[Operator]) -> None:
        """Check that values of a block are new contents of its own buffers only."""
        inside = {name for op in body for name in _names(op.results)}
        for buffer, value in self._graph.updates:
            if (value in inside) != buffer.startswith(f"{first}."):
                raise NotAlikeError(f"{buffer} is changed across the boundary of {first}")

    def _copy(self, first: str, path: str, body: Sequence[Operator], entering: Sequence[str], end: Operator) -> None:
        repeat = self._marker(f"repeat {path}")
        count = len(entering)
        names = dict(zip(entering, repeat.operands[:count], strict=True))
        for op in (*body, end):
            for name in (*op.operands, *(() if op is end else _names(op.results))):
                if name not in names:
                    names[name] = f"{path}{name[len(first) :]}" if name in self._held else f"{name}@{path}"
                    self.types[names[name]] = self._graph.types[name]
        self.copies[f"repeat {path}"] = [
            replace(
                op.reading(names),
                name=f"{op.name}@{path}",
                results=tuple(None if r is None else names[r] for r in op.results),
                module=f"{path}{op.module[len(first) :]}" if f"{op.module}.".startswith(f"{first}.") else op.module,
            )
            for op in body
        ]
        self.stand_for.update(zip(_names(repeat.results)[count:], [names[n] for n in end.operands], strict=True))
        self.updates += [
            (f"{path}{buffer[len(first) :]}", names[value])
            for buffer, value in self._graph.updates
            if buffer.startswith(f"{first}.")
        ]


def _names(results: Sequence[str | None]) -> list[str]:
    return [name for name in results if name is not None]


def rename(graph: OperatorGraph, operator_names: Sequence[str], value_names: Mapping[str, str]) -> OperatorGraph:
    """The same graph with other names for its operators and for some of its values."""
    operators = tuple(
        replace(
            op,
            name=name,
            arguments=tuple(substitute(a, value_names) for a in op.arguments),
            keywords=tuple((key, substitute(value, value_names)) for key, value in op.keywords),
            results=tuple(None if r is None else value_names.get(r, r) for r in op.results),
        )
        for name, op in zip(operator_names, graph.operators, strict=True)
    )
    types = {value_names.get(name, name): tensor for name, tensor in graph.types.items()}
    return replace(
        graph,
        operators=operators,
        types=types,
        loss=value_names.get(graph.loss, graph.loss),
        updates=tuple((buffer, value_names.get(value, value)) for buffer, value in graph.updates),
    )
