"""Messages between ranks outside of the training step: JSON, and tensors by name.

    own ── JSON ── bytes ──┬─ lengths of all ranks, checked before memory is allocated
                           └─ bytes of all ranks, padded to the longest ──▶ parsed as the type that the caller names

PyTorch's collectives for objects unpickle what they receive, so whoever can write into a connection can run code in
every rank. Here a message is only numbers and text: one that is not of the type, or longer than `MOST`, raises
RunError.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter, ValidationError

from planner.errors import RunError

MOST = 1 << 28
"""Maximum bytes of JSON that a rank may send."""

MOST_ELEMENTS = 1 << 40
"""Maximum elements of a tensor that a rank may send."""

_T = TypeVar("_T")
_Header = list[tuple[str, str, tuple[int, ...]]]  # name, dtype and shape of tensors
_NUMBERS = ConfigDict(ser_json_inf_nan="constants")


def gather(own: _T, kind: Any, group: dist.ProcessGroup | None = None) -> list[_T]:
    """The values of all ranks of a group, in rank order; `kind` is their type. Collective."""
    written = _written(own, kind)
    device = _device(group)
    size = dist.get_world_size(group)
    lengths = torch.empty(size, dtype=torch.int64, device=device)
    dist.all_gather_single(lengths, torch.tensor([len(written)], device=device), group)
    found = [_length(length) for length in lengths.tolist()]
    longest = max(found)
    filled = torch.zeros(longest, dtype=torch.uint8, device=device)
    filled[: len(written)] = _bytes(written)
    every = torch.empty(size * longest, dtype=torch.uint8, device=device)
    dist.all_gather_single(every, filled, group)
    rows = every.view(size, longest).cpu()
    return [_read(row[:length], kind) for row, length in zip(rows, found, strict=True)]


def told_by_first(own: _T | None, kind: Any) -> _T:
    """The value of rank 0, on every rank; the values of the others are ignored. Collective."""
    device, first = _device(None), dist.get_rank() == 0
    written = _written(own, kind) if first else b""
    length = torch.tensor([len(written)], device=device)
    dist.broadcast(length, 0)
    told = torch.empty(_length(int(length.item())), dtype=torch.uint8, device=device)
    if first:
        told.copy_(_bytes(written))
    dist.broadcast(told, 0)
    found: _T = _read(told.cpu(), kind)
    return found


def gather_tensors(own: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> list[dict[str, torch.Tensor]]:
    """The tensors of every rank of a group, by name, in host memory. Collective. Tensors are sent one at a time, so the
    device holds only one of them."""
    header: _Header = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in own.items()]
    device = _device(group)
    found = []
    for source, promised in enumerate(gather(header, _Header, group)):
        found.append({name: _empty(dtype, shape) for name, dtype, shape in promised})
        for name, tensor in found[-1].items():
            if source == dist.get_rank(group):
                tensor.copy_(own[name].detach())
            if tensor.numel():
                raw = tensor.view(-1).view(torch.uint8)
                sent = raw.to(device)
                dist.broadcast(sent, group=group, group_src=source)
                raw.copy_(sent)
    return found


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=_NUMBERS)


def _written(own: Any, kind: Any) -> bytes:
    try:
        written = _adapter(kind).dump_json(own)
    except ValueError as error:  # text that is no UTF-8
        raise RunError(f"data that a rank sends to the others cannot be written as JSON: {error}") from error
    _length(len(written))
    return written


def _read(row: torch.Tensor, kind: Any) -> Any:
    try:
        return _adapter(kind).validate_json(row.numpy().tobytes(), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole of it"
        raise RunError(f"a rank sent something other than {kind}: {place}: {first['msg']}") from error


def _bytes(written: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(written), dtype=torch.uint8)


def _length(found: int) -> int:
    if not 0 < found <= MOST:
        raise RunError(f"a rank sends {found} bytes of JSON to the others; the limit is 1 to {MOST}")
    return found


def _empty(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or min(shape, default=0) < 0 or math.prod(shape) > MOST_ELEMENTS:
        raise RunError(f"a rank sent something other than a tensor: dtype '{dtype[:40]}', shape {shape}")
    return torch.empty(shape, dtype=kind)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which this group's tensors must be: the host, if the group supports it."""
    types = [device.type for device in (group or dist.group.WORLD)._device_types]  # type: ignore[union-attr]
    if "cpu" in types:
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    assert found is not None, types
    return torch.device(found.type, torch.accelerator.current_device_index())


def rank_number() -> int:
    """The number of this process among all of them."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1
