"""Questions about a tensor that do not need its values: its shape, its dtype, whether it is a view.

PyTorch's tracer asks forty times as often as a model calls operators, and each question goes through every mode that
is active while a model is traced. No mode changes the answer, so the first mode passes the question by the others.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

_OWN = frozenset({FakeTensor, nn.Parameter, Tensor})
"""Tensors that PyTorch's tracer and a model have. Another class may answer for itself."""

_PLAIN = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in (
                "device", "dtype", "is_leaf", "is_meta", "is_mkldnn", "is_nested", "is_quantized", "is_sparse",
                "is_sparse_csr", "layout", "ndim", "requires_grad", "shape",
            )
        ),
        Tensor._is_view, Tensor.dim, Tensor.is_complex, Tensor.is_conj, Tensor.is_floating_point, Tensor.is_inference,
        Tensor.is_neg, Tensor.numel, Tensor.size, Tensor.storage_offset, Tensor.stride, Tensor.untyped_storage,
    }
)  # fmt: skip


class PlainQuestions(TorchFunctionMode):
    """While active, modes that were entered before it see none of these questions, except about other tensor
    classes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _PLAIN or not _OWN.issuperset(types):
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))
