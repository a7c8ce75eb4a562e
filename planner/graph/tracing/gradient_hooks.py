"""Refuses hooks that autograd calls: no plan would call them.

A plan computes gradients of its own tensors, in pieces, on several devices. Hooks of the forward pass are traced like
everything else.
"""

from torch import nn

from planner.errors import ModelError


def refuse_gradient_hooks(module: nn.Module) -> None:
    """Raise ModelError for a parameter or a module with a hook of the backward pass."""
    name = type(module).__name__
    for path, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ModelError(
                f"parameter '{path}' of {name} has a hook for its gradient, which no plan calls; remove it (.remove()"
                " of what register_hook returned): --clip-norm clips gradients, and an autograd.Function changes them"
            )
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise ModelError(
                f"module '{path or '(root)'}' of {name} has a hook of the backward pass, which no plan calls; remove it"
                " (.remove() of what register_full_backward_hook returned); an autograd.Function changes gradients"
            )
