"""Literals of a model's code keep their values while it is traced on devices without storage.

    torch.tensor([0, 2], device=x.device)   torch.as_tensor(3, device=x.device)   x.new_tensor(0.5)   x[..., [-2], :]
    1j * x

On the meta device these would have no values for a run to start from. So they are made on the host and copied to the
device: the graph has the constant and a copy of it. Complex numbers become such tensors too, without dims, so that they
promote the dtype of a result as the number does: a plan file has no complex numbers.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_FROM_NUMBERS = frozenset({torch.as_tensor, torch.asarray})
"""These functions take tensors, too; then the device is that of the tensor."""


class LiteralsKept(TorchFunctionMode):
    """While active, tensors made of Python's numbers are made on the host first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        numbers = not any(isinstance(one, torch.Tensor) for one in (*args, *kwargs.values()))
        if func is torch.tensor or (func in _FROM_NUMBERS and numbers):
            return _sent(kwargs.pop("device", None), func, *args, **kwargs)
        if func is torch.Tensor.new_tensor:
            like, *data = args
            kwargs.setdefault("dtype", like.dtype)
            return _sent(kwargs.pop("device", like.device), torch.tensor, *data, **kwargs)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and args[0].is_meta:
            args = (args[0], _indices(args[1], args[0].device), *args[2:])
        if any(isinstance(one, complex) for one in args):
            args = _complex_as_tensors(args)
        return func(*args, **kwargs)


def _sent(device: Any, make: Any, *args: Any, **kwargs: Any) -> Any:
    if device is None or torch.device(device).type != "meta":
        return make(*args, device=device, **kwargs)
    return make(*args, **kwargs).to(device)


def _complex_as_tensors(args: Any) -> Any:
    """Arguments with tensors in the place of complex numbers, where there is a tensor among them."""
    device = next((one.device for one in args if isinstance(one, torch.Tensor)), None)
    if device is None:
        return args
    return tuple(_sent(device, torch.tensor, one) if isinstance(one, complex) else one for one in args)


def _indices(given: Any, device: torch.device) -> Any:
    """Lists of numbers among indices, as tensors."""
    if isinstance(given, tuple):
        return tuple(_indices(one, device) for one in given)
    flat = isinstance(given, list) and bool(given) and all(isinstance(one, bool | int) for one in given)
    return _sent(device, torch.tensor, given) if flat else given
