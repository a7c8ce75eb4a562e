"""A call as the rules see it: the operator with the types of its tensors in place of their names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.errors import RuleError
from planner.graph.operator_graph import Argument, Operator, OperatorGraph, TensorType, TorchConstant, ValueRef

Typed = TensorType | TorchConstant | None | bool | int | float | str | tuple["Typed", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`results = op(*arguments, **keywords)` with tensor types for tensors. Hashable: equal calls share one rule.

    `drops_fused` says that attention which drops probabilities is one kernel (`planner.graph.fused_dropout`).
    """

    op: str
    arguments: tuple[Typed, ...]
    keywords: tuple[tuple[str, Typed], ...]
    results: tuple[TensorType, ...]
    drops_fused: bool = False

    @property
    def operands(self) -> tuple[TensorType, ...]:
        """Types of the tensor arguments in the order of `Operator.operands`."""
        return tuple(_tensors((*self.arguments, *(value for _, value in self.keywords))))

    def argument(self, position: int, name: str, default: Typed = None) -> Typed:
        """An argument given by position or by keyword."""
        if position < len(self.arguments):
            return self.arguments[position]
        return dict(self.keywords).get(name, default)

    def integer(self, position: int, name: str, default: int) -> int:
        value = self.argument(position, name, default)
        if not isinstance(value, int):
            raise RuleError(f"{self.op}: argument '{name}' must be an integer, it is {value!r}")
        return value

    def tensor(self, position: int, name: str) -> TensorType:
        value = self.argument(position, name)
        if not isinstance(value, TensorType):
            raise RuleError(f"{self.op}: argument '{name}' must be a tensor, it is {value!r}")
        return value


def typed_call(graph: OperatorGraph, operator: Operator) -> Call:
    """The call of an operator of a graph."""
    return call_with(operator, graph.types, drops_fused=graph.drops_fused)


def call_with(operator: Operator, types: Mapping[str, TensorType], *, drops_fused: bool = False) -> Call:
    """The call of an operator whose values have these types."""
    return Call(
        op=operator.op,
        arguments=tuple([_typed(argument, types) for argument in operator.arguments]),
        keywords=tuple([(key, _typed(value, types)) for key, value in operator.keywords]),
        results=tuple([types[name] for name in operator.results if name is not None]),
        drops_fused=drops_fused,
    )


def _typed(argument: Argument, types: Mapping[str, TensorType]) -> Typed:
    if isinstance(argument, ValueRef):
        return types[argument.name]
    if isinstance(argument, tuple):
        return tuple([_typed(item, types) for item in argument])
    return argument


def _tensors(argument: Typed) -> Iterator[TensorType]:
    if isinstance(argument, TensorType):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _tensors(item)
