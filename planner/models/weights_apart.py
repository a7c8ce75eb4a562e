"""Builds modules on the host with weights that have no data.

A factory that reads numbers of tensors as it builds (`x.item()` of `torch.linspace`, for the rates of stochastic depth)
needs the data of these tensors, but not of weights, which would fill the host's memory. So a parameter is on meta from
the time a module gets it:

    Parameter(empty(h, h))  ─ register_parameter ─>  Parameter on meta ─ init.kaiming_uniform_ ─>  nothing to do

Only one weight at a time is on the host, before a module gets it. Buffers and plain tensors have their data.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def weights_without_data() -> Iterator[None]:
    """While active, modules get parameters on the meta device. They stay there, whatever `.to(device)` a module is
    asked for. A parameter shared by several modules stays one. Subclasses of parameters are left as they are."""
    import torch
    from torch import nn
    from torch.utils.weak import WeakTensorKeyDictionary

    register = nn.Module.register_parameter
    apply: Callable[..., Any] = nn.Module._apply
    known = WeakTensorKeyDictionary()  # for each parameter that is still alive on the host, that on meta

    def registering(module: Any, name: str, parameter: Any) -> None:
        if type(parameter) is nn.Parameter and not parameter.is_meta:
            if parameter not in known:
                empty = torch.empty_like(parameter, device="meta")
                known[parameter] = nn.Parameter(empty, parameter.requires_grad)
                vars(known[parameter]).update(vars(parameter))
            parameter = known[parameter]
        register(module, name, parameter)

    def applying(module: Any, change: Callable[[Any], Any], recurse: bool = True) -> Any:
        def changed(tensor: Any) -> Any:
            try:
                return change(tensor)
            except NotImplementedError:  # torch's error for tensors on meta, which have no data to move
                if not tensor.is_meta:
                    raise
            return torch.empty_like(tensor, dtype=change(torch.empty(0, dtype=tensor.dtype)).dtype)

        return apply(module, changed, recurse)

    with patch.object(nn.Module, "register_parameter", registering), patch.object(nn.Module, "_apply", applying):
        yield
