"""Operators of the planner that are composed of PyTorch's, and keep only their operands for the backward pass.

    namespace::name            (tensors and settings) -> tensor              what is composed
    namespace::name_backward   (gradient, the same)   -> gradients           computes it once more, and differentiates

To PyTorch each of the two is one operator, with one autograd node. Fused kernels of such scans work in the same way:
they keep their operands, and compute the rest again. Where a package with such a kernel is installed, it computes
tensors on a GPU.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils.checkpoint import checkpoint

from planner.graph.operators.state_kernels import installed


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """Such an operator: the two operators that PyTorch knows, and the functions that they are composed of."""

    name: str
    operator: Any
    backward: Any
    composed: Callable[..., torch.Tensor]
    composed_backward: Callable[..., list[torch.Tensor]]

    def __call__(self, *given: Any) -> torch.Tensor:
        made: torch.Tensor = self.operator(*given)
        return made

    @property
    def in_pieces(self) -> Mapping[str, Callable[..., Any]]:
        """The functions of the two operators, by their names in a graph."""
        name = self.name.replace("::", ".")
        return {f"{name}.default": self.composed, f"{name}_backward.default": self.composed_backward}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A function that computes the same where a package is installed; autograd can differentiate it."""

    package: str
    call: Callable[..., torch.Tensor]


def recomputed(
    name: str,
    composed: Callable[..., torch.Tensor],
    like: int = 0,
    kernel: Kernel | None = None,
    empty: Callable[..., torch.Tensor] | None = None,
) -> Recomputed:
    """Make `composed` an operator called `name`. Its result has the shape of operand `like` and the dtype of the first
    operand, unless `empty` makes it, without data. Its backward pass makes the gradients of all tensor operands, in
    their order."""

    def chosen(tensor: torch.Tensor) -> Callable[..., torch.Tensor]:
        there = kernel is not None and on_gpu(tensor) and installed(kernel.package)
        return kernel.call if kernel is not None and there else composed

    def computed(*given: Any) -> torch.Tensor:
        return chosen(given[0])(*given)

    def computed_backward(gradient: torch.Tensor, *given: Any) -> list[torch.Tensor]:
        return _gradients(chosen(given[0]), gradient, given)

    def composed_backward(gradient: torch.Tensor, *given: Any) -> list[torch.Tensor]:
        return _gradients(composed, gradient, given)

    schema = torch.library.infer_schema(composed, mutates_args=())
    taken = re.sub(r"=[^,]+", "", schema[1 : schema.rindex(") -> ")])  # what is left out is not seen by who counts
    operator = torch.library.custom_op(name, computed, mutates_args=(), schema=schema)
    backward = torch.library.custom_op(
        f"{name}_backward", computed_backward, mutates_args=(), schema=f"(Tensor gradient, {taken}) -> Tensor[]"
    )

    def alike(*given: Any) -> torch.Tensor:
        return torch.empty_like(given[like], dtype=given[0].dtype, memory_format=torch.contiguous_format)

    def empty_gradients(_: torch.Tensor, *given: Any) -> list[torch.Tensor]:
        return [torch.empty_like(one) for one in given if isinstance(one, torch.Tensor)]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.settings = [None if isinstance(one, torch.Tensor) else one for one in inputs]
        ctx.tensors = [at for at, one in enumerate(inputs) if isinstance(one, torch.Tensor)]
        ctx.save_for_backward(*(inputs[at] for at in ctx.tensors))

    def differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given, found = list(ctx.settings), [None] * len(ctx.settings)
        for at, tensor in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            given[at] = tensor
        for at, one in zip(ctx.tensors, backward(gradient.contiguous(), *given), strict=True):
            found[at] = one if ctx.needs_input_grad[at] else None
        return tuple(found)

    operator.register_fake(alike if empty is None else empty)
    backward.register_fake(empty_gradients)
    operator.register_autograd(differentiate, setup_context=keep)
    return Recomputed(
        name=name, operator=operator, backward=backward, composed=composed, composed_backward=composed_backward
    )


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether kernels of other packages take the tensor."""
    return tensor.is_cuda


def _gradients(
    function: Callable[..., torch.Tensor], gradient: torch.Tensor, given: Sequence[Any]
) -> list[torch.Tensor]:
    with _differentiating():
        leaves = [one.detach().requires_grad_() if isinstance(one, torch.Tensor) else one for one in given]
        wanted = [one for one in leaves if isinstance(one, torch.Tensor)]
        return list(torch.autograd.grad(function(*leaves), wanted, gradient))


def computed_again(compute: Callable[..., Any], *given: Any) -> Any:
    """The result of `compute`; only its arguments are kept where gradients are wanted."""
    if not torch.is_grad_enabled():
        return compute(*given)
    return checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False)


@contextlib.contextmanager
def _differentiating() -> Iterator[None]:
    """While active, autograd records what is computed; inside of an operator it does not by default."""
    hidden = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView"):
        hidden = hidden.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), hidden), torch.enable_grad():
        yield
