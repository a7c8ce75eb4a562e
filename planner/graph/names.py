"""The names of a graph: those of the module for parameters and buffers, which may be any text, and the planner's
own."""

from collections.abc import Iterable

from torch import nn

from planner.errors import ModelError


def check_names(module: nn.Module) -> None:
    """Raise ModelError for a parameter or a buffer whose name cannot be shown. PyTorch takes any name
    without a dot; a name with control characters, or half a UTF-16 character, cannot be in a plan file or a report."""
    for kind, held in (
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
    ):
        for name, _ in held:
            wrong = next((letter for letter in name if not letter.isprintable()), None)
            if wrong is not None:
                raise ModelError(
                    f"{kind} {name!a} of {type(module).__name__}: its name has the character {wrong!a}, which cannot be"
                    " printed; call the module or the parameter otherwise"
                )


def free_name(name: str, taken: Iterable[str]) -> str:
    """A name for an input of the model whose name a parameter or a buffer has too; batches find it by its beginning."""
    return f"{name}_input" if name in taken else name
