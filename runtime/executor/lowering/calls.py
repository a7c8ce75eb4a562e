"""The call of an operator as the text of an expression, and the constants that the text names."""

import functools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.graph.blocks import IDENTITY
from planner.graph.operator_graph import STARTING, ValueRef
from planner.graph.torch_operators import resolve
from planner.plan.binding.bind import BoundPlan
from runtime.executor.instruction import Instruction
from runtime.executor.lowering.kernels import SHORT, TRACED
from runtime.ops.local.local_ops import SHAPED, FormCall
from runtime.ops.shard import Shard


@dataclass(kw_only=True)
class Text:
    """The text of a function. `constants` are those it names, with keys by which equal ones are recognized; `names` are
    the values, weights and buffers that it uses."""

    lines: list[str] = field(default_factory=list)
    constants: list[tuple[Hashable, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def key(self) -> Hashable:
        """Equal for functions that do the same."""
        return "\n".join(self.lines), tuple(key for key, _ in self.constants)

    @property
    def source(self) -> str:
        """The text as Python source."""
        return "\n".join(self.lines) + "\n"

    @property
    def known(self) -> dict[str, Any]:
        """The namespace of the text: its constants, and `sequence`."""
        return {"sequence": _sequence} | {f"k{number}": value for number, (_, value) in enumerate(self.constants)}

    def constant(self, key: Hashable, value: Any) -> str:
        """The name of a constant in the text."""
        for number, (known, _) in enumerate(self.constants):
            if known == key:
                return f"k{number}"
        self.constants.append((key, value))
        return f"k{len(self.constants) - 1}"

    def name(self, name: str) -> str:
        """The expression with which the text looks up the name of a value."""
        if name not in self.names:
            self.names.append(name)
        return f"names[{self.names.index(name)}]"


def special(bound: BoundPlan, instruction: Instruction, *, recomputed: bool) -> bool:
    """Whether an operator needs more than its call (as the general executor runs it), or its call has no local form."""
    call = instruction.call
    if not isinstance(call, FormCall) or instruction.part is not None:
        return True
    gathers = any(o.weight and o.transfer is not None and o.transfer.gathers for o in instruction.operands)
    return (
        call.code is not None
        or instruction.deferred
        or (call.sliced is not None and bound.plan.slices > 1)
        or (instruction.kept if recomputed else gathers)
    )


def traced_form(instruction: Instruction) -> Any:
    """A function that `torch.compile` can trace, in the place of an operator's local form; None where there is none, or
    where the form spells out the shape of its result (`call_of`)."""
    call, op = instruction.call, instruction.bound.operator.op
    assert isinstance(call, FormCall), op
    return TRACED.get(op) if isinstance(call.form, functools.partial) else call.form


def shaped(instruction: Instruction) -> str | None:
    """The tensor method ("expand" or "reshape") that an operator calls with the local shape of its result; None for all
    other operators."""
    form = instruction.call.form if isinstance(instruction.call, FormCall) else None
    if not isinstance(form, functools.partial):
        return None
    return next((name for name in ("expand", "reshape") if form.func is SHAPED[name]), None)


def call_of(
    text: Text, bound: BoundPlan, instruction: Instruction, given: Sequence[str], *, traced: bool = False
) -> tuple[str, bool]:
    """The expression for the results of an operator, from the expressions `given` for its operands; and whether it is a
    single tensor rather than a sequence. In a text that is `traced` it has only what `torch.compile` can trace."""
    call, op = instruction.call, instruction.bound.operator.op
    assert isinstance(call, FormCall), op
    single = len(instruction.results) == 1 and _makes_one(instruction, call, traced)
    made = _made(text, bound, instruction, call, given, traced)
    made = made if single else f"sequence({made})"
    if call.scale == 1.0:
        return made, single
    return (f"{made} * {call.scale!r}" if single else f"[one * {call.scale!r} for one in {made}]"), single


def _made(
    text: Text, bound: BoundPlan, instruction: Instruction, call: FormCall, given: Sequence[str], traced: bool
) -> str:
    if instruction.bound.operator.op == IDENTITY:
        return given[0]
    method = shaped(instruction)
    if method is not None:
        shard: Shard = call.form.args[0]  # type: ignore[attr-defined]
        return f"{given[0]}.{method}({shard.shapes[0]!r})"
    operands = iter(given)
    arguments = [_argument(text, value, operands) for value in call.arguments]
    arguments += [f"{name}={_argument(text, value, operands)}" for name, value in call.keywords.items()]
    return f"{_form(text, bound, instruction, call, traced)}({', '.join(arguments)})"


def _form(text: Text, bound: BoundPlan, instruction: Instruction, call: FormCall, traced: bool) -> str:
    op = instruction.bound.operator.op
    if traced:
        return text.constant(op, traced_form(instruction))
    if not isinstance(call.form, functools.partial):
        return text.constant(op, SHORT.get(op, call.form))
    shard: Shard = call.form.args[0]
    alike = bound.blocks.template(instruction.index)
    own = (
        None if shard.scales is None else shard.scales.name
    )  # of one layer, so that its block has a program of its own
    return text.constant((alike, instruction.bound.strategy, shard.shapes, shard.region, own), call.form)


def _argument(text: Text, value: Any, operands: Iterator[str]) -> str:
    if isinstance(value, ValueRef):
        return next(operands)
    if isinstance(value, list):
        return f"[{', '.join(_argument(text, item, operands) for item in value)}]"
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    return text.constant((type(value).__name__, repr(value)), value)


def _makes_one(instruction: Instruction, call: FormCall, traced: bool) -> bool:
    """Whether the call returns a single tensor, as it declares; if it does not say, its result is checked at run
    time."""
    op = instruction.bound.operator.op
    if op in (IDENTITY, STARTING) or shaped(instruction) is not None:
        return True
    if isinstance(call.form, functools.partial) and not traced:
        return False
    returned = resolve(op)._schema.returns
    return len(returned) == 1 and str(returned[0].type) == "Tensor"


def _sequence(made: Any) -> Sequence[Any]:
    return made if isinstance(made, tuple | list) else (made,)
