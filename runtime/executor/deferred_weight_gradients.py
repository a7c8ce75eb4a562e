"""Deferred weight gradients: the backward pass of a linear layer in two parts.

    forward           x, W ─> y = x W^T + b
    input gradient    dy, W ─> dx               keeps x and dy
    weight gradient   dy, x ─> dW, db ─> back to the layout of the gradient, reduced where it is sharded, accumulated

In the autograd graph the product reads detached weights, so the pass that computes dx never reaches them. The second
part starts at a separate node, which passes dW on to where the weight came from: through the redistribution of the
weight to its leaf, like any gradient of it. A recomputed block computes x once, for both parts.

Source: Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, section 2.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from runtime.observer import Observer

if TYPE_CHECKING:
    from runtime.executor.instruction import Instruction

Call = Callable[[Sequence[torch.Tensor]], Sequence[Any]]


@dataclass(slots=True)
class _Product:
    """One product of one micro-batch: after its input gradient it holds the inputs of its weight gradients, and their
    target."""

    start: GradientEdge | None = None
    given: torch.Tensor | None = None
    gradient: torch.Tensor | None = None


class DeferredGradients:
    """The deferred weight gradients of one micro-batch through a chunk."""

    def __init__(self) -> None:
        self._products: dict[int, _Product] = {}

    def run(
        self, instruction: "Instruction", call: Call, observer: Observer | None, operands: Sequence[torch.Tensor]
    ) -> Sequence[Any]:
        """The results of a product, as `call` computes them; its weights get their gradients in `finish`."""
        given, *weights = operands
        product = self._products.get(instruction.index)
        if product is not None and not instruction.repeated:
            call = functools.partial(_not_again, instruction)
        if product is None:  # and not its recomputation
            product = self._products[instruction.index] = _Product()
            start = _WeightGradients.apply(product, *weights)  # type: ignore[no-untyped-call]
            product.start = get_gradient_edge(start)
            if observer is not None:
                observer.deferred_weight_gradients(instruction, start)
        detached = [weight.detach() for weight in weights]
        return (_Apart.apply(product, call, given, *detached),)  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Compute the weight gradients, from the last product to the first."""
        while self._products:
            _, product = self._products.popitem()
            if product.gradient is not None:
                assert product.start is not None, "set when the product was made"
                torch.autograd.backward([product.start], [product.gradient.new_zeros(())])
            product.start = None  # it refers back to the product


def _not_again(instruction: "Instruction", operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Replaces a product with which a recomputation ends: only its operands are needed, and the recomputation stops
    once they are saved. Autograd's own products save before they compute; our function would save afterwards."""
    promise = instruction.results[0]
    assert promise is not None, "a product makes a tensor"
    return (operands[0].new_empty(()).expand(promise[1]),)


class _Apart(torch.autograd.Function):
    """A linear layer of which only the input gets a gradient."""

    @staticmethod
    def forward(
        ctx: Any, product: _Product, call: Call, given: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor
    ) -> torch.Tensor:
        ctx.product = product
        ctx.save_for_backward(given, weight)
        result: torch.Tensor = call([given, weight, *bias])[0]
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given, weight = ctx.saved_tensors
        ctx.product.given, ctx.product.gradient = given.detach(), gradients[0]  # detached from how it was made
        return None, None, gradients[0].matmul(weight), *(None for _ in ctx.needs_input_grad[3:])


class _WeightGradients(torch.autograd.Function):
    """Does nothing forward; backward it gives the weight gradients of a linear layer, from what its product has
    kept."""

    @staticmethod
    def forward(ctx: Any, product: _Product, *weights: torch.Tensor) -> torch.Tensor:
        ctx.product = product
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        product: _Product = ctx.product
        assert product.given is not None, "its input gradient comes first"
        assert product.gradient is not None, "its input gradient comes first"
        given, gradient = (each.reshape(-1, each.shape[-1]) for each in (product.given, product.gradient))
        product.given = product.gradient = None
        weight = gradient.t().mm(given) if ctx.needs_input_grad[1] else None
        biases = [gradient.sum(0) if needed else None for needed in ctx.needs_input_grad[2:]]
        return None, weight, *biases
