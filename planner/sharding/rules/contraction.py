"""The rule of `einsum`: its equation is one."""

from dataclasses import dataclass
from typing import final

from planner.errors import ModelError, RuleError
from planner.graph.call import Call
from planner.graph.rewriting.contractions import read_equation
from planner.sharding.rule import Dims, FactorKind, Rule, Work
from planner.sharding.rules.spec import FactorTable, RuleSpec


@final
@dataclass(frozen=True, kw_only=True)
class Contraction(RuleSpec):
    """`bsh,ehf->bsef`: letters of the result are independent loops, the other letters are summed.

    Two tensors that are summed over letters that they share make a matrix product; anything else is a pass over its
    tensors. A letter that one tensor has twice (`bii->bi`) takes its diagonal, which is never split. Tracing breaks
    products of more than two tensors up into products of two (`planner.graph.rewriting.contractions`).
    """

    def build(self, call: Call) -> Rule:
        text, operands = call.arguments[0], call.operands
        if not isinstance(text, str) or len(operands) > 2:
            raise RuleError(f"{call.op}: the rule knows an equation with one or two tensors, not {len(operands)}")
        try:
            equation = read_equation(text, [len(operand.shape) for operand in operands])
        except ModelError as error:
            raise RuleError(f"{call.op}: {error}") from error
        diagonal = {letter for each in equation.operands for letter in each if each.count(letter) > 1}
        table = FactorTable(call.op)

        def dims_of(letters: str, shape: tuple[int, ...]) -> Dims:
            seen: dict[str, int] = {}
            found = []
            for letter, extent in zip(letters, shape, strict=True):
                seen[letter] = seen.get(letter, 0) + 1
                name = letter if seen[letter] == 1 else f"{letter}{seen[letter]}"
                kind = FactorKind.PARALLEL if letter in equation.result else FactorKind.REDUCTION
                found.append(table.add_unless_one(name, extent, FactorKind.BLOCKED if letter in diagonal else kind))
            return tuple(found)

        indexed = tuple(
            dims_of(letters, operand.shape) for letters, operand in zip(equation.operands, operands, strict=True)
        )
        result = dims_of(equation.result, call.results[0].shape)
        every = tuple(range(len(table.freeze())))
        kept = {factor for dim in result for factor in dim}
        a, *others = ({factor for dim in dims for factor in dim} for dims in indexed)
        multiplied = any((a & b) - kept for b in others)
        moved = not others and kept == a  # nothing is summed: the same elements, in another order
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=indexed,
            results=(result,),
            op_class="matmul" if multiplied else "view" if moved or (diagonal and not others) else "elementwise",
            work=() if moved else (Work(coefficient=2.0 if multiplied else 1.0, factors=every),),
            saves=((0, (1,)), (1, (0,))) if others else (),
        )
