"""`einsum` of two tensors that keeps the original tensors for the backward pass.

PyTorch permutes the operands of a product and keeps the permuted ones: copies, where dims that are merged do not lie
together. Such a copy of a gathered weight would stay alive until the backward pass. The gradients are einsums too:

    c                  einsum("bsh,ehf->bsef", a, b)
    gradient of a      einsum("bsef,ehf->bsh", g, b)
    gradient of b      einsum("bsef,bsh->ehf", g, a)         of complex ones with the conjugate of a or b
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from planner.graph.rewriting.contractions import Equation, read_equation


def product(text: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`torch.einsum(text, *tensors)`."""
    equation = read_equation(text, [tensor.dim() for tensor in tensors])
    takes_diagonal = any(len(set(letters)) < len(letters) for letters in equation.operands)
    shared = set.intersection(*map(set, equation.operands))
    if len(tensors) != 2 or takes_diagonal or shared <= set(equation.result):  # no dim of both is summed over
        return torch.einsum(text, *tensors)
    return _Product.apply(equation, *tensors)  # type: ignore[no-any-return, no-untyped-call]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, equation: Equation, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        _, of_a, of_b = ctx.needs_input_grad
        ctx.equation, ctx.shapes = equation, (a.shape, b.shape)
        ctx.save_for_backward(a if of_b else None, b if of_a else None)
        return torch.einsum(str(equation), a, b)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor | None, torch.Tensor | None]:
        a, b = ctx.saved_tensors
        (first, second), result = ctx.equation.operands, ctx.equation.result
        of_a = None if b is None else _gradient(gradients[0], result, b.conj(), second, first, ctx.shapes[0])
        of_b = None if a is None else _gradient(gradients[0], result, a.conj(), first, second, ctx.shapes[1])
        return None, of_a, of_b


def _gradient(
    gradient: torch.Tensor, result: str, other: torch.Tensor, letters: str, wanted: str, shape: Sequence[int]
) -> torch.Tensor:
    """The gradient of a tensor with the letters `wanted`, from the gradient of the result and the other tensor. A
    letter that neither has was summed over; one that has extent 1 here was broadcast."""
    known = "".join(letter for letter in wanted if letter in result or letter in letters)
    if {*result, *letters} <= set(known):
        found = _outer(gradient, result, other, letters, known)
    else:
        found = torch.einsum(f"{result},{letters}->{known}", gradient, other)
    for dim, letter in enumerate(wanted):
        if letter not in known:
            found = found.unsqueeze(dim)
    broadcast = [dim for dim, extent in enumerate(shape) if extent == 1 and found.shape[dim] > 1]
    return (found.sum(broadcast, keepdim=True) if broadcast else found).expand(shape)


def _outer(a: torch.Tensor, of_a: str, b: torch.Tensor, of_b: str, result: str) -> torch.Tensor:
    """A product with one term in each sum, by a matrix-product kernel, as in PyTorch and in the plan's price."""
    both = [letter for letter in of_a if letter in of_b]
    rows = [letter for letter in of_a if letter not in of_b]
    columns = [letter for letter in of_b if letter not in of_a]
    shapes = [dict(zip(letters, one.shape, strict=True)) for letters, one in ((of_a, a), (of_b, b))]
    extents = {letter: max(shape.get(letter, 1) for shape in shapes) for letter in (*both, *rows, *columns)}
    left, right = (
        one.permute([of.index(letter) for letter in (*both, *own)])
        .expand([extents[letter] for letter in (*both, *own)])
        .reshape([*(extents[letter] for letter in both), math.prod(extents[letter] for letter in own)])
        for one, of, own in ((a, of_a, rows), (b, of_b, columns))
    )
    made = (left.unsqueeze(-1) @ right.unsqueeze(-2)).reshape([extents[letter] for letter in (*both, *rows, *columns)])
    places = [*both, *rows, *columns]
    return made.permute([places.index(letter) for letter in result])
