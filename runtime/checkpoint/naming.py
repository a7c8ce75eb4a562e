"""Our checkpoints under the tensor names of transformers, and transformers' files under ours.

`planner.models.naming` maps the names, box by box; here the mapping becomes the input of `Renamed`. Names and shapes
are checked before anything is read. This file also converts the numbers between both sides.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from hardware_profiles.foreign import ForeignTextError, Limits, form_fault, parse_json, read_text
from planner.errors import CheckpointError, ModelError
from planner.models.naming.parts import Naming, Part
from planner.models.naming.parts import whole as whole_part
from planner.models.overrides import looks_like_config
from planner.plan.binding.model_of import buildable
from planner.plan.plan import ModelReference
from runtime.checkpoint.manifest import SavedTensor
from runtime.checkpoint.renamed import TOUCHED, Box, Copy, Renamed
from runtime.checkpoint.source import Readable, listed
from runtime.checkpoint.state_names import BESIDE
from runtime.checkpoint.tensor_files import dtype_of

CONFIG = "config.json"
_NEAR = 1e-3
"""How far a bias may be from a whole number of steps, in steps: the rounding of float32."""


_LIMITS = Limits(size=2**24, finite=False)


class _Config(BaseModel):
    """The fields that are read from a config beside files of tensors."""

    model_config = ConfigDict(strict=True)

    model_type: str | None = None
    rope_interleave: bool = True


def in_own_names(source: Readable, model: ModelReference, given: str | None = None, touched: int = TOUCHED) -> Readable:
    """Tensors under the names of the plan's model, whichever library wrote them: our checkpoints as they are, files of
    transformers renamed. Files that do not say whose names they use count as files of transformers, unless they have
    all names of the model and transformers uses others. `given` as in `naming_of_model`, `touched` as in `Renamed`.

    Raises CheckpointError where files of transformers are not of this model, or transformers has no class for it.
    """
    names = None if source.manifest is None else source.manifest.names
    if names == "own":
        return source
    try:
        naming = naming_of_model(model, given)
    except ModelError as error:
        if names is None:  # names of their own, which are compared when they are loaded
            return source
        raise CheckpointError(f"{source.path}: has the names of transformers: {error}") from error
    if naming is not None and not naming.parts and names is None:
        naming = _without_head(source, naming)
    if naming is None or not naming.parts:
        return source
    ours, theirs = ({getattr(part, side) for part in naming.parts} for side in ("ours", "theirs"))
    if names is None and ours != theirs and ours <= set(source.tensors):
        return source
    return as_ours(source, naming, touched)


def _without_head(source: Readable, naming: Naming) -> Naming:
    """The naming with its parts, of a model whose names are transformers' own, where files are those of the model
    without its head."""
    parts = tuple(whole_part(name, name, shape) for name, (shape, _) in naming.built.items())
    with_parts = replace(naming, parts=parts)
    found, lacking = _found(source, with_parts)
    return with_parts if lacking or found != list(parts) else naming


def naming_of_model(model: ModelReference, given: str | None) -> Naming | None:
    """Transformers' names for the tensors of a plan's model: a model of the zoo, or the config that the user has
    `given`. Raises ModelError, also where the plan names a config: it is opened only if the user names it."""
    from planner.models.naming.of_model import naming_of
    from planner.models.zoo import is_of_zoo

    if given is None and not is_of_zoo(model.reference) and not looks_like_config(model.reference):
        return None
    why = ", and its config says what transformers calls its tensors"
    return naming_of(buildable(model, given, why), model.sequence_length)


def trained_beside(
    source: Readable, model: ModelReference, given: str | None, base: Naming
) -> tuple[Readable, Naming] | None:
    """The adapters of a checkpoint and the weights trained in full beside them, under peft's names; None for a model
    without adapters. `base` is the naming of the model. Raises ModelError."""
    from planner.models.naming.of_model import adapter_naming_of

    naming = adapter_naming_of(buildable(model, given), model.sequence_length, base)
    if naming is None:
        return None
    tensors = {name: tensor for name, tensor in source.tensors.items() if name in naming.built}
    copies = {name: (_itself(name, tensor),) for name, tensor in tensors.items()}
    return Renamed(source=source, tensors=tensors, copies=copies), naming


def _itself(name: str, tensor: SavedTensor) -> Copy:
    box = Box(name=name, at=(0,) * len(tensor.shape), step=(1,) * len(tensor.shape))
    return Copy(to=box, source=box, count=tensor.shape, dims=tuple(range(len(tensor.shape))), value=None)


def as_theirs(source: Readable, naming: Naming, touched: int = TOUCHED) -> Readable:
    """One of our checkpoints under the names of transformers, the model alone. Raises CheckpointError where a tensor of
    the model is missing or there are others."""
    if not naming.parts:
        return source
    ours = {name: tensor for name, tensor in source.tensors.items() if not name.startswith(BESIDE)}
    shapes = {name: shape for name, (shape, _) in naming.built.items()}
    _check(source, ours, shapes, naming.fresh)
    copies, dtypes = defaultdict[str, list[Copy]](list), {}
    for part in naming.parts:
        here, there = _ends(part)
        dtypes[part.theirs] = (part.value and part.value.there) or ours[part.ours].dtype
        count, dims = tuple(part.extent[dim] for dim in part.dims), part.dims
        value = _to_theirs(part, dtypes[part.theirs])
        copies[part.theirs].append(Copy(to=there, source=here, count=count, dims=dims, value=value))
    tensors = {name: _saved(shape, dtypes[name]) for name, shape in _shapes_there(naming.parts).items()}
    return Renamed(source=source, tensors=tensors, copies=copies, touched=touched)


def as_ours(source: Readable, naming: Naming, touched: int = TOUCHED) -> Readable:
    """Files of transformers under our names. Where they have all of the model except its head, that is `initial`.
    Raises CheckpointError where another tensor of the model is missing, there are others, or their config is of another
    kind of model."""
    _check_config(source, naming)
    parts, initial = _found(source, naming)
    shapes = _shapes_there(parts)
    others = [name for name in source.tensors if name not in shapes]
    free = [one for one in others if _matches(naming.unused, one) or _matches(naming.unused, naming.base + one)]
    _check(source, source.tensors, shapes, free)
    copies, dtypes = defaultdict[str, list[Copy]](list), {}
    for part in parts:
        here, there = _ends(part)
        dtypes[part.ours] = (part.value and part.value.here) or source.tensors[part.theirs].dtype
        dims = tuple(part.dims.index(dim) if dim in part.dims else None for dim in range(len(part.extent)))
        value = _to_ours(part, dtypes[part.ours], source)
        copies[part.ours].append(Copy(to=here, source=there, count=part.extent, dims=dims, value=value))
    built = {name: one for name, one in naming.built.items() if name not in initial}
    tensors = {name: _saved(shape, dtypes.get(name, dtype)) for name, (shape, dtype) in built.items()}
    fresh = frozenset(naming.fresh)
    return Renamed(source=source, tensors=tensors, copies=copies, fresh=fresh, initial=initial, touched=touched)


def _ends(part: Part) -> tuple[Box, Box]:
    """The boxes of a part on our side and on theirs."""
    steps = tuple(part.step if dim == 0 else 1 for dim in part.dims)
    return (
        Box(name=part.ours, at=part.at, step=(1,) * len(part.at)),
        Box(name=part.theirs, at=part.there, step=steps),
    )


def _shapes_there(parts: Iterable[Part]) -> dict[str, tuple[int, ...]]:
    """Shapes of transformers' tensors, which the parts fill."""
    found: dict[str, tuple[int, ...]] = {}
    for part in parts:
        box = _ends(part)[1]
        last = (
            at + (part.extent[dim] - 1) * step + 1 for at, dim, step in zip(box.at, part.dims, box.step, strict=True)
        )
        before = found.get(part.theirs, (0,) * len(part.dims))
        found[part.theirs] = tuple(map(max, before, last))
    return found


def _found(source: Readable, naming: Naming) -> tuple[list[Part], tuple[str, ...]]:
    """The parts of a model, with the names of the files, which have no prefix where they are those of the model without
    its head. Also our names of a head that files of others lack as a whole, beside all else."""
    base, parts = naming.base, naming.parts
    if not base:
        return list(parts), ()
    head = [part for part in parts if not part.theirs.startswith(base)]
    bare = any(part.theirs.removeprefix(base) in source.tensors for part in parts if part.theirs.startswith(base))
    prefix = base if bare and not any(name.startswith(base) for name in source.tensors) else ""
    rest = [replace(part, theirs=part.theirs.removeprefix(prefix)) for part in parts if part.theirs.startswith(base)]
    lacks = not any(part.theirs in source.tensors for part in head)
    if source.manifest is None and lacks and all(part.theirs in source.tensors for part in rest):
        return rest, tuple(dict.fromkeys(part.ours for part in head))
    return [replace(part, theirs=part.theirs.removeprefix(prefix)) for part in parts], ()


def _saved(shape: tuple[int, ...], dtype: str) -> SavedTensor:
    return SavedTensor(shape=shape, dtype=dtype, cuts=(1,) * len(shape), files=(0,))


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _check(
    source: Readable,
    found: Mapping[str, SavedTensor],
    wanted: Mapping[str, tuple[int, ...]],
    free: Collection[str],
) -> None:
    """Raise CheckpointError that lists all differences from the wanted names and shapes, except where they are free."""
    shapes = [
        f"{name} {list(found[name].shape)}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    missing = [name for name in wanted if name not in found and name not in free]
    unexpected = [name for name in found if name not in wanted and name not in free]
    kinds = {"it lacks": missing, "not in the model": unexpected, "other shape": shapes}
    if any(kinds.values()):
        said = "; ".join(f"{kind}: {listed(sorted(names))}" for kind, names in kinds.items() if names)
        raise CheckpointError(f"{source.path}: does not fit this model, by the names of transformers: {said}")


def _check_config(source: Readable, naming: Naming) -> None:
    """Raise CheckpointError where a config beside the files is of a model whose numbers mean something else."""
    path = source.path / CONFIG
    if naming.config is None or not path.is_file():
        return
    try:
        config = _Config.model_validate(parse_json(read_text(path, _LIMITS.size), _LIMITS))
    except ForeignTextError as error:
        raise CheckpointError(f"{path}: is not a model config: {error}; correct or remove it") from error
    except ValidationError as error:
        raise CheckpointError(f"{path}: is not a model config: {form_fault(error)}; correct or remove it") from error
    kind, order = config.model_type, config.rope_interleave
    if kind is not None and kind not in naming.model_types:
        wanted = " or ".join(naming.model_types)
        raise CheckpointError(f"{path}: model type {kind}, but the plan's model is {wanted}; give weights of that type")
    wanted_order = naming.config.get("rope_interleave", True)
    if order != wanted_order:
        raise CheckpointError(
            f"{path}: rope_interleave is {order}, but {wanted_order} for the plan's model, which orders the rows of its"
            " weights otherwise; plan from that config"
        )


def _to_theirs(part: Part, dtype: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The conversion of our numbers to theirs."""
    value = part.value
    if value is None:
        return None
    return lambda piece: (piece.to(torch.float64) * value.scale + value.shift).to(dtype_of(dtype))


def _to_ours(part: Part, dtype: str, source: Readable) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The conversion of their numbers to ours. For integer tensors it raises CheckpointError on a number that is not
    whole."""
    value, kind = part.value, dtype_of(dtype)
    if value is None:
        return None

    def made(piece: torch.Tensor) -> torch.Tensor:
        found = (piece.to(torch.float64) - value.shift) / value.scale
        if not kind.is_floating_point:
            if float((found - found.round()).abs().max()) > _NEAR:
                raise CheckpointError(
                    f"{source.path}: {part.theirs} has numbers that are not multiples of {value.scale:g}, the step by"
                    " which the model's biases change; plan with another --set balance_speed"
                )
            found = found.round()
        return found.to(kind)

    return made
