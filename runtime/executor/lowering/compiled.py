"""Chains as functions that `torch.compile` has compiled to kernels.

    def chain(a0, a1, a2):          a0, ..: results of operators before it, weights, buffers
        t0 = k0(a0, [512], a1)
        t1 = k1(t0, a2)
        return (t1, )               only values that are read after it; the others are never in memory

Equal chains on pieces of equal shapes are one function, compiled when it first runs; `torch.compile` caches it for
later runs on this machine. Autograd sees one node; the partitioner of AOTAutograd decides what the node saves, and what
the backward pass recomputes. Nothing here falls back to single operators: what cannot be compiled is an error.
"""

import linecache
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from planner.errors import ModelError, RequestError
from planner.plan.binding.bind import BoundPlan
from planner.sharding.layout import local_shape
from runtime.executor.instruction import Instruction
from runtime.executor.lowering.calls import Text, call_of

Fused = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(kw_only=True)
class Chain:
    """A chain as a function: its `text`; its `operands`, each as the position of an instruction and the position among
    that instruction's operands; and, by name, where values that are read after it are found: among the results of the
    function (`results`), or among its operands where the value is an operand itself (`passed`)."""

    text: Text
    operands: tuple[tuple[int, int], ...]
    results: dict[str, int]
    passed: dict[str, int]


@dataclass(kw_only=True)
class Compiled:
    """The compiled chains of one rank. `texts` has the text of each, `operators` the number of operators in each."""

    bound: BoundPlan
    texts: dict[str, Text] = field(default_factory=dict)
    operators: dict[str, int] = field(default_factory=dict)
    _functions: dict[Hashable, Fused] = field(default_factory=dict)

    def function(self, chain: Chain, instructions: Sequence[Instruction]) -> tuple[Hashable, Fused]:
        """The function that runs a chain of these instructions, and a key by which equal chains are recognized."""
        pieces = tuple(_piece(self.bound, instructions[place], position) for place, position in chain.operands)
        key = (chain.text.key, pieces)
        if key not in self._functions:
            name = f"<chain {len(self._functions)}>"
            self.texts[name], self.operators[name] = chain.text, len(instructions)
            source, known = chain.text.source, chain.text.known
            exec(compile(source, name, "exec"), known)
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # for tracebacks
            operators = ", ".join(instruction.bound.operator.name for instruction in instructions)
            self._functions[key] = _named(torch.compile(known["chain"], fullgraph=True, dynamic=False), operators)
        return key, self._functions[key]


def _named(function: Fused, operators: str) -> Fused:
    """The function; it names its operators in the error if it cannot be compiled."""

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from torch._dynamo.exc import TorchDynamoException

        try:
            return function(*given)
        except TorchDynamoException as error:
            raise ModelError(
                f"torch.compile cannot make one function of {operators}: {_first_line(error)}; run without --compile"
            ) from error

    return run


def check_compiler(device: torch.device) -> None:
    """Compile a function of two operators and run it on the device. Raises RequestError where that fails, and says what
    is missing. The second time the compiled function is cached."""
    compiled = torch.compile(_tiny, fullgraph=True, dynamic=False)
    given = torch.ones(8, device=device, requires_grad=True)
    try:
        torch.autograd.backward(compiled(given).sum())
    except (RuntimeError, OSError) as error:  # torch's errors here have no other common base
        compiler = "a C++ compiler, such as g++ (CXX names another one), and the headers of Python"
        needs = compiler if device.type == "cpu" else "triton"
        raise RequestError(
            f"--compile (compiled=True): torch.compile does not work on this machine's {device.type}:"
            f" {_first_line(error)}; it needs {needs}; without --compile operators run one by one"
        ) from error


def _tiny(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x) * x


def _first_line(error: BaseException) -> str:
    """The first line of the innermost error; of a compiler's output, its first error."""
    while error.__cause__ is not None:
        error = error.__cause__
    inner = getattr(error, "inner_exception", error)
    lines = str(inner).strip().splitlines() or [""]
    return f"{type(inner).__name__}: {next((line for line in lines if 'error:' in line), lines[0])}"


def _piece(bound: BoundPlan, instruction: Instruction, position: int) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of an operand as the instruction wants it on this rank."""
    kind = bound.graph.types[instruction.operands[position].name]
    wanted = instruction.bound.layouts.operands[position].forward
    return local_shape(kind.shape, wanted, bound.plan.mesh.sizes), kind.dtype


def written(bound: BoundPlan, instructions: Sequence[Instruction], over: Sequence[str]) -> Chain:
    """The function of a chain; the values in `over` are not read after it."""
    text, operands = Text(), list[tuple[int, int]]()
    known: dict[str, str] = {}  # variable names of values
    lines: list[str] = []
    made: list[str] = []
    for number, instruction in enumerate(instructions):
        given = []
        for position, operand in enumerate(instruction.operands):
            variable = known.get(operand.name) if operand.transfer is None else None
            if variable is None:
                variable = f"a{len(operands)}"
                operands.append((number, position))
                if operand.transfer is None:
                    known[operand.name] = variable
            given.append(variable)
        call, single = call_of(text, bound, instruction, given, traced=True)
        names = [None if promise is None else promise[0] for promise in instruction.results]
        made += [name for name in names if name is not None]
        if single and call in given:
            known[str(names[0])] = call
            continue
        targets = ["_" if name is None else known.setdefault(name, f"t{len(known)}") for name in names]
        lines.append(f"{', '.join(targets)}{'' if single else ','} = {call}")
    read = {name: known[name] for name in made if name not in over}
    returned = list(dict.fromkeys(variable for variable in read.values() if variable.startswith("t")))
    text.lines = [
        f"def chain({', '.join(f'a{number}' for number in range(len(operands)))}):",
        *(f"    {line}" for line in lines),
        f"    return ({''.join(f'{variable}, ' for variable in returned)})",
    ]
    return Chain(
        text=text,
        operands=tuple(operands),
        results={name: returned.index(variable) for name, variable in read.items() if variable in returned},
        passed={name: int(variable[1:]) for name, variable in read.items() if variable not in returned},
    )
