"""A LightningModule as a plan trains it: a module whose forward calls `training_step` and returns the loss."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from planner.errors import RequestError

PREFIX = "module."
"""The prefix of the names of weights in the plan, before the LightningModule's names."""


@dataclass(eq=False)
class Logged:
    """What `training_step` logs: the names under which it logs the loss, with their options, and all other names.
    Copies of the module that are traced share one record."""

    losses: dict[str, dict[str, Any]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    def __deepcopy__(self, memo: Any) -> "Logged":
        return self


class TrainingStepModule(nn.Module):
    """`forward(*batch)` is `module.training_step(batch, 0)`; keyword batches become a mapping, a single tensor stays
    one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.logged = Logged()

    def forward(self, *parts: Any, **named: Any) -> torch.Tensor:
        """The loss of a batch. Raises RequestError where `training_step` returns none."""
        batch: Any = named or (parts[0] if len(parts) == 1 else parts)
        calls: list[tuple[str, Any, dict[str, Any]]] = []
        with _logging(self.module, calls):
            returned = self.module.training_step(batch, 0)  # type: ignore[operator]
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, torch.Tensor):
            raise RequestError(
                f"{type(self.module).__name__}.training_step returned {type(loss).__name__}; return the loss, or a dict"
                " with 'loss'"
            )
        self.logged.losses = {name: options for name, value, options in calls if value is loss}
        self.logged.others = [name for name, value, _ in calls if value is not loss]
        return loss


class _NoTrainer:
    """What a LightningModule finds as its Trainer while it is traced: a process without a logger. All else would change
    between steps, as epochs do, and stay as it was traced."""

    logger = None
    loggers = ()
    global_rank = local_rank = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RequestError(
            f"training_step reads {name} of the Trainer, and a plan keeps what it was when the step was traced; take it"
            " out of training_step, or put it into the batch as a tensor"
        )


@contextlib.contextmanager
def _logging(module: nn.Module, calls: list[tuple[str, Any, dict[str, Any]]]) -> Iterator[None]:
    """Inside of this context `module.log` and `log_dict` only record their arguments, and there is no Trainer."""

    def log(name: str, value: Any, *rest: Any, **options: Any) -> None:
        calls.append((name, value, options))

    def log_dict(values: Mapping[str, Any], *rest: Any, **options: Any) -> None:
        calls.extend((name, value, options) for name, value in values.items())

    own = {"log": log, "log_dict": log_dict, "_trainer": _NoTrainer()}
    before = {name: module.__dict__[name] for name in own if name in module.__dict__}
    module.__dict__.update(own)
    try:
        yield
    finally:
        for name in own:
            module.__dict__.pop(name, None)
        module.__dict__.update(before)
