"""The operator graph: what a model computes, as plain data.

    inputs ──┐
    buffers ─┼─> operator ─> value ─> operator ─> ... ─> loss
    parameters ┘

Values are named tensors with a type; operators are calls of PyTorch operators on values and literals, in an order in
which they can be executed. Nothing here needs torch: the graph can be planned, stored and compared without it, and
the runtime executes the very same operators. Graphs are immutable; passes return new ones.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx as nx

DTYPE_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "complex32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
CASTS = ("aten.to.dtype", "aten._to_copy.default")
"""Operators that convert a tensor to another dtype."""

COMPLEX = frozenset({"complex32", "complex64", "complex128"})
_NARROW = frozenset(name for name in DTYPE_BYTES if name.startswith("float8_"))
FLOATING = frozenset({"float16", "bfloat16", "float32", "float64"}) | _NARROW


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """Shape and dtype of a value; `contiguous` is False for a strided view (a reshape of it copies)."""

    shape: tuple[int, ...]
    dtype: str
    contiguous: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def floating(self) -> bool:
        return self.dtype in FLOATING

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient can flow through such a tensor."""
        return self.floating or self.dtype in COMPLEX


DETACH = "aten.detach.default"
"""The operator that stops gradients."""

STARTING = "planner.gradient_start"
"""The operator whose result requires a gradient, whatever made it (`planner.graph.rewriting.gradient_starts`)."""

STOPPING = frozenset(
    {DETACH}
    | {f"aten.{name}.default" for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")}
)
"""Operators through which no gradient flows: detach, and operators that read only the shape of their operand."""

ONE_EACH = frozenset({"aten.broadcast_tensors.default", "aten.meshgrid.default", "aten.meshgrid.indexing"})
"""Operators with one result per operand; the gradient of a result goes to its own operand alone."""

STATISTICS: Mapping[str, int] = {
    "aten._native_batch_norm_legit_functional.default": 1,
    "aten._native_batch_norm_legit_no_training.default": 1,
    "aten._native_batch_norm_legit.no_stats": 1,
}
"""Operators, and the first of their results that is a statistic, without a gradient: a batch norm that is called twice
reads the statistics of its first call."""

ROWS_FROM = {"host": "planner.rows_from_host", "servers": "planner.rows_from_servers"}
"""The operators that get rows of tables which are not on the devices, by the place of the tables
(`planner.graph.placed`)."""


@dataclass(frozen=True, slots=True)
class ValueRef:
    """An argument of an operator that is a value of the graph."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchConstant:
    """An argument that names an object of torch: kind 'dtype', 'device', 'layout' or 'memory_format'."""

    kind: str
    name: str


Argument = ValueRef | TorchConstant | None | bool | int | float | str | tuple["Argument", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenRule:
    """A sharding rule that was found by trial, as text (see `planner.graph.written`): the table of rules has none.

    Factors in no result are reductions, unless `blocked`; those in `mean` average. `addends` are operands that join a
    reduction's sum once. Autograd keeps operand i for the gradients of operands J where `saves` has (i, J), the results
    in `saved_results`, and `saved_extra` beside them: bytes for each point of the factors named; `scratch` lives only
    during the backward pass. `reason` says why no factor can be split, where none can.
    """

    text: str
    blocked: tuple[str, ...] = ()
    mean: tuple[str, ...] = ()
    addends: tuple[int, ...] = ()
    saves: tuple[tuple[int, tuple[int, ...]], ...] = ()
    saved_results: tuple[int, ...] = ()
    saved_extra: tuple[tuple[float, str], ...] = ()
    scratch: tuple[tuple[float, str], ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One call: `results = op(*arguments, **keywords)`.

    `operands` are the names of the tensor arguments in the order of the call (lists flattened, keywords last).
    `op` is the full name of a PyTorch operator ("aten.linear.default") or `planner.identity`; `module` is the path of
    the module whose forward made the call. `results` has one name per returned tensor, None for a result that is not
    a tensor. `rule` is a rule that was found by trial; None for an operator that is in the table of rules. `line` is
    the line of the model's code that made the call, "file:number", for messages only; empty where it is not known.
    """

    name: str
    op: str
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...] = ()
    results: tuple[str | None, ...]
    module: str = ""
    rule: WrittenRule | None = None
    line: str = field(default="", repr=False, compare=False)
    operands: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = references((*self.arguments, *(value for _, value in self.keywords)))
        object.__setattr__(self, "operands", tuple(reference.name for reference in found))

    def reading(self, names: Mapping[str, str]) -> "Operator":
        """The same operator with its values renamed by `names`."""
        if names.keys().isdisjoint(self.operands):
            return self
        return replace(
            self,
            arguments=tuple(substitute(argument, names) for argument in self.arguments),
            keywords=tuple((key, substitute(value, names)) for key, value in self.keywords),
        )

    @property
    def at(self) -> str:
        """` (at file:number)`, for messages; empty where the line is not known."""
        return f" (at {self.line})" if self.line else ""

    @property
    def place(self) -> str:
        """Where the model calls it: `module 'layers.0' (at file:number)`."""
        return f"module '{self.module or '(root)'}'{self.at}"

    @property
    def trains_rows(self) -> bool:
        """Whether it makes gradients for a table that is no parameter of the graph."""
        return self.op in ROWS_FROM.values() and bool(dict(self.keywords)["trainable"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where a parameter of a graph lies in a weight `of` the module: `length` elements from `start` on along `dim`."""

    of: str
    dim: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A trainable or frozen weight. `aliases` are further names of the same tensor (tied weights). `cut` says that it
    is a part of a weight of the module, which has another name (`planner.graph.rewriting.fused_weights`)."""

    name: str
    aliases: tuple[str, ...] = ()
    trainable: bool = True
    cut: Cut | None = None

    @property
    def in_module(self) -> str:
        """The name of the module's weight."""
        return self.name if self.cut is None else self.cut.of

    @property
    def names(self) -> tuple[str, ...]:
        """All its names, and that of the weight of which it is a part."""
        return (self.name, *self.aliases, *(() if self.cut is None else (self.cut.of,)))


def references(argument: Argument) -> Iterator[ValueRef]:
    """All value references in an argument, left to right."""
    if isinstance(argument, ValueRef):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from references(item)


def substitute(argument: Argument, names: Mapping[str, str]) -> Argument:
    """`argument` with each referenced value renamed by `names` (names not in it stay)."""
    if isinstance(argument, ValueRef):
        return ValueRef(names.get(argument.name, argument.name))
    if isinstance(argument, tuple):
        return tuple(substitute(item, names) for item in argument)
    return argument


@dataclass(frozen=True, kw_only=True)
class OperatorGraph:
    """Values, operators in execution order, and which value is the loss.

    `types` has the type of every value: inputs, parameters, buffers and results of operators. `updates` says which
    buffers the forward pass changes, and which value is the new content of each: (buffer, value). `constants` are the
    tensors that the code of the model makes, by their names among the buffers. `unpadded` lists padded values, with the
    padded dim and its extent in the model (`planner.sharding.padding`). `drops_fused` says that attention which drops
    probabilities is one kernel, as in most software (`planner.graph.fused_dropout`); no digest contains it.
    """

    types: Mapping[str, TensorType]
    inputs: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[str, ...]
    operators: tuple[Operator, ...]
    loss: str
    updates: tuple[tuple[str, str], ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    unpadded: tuple[tuple[str, int, int], ...] = ()
    drops_fused: bool = False

    def __repr__(self) -> str:
        return f"OperatorGraph({len(self.operators)} operators, {len(self.parameters)} parameters)"

    @cached_property
    def derived(self) -> dict[object, Any]:
        """A cache of what others derive from this graph, which never changes: the sharding rule of an operator under
        its name, everything else under a tuple that begins with a word."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """The state without the derived cache."""
        return {name: value for name, value in vars(self).items() if name != "derived"}

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Index of the operator that makes a value; inputs, parameters and buffers have none."""
        return {name: i for i, op in enumerate(self.operators) for name in op.results if name is not None}

    @cached_property
    def cuts(self) -> Mapping[str, Cut]:
        """The parameters that are parts of weights of the module."""
        return {parameter.name: parameter.cut for parameter in self.parameters if parameter.cut is not None}

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        return frozenset(parameter.name for parameter in self.parameters)

    def parameter_behind(self, value: str) -> str | None:
        """The parameter that a value is, or that operators on nothing else made it of: casts, views, chunks."""
        while (made := self.producer.get(value)) is not None and len(self.operators[made].operands) == 1:
            (value,) = self.operators[made].operands
        return value if value in self.parameter_names else None

    def parameters_of(self, operator: Operator) -> tuple[str, ...]:
        """Parameters that an operator reads: as they are, then as what other operators made of them alone."""
        behind = map(self.parameter_behind, operator.operands)
        own = (name for name in operator.operands if name in self.parameter_names)
        return tuple(dict.fromkeys([*own, *(name for name in behind if name is not None)]))

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """Values through which a gradient flows back to some trainable parameter."""
        found = {p.name for p in self.parameters if p.trainable and self.types[p.name].floating}
        for op in self.operators:
            if op.op in STOPPING:
                continue
            made: Iterable[str | None] = ()
            if op.op in ONE_EACH:
                made = [made for name, made in zip(op.operands, op.results, strict=True) if name in found]
            elif op.op == STARTING or op.trains_rows or any(name in found for name in op.operands):
                made = op.results[: STATISTICS.get(op.op)]
            found.update(name for name in made if name is not None and self.types[name].has_gradient)
        return frozenset(found)

    def returns(self, op: Operator, name: str) -> bool:
        """Whether an operator makes a gradient of the value with this name, which it reads."""
        return name in self.differentiable and op.name not in self._stopping

    @cached_property
    def _stopping(self) -> frozenset[str]:
        """The names of operators that make no gradients of their operands, whatever these are: none of their results
        has one, as of a comparison."""
        graded = {name for name, kind in self.types.items() if kind.has_gradient}
        return frozenset(op.name for op in self.operators if op.op in STOPPING or graded.isdisjoint(op.results))

    def graded(self, op: Operator) -> tuple[bool, ...]:
        """For each operand of an operator whether the operator makes a gradient of it."""
        if self.differentiable.isdisjoint(op.operands) or op.name in self._stopping:
            return (False,) * len(op.operands)
        return tuple([name in self.differentiable for name in op.operands])

    def graded_places(self, op: Operator) -> tuple[int, ...]:
        """The places of these operands."""
        return tuple([place for place, gets in enumerate(self.graded(op)) if gets])

    def own_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a value without its padding."""
        shape = list(self.types[name].shape)
        for dim, extent in self._unpadded.get(name, ()):
            shape[dim] = extent
        return tuple(shape)

    @cached_property
    def _unpadded(self) -> Mapping[str, list[tuple[int, int]]]:
        found: dict[str, list[tuple[int, int]]] = {}
        for name, dim, extent in self.unpadded:
            found.setdefault(name, []).append((dim, extent))
        return found

    @property
    def trains(self) -> bool:
        """Whether any gradient reaches the loss; if not, there is only a forward pass
        (`planner.graph.forward_only`)."""
        return self.loss in self.differentiable

    @cached_property
    def data_dependent(self) -> frozenset[str]:
        """Values computed from the inputs, the parameters, tables elsewhere or buffers that change, which therefore may
        differ in every step."""
        found = {*self.inputs, *self.parameter_names, *(buffer for buffer, _ in self.updates)}
        for op in self.operators:
            if op.op in ROWS_FROM.values() or any(name in found for name in op.operands):
                found.update(name for name in op.results if name is not None)
        return frozenset(found)

    @cached_property
    def consumers(self) -> Mapping[str, tuple[int, ...]]:
        """Indices of the operators that read a value, one entry per use."""
        uses: dict[str, list[int]] = {}
        for i, op in enumerate(self.operators):
            for name in op.operands:
                uses.setdefault(name, []).append(i)
        return {name: tuple(indices) for name, indices in uses.items()}

    @cached_property
    def live(self) -> frozenset[str]:
        """Names of the operators that the loss or a changed buffer depends on; nothing reads the results of others."""
        import networkx as nx

        wanted = (self.loss, *(content for _, content in self.updates))
        makers = {self.operators[self.producer[value]].name for value in wanted if value in self.producer}
        graph = self.to_networkx()
        return frozenset(makers.union(*(nx.ancestors(graph, name) for name in makers)))

    def to_networkx(self) -> "nx.MultiDiGraph":
        """Operators as nodes, with their `op` and their `index` in execution order; an edge from an operator to another
        for each of its results that the other reads, with the name of the `value` as key and its `type`."""
        import networkx as nx

        graph = nx.MultiDiGraph()
        for index, op in enumerate(self.operators):
            graph.add_node(op.name, op=op.op, index=index)
        for value, made in self.producer.items():
            for reader in dict.fromkeys(self.consumers.get(value, ())):
                graph.add_edge(
                    self.operators[made].name, self.operators[reader].name, key=value, type=self.types[value]
                )
        return graph

    def batched_inputs(self, batch: int) -> frozenset[str]:
        """Inputs whose leading dim is that of `batch` samples."""
        return frozenset(name for name in self.inputs if self.types[name].shape[:1] == (batch,))

    def parameter_count(self) -> int:
        """Number of trainable and frozen parameters; tied weights count once."""
        return sum(self.types[parameter.name].numel for parameter in self.parameters)

    def content_of(self, op: Operator) -> list[object]:
        """All that decides whether an operator equals one of another graph, for JSON: name, call, types of its
        results."""
        return [
            op.name,
            op.op,
            _argument_json(op.arguments),
            [[key, _argument_json(value)] for key, value in op.keywords],
            [name and _type_json(self.types[name]) for name in op.results],
        ]

    def fingerprint(self) -> str:
        """A digest of all that decides whether a plan for one graph is a plan for another: operators, types,
        parameters."""
        if ("fingerprint",) not in self.derived:
            self.derived["fingerprint",] = self._fingerprint()
        return str(self.derived["fingerprint",])

    def _fingerprint(self) -> str:
        content = {
            "inputs": [_type_json(self.types[name]) for name in self.inputs],
            "buffers": [[name, _type_json(self.types[name])] for name in self.buffers],
            "parameters": [
                [p.name, p.trainable, list(p.aliases), _type_json(self.types[p.name])] for p in self.parameters
            ],
            "operators": [self.content_of(op) for op in self.operators],
            "loss": self.loss,
            **({"updates": self.updates} if self.updates else {}),
        }
        text = json.dumps(content, separators=(",", ":"), sort_keys=True)
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _type_json(tensor: TensorType) -> list[object]:
    return [list(tensor.shape), tensor.dtype]


def _argument_json(argument: Argument) -> object:
    if isinstance(argument, ValueRef):
        return {"value": argument.name}
    if isinstance(argument, TorchConstant):
        # The device on which a model is traced is not part of what it computes.
        return {argument.kind: "any" if argument.kind == "device" else argument.name}
    if isinstance(argument, tuple):
        return [_argument_json(item) for item in argument]
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"float": repr(argument)}
    return argument
