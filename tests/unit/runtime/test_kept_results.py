"""Kept operators: the kernel runs once, the results are the very same, and so is every gradient."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from runtime.ops.kept_results import KeptResults
from runtime.step.training_step import parallelize
from tests.distributed import plans
from tests.long_lists import first

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
MM = torch.ops.aten.mm.default
SILU = torch.ops.aten.silu.default
NEG = torch.ops.aten.neg.default
KERNELS = {
    "scaled_dot_product_attention": FLASH,
    "down_proj/linear": MM,
    "q_proj/linear": MM,
    "silu": SILU,
    "rotary": NEG,
}


class Counted(TorchDispatchMode):
    """Counts the kernels that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function] += 1
        return function(*args, **(kwargs or {}))


def counted(recomputation: str, kept: tuple[str, ...]) -> tuple[Counter[Any], dict[str, torch.Tensor]]:
    """Kernels of forward and backward of two micro-batches of a Llama of two blocks, and its gradients."""
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of(), recomputation=recomputation, kept=kept, micro_batches=2)
    step = parallelize(plans.build("llama"), plan, traced=plans.traced("llama"))
    with Counted() as mode:
        step.accumulate(*plans.batch())
    return mode.counts, step.full_gradients()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "kept",
    [
        ("scaled_dot_product_attention",),
        ("q_proj/linear",),
        ("q_proj/linear", "silu", "scaled_dot_product_attention", "rotary"),
    ],
    ids=str,
)
def test_the_kernel_of_a_kept_operator_runs_once(kept: tuple[str, ...]) -> None:
    """In each of two blocks and two micro-batches the recomputation runs each kept kernel one time less."""
    plain, gradients = counted("none", ())
    full, _ = counted("full", ())
    found, same = counted("selective", kept)
    saved = Counter(KERNELS[name] for name in kept)
    for kernel in set(KERNELS.values()):
        assert full[kernel] - found[kernel] == 4 * saved[kernel], kernel
        assert plain[kernel] <= found[kernel]
    assert found[FLASH] == (4 if FLASH in saved else 8)
    assert gradients.keys() == same.keys()
    assert all(torch.equal(gradients[name], same[name]) for name in gradients)


@pytest.mark.parametrize("words", ["full", ("none", "selective"), ("selective", "full"), ("full", "none")], ids=str)
@pytest.mark.parametrize("model", first(1, ["llama", "gpt"]))
def test_gradients_are_equal_bit_by_bit(model: str, words: str | tuple[str, ...]) -> None:
    def gradients(recomputation: str | tuple[str, ...]) -> dict[str, torch.Tensor]:
        kept = ("linear", "norm", "scaled_dot_product_attention", "silu", "gelu", "mul", "add")
        plan = plans.hand_plan("zero1", model, plans.mesh_of(), recomputation=recomputation, kept=kept)
        step = parallelize(plans.build(model), plan, traced=plans.traced(model))
        step.accumulate(*plans.batch())
        return step.full_gradients()

    expected, found = gradients("none"), gradients(words)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def run_twice(call: Any, x: torch.Tensor) -> tuple[torch.Tensor, Counter[Any]]:
    """Gradient of a checkpointed call whose results are kept, and the kernels of both passes."""
    kept = KeptResults()
    with Counted() as mode:
        y = checkpoint(lambda t: kept.run("call", lambda o: [call(o[0])], [t * 2])[0].sin(), x, use_reentrant=False)
        y.sum().backward()
    assert x.grad is not None
    return x.grad, mode.counts


@pytest.mark.parametrize(
    ("call", "kernel", "runs"),
    [
        (lambda t: t.tanh(), torch.ops.aten.tanh.default, 1),
        (lambda t: F.linear(t, torch.ones(3, 4)), MM, 1 + 1),  # one is the gradient
        (lambda t: t.exp().cumsum(0), torch.ops.aten.exp.default, 2),  # made on the way: again
        (lambda t: t.exp().cumsum(0), torch.ops.aten.cumsum.default, 1 + 1),
        (lambda t: t.abs().add_(3), torch.ops.aten.abs.default, 2),  # written into: all of it again
        (lambda t: t.reshape(-1), torch.ops.aten.view.default, 2 + 1),  # nothing but a view
    ],
)
def test_what_is_kept_of_a_call(call: Any, kernel: Any, runs: int) -> None:
    x, y = (torch.arange(8.0).reshape(2, 4).div(8).requires_grad_() for _ in range(2))
    found, counts = run_twice(call, x)
    call(y * 2).sin().sum().backward()
    assert torch.equal(found, y.grad)
    assert counts[kernel] == runs
