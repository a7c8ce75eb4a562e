"""What autograd keeps of operators of one tensor, and the tensors that live while it computes their gradients, are what
their rules say."""

import math

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.sharding.rules import RULES
from planner.sharding.rules.picks import Gather
from planner.sharding.rules.shapes import Elementwise, Reduce
from runtime.executor.live_tensors import LiveTensors
from tests.contract.rule_calls import Example, examples
from tests.contract.test_rules_by_execution import leaf, localised, run

BUFFERED = frozenset({"aten.log_sigmoid.default"})
"""Of these CPUs keep a result that no device else makes."""


class Counting(TorchDispatchMode):
    def __init__(self, live: LiveTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = live

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.live.add(tensor)
        return made


def told(example: Example) -> bool:
    """Whether it has one tensor with a gradient, and its result the same dtype."""
    spec, graded = RULES[example.op], example.takes_gradients()
    return isinstance(spec, Elementwise | Gather | Reduce) and graded[:1] == [True] and not any(graded[1:])


ONE = tuple(example for example in examples() if told(example))


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("example", ONE, ids=str)
def test_operands_and_results_are_kept_as_the_rule_says(example: Example) -> None:
    tensors = [leaf(tensor, takes) for tensor, takes in zip(example.tensors(), example.takes_gradients(), strict=True)]
    kept: set[int] = set()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.add(address(tensor)), tensor)[1], lambda tensor: tensor
    ):
        results = run(example.op, *localised(example, tensors))
    if not any(result.requires_grad for result in results):
        return
    rule = example.rule()
    assert {at for at, tensor in enumerate(tensors) if address(tensor) in kept} == {at for at, _ in rule.saves}
    made = {at for at, tensor in enumerate(results) if address(tensor) in kept} if rule.op_class != "view" else set()
    assert made == set(rule.saved_results)


@pytest.mark.parametrize(
    "example",
    [e for e in ONE if isinstance(RULES[e.op], Elementwise) and len(e.tensors()) == 1 and e.label != "dtype"],
    ids=str,
)
def test_gradients_make_as_much_on_the_way_as_the_rule_says(example: Example) -> None:
    (operand,) = (leaf(tensor, takes_gradient=True) for tensor in example.tensors())
    results = [one for one in run(example.op, *localised(example, [operand])) if one.requires_grad]
    given = [torch.randn_like(result) for result in results]
    if not results:
        return
    live = LiveTensors()
    live.leave_out([operand, *results, *given])
    with Counting(live):
        (gradient,) = torch.autograd.grad(results, operand, given)
    left = sum(live.now.values())
    rule = example.rule()
    scratch = sum(work.coefficient * math.prod(rule.factors[f].extent for f in work.factors) for work in rule.scratch)
    assert live.peak - left == pytest.approx(scratch, abs=3 * gradient.numel() + 8)  # masks of bytes, a number
