"""Instructions as the text of a Python function: the general executor's run-time decisions, made beforehand.

    def program(batch, body):
        values, tensors, stubs, names, ops = ...
        t0 = values.pop(names[0])                                   # not read after this program
        t2 = k0(t0, tensors[names[1]])  # ops[0]                    # operands that are already in the wanted layout
        t3 = k1(k2(t2, place, None, ops[1]))  # ops[1]              # an operand that is redistributed first
        del t2                                                      # after its last use
        values[names[3]] = t3                                       # read after this program

The caller passes the names of values and weights (`names`), so equal blocks have equal texts. `k` are constants: the
operators of torch, local forms with this rank's settings, redistributions. An operator that needs more than its call
(kept results, deferred gradients, gathered weights, random numbers) is not spelled out: it runs as in the general
executor, `called(ops[7], ...)`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from planner.plan.binding.bind import BoundPlan
from runtime.executor.instruction import Instruction, Operand
from runtime.executor.lowering.calls import Text, call_of, special
from runtime.executor.lowering.chains import Unit, one_by_one
from runtime.executor.lowering.compiled import Compiled, written

_INDENT = "    "


def emit(
    bound: BoundPlan,
    instructions: Sequence[Instruction],
    *,
    recomputed: bool,
    departs: bool,
    watched: bool,
    units: Sequence[Unit] = (),
    compiled: Compiled | None = None,
    names: Sequence[str] = (),
) -> Text:
    """The text of consecutive instructions, which are `recomputed` or not. With `departs` it is a generator and yields
    to other micro-batches after each send. With `watched` it compares the shapes of results with the promises of their
    rules, and calls the batch's observer. Instructions run in the order of `units`, by default one by one; `compiled`
    has the functions of chains. The text uses `names` in their order, before all other names."""
    emitter = _Emitter(bound, instructions, recomputed=recomputed, departs=departs, watched=watched)
    emitter.text.names += names
    for unit in units or one_by_one(instructions):
        if unit.fused:
            assert compiled is not None, "chains are compiled"
            emitter.chain(unit, compiled)
        else:
            emitter.instruction(unit)
    return emitter.done()


class _Emitter:
    def __init__(
        self, bound: BoundPlan, instructions: Sequence[Instruction], *, recomputed: bool, departs: bool, watched: bool
    ) -> None:
        self._bound, self._recomputed, self._departs, self._watched = bound, recomputed, departs, watched
        self._instructions = instructions
        operands = [operand for instruction in instructions for operand in instruction.operands]
        gathered = {o.name for o in operands if o.name in bound.graph.parameter_names and not o.weight}
        self._held = (bound.graph.parameter_names | set(bound.graph.buffers)) - gathered
        self._ended = {name for instruction in instructions for name in instruction.last}
        self._local: dict[str, str] = {}  # values that have a variable
        self._depth = 0
        self._moves: list[str] = []  # variables of one unit that hold moved operands
        self.text = Text()
        self._line("def program(batch, body):")
        self._depth = 1
        self._line("values, tensors, stubs = batch.values, batch.tensors, batch.stubs")
        self._line("names, ops = body.names, body.instructions")

    def done(self) -> Text:
        """The whole text."""
        if self._departs:
            self._line("yield from ()")
        return self.text

    def _line(self, line: str) -> None:
        self.text.lines.append(_INDENT * self._depth + line)

    @contextmanager
    def _looking(self, number: int) -> Iterator[None]:
        """Code written inside of this context belongs to the operator, for observers."""
        if not self._watched:
            yield
            return
        before = self.text.lines
        self.text.lines, self._depth = [], self._depth + 1
        yield
        inside, self.text.lines, self._depth = self.text.lines, before, self._depth - 1
        if inside:
            self._line(f"with batch.looking(ops[{number}]):")
            self.text.lines += inside

    def instruction(self, unit: Unit) -> None:
        """A single operator."""
        (number,) = unit.places
        instruction = self._instructions[number]
        if self._departs and instruction.then == "pause":
            self._line("yield 'pause'")
        with self._looking(number):
            operands = [self._moved(number, operand) for operand in instruction.operands]
        if self._yields(instruction.operands):
            self._line(f"yield {instruction.then!r}")
        with self._looking(number):
            given = [f"{operand}.arrive()" if arrives else operand for operand, arrives in operands]
            self._computed(number, instruction, self._looked_at(number, given) if self._watched else given)
        self._over(unit)
        if self._departs and instruction.sends:
            self._line("yield 'work'")

    def chain(self, unit: Unit, compiled: Compiled) -> None:
        """A chain, as the call of one function."""
        assert not self._watched, "operators are watched one by one"
        members = [self._instructions[place] for place in unit.places]
        chain = written(self._bound, members, unit.last)
        assert all(member.then != "pause" for member in members), "products are in no chain"
        ways = [self._moved(unit.places[at], members[at].operands[position]) for at, position in chain.operands]
        yielding = [members[at] for at, position in chain.operands if self._yields([members[at].operands[position]])]
        if yielding:
            self._line(f"yield {yielding[-1].then!r}")
        given = [f"{operand}.arrive()" if arrives else operand for operand, arrives in ways]
        for place in set(chain.passed.values()):
            variable = self._fresh()
            self._line(f"{variable} = {given[place]}")
            given[place] = variable
        made = {place: self._variable(name) for name, place in reversed(chain.results.items())}
        targets = "".join(f"{made[place]}, " for place in sorted(made))
        function = self.text.constant(*compiled.function(chain, members))
        self._line(f"({targets}) = {function}({', '.join(given)})  # ops[{unit.places[0]}]")
        for name, place in chain.passed.items():
            self._line(f"{self._variable(name)} = {given[place]}")
        for name, place in chain.results.items():
            if name not in self._local:
                self._line(f"{self._variable(name)} = {made[place]}")
        for name in (*chain.results, *chain.passed):
            self._kept(name)
        self._over(unit)

    def _yields(self, operands: Sequence[Operand]) -> bool:
        """Whether other micro-batches run before these operands have arrived."""
        return self._departs and any(one.yields for one in operands)

    def _over(self, unit: Unit) -> None:
        over = [self._local[name] for name in unit.last if name in self._local] + self._moves
        if over:
            self._line(f"del {', '.join(over)}")
        self._moves = []

    def _looked_at(self, number: int, given: Sequence[str]) -> list[str]:
        """The operands in variables, for the observer."""
        variables = [self._fresh() for _ in given]
        for variable, operand in zip(variables, given, strict=True):
            self._line(f"{variable} = {operand}")
        self._line("if batch.observer is not None:")
        self._line(f"{_INDENT}batch.observer.operands(ops[{number}], [{', '.join(variables)}])")
        return variables

    def _computed(self, number: int, instruction: Instruction, given: Sequence[str]) -> None:
        made, single = self._call(number, instruction, given)
        tensors, targets = [], []
        for promise in instruction.results:
            if promise is not None:
                tensors.append(self._variable(promise[0]))
            targets.append("_" if promise is None else tensors[-1])
        mark = f"  # ops[{number}]"  # for the diagnosis of waiting ranks (`runtime.processes.wait_diagnosis`)
        self._line((f"{', '.join(targets)}{'' if single else ','} = {made}" if targets else made) + mark)
        for slot, promise in enumerate(instruction.results):
            if promise is not None and self._watched:
                self._line(f"if {targets[slot]}.shape != {promise[1]!r}:")
                self._line(f"{_INDENT}raise ops[{number}].broken_promise({slot}, {targets[slot]})")
        for promise in instruction.results:
            if promise is not None:
                self._kept(promise[0])
        if self._watched:
            self._line("if batch.observer is not None:")
            self._line(f"{_INDENT}batch.observer.results(ops[{number}], [{', '.join(tensors)}])")

    def _moved(self, number: int, operand: Operand) -> tuple[str, bool]:
        """An operand in the layout that the operator wants, or in flight to it."""
        found, steps = self._found(operand.name), operand.transfer
        if steps is None:
            return found, False
        stub = f"stubs.get({self.text.name(operand.name)})" if operand.weight else "None"
        way = self.text.constant(steps, steps)
        if self._departs and steps.departs:
            variable = self._fresh()
            turn = "None" if operand.yields else "batch.turn"
            self._line(f"{variable} = depart({found}, {way}, place, {stub}, ops[{number}], {turn})")
            return variable, True
        moved = f"{way}({found}, place, {stub}, ops[{number}])"
        if not (self._departs or self._watched):
            return moved, False
        variable = self._fresh()  # evaluated before other batches or observers run
        self._line(f"{variable} = {moved}")
        return variable, False

    def _kept(self, name: str) -> None:
        """Store a new value in the batch's values, if it is read after this program."""
        if name not in self._ended:
            self._line(f"values[{self.text.name(name)}] = {self._local[name]}")

    def _variable(self, name: str) -> str:
        """A new variable for a value."""
        self._local[name] = f"t{len(self._local)}"
        return self._local[name]

    def _fresh(self) -> str:
        self._moves.append(f"m{len(self._moves)}")
        return self._moves[-1]

    def _found(self, name: str) -> str:
        if name in self._held:
            return f"tensors[{self.text.name(name)}]"
        if name not in self._local:
            where = self.text.name(name)
            self._line(f"{self._variable(name)} = values" + (f".pop({where})" if name in self._ended else f"[{where}]"))
        return self._local[name]

    def _call(self, number: int, instruction: Instruction, given: Sequence[str]) -> tuple[str, bool]:
        """The expression for the results, and whether it is a single tensor rather than a sequence."""
        if special(self._bound, instruction, recomputed=self._recomputed):
            return f"called(ops[{number}], batch, [{', '.join(given)}], place)", False
        return call_of(self.text, self._bound, instruction, given)
