"""Blocks that are alike are traced once: who is alike, how a repeated call is announced, and how it is expanded
afterwards.

`announce` gives the forward of every block after the first of a run to a stand-in that calls the operator
`planner_trace.call`, which computes nothing and has the shapes of the first block's results. `expand` replaces each
such call by a copy of the first block's operators. See `trace` for the picture and for what happens when blocks turn
out not to be alike.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.graph.operator_graph import Operator, OperatorGraph, TensorType, substitute

_SHORTEST_RUN = 3
_CALL = "planner_trace.call.default"
_MODULE_STATE = frozenset(nn.Module().__dict__)


class NotAlikeError(Exception):
    """Blocks that looked alike are not; the model must be traced in full."""


@dataclass
class Run:
    """Consecutive alike blocks of one module list, and what the first call of the first one looked like."""

    paths: tuple[str, ...]
    inputs: tuple[Any, ...] = ()
    input_spec: Any = None
    outputs: tuple[Any, ...] = ()
    output_spec: Any = None
    calls: dict[str, int] = field(default_factory=dict)


@contextlib.contextmanager
def announce(module: nn.Module) -> Iterator[tuple[Run, ...]]:
    """While active, only the first block of each run in `module` computes; yields the runs (none: nothing repeats)."""
    blocks = dict(module.named_modules())
    runs = tuple(Run(paths=paths) for paths in _runs(module))
    with contextlib.ExitStack() as stack:
        if runs:
            stack.enter_context(_library())
        for run in runs:
            for index, path in enumerate(run.paths):
                block = blocks[path]
                stand_in = _first(run, path, block.forward) if index == 0 else _other(run, path)
                block.forward = stand_in
                stack.callback(block.__dict__.pop, "forward", None)
        yield runs


@contextlib.contextmanager
def _library() -> Iterator[None]:
    """Define `planner_trace.call(tensors, path) -> tensors` for as long as a trace lasts."""
    library = torch.library.Library("planner_trace", "FRAGMENT")
    try:
        library.define("call(Tensor[] tensors, str path) -> Tensor[]")
        library.impl("call", lambda tensors, path: [torch.empty_like(t) for t in tensors], "CompositeExplicitAutograd")
        yield
    finally:
        library._destroy()


def _marker(tensors: Sequence[torch.Tensor], path: str) -> list[torch.Tensor]:
    """One node of the traced graph whose results have the types of `tensors`."""
    return list(torch.ops.planner_trace.call(list(tensors), path)) if tensors else []


def _first(run: Run, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        _count(run, path)
        leaves, run.input_spec = pytree.tree_flatten((args, kwargs))
        run.inputs = tuple(_describe(leaf) for leaf in leaves)
        tensors = iter(_marker([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], f"begin {path}"))
        args, kwargs = pytree.tree_unflatten(
            [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], run.input_spec
        )
        results, run.output_spec = pytree.tree_flatten(forward(*args, **kwargs))
        marked = iter(_marker([leaf for leaf in results if isinstance(leaf, torch.Tensor)], f"end {path}"))
        outputs = [next(marked) if isinstance(leaf, torch.Tensor) else leaf for leaf in results]
        run.outputs = tuple(outputs)
        return pytree.tree_unflatten(outputs, run.output_spec)

    return stand_in


def _other(run: Run, path: str) -> Callable[..., Any]:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        _count(run, path)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if run.input_spec is None or spec != run.input_spec or tuple(_describe(leaf) for leaf in leaves) != run.inputs:
            raise NotAlikeError(path)
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        expected = [leaf for leaf in run.outputs if isinstance(leaf, torch.Tensor)]
        _marker(inputs, f"inputs {path}")
        made = iter(_marker(expected, f"outputs {path}"))
        return pytree.tree_unflatten(
            [next(made) if isinstance(leaf, torch.Tensor) else leaf for leaf in run.outputs], run.output_spec
        )

    return stand_in


def _count(run: Run, path: str) -> None:
    run.calls[path] = run.calls.get(path, 0) + 1
    if run.calls[path] > 1:
        raise NotAlikeError(f"{path} is called twice")


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
    if leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | torch.device):
        return type(leaf), leaf
    raise NotAlikeError(f"an argument of type {type(leaf).__name__}")


def _runs(module: nn.Module) -> Iterator[tuple[str, ...]]:
    """Longest stretches of alike neighbours in every ModuleList and Sequential, outermost lists first."""
    covered: list[str] = []
    uses: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for path, owner in module.named_modules():
        if not isinstance(owner, nn.ModuleList | nn.Sequential) or any(f"{path}.".startswith(f"{c}.") for c in covered):
            continue
        stretch: list[str] = []
        last: Any = None
        for name, child in [*owner.named_children(), ("", None)]:
            signature = None if child is None else _signature(child, uses)
            if stretch and (signature is None or signature != last):
                if len(stretch) >= _SHORTEST_RUN:
                    covered.extend(stretch)
                    yield tuple(stretch)
                stretch = []
            if signature is not None:
                stretch.append(f"{path}.{name}" if path else name)
            last = signature


def _signature(module: nn.Module, uses: Mapping[int, int]) -> Any:
    """Everything about a block that its forward could depend on; None where that cannot be compared."""
    parts: list[Any] = []
    for path, child in module.named_modules():
        if "forward" in child.__dict__:
            return None
        plain = {key: value for key, value in child.__dict__.items() if key not in _MODULE_STATE}
        hooks = any(value for key, value in child.__dict__.items() if key.endswith("_hooks"))
        if hooks or not all(_comparable(value) for value in plain.values()):
            return None
        tensors = [
            (name, tuple(t.shape), t.stride(), t.dtype, t.requires_grad)
            for name, t in [*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)]
        ]
        if any(uses[id(p)] > 1 for p in child.parameters(recurse=False)):
            return None
        parts.append((path, type(child), child.training, sorted(plain.items(), key=lambda item: item[0]), tensors))
    return parts


def _comparable(value: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return all(_comparable(item) for item in value)
    if isinstance(value, dict):
        return all(_comparable(item) for item in [*value.keys(), *value.values()])
    return (
        value is None
        or isinstance(value, bool | int | float | str | torch.dtype | torch.device | type)
        or callable(value)
    )


def expand(graph: OperatorGraph, runs: Sequence[Run]) -> OperatorGraph:
    """`graph` with every announced call replaced by the operators of the first block of its run."""
    markers = {str(op.arguments[1]): op for op in graph.operators if op.op == _CALL}
    types = dict(graph.types)
    made: dict[str, list[Operator]] = {}
    dropped: dict[str, str] = {}
    for run in runs:
        body = _body(graph, run, markers)
        for path in run.paths[1:]:
            if path in run.calls:
                made[f"outputs {path}"] = _copy(graph, run, path, body, markers, types, dropped)
        for kind in ("begin", "end"):
            marker = markers.get(f"{kind} {run.paths[0]}")
            if marker is not None and run.calls:
                dropped.update(zip([r for r in marker.results if r], marker.operands, strict=True))
    operators = []
    for op in graph.operators:
        if op.op != _CALL:
            operators.append(op)
        else:
            operators.extend(made.get(str(op.arguments[1]), ()))
    names = {name: _final(name, dropped) for name in dropped}
    operators = [replace(op, arguments=tuple(substitute(a, names) for a in op.arguments),
                         keywords=tuple((k, substitute(v, names)) for k, v in op.keywords)) for op in operators]  # fmt: skip
    for name in dropped:
        types.pop(name, None)
    return replace(graph, operators=tuple(operators), types=types, loss=_final(graph.loss, dropped))


def _final(name: str, dropped: Mapping[str, str]) -> str:
    while name in dropped:
        name = dropped[name]
    return name


def _body(graph: OperatorGraph, run: Run, markers: Mapping[str, Operator]) -> list[Operator]:
    """Operators between the markers of the first block. They may read only its arguments, its parameters and each
    other."""
    first = run.paths[0]
    if not run.calls:
        return []
    order = {op.name: i for i, op in enumerate(graph.operators)}
    if f"begin {first}" not in markers or f"end {first}" not in markers:
        raise NotAlikeError(f"{first} takes or returns no tensor")
    begin, end = markers[f"begin {first}"], markers[f"end {first}"]
    body = list(graph.operators[order[begin.name] + 1 : order[end.name]])
    known = {name for name in begin.results if name}
    for op in body:
        for name in op.operands:
            if name not in known and not name.startswith(f"{first}."):
                raise NotAlikeError(f"{first} reads {name}, which is neither its argument nor its parameter")
        known.update(name for name in op.results if name)
    return body


def _copy(
    graph: OperatorGraph,
    run: Run,
    path: str,
    body: Sequence[Operator],
    markers: Mapping[str, Operator],
    types: dict[str, TensorType],
    dropped: dict[str, str],
) -> list[Operator]:
    first = run.paths[0]
    begin, end = markers[f"begin {first}"], markers[f"end {first}"]
    inputs, outputs = markers[f"inputs {path}"], markers[f"outputs {path}"]
    names = dict(zip([r for r in begin.results if r], inputs.operands, strict=True))

    def moved(name: str) -> str:
        return f"{path}{name[len(first) :]}" if name.startswith(f"{first}.") else f"{name}@{path}"

    for op in body:
        for name in (*op.operands, *(r for r in op.results if r)):
            if name not in names:
                names[name] = moved(name)
                types[names[name]] = graph.types[name]
    dropped.update(zip([r for r in outputs.results if r], [names[n] for n in end.operands], strict=True))
    return [
        Operator(
            name=f"{op.name}@{path}",
            op=op.op,
            arguments=tuple(substitute(a, names) for a in op.arguments),
            keywords=tuple((key, substitute(value, names)) for key, value in op.keywords),
            results=tuple(None if r is None else names[r] for r in op.results),
            module=f"{path}{op.module[len(first) :]}" if op.module.startswith(first) else op.module,
        )
        for op in body
    ]


def rename(graph: OperatorGraph, operator_names: Sequence[str], value_names: Mapping[str, str]) -> OperatorGraph:
    """The same graph with other names for its operators and for some of its values."""
    operators = tuple(
        Operator(
            name=name,
            op=op.op,
            arguments=tuple(substitute(a, value_names) for a in op.arguments),
            keywords=tuple((key, substitute(value, value_names)) for key, value in op.keywords),
            results=tuple(None if r is None else value_names.get(r, r) for r in op.results),
            module=op.module,
        )
        for name, op in zip(operator_names, graph.operators, strict=True)
    )
    types = {value_names.get(name, name): tensor for name, tensor in graph.types.items()}
    return replace(graph, operators=operators, types=types, loss=value_names.get(graph.loss, graph.loss))
