"""A tensor here and the same numbers in files of transformers, box by box.

    h.0.c_attn.weight  (heads, then query, key, value) x inputs    ours, 12 x 4: heads outermost
    │ rows 0-1   query of head 0  ─▶  columns 0-1 of transformer.h.0.attn.c_attn.weight, 4 x 12: inputs first, then
    │ rows 2-3   key of head 0    ─▶  columns 4-5                                           all queries, keys, values
    …

A part is one such box. Its dims may stand in another order there (a transposed weight), or be left out where it is one
long (an expert of a stack); along the first dim, its rows may lie `step` rows apart there (rotations of neighbours in
the place of halves).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Built = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of every tensor that a model keeps, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A number there is that here times `scale` plus `shift`. Where dtypes are given, a tensor has the one here and the
    other there; else both have that of the file that is read."""

    scale: float = 1.0
    shift: float = 0.0
    here: str | None = None
    there: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The box of `extent` elements at `at` of a tensor here, which lies at `there` in one of transformers.

    `dims` has for each dim of theirs the one of ours that it is; `step` is how far apart two rows of ours are along the
    dim of theirs that is our first.
    """

    ours: str
    theirs: str
    at: tuple[int, ...]
    extent: tuple[int, ...]
    there: tuple[int, ...]
    dims: tuple[int, ...]
    step: int = 1
    value: Value | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """A model as transformers has it.

    Attributes:
        parts: of all tensors that are in files of transformers; nothing where transformers itself built the model, so
            that names are its own.
        fresh: tensors that are not, and begin with zeros.
        config: what a `config.json` says of the model; None where there is no file to take it from.
        model_types: of the config files whose classes keep weights like this.
        base: how names begin that files of the model without its head leave out.
        unused: patterns of names in such files that nobody needs.
        built: all tensors of the model here.
        single, config_file: what files are called that have all tensors, and the `config`.
    """

    parts: tuple[Part, ...]
    config: Mapping[str, Any] | None
    model_types: tuple[str, ...]
    fresh: tuple[str, ...] = ()
    base: str = ""
    unused: tuple[str, ...] = ()
    built: Built = field(default_factory=dict)
    single: str = "model.safetensors"
    config_file: str = "config.json"

    @property
    def misleading(self) -> bool:
        """Whether all names here are those there, and numbers under them are not."""
        same = {part.ours for part in self.parts} == {part.theirs for part in self.parts}
        return same and any(part.value is not None for part in self.parts)


def whole(ours: str, theirs: str, shape: tuple[int, ...], value: Value | None = None) -> Part:
    """All of a tensor, as it is."""
    start = (0,) * len(shape)
    return Part(
        ours=ours, theirs=theirs, at=start, extent=shape, there=start, dims=tuple(range(len(shape))), value=value
    )


def rows(ours: str, theirs: str, shape: tuple[int, ...], at: int, there: int, count: int, step: int = 1) -> Part:
    """So many rows of a tensor, all other dims whole."""
    rest = (0,) * (len(shape) - 1)
    return Part(
        ours=ours,
        theirs=theirs,
        at=(at, *rest),
        extent=(count, *shape[1:]),
        there=(there, *rest),
        dims=tuple(range(len(shape))),
        step=step,
    )


def transposed(part: Part) -> Part:
    """The same with its dims the other way round there; a part with one dim stays as it is."""
    return Part(
        ours=part.ours,
        theirs=part.theirs,
        at=part.at,
        extent=part.extent,
        there=part.there[::-1],
        dims=part.dims[::-1],
        step=part.step,
        value=part.value,
    )
