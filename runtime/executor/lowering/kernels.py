"""Shortcuts for operators: functions of torch that run the same operator without the lookup by schema.

A call of `torch.ops.aten.add.Tensor` costs about a microsecond more on the host than `torch.add` with the same
arguments, which ends in the same kernel (2.13; measured by `tests/benchmarks/bench_lowering.py`). The table has only
operators whose function takes the schema's arguments in order, and cannot mistake one overload for another.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

SHORT: Mapping[str, Callable[..., Any]] = {
    "aten.add.Tensor": torch.add,
    "aten.addmm.default": torch.addmm,
    "aten.bmm.default": torch.bmm,
    "aten.cat.default": torch.cat,
    "aten.cos.default": torch.cos,
    "aten.div.Tensor": torch.div,
    "aten.exp.default": torch.exp,
    "aten.gelu.default": F.gelu,
    "aten.layer_norm.default": torch.layer_norm,
    "aten.linear.default": F.linear,
    "aten.matmul.default": torch.matmul,
    "aten.mm.default": torch.mm,
    "aten.mul.Tensor": torch.mul,
    "aten.neg.default": torch.neg,
    "aten.permute.default": torch.permute,
    "aten.relu.default": torch.relu,
    "aten.rsqrt.default": torch.rsqrt,
    "aten.sigmoid.default": torch.sigmoid,
    "aten.silu.default": torch.ops.aten.silu.default._op,
    "aten.sin.default": torch.sin,
    "aten.sub.Tensor": torch.sub,
    "aten.t.default": torch.t,
    "aten.tanh.default": torch.tanh,
    "aten.to.dtype": torch.Tensor.to,
    "aten.transpose.int": torch.transpose,
    "aten.unsqueeze.default": torch.unsqueeze,
}

TRACED: Mapping[str, Callable[..., Any]] = {"aten.rms_norm.default": F.rms_norm}
"""Replacements that `torch.compile` can compile, for operators whose local form it cannot trace: kernels that we have
written ourselves, because PyTorch composes these operators of several kernels."""
