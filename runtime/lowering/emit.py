"""Instructions as the text of a Python function: what the general executor decides while it runs, decided beforehand.

    def program(copy, body):
        values, tensors, stubs, names, ops = ...
        t0 = values.pop(names[0])                                   # nobody reads it after this program
        t2 = k0(t0, tensors[names[1]])  # ops[0]                    # an operator on operands that lie as it wants them
        t3 = k1(k2(t2, place, None, ops[1]))  # ops[1]              # one that is moved first, for that operator
        del t2                                                      # after its last use
        values[names[3]] = t3                                       # read after this program

Names of values and weights are the caller's (`names`), so that equal blocks have equal texts; `k` are constants: the
operators of torch, local forms with all that they know of this rank, transfers. What goes on around an operator beside
its call (results that are kept, gradients that are put off, weights that are gathered, numbers that are drawn) is not
spelled out: such an operator runs as the general executor runs it, `called(ops[7], ...)`.
"""

import functools
import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from planner.graph.blocks import IDENTITY
from planner.graph.operator_graph import ValueRef
from planner.graph.trace import resolve
from planner.plan.bind import BoundPlan
from runtime.instruction import Instruction, Operand
from runtime.local_ops import SHAPED, FormCall, Shard
from runtime.lowering.kernels import SHORT

_INDENT = "    "


@dataclass(kw_only=True)
class Text:
    """The text of a program; `constants` that it names, with what makes two of them the same; `names` of the values,
    weights and buffers that it is about."""

    lines: list[str] = field(default_factory=list)
    constants: list[tuple[Hashable, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def key(self) -> Hashable:
        """Equal for programs that do the same."""
        return "\n".join(self.lines), tuple(key for key, _ in self.constants)

    def constant(self, key: Hashable, value: Any) -> str:
        """The name of a constant in the text."""
        for number, (known, _) in enumerate(self.constants):
            if known == key:
                return f"k{number}"
        self.constants.append((key, value))
        return f"k{len(self.constants) - 1}"

    def name(self, name: str) -> str:
        """Where the text finds the name of a value."""
        if name not in self.names:
            self.names.append(name)
        return f"names[{self.names.index(name)}]"


def emit(
    bound: BoundPlan, instructions: Sequence[Instruction], *, recomputed: bool, departs: bool, watched: bool
) -> Text:
    """The text of consecutive instructions, which are `recomputed` or not. One that `departs` is a generator and lets
    others go on whenever it has sent something; one that is `watched` compares the shapes of results with what their
    rules promise, and lets the copy's observer look on."""
    return _Emitter(bound, instructions, recomputed=recomputed, departs=departs, watched=watched).text


class _Emitter:
    def __init__(
        self, bound: BoundPlan, instructions: Sequence[Instruction], *, recomputed: bool, departs: bool, watched: bool
    ) -> None:
        self._bound, self._recomputed, self._departs, self._watched = bound, recomputed, departs, watched
        operands = [operand for instruction in instructions for operand in instruction.operands]
        gathered = {o.name for o in operands if o.name in bound.graph.parameter_names and not o.weight}
        self._held = (bound.graph.parameter_names | set(bound.graph.buffers)) - gathered
        self._ended = {name for instruction in instructions for name in instruction.last}
        self._local: dict[str, str] = {}  # values that have a variable
        self._depth = 0
        self._moves: list[str] = []  # variables of one instruction
        self.text = Text()
        self._line("def program(copy, body):")
        self._depth = 1
        self._line("values, tensors, stubs = copy.values, copy.tensors, copy.stubs")
        self._line("names, ops = body.names, body.instructions")
        for number, instruction in enumerate(instructions):
            self._instruction(number, instruction)
        if departs:
            self._line("yield from ()")

    def _line(self, line: str) -> None:
        self.text.lines.append(_INDENT * self._depth + line)

    @contextmanager
    def _looking(self, number: int) -> Iterator[None]:
        """What is written here is the operator's to whoever looks on."""
        if not self._watched:
            yield
            return
        before = self.text.lines
        self.text.lines, self._depth = [], self._depth + 1
        yield
        inside, self.text.lines, self._depth = self.text.lines, before, self._depth - 1
        if inside:
            self._line(f"with copy.looking(ops[{number}]):")
            self.text.lines += inside

    def _instruction(self, number: int, instruction: Instruction) -> None:
        with self._looking(number):
            operands = [self._moved(number, operand) for operand in instruction.operands]
        if any(arrives for _, arrives in operands):
            self._line("yield")
        with self._looking(number):
            given = [f"{operand}.arrive()" if arrives else operand for operand, arrives in operands]
            self._computed(number, instruction, self._looked_at(number, given) if self._watched else given)
        over = [self._local[name] for name in instruction.last if name in self._local] + self._moves
        if over:
            self._line(f"del {', '.join(over)}")
        self._moves = []

    def _looked_at(self, number: int, given: Sequence[str]) -> list[str]:
        """The operands in variables, to be looked at."""
        variables = [self._fresh() for _ in given]
        for variable, operand in zip(variables, given, strict=True):
            self._line(f"{variable} = {operand}")
        self._line("if copy.observer is not None:")
        self._line(f"{_INDENT}copy.observer.operands(ops[{number}], [{', '.join(variables)}])")
        return variables

    def _computed(self, number: int, instruction: Instruction, given: Sequence[str]) -> None:
        made, single = self._call(number, instruction, given)
        tensors, targets = [], []
        for promise in instruction.results:
            if promise is not None:
                self._local[promise[0]] = f"t{len(self._local)}"
                tensors.append(self._local[promise[0]])
            targets.append("_" if promise is None else tensors[-1])
        mark = f"  # ops[{number}]"  # for whoever asks where a rank waits (`runtime.whereabouts`)
        self._line((f"{', '.join(targets)}{'' if single else ','} = {made}" if targets else made) + mark)
        for slot, promise in enumerate(instruction.results):
            if promise is not None and self._watched:
                self._line(f"if {targets[slot]}.shape != {promise[1]!r}:")
                self._line(f"{_INDENT}raise ops[{number}].broken_promise({slot}, {targets[slot]})")
        for slot, promise in enumerate(instruction.results):
            if promise is not None and promise[0] not in self._ended:
                self._line(f"values[{self.text.name(promise[0])}] = {targets[slot]}")
        if self._watched:
            self._line("if copy.observer is not None:")
            self._line(f"{_INDENT}copy.observer.results(ops[{number}], [{', '.join(tensors)}])")

    def _moved(self, number: int, operand: Operand) -> tuple[str, bool]:
        """An operand where the operator wants it, or under way to there."""
        found, steps = self._found(operand.name), operand.transfer
        if steps is None:
            return found, False
        stub = f"stubs.get({self.text.name(operand.name)})" if operand.weight else "None"
        way = self.text.constant(steps, steps)
        if self._departs and steps.departs:
            variable = self._fresh()
            self._line(f"{variable} = depart({found}, {way}, place, {stub}, ops[{number}])")
            return variable, True
        moved = f"{way}({found}, place, {stub}, ops[{number}])"
        if not (self._departs or self._watched):
            return moved, False
        variable = self._fresh()  # before anybody else goes on, or looks
        self._line(f"{variable} = {moved}")
        return variable, False

    def _fresh(self) -> str:
        self._moves.append(f"m{len(self._moves)}")
        return self._moves[-1]

    def _found(self, name: str) -> str:
        if name in self._held:
            return f"tensors[{self.text.name(name)}]"
        if name not in self._local:
            self._local[name] = f"t{len(self._local)}"
            where = self.text.name(name)
            self._line(f"{self._local[name]} = values" + (f".pop({where})" if name in self._ended else f"[{where}]"))
        return self._local[name]

    def _call(self, number: int, instruction: Instruction, given: Sequence[str]) -> tuple[str, bool]:
        """What makes the results, and whether it is the one tensor itself, and no sequence."""
        call = instruction.call
        if not isinstance(call, FormCall) or self._special(instruction, call):
            return f"called(ops[{number}], copy, [{', '.join(given)}], place)", False
        operands = iter(given)
        shaped = self._shaped(instruction, call, given)
        arguments = [self._argument(value, operands) for value in call.arguments]
        arguments += [f"{name}={self._argument(value, operands)}" for name, value in call.keywords.items()]
        single = len(instruction.results) == 1 and _makes_one(instruction, call)
        made = shaped or f"{self._form(instruction, call)}({', '.join(arguments)})"
        made = made if single else f"sequence({made})"
        if call.scale == 1.0:
            return made, single
        return (f"{made} * {call.scale!r}" if single else f"[one * {call.scale!r} for one in {made}]"), single

    def _special(self, instruction: Instruction, call: FormCall) -> bool:
        gathers = any(o.weight and o.transfer is not None and o.transfer.gathers for o in instruction.operands)
        return (
            call.code is not None
            or instruction.put_off
            or (call.sliced is not None and self._bound.plan.slices > 1)
            or (instruction.kept if self._recomputed else gathers)
        )

    def _shaped(self, instruction: Instruction, call: FormCall, given: Sequence[str]) -> str | None:
        """The call of an operator that is a method of its operand, or nothing at all."""
        if instruction.bound.operator.op == IDENTITY:
            return given[0]
        if isinstance(call.form, functools.partial):
            for name in ("expand", "reshape"):
                if call.form.func is SHAPED[name]:
                    shard: Shard = call.form.args[0]
                    return f"{given[0]}.{name}({shard.shapes[0]!r})"
        return None

    def _form(self, instruction: Instruction, call: FormCall) -> str:
        bound = instruction.bound
        if not isinstance(call.form, functools.partial):
            return self.text.constant(bound.operator.op, SHORT.get(bound.operator.op, call.form))
        shard: Shard = call.form.args[0]
        alike = self._bound.blocks.template(instruction.index)
        return self.text.constant((alike, bound.strategy, shard.shapes, shard.region), call.form)

    def _argument(self, value: Any, operands: Iterator[str]) -> str:
        if isinstance(value, ValueRef):
            return next(operands)
        if isinstance(value, list):
            return f"[{', '.join(self._argument(item, operands) for item in value)}]"
        if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        return self.text.constant((type(value).__name__, repr(value)), value)


def _makes_one(instruction: Instruction, call: FormCall) -> bool:
    """Whether the call makes a tensor, by its own word; who does not say is looked at when it has run."""
    if instruction.bound.operator.op == IDENTITY:
        return True
    if isinstance(call.form, functools.partial):
        return call.form.func in (SHAPED["expand"], SHAPED["reshape"])
    returned = resolve(instruction.bound.operator.op)._schema.returns  # type: ignore[attr-defined]
    return len(returned) == 1 and str(returned[0].type) == "Tensor"
