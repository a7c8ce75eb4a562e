"""Rewrites checkpoints in one process, in bounded memory: for another plan, or merged into whole tensors.

    convert     the files that the ranks of another plan would have written
    merge       model-00001-of-00003.safetensors, … and model.safetensors.index.json: whole tensors, the model alone

Tensors are copied from file to file in blocks of `most` bytes. Memory holds the block that is written, the block that
is read, and the mapped parts of the input files, which are unmapped after each block. So memory grows by at most `HELD`
blocks, whatever the size of the checkpoint, unless a single row of a tensor is larger than a block.
"""

import contextlib
import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from planner.errors import CheckpointError
from planner.graph.placed import tables_outside
from planner.models.naming.parts import Naming
from planner.plan.binding.bind import BoundPlan
from planner.sharding.mesh import Mesh
from runtime.checkpoint.folder import is_checkpoint, take_name
from runtime.checkpoint.fused import as_in_graph
from runtime.checkpoint.manifest import Manifest, Progress, SavedFile, SavedTensor, plan_content, write_manifest
from runtime.checkpoint.naming import CONFIG, as_theirs
from runtime.checkpoint.opening import open_run
from runtime.checkpoint.regions import Region, blocks, whole
from runtime.checkpoint.restoring import as_found, check_optimizer, check_same, in_both_places, name_in
from runtime.checkpoint.source import INDEX, SINGLE, Readable
from runtime.checkpoint.spread import Spread, StateOfPlan, writers
from runtime.checkpoint.state_names import BESIDE, MASTER, file_key, kept_name, read_name, saved_name
from runtime.checkpoint.tensor_files import Entry, dtype_of, write_tensors
from runtime.checkpoint.writing import file_of
from runtime.optimizers.optimizers import every_moment
from runtime.run_folder import owned
from runtime.run_folder.identity import Origin, new_identity
from runtime.run_folder.private import replace_text

HELD = 8
"""The maximum growth of memory, in blocks: four are there at a time, and the allocator keeps as many freed ones."""
BLOCK = 32 * 2**20
"""Bytes of a tensor that are in memory at a time."""
SHARD = 5 * 10**9
"""Bytes of a file of a merged checkpoint: Hugging Face's default."""
_MASTERS = kept_name(MASTER, "")


def convert(
    source: Readable,
    manifest: Manifest,
    bound: BoundPlan,
    buffers: Mapping[str, tuple[int, ...]],
    destination: Path,
    most: int = BLOCK,
) -> Manifest:
    """Write into a new folder the files that the ranks of a plan would have written, from tensors saved under any other
    plan. `buffers` has the pipeline ranks of the buffers that the model keeps, `most` the bytes of a block.

    From a model alone, training starts at step 0. Raises CheckpointError where names, shapes or dtypes differ from
    those of the plan, or something cannot be read or written.
    """
    place, source = source.path, as_in_graph(source, bound.graph.cuts)
    if manifest.kind == "merged":
        manifest = replace(manifest, progress=Progress(step=0, updates=0, samples=0, seed=manifest.progress.seed))
    else:
        check_optimizer(place, manifest, bound.plan)
    wanted, names = _wanted(source, manifest, bound, buffers, place)
    plan, ranks = bound.plan, writers(wanted, bound.plan.mesh, bound.plan.pipeline)
    files = sorted({rank for each in ranks.values() for rank in each})

    def fill(folder: Path) -> Manifest:
        saved = [
            _write(folder / file_of(rank), source, _entries(source, wanted, names, ranks, rank, plan.mesh, most))
            for rank in files
        ]
        number = {rank: at for at, rank in enumerate(files)}
        return replace(
            manifest,
            kind="sliced",
            names="own",
            optimizer=plan.training.optimizer,
            files=tuple(saved),
            tensors={s.name: s.saved(plan.mesh, [number[rank] for rank in ranks[s.name]]) for s in wanted},
            plan=plan_content(plan),
        )

    return _written(destination, fill)


def _wanted(
    source: Readable, manifest: Manifest, bound: BoundPlan, buffers: Mapping[str, tuple[int, ...]], place: Path
) -> tuple[list[Spread], Mapping[str, str | None]]:
    """The tensors that a plan keeps, and the name under which each was saved; None for a tensor that starts as
    zeros."""
    found, updates = source.tensors, manifest.progress.updates
    kinds = {read_name(name).kind for name in found}
    moments = [kind for kind in every_moment(bound.plan.training.optimizer) if kind in kinds]
    own = {saved_name(name): name for name in buffers}
    known = {own[n]: (found[n].shape, found[n].dtype, buffers[own[n]]) for n in own if n in found}
    wanted = sorted(StateOfPlan(bound=bound).tensors(moments, updates, known), key=lambda spread: spread.name)
    names = {spread.name: name_in(found, spread.name, manifest.tied) for spread in wanted}
    promised = wanted
    if manifest.kind == "merged":  # the master is equal to the weight until the first update
        names.update({name: names[name.removeprefix(_MASTERS)] for name in names if name.startswith(_MASTERS)})
        promised = [spread for spread in wanted if not spread.name.startswith(_MASTERS)]
    here = [table.name for table in tables_outside(bound.whole)]
    promised, saved = in_both_places(promised, names, found, here, manifest.tables_outside())
    lacking = sorted(set(own) - set(found))
    check_same(place, as_found(promised, names, saved), names, saved, manifest.tied, lacking=lacking)
    return wanted, {name: _read_as(name, names[name], found) for name in names}


def _read_as(name: str, saved: str, found: Mapping[str, SavedTensor]) -> str | None:
    """The saved tensor from which one is read: a master that was not saved from its narrow weight, other states from
    none."""
    if saved in found:
        return saved
    return name.removeprefix(_MASTERS) if name.startswith(_MASTERS) else None


def _entries(
    source: Readable,
    wanted: Sequence[Spread],
    names: Mapping[str, str | None],
    ranks: Mapping[str, tuple[int, ...]],
    rank: int,
    mesh: Mesh,
    most: int,
) -> list[Entry]:
    """The tensors that a rank writes: at most one cell of each."""
    found = []
    for spread in wanted:
        for cell, writer in enumerate(ranks[spread.name]):
            if writer == rank:
                region = spread.of_cell(mesh, cell)
                found.append(_entry(source, spread.name, names[spread.name], spread.dtype, region, most))
    return found


def _entry(source: Readable, name: str, saved: str | None, dtype: str, region: Region, most: int) -> Entry:
    """A tensor to write, read under the name `saved`; zeros where that is None."""
    kind = dtype_of(dtype)

    def read() -> Iterator[torch.Tensor]:
        for block in blocks(region, max(1, most // kind.itemsize)):
            yield torch.zeros(block.extent, dtype=kind) if saved is None else source.read(saved, block).to(kind)
            source.release()

    return Entry(name=name, dtype=dtype, shape=region.extent, blocks=read)


def merge(
    source: Readable,
    manifest: Manifest,
    destination: Path,
    shard: int = SHARD,
    most: int = BLOCK,
    naming: Naming | None = None,
) -> Manifest:
    """Write the whole tensors of a model into a new folder, in files of at most `shard` bytes (a larger tensor gets its
    own file), with file names as Hugging Face's. With a `naming` they also get the tensor names of transformers, and
    the config beside them where one is known.

    Raises CheckpointError where each device has its own parameters instead of one model, where the tensors do not match
    the naming, or something cannot be read or written.
    """
    _check_one_model(source)
    if naming is not None:
        source = as_theirs(source, naming, most)
    found = {name: tensor for name, tensor in sorted(source.tensors.items()) if not name.startswith(BESIDE)}
    parts = _shards(found, shard)
    names = (
        [SINGLE if naming is None else naming.single]
        if len(parts) == 1
        else [f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in _from_one(parts)]
    )

    def fill(folder: Path) -> Manifest:
        saved = [
            _write(
                folder / name,
                source,
                [_entry(source, file_key(one), one, found[one].dtype, whole(found[one].shape), most) for one in part],
            )
            for name, part in zip(names, parts, strict=True)
        ]
        place_of = {one: at for at, part in enumerate(parts) for one in part}
        if len(parts) > 1:
            index = {
                "metadata": {"total_size": sum(_bytes(tensor) for tensor in found.values())},
                "weight_map": {file_key(one): names[place_of[one]] for one in found},
            }
            replace_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
        if naming is not None and naming.config is not None:
            content = {**naming.config, **({"dtype": _dtype(found)} if naming.config_file == CONFIG else {})}
            replace_text(folder / naming.config_file, json.dumps(content, indent=2) + "\n")
        return replace(
            manifest,
            kind="merged",
            names=manifest.names if naming is None else "huggingface",
            tied=manifest.tied if naming is None or not naming.parts else {},
            optimizer=None,
            files=tuple(saved),
            tensors={
                one: replace(tensor, cuts=(1,) * len(tensor.shape), files=(place_of[one],))
                for one, tensor in found.items()
            },
        )

    return _written(destination, fill)


def _check_one_model(source: Readable) -> None:
    own = [name for name in source.tensors if not name.startswith(BESIDE) and read_name(name).place is not None]
    if own:
        raise CheckpointError(
            f"{source.path}: has parameters that each device trained for itself ({min(own)}), so it is not one model;"
            " convert it for another plan with as many devices instead"
        )


def _dtype(tensors: Mapping[str, SavedTensor]) -> str:
    """The floating point type of most numbers."""
    count = Counter[str]()
    for tensor in tensors.values():
        if dtype_of(tensor.dtype).is_floating_point:
            count[tensor.dtype] += tensor.elements
    return count.most_common(1)[0][0]


def _from_one(parts: Sequence[object]) -> range:
    return range(1, len(parts) + 1)


def _shards(tensors: Mapping[str, SavedTensor], most: int) -> list[list[str]]:
    """Names in their order, in groups of at most `most` bytes."""
    found: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if found[-1] and size + _bytes(tensor) > most:
            found.append([])
            size = 0
        found[-1].append(name)
        size += _bytes(tensor)
    return found


def _bytes(tensor: SavedTensor) -> int:
    return tensor.elements * dtype_of(tensor.dtype).itemsize


def _write(path: Path, source: Readable, entries: Sequence[Entry]) -> SavedFile:
    saved = write_tensors(path, entries, {"format": "pt"})
    source.release()
    return saved


def _written(destination: Path, fill: Callable[[Path], Manifest]) -> Manifest:
    """Fill a folder, the manifest last, and give it its name when everything in it is on disk. With a checkpoint's name
    in the folder of a run (`step-000100`) it belongs to that run, and the run is locked meanwhile."""
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination}: is there already; name a new folder")
    parent, token = destination.parent, secrets.token_hex(4)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _run_of(destination) as origin:
            part = parent / f".{destination.name}.{token}.part"
            mark = owned.Mark(kind="checkpoint", origin=origin or Origin(run=new_identity(), folder=new_identity()))
            owned.make(part, mark)
            try:
                manifest = replace(fill(part), origin=origin)
                write_manifest(part, manifest)
                if origin is None:
                    (part / owned.MARK).unlink()
                take_name(part, destination)
            except BaseException:
                _clear(part, mark)
                raise
    except OSError as error:
        raise CheckpointError(f"{destination}: cannot be written: {error.strerror}; name another place") from error
    return manifest


@contextlib.contextmanager
def _run_of(destination: Path) -> Iterator[Origin | None]:
    """The run in whose folder a new checkpoint lies, which is locked; None for any other folder."""
    if not is_checkpoint(destination):
        yield None
        return
    opened = open_run(destination.parent)
    try:
        yield opened.folder.record.origin
    finally:
        opened.close()


def _clear(part: Path, mark: owned.Mark) -> None:
    """Delete a folder that could not be filled; if that fails too, the first error is the one that is raised."""
    with contextlib.suppress(OSError):
        owned.remove(part, inside=part.parent, name=re.compile(re.escape(part.name)), ours=lambda found: found == mark)
