"""Hides the parameters of blocks that are not computed, so that they are no inputs of an export.

Every parameter of a module becomes an input of a torch.export, at about a hundred calls each: with 92 layers of 20
parameters that is most of the time of an export. Blocks that only announce that they were called
(`planner.graph.tracing.repeats`) need none, so their parameters are hidden meanwhile. A model that asks for one of them
all the same, for example to sum the squares of all weights, gets an error, and is traced once more with nothing hidden.
The same happens to a model that calls a third block in a way of its own.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from planner.graph.tracing.alike import NotAlikeError

_PARAMETERS = "_parameters"


class AskedForError(NotAlikeError):
    """Hidden parameters of a block are needed."""

    def __init__(self, block: str) -> None:
        super().__init__(f"the parameters of {block} are asked for")


class HiddenParameters:
    """Hides the parameters of some blocks, given by their paths."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self._held = {
            path: [(part, _Hidden(self, path, part._parameters)) for part in block.modules() if part._parameters]
            for path, block in blocks.items()
        }
        self.read = False

    def __contains__(self, path: str) -> bool:
        """Whether the parameters of a block are among them."""
        return path in self._held

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """While active, the blocks have no parameters."""
        try:
            for path in self._held:
                self._hide(path)
            yield
        finally:
            for path in self._held:
                self._show(path)

    @contextlib.contextmanager
    def model_runs(self) -> Iterator[None]:
        """While active, the model runs: it gets an AskedForError when it asks for hidden parameters."""
        self.read = True
        try:
            yield
        finally:
            self.read = False

    @contextlib.contextmanager
    def shown(self, path: str) -> Iterator[None]:
        """While active, a hidden block has its parameters."""
        self._show(path)
        try:
            yield
        finally:
            self._hide(path)

    def _hide(self, path: str) -> None:
        for part, none in self._held.get(path, ()):
            part.__dict__[_PARAMETERS] = none

    def _show(self, path: str) -> None:
        for part, none in self._held.get(path, ()):
            part.__dict__[_PARAMETERS] = none.held


class _Hidden(dict[str, Any]):
    """Holds no parameters, in place of those in `held`. Raises AskedForError where a running model asks for them."""

    def __init__(self, owner: HiddenParameters, path: str, held: dict[str, Any]) -> None:
        super().__init__()
        self.owner, self.path, self.held = owner, path, held

    def _asked(self) -> None:
        if self.owner.read:
            raise AskedForError(self.path)

    def __contains__(self, name: object) -> bool:
        if name in self.held:
            self._asked()
        return False

    def __iter__(self) -> Iterator[str]:
        self._asked()
        return super().__iter__()

    def items(self) -> Any:
        self._asked()
        return super().items()

    def values(self) -> Any:
        self._asked()
        return super().values()

    def keys(self) -> Any:
        self._asked()
        return super().keys()
