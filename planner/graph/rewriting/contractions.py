"""`einsum`: its equation, and calls with many tensors as PyTorch computes them, two at a time.

    bld,bln,bld->bldn       einsum("bld,bln->bldn", x, y) ─> einsum("bldn,bld->bldn", …, z)

The order is that of the arguments, or of the path that a library chose (torch.backends.opt_einsum). A letter of one
tensor alone is summed before its product is taken (aten/src/ATen/native/Linear.cpp of PyTorch 2.13). So each product is
priced and cut by itself, and intermediate results are kept for the backward pass as PyTorch keeps them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from string import ascii_letters
from typing import Any

from planner.errors import ModelError
from planner.graph.operator_graph import Operator, OperatorGraph, TensorType, ValueRef

EINSUM = "aten.einsum.default"
_ELLIPSIS = "..."


@dataclass(frozen=True)
class Equation:
    """Letters of the dims of each operand, and of the result. Dims that `...` stands for have letters, too."""

    operands: tuple[str, ...]
    result: str

    def __str__(self) -> str:
        return f"{','.join(self.operands)}->{self.result}"


def read_equation(text: str, ranks: Sequence[int]) -> Equation:
    """The equation of operands of these ranks. Raises ModelError where they do not fit, which PyTorch refuses too,
    or where there are more dims than letters."""
    left, arrow, right = text.replace(" ", "").partition("->")
    written = left.split(",")
    if len(written) != len(ranks):
        raise ModelError(f"einsum('{text}') is called with {len(ranks)} tensors")
    own = [rank - len(each.replace(_ELLIPSIS, "")) for each, rank in zip(written, ranks, strict=True)]
    if any(more and (more < 0 or _ELLIPSIS not in each) for each, more in zip(written, own, strict=True)):
        raise ModelError(f"einsum('{text}') does not fit tensors of {', '.join(map(str, ranks))} dims")
    free = [letter for letter in ascii_letters if letter not in text]
    leading = max([0, *own])
    if leading > len(free):
        raise ModelError(f"einsum('{text}') has more dims than there are letters")
    stands = "".join(free[:leading])
    operands = tuple(each.replace(_ELLIPSIS, stands[leading - more :]) for each, more in zip(written, own, strict=True))
    if arrow:
        return Equation(operands, right.replace(_ELLIPSIS, stands))
    count = Counter(left.replace(_ELLIPSIS, "").replace(",", ""))
    return Equation(operands, stands + "".join(sorted(letter for letter, times in count.items() if times == 1)))


def with_pairs(graph: OperatorGraph) -> OperatorGraph:
    """`graph` with products of two tensors in place of those of more, and sums before them."""
    if not any(op.op == EINSUM for op in graph.operators):
        return graph
    types = dict(graph.types)
    operators = [one for op in graph.operators for one in (_Pairs(types, op).operators() if _is_long(op) else [op])]
    return replace(graph, types=types, operators=tuple(operators))


def _is_long(op: Operator) -> bool:
    if op.op != EINSUM:
        return False
    _, tensors = op.arguments[:2]
    assert isinstance(tensors, tuple)
    return len(tensors) > 1


@dataclass(frozen=True)
class _Operand:
    """A tensor among those that are still to be multiplied."""

    name: str
    letters: str


@dataclass
class _Pairs:
    """The products of one call; values between its products are added to `types`."""

    types: dict[str, TensorType]
    op: Operator

    def operators(self) -> list[Operator]:
        text, tensors, *_ = self.op.arguments
        names = (
            [tensor.name for tensor in tensors if isinstance(tensor, ValueRef)] if isinstance(tensors, tuple) else []
        )
        equation = read_equation(str(text), [len(self.types[name].shape) for name in names])
        left = [_Operand(name, letters) for name, letters in zip(names, equation.operands, strict=True)]
        made: list[Operator] = []
        for first, second in _order(len(left), dict(self.op.keywords).get("path")):
            b, a = left.pop(second), left.pop(first)
            wanted = {*equation.result, *(letter for one in left for letter in one.letters)}
            a, b = self._summed(a, {*wanted, *b.letters}, made), self._summed(b, {*wanted, *a.letters}, made)
            kept = "".join(letter for letter in dict.fromkeys(a.letters + b.letters) if letter in wanted)
            made.append(self._call((a, b), kept if left else equation.result, len(made), last=not left))
            product = _Operand(str(made[-1].results[0]), kept)
            left = [product, *left] if "path" not in dict(self.op.keywords) else [*left, product]
        return made

    def _summed(self, one: _Operand, wanted: set[str], made: list[Operator]) -> _Operand:
        """The tensor summed over letters that no other has; where a letter stands twice, its diagonal is taken."""
        if wanted.issuperset(one.letters):
            return one
        kept = "".join(letter for letter in dict.fromkeys(one.letters) if letter in wanted)
        made.append(self._call((one,), kept, len(made), last=False))
        return _Operand(str(made[-1].results[0]), kept)

    def _call(self, operands: tuple[_Operand, ...], result: str, number: int, *, last: bool) -> Operator:
        name = str(self.op.results[0])
        if not last:
            name = f"{name} of {number}"
            extents: dict[str, int] = {}
            for one in operands:
                for letter, extent in zip(one.letters, self.types[one.name].shape, strict=True):
                    extents[letter] = max(extent, extents.get(letter, 1))
            first = self.types[operands[0].name]
            self.types[name] = TensorType(shape=tuple(extents[letter] for letter in result), dtype=first.dtype)
        equation = Equation(tuple(one.letters for one in operands), result)
        return replace(
            self.op,
            name=self.op.name if last else f"{self.op.name} of {number}",
            arguments=(str(equation), tuple(ValueRef(one.name) for one in operands)),
            keywords=(),
            results=(name,),
        )


def _order(count: int, path: Any) -> Iterable[tuple[int, int]]:
    """Places of the two tensors that are multiplied next: the first two, or those of a path."""
    if not isinstance(path, tuple):
        return [(0, 1)] * (count - 1)
    return [(min(pair), max(pair)) for pair in zip(path[::2], path[1::2], strict=True)]
