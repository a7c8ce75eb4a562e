"""Recurrent layers (LSTM, GRU, RNN), each layer as its own operator.

PyTorch exports one operator for all layers of a module, and the operator says that it draws random numbers, because it
may drop elements between layers. Here it is split into layers:

    traced     x, h0, c0, weights of all ─> lstm of 2 layers ─> y, h, c
    layers     x, zeros ─> lstm ─> y ─> dropout ─> lstm ─> y        h, c joined, where an operator reads them
                           zeros ─────────────────┘

So layers can be stages of a pipeline, their weights are gathered and recomputed one by one, and elements are dropped
between them as everywhere: by their place (`runtime.ops.randomness`). A bidirectional layer stays one operator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.graph.operator_graph import Argument, Operator, OperatorGraph, TensorType, ValueRef

GATES = {
    "aten.lstm.input": 4,
    "aten.gru.input": 3,
    "aten.rnn_tanh.input": 1,
    "aten.rnn_relu.input": 1,
}
"""Recurrent operators on padded sequences, and the number of products of a step for each hidden element."""

LSTM = "aten.lstm.input"
_ZEROS = "aten.zeros.default"
_PARAMETERS, _BIASES, _LAYERS, _DROPOUT, _TRAIN, _BIDIRECTIONAL = 2, 3, 4, 5, 6, 7  # positions of arguments


def with_recurrent_layers(graph: OperatorGraph) -> OperatorGraph:
    """`graph` with an operator for each layer of each recurrent module; these draw no random numbers."""
    if not any(op.op in GATES for op in graph.operators):
        return graph
    types = dict(graph.types)
    operators: list[Operator] = []
    taken_apart: set[str] = set()
    for op in graph.operators:
        if op.op in GATES:
            taken_apart.update(op.operands)
            operators += _Layers(graph, types, op).operators()
        else:
            operators.append(op)
    read = {graph.loss, *(content for _, content in graph.updates), *(name for op in operators for name in op.operands)}
    unread = {  # zeros that were the states of several layers
        name for name in taken_apart - read if name in graph.producer and _made_of_zeros(graph, name)
    }
    kept = tuple(op for op in operators if unread.isdisjoint(name or "" for name in op.results))
    return replace(graph, types={name: each for name, each in types.items() if name not in unread}, operators=kept)


def _made_of_zeros(graph: OperatorGraph, name: str) -> bool:
    made = graph.producer.get(name)
    return made is not None and graph.operators[made].op == _ZEROS


@dataclass(frozen=True)
class _Layers:
    """One recurrent operator; values of its layers are added to `types`."""

    graph: OperatorGraph
    types: dict[str, TensorType]
    op: Operator

    def operators(self) -> list[Operator]:
        arguments, layers = self.op.arguments, self.op.arguments[_LAYERS]
        assert isinstance(layers, int)
        if layers == 1:
            return [replace(self.op, arguments=(*arguments[:_DROPOUT], 0.0, *arguments[_TRAIN:]))]
        source = arguments[0]
        found: list[Operator] = []
        made: list[Operator] = []
        for layer in range(layers):
            starts = [self._start(state, layer, layers, found) for state in self._states()]
            made.append(self._layer(source, starts, layer, layers))
            found.append(made[-1])
            source = ValueRef(str(made[-1].results[0]))
            if layer + 1 < layers and arguments[_TRAIN] is True and arguments[_DROPOUT]:
                found.append(self._dropped(source, layer))
                source = ValueRef(str(found[-1].results[0]))
        return [*found, *self._joined(made)]

    @property
    def _directions(self) -> int:
        return 2 if self.op.arguments[_BIDIRECTIONAL] is True else 1

    def _states(self) -> tuple[ValueRef, ...]:
        given = self.op.arguments[1]
        states = given if isinstance(given, tuple) else (given,)
        assert all(isinstance(state, ValueRef) for state in states)
        return states  # type: ignore[return-value]

    def _start(self, state: ValueRef, layer: int, layers: int, found: list[Operator]) -> ValueRef:
        """The initial state of a layer: zeros of its own, or its part of a given state."""
        whole, own = self.graph.types[state.name], self._directions
        result = f"{state.name}@{layer} of {self.op.name}"
        self.types[result] = replace(whole, shape=(own, *whole.shape[1:]))
        name = f"{result} made"
        if _made_of_zeros(self.graph, state.name):
            zeros = self.graph.operators[self.graph.producer[state.name]]
            shape: tuple[Argument, ...] = (own, *whole.shape[1:])
            part = replace(zeros, name=name, arguments=(shape, *zeros.arguments[1:]), results=(result,))
        else:
            first = layer * own
            part = Operator(
                name=name,
                op="aten.slice.Tensor",
                arguments=(state, 0, first, first + own),
                results=(result,),
                module=self.op.module,
                line=self.op.line,
            )
        found.append(part)
        return ValueRef(result)

    def _layer(self, source: Argument, starts: Sequence[ValueRef], layer: int, layers: int) -> Operator:
        arguments, given = self.op.arguments, self.op.arguments[_PARAMETERS]
        assert isinstance(given, tuple)
        each = len(given) // layers
        last = layer + 1 == layers
        results = [f"{name}@{layer}" for name in self.op.results]
        for at, (name, result) in enumerate(zip(self.op.results, results, strict=True)):
            whole = self.graph.types[str(name)]
            self.types[result] = replace(whole, shape=(self._directions, *whole.shape[1:])) if at else whole
        if last:
            results[0] = str(self.op.results[0])
        state: Argument = tuple(starts) if isinstance(arguments[1], tuple) else starts[0]
        parameters = given[layer * each : (layer + 1) * each]
        return replace(
            self.op,
            name=f"{self.op.name}@{layer}",
            arguments=(source, state, parameters, arguments[_BIASES], 1, 0.0, *arguments[_TRAIN:]),
            results=tuple(results),
        )

    def _dropped(self, source: ValueRef, layer: int) -> Operator:
        result = f"{source.name} dropped"
        self.types[result] = replace(self.types[source.name], contiguous=True)
        return Operator(
            name=f"{self.op.name}@{layer} dropped",
            op="aten.dropout.default",
            arguments=(source, self.op.arguments[_DROPOUT], True),
            results=(result,),
            module=self.op.module,
            line=self.op.line,
        )

    def _joined(self, made: Sequence[Operator]) -> list[Operator]:
        """The last states of all layers, where an operator reads them."""
        found = []
        for at, name in list(enumerate(self.op.results))[1:]:
            if name not in self.graph.consumers and name != self.graph.loss:
                self.types.pop(str(name))
                continue
            parts = tuple(ValueRef(str(op.results[at])) for op in made)
            found.append(
                Operator(
                    name=f"{self.op.name} joined {at}",
                    op="aten.cat.default",
                    arguments=(parts, 0),
                    results=(name,),
                    module=self.op.module,
                    line=self.op.line,
                )
            )
        return found
