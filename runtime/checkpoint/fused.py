"""Weights that hold several matrices, in checkpoints.

A plan keeps such a weight in parts (`planner.graph.rewriting.fused_weights`), and so does a checkpoint of it:

    h.0.c_attn.weight[0], h.0.c_attn.weight[1], ...        optimizer/exp_avg/h.0.c_attn.weight[0], ...

Whoever reads the checkpoint sees the weights of the module. A plan that reads it takes them apart as its own graph
does, whatever wrote them: a plan with the same parts, one without, or another library.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from planner.errors import CheckpointError
from planner.graph.operator_graph import Cut
from runtime.checkpoint.manifest import SavedCut, SavedTensor
from runtime.checkpoint.renamed import Box, Copy, Renamed, initial_in
from runtime.checkpoint.source import Readable, listed, open_checkpoint
from runtime.checkpoint.state_names import SCALES, read_name, with_tensor


def opened_in_module(path: Path) -> Readable:
    """The checkpoint at a path, with the weights of the module. Errors as `open_checkpoint`."""
    return as_in_module(open_checkpoint(path))


def saved_cut(saved: str, cuts: Mapping[str, Cut]) -> SavedCut | None:
    """Where a tensor of a checkpoint lies in that of the whole weight; None for one that is no part."""
    kept = read_name(saved)
    cut = cuts.get(kept.tensor)
    if cut is None or kept.kind == SCALES:
        return None
    return SavedCut(of=with_tensor(kept, cut.of), dim=cut.dim, start=cut.start)


def as_in_module(source: Readable) -> Readable:
    """A checkpoint with whole weights in place of their parts."""
    parts = [(tensor.cut, name, tensor) for name, tensor in source.tensors.items() if tensor.cut is not None]
    if not parts:
        return source
    tensors, copies = _others(source, {name for _, name, _ in parts})
    parts.sort(key=lambda one: (one[0].of, one[0].start))
    for of, each in groupby(parts, key=lambda one: one[0].of):
        copies[of] = []
        for cut, name, tensor in each:
            tensors[of] = _tensor(tensor, cut.dim, cut.start + tensor.shape[cut.dim])
            copies[of].append(_copy(of, name, tensor.shape, cut.dim, to=cut.start))
    return Renamed(source=source, tensors=tensors, copies=copies, initial=initial_in(source), tied=source.tied)


def as_in_graph(source: Readable, cuts: Mapping[str, Cut]) -> Readable:
    """A checkpoint with the parts of a graph in place of whole weights. Raises CheckpointError where a weight is longer
    or shorter than its parts."""
    parts: dict[str, list[tuple[str, Cut]]] = {}
    for name, cut in cuts.items():
        parts.setdefault(cut.of, []).append((name, cut))
    kept = {name: read_name(name) for name in source.tensors}
    whole = {name: one for name, one in kept.items() if one.tensor in parts and one.kind != SCALES}
    if not whole:
        return source
    _check_lengths(source, {name: [cut for _, cut in parts[one.tensor]] for name, one in whole.items()})
    tensors, copies = _others(source, whole.keys())
    for name, one in whole.items():
        tensor = source.tensors[name]
        for part, cut in parts[one.tensor]:
            if cut.dim < len(tensor.shape):
                own = with_tensor(one, part)
                tensors[own] = _tensor(tensor, cut.dim, cut.length)
                copies[own] = [_copy(own, name, tensors[own].shape, cut.dim, start=cut.start)]
    initial = tuple(part for name in initial_in(source) for part, _ in parts.get(name, [(name, None)]))
    return Renamed(source=source, tensors=tensors, copies=copies, initial=initial, tied=source.tied)


def _check_lengths(source: Readable, cuts: Mapping[str, Sequence[Cut]]) -> None:
    """Check that weights are as long as their parts together."""
    wrong = []
    for name, each in cuts.items():
        shape, dim = source.tensors[name].shape, each[0].dim
        length = sum(cut.length for cut in each)
        if dim < len(shape) and shape[dim] != length:
            wrong.append(f"{name} {list(shape)}, not {[*shape[:dim], length, *shape[dim + 1 :]]}")
    if wrong:
        raise CheckpointError(f"{source.path}: does not fit this model: other shape: {listed(wrong)}")


def _others(source: Readable, left: Collection[str]) -> tuple[dict[str, SavedTensor], dict[str, list[Copy]]]:
    tensors = {name: tensor for name, tensor in source.tensors.items() if name not in left}
    return tensors, {name: [_copy(name, name, tensor.shape)] for name, tensor in tensors.items()}


def _tensor(like: SavedTensor, dim: int, length: int) -> SavedTensor:
    shape = tuple(length if at == dim else extent for at, extent in enumerate(like.shape))
    return SavedTensor(shape=shape, dtype=like.dtype, cuts=(1,) * len(shape), files=(0,))


def _copy(ours: str, theirs: str, shape: tuple[int, ...], dim: int = 0, to: int = 0, start: int = 0) -> Copy:
    """The copy of a box of this shape, which begins along a dim at `to` in one tensor and at `start` in the other."""
    steps = (1,) * len(shape)
    ends = (tuple(first if at == dim else 0 for at in range(len(shape))) for first in (to, start))
    return Copy(
        to=Box(name=ours, at=next(ends), step=steps),
        source=Box(name=theirs, at=next(ends), step=steps),
        count=shape,
        dims=tuple(range(len(shape))),
        value=None,
    )
