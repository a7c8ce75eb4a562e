"""The operators of PyTorch by their names, and those that we add to them: importing this file makes them known."""

import functools
from typing import Any, cast

import torch

from planner.errors import ModelError
from planner.graph.operators import causal_convolution as causal_convolution
from planner.graph.operators import ctc as ctc
from planner.graph.operators import delta_rule as delta_rule
from planner.graph.operators import index_scores as index_scores
from planner.graph.operators import rotary as rotary
from planner.graph.operators import selective_scan as selective_scan
from planner.graph.operators import state_space_scan as state_space_scan
from planner.graph.rewriting import gated_norm as gated_norm
from planner.graph.tracing import marked as marked
from planner.graph.tracing import stacked as stacked
from planner.graph.tracing.own_functions import NAMESPACE


def resolve(op: str) -> torch._ops.OpOverload:
    """The PyTorch operator named "namespace.name.overload". Raises ModelError for a name of anything else:
    `torch.ops` has methods too, such as the one that loads a library."""
    found: Any = functools.reduce(lambda at, name: getattr(at, name, None), op.split("."), cast("Any", torch.ops))
    if not isinstance(found, torch._ops.OpOverload):
        if op.startswith(f"{NAMESPACE}."):
            raise ModelError(
                f"'{op}' is an autograd.Function of the model's code, which is no part of a plan file and is known once"
                " the model is traced; give the model (--model package.module:factory, or planner.trace)"
            )
        raise ModelError(f"'{op}' is not the name of a PyTorch operator, as aten.linear.default is")
    return found
