"""Observers of running operators: a hook of the executor, unused in a normal run."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from planner.plan.prediction.charges import Phase

if TYPE_CHECKING:
    from runtime.executor.instruction import Instruction


Told = Callable[[torch.UntypedStorage], None]
"""Called whenever memory is freed or allocated again."""


class Observer:
    """Called for every operator whenever it runs: in the forward pass and again in a recomputed block. It must not
    communicate: ranks of a pipeline are at different operators."""

    def operator(self, instruction: "Instruction") -> AbstractContextManager[None]:
        """Entered before the operands are redistributed for the operator, exited when its results are there, or when a
        recomputation stops inside of it."""
        return nullcontext()

    def operands(self, instruction: "Instruction", operands: Sequence[torch.Tensor]) -> None:
        """An operator is about to run on these local tensors, in the layouts that it wants."""

    def results(self, instruction: "Instruction", results: Sequence[torch.Tensor]) -> None:
        """The operator has made these results, without those that are no tensors."""

    def gathering(self, phase: Phase) -> AbstractContextManager[None]:
        """Entered while weights of a block are gathered together, or their gradients reduced, for no particular
        operator: in a "forward" pass, a "recomputation", or a "backward" pass."""
        return nullcontext()

    def updating(self) -> AbstractContextManager[None]:
        """Entered for work that is done once per step."""
        return nullcontext()

    def adding_up(self) -> AbstractContextManager[None]:
        """Entered while gradients of a coalesced reduction are accumulated; gradient buckets that they complete start
        meanwhile."""
        return nullcontext()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Offloaded memory was freed, or has been allocated again."""

    def deferred_weight_gradients(self, instruction: "Instruction", start: torch.Tensor) -> None:
        """The weight gradients of the operator are deferred; they will start with the gradient of `start`."""


def gathering(observer: Observer | None, phase: Phase) -> AbstractContextManager[None]:
    """Inside of this context nothing belongs to an operator, for the observer if there is one."""
    return nullcontext() if observer is None else observer.gathering(phase)


def updating(observer: Observer | None) -> AbstractContextManager[None]:
    """Inside of this context work is done once per step, for the observer if there is one."""
    return nullcontext() if observer is None else observer.updating()


def teller(observer: Observer | None) -> Told:
    """The function to call when memory is freed or allocated again."""
    return _nobody if observer is None else observer.resized


def _nobody(storage: torch.UntypedStorage) -> None:
    """Used without an observer."""
