"""Who wants to know which operator runs: a seam of the executor, empty in a run of which nobody asks anything."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from runtime.executor import Instruction


class Observer(Protocol):
    """Told of every operator whenever it runs: in the forward pass, and again where its block is recomputed."""

    def operator(self, instruction: "Instruction") -> AbstractContextManager[None]:
        """Entered before the operands are brought to where the operator wants them, left after its results are there;
        left too where a recomputation stops inside."""
        ...

    def made(self, results: Sequence[torch.Tensor]) -> None:
        """Told, inside of that, of the local results."""
        ...
