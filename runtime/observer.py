"""Who looks on while operators run: a seam of the executor, empty in a run of which nobody asks anything."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from planner.plan.prediction.charges import Phase

if TYPE_CHECKING:
    from runtime.executor.instruction import Instruction


Told = Callable[[torch.UntypedStorage], None]
"""Called whenever memory is given back or taken again."""


class Observer:
    """Told of every operator whenever it runs: in the forward pass and, in a recomputed block, once more. It must not
    communicate: ranks of a pipeline stand at different operators."""

    def operator(self, instruction: "Instruction") -> AbstractContextManager[None]:
        """Entered before the operands are brought to where the operator wants them, left after its results are there;
        left too where a recomputation stops inside."""
        return nullcontext()

    def operands(self, instruction: "Instruction", operands: Sequence[torch.Tensor]) -> None:
        """An operator is about to run on these local tensors, in the layouts that it wants."""

    def results(self, instruction: "Instruction", results: Sequence[torch.Tensor]) -> None:
        """It has made these; what is no tensor is left out."""

    def gathering(self, phase: Phase) -> AbstractContextManager[None]:
        """Entered while weights of a block are gathered together, or their gradients reduced, for no operator in
        particular: for a "forward" pass, a "recomputation", or a "backward" pass."""
        return nullcontext()

    def updating(self) -> AbstractContextManager[None]:
        """Entered while anything happens that a step does once."""
        return nullcontext()

    def adding_up(self) -> AbstractContextManager[None]:
        """Entered while gradients that were reduced so are added up; buckets that these complete start meanwhile."""
        return nullcontext()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Memory that is offloaded was given back, or has been taken again."""

    def deferred_weight_gradients(self, instruction: "Instruction", start: torch.Tensor) -> None:
        """The gradients of its weights wait for a turn of their own, which begins with the gradient of `start`."""


def gathering(observer: Observer | None, phase: Phase) -> AbstractContextManager[None]:
    """What happens meanwhile is no operator's, where somebody looks on."""
    return nullcontext() if observer is None else observer.gathering(phase)


def updating(observer: Observer | None) -> AbstractContextManager[None]:
    """What happens meanwhile happens once a step, where somebody looks on."""
    return nullcontext() if observer is None else observer.updating()


def teller(observer: Observer | None) -> Told:
    """Who wants to know of memory that is given back or taken again."""
    return _nobody if observer is None else observer.resized


def _nobody(storage: torch.UntypedStorage) -> None:
    """Where nobody looks on."""
