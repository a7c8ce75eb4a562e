"""A device on the host: PrivateUse1 of PyTorch, written in Python, on which whole plans run.

    tensor on "stand_in" ── operator below autograd ──> tensors of the host ── the same operator ──> wrapped again

Views of a tensor are views of its memory, and operators in place return the tensor that they were given, so that
autograd, storages that are emptied and filled again, and saved tensors are as on any device. Collectives are operators,
too, and those of gloo. Streams and events are those of PyTorch's own dummies: everything is done at once.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "stand_in"


class Held(torch.Tensor):
    """A tensor of the device; `memory` has its elements, on the host."""

    memory: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> "Held":
        made: Held = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=torch.device(NAME, 0),
        )
        made.memory = memory
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.memory.untyped_storage()

    def tolist(self) -> Any:
        return self.memory.tolist()  # PyTorch refuses that for subclasses


class _Module(_DummyBackendModule):
    """What `torch.stand_in` is; recomputed blocks ask for the dtypes of autocast."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def register() -> list[torch.library.Library]:
    """Make the device that of this process, for as long as what is returned lives."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    dist.Backend.default_device_backend_map[NAME] = "gloo"
    every, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    own.impl("_to_copy", lambda *args, **kwargs: _run(_COPY, args, kwargs), "PrivateUse1")  # `torch.tensor` passes by
    return [every, own]


_COPY = torch.ops.aten._to_copy.default


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator, on the host."""
    if func is torch.ops.aten.copy_.default and not isinstance(args[0], Held):
        return args[0].copy_(_on_host(args[1]))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    given = {id(leaf.memory): leaf for leaf in leaves if isinstance(leaf, Held)}
    on_host, named = pytree.tree_unflatten([_on_host(leaf) for leaf in leaves], spec)
    made = func(*on_host, **named)
    if func is _COPY and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
        return made
    return pytree.tree_map_only(torch.Tensor, lambda one: given[id(one)] if id(one) in given else Held(one), made)


def _on_host(value: Any) -> Any:
    if isinstance(value, Held):
        return value.memory
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value
