"""How tensors lie, as PyTorch has it."""

import random

import pytest
import torch

from planner.graph.call import Call
from planner.graph.tracing.exported import tensor_type
from planner.plan.layout.strides import elementwise, folded, in_order, lies_in_order, reshaped, spread, viewed
from planner.sharding.rules import RULES

SHAPES = ((6,), (4, 6), (2, 3, 4), (2, 1, 3, 4), (1, 4, 2, 2))
LYING = (
    lambda x: x,
    lambda x: x.transpose(0, -1),
    lambda x: x.flip(0).permute(*reversed(range(x.dim()))),
    lambda x: x[..., :2],
    lambda x: x[:1],
    lambda x: x.unsqueeze(1).expand(-1, 3, *x.shape[1:]),
)


def tensors() -> list[torch.Tensor]:
    return [lay(torch.randn(shape)) for shape in SHAPES for lay in LYING]


def same(shape: torch.Size, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Dims of extent 1 lie anywhere."""
    return all(extent == 1 or a == b for extent, a, b in zip(shape, one, other, strict=True))


def test_what_lies_in_order() -> None:
    for x in tensors():
        assert lies_in_order(x.shape, x.stride()) == x.is_contiguous()
        assert in_order(x.shape) == x.contiguous().stride()
    assert in_order(()) == ()


def test_views_of_another_shape_are_those_that_pytorch_makes() -> None:
    drawn, made = random.Random(1), 0
    for x in tensors():
        for _ in range(20):
            left, wanted = x.numel(), []
            while left > 1 and len(wanted) < 4:
                wanted.append(drawn.choice([k for k in range(1, left + 1) if left % k == 0]))
                left //= wanted[-1]
            wanted = [*wanted, left]
            found = reshaped(x.shape, x.stride(), wanted)
            try:
                view = x.view(wanted)
            except RuntimeError:
                assert found is None
                continue
            made += 1
            assert found is not None
            assert same(view.shape, view.stride(), found)
    assert made > 100


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("aten.transpose.int", (0, 2)),
        ("aten.permute.default", ([2, 0, 1],)),
        ("aten.slice.Tensor", (1, 0, 2)),
        ("aten.select.int", (1, 1)),
        ("aten.expand.default", ([5, -1, -1, -1],)),
        ("aten.split.Tensor", (1, 1)),
    ],
)
def test_views_lie_as_those_that_pytorch_makes(op: str, arguments: tuple[object, ...]) -> None:
    for x in (torch.randn(2, 3, 4), torch.randn(4, 2, 3).permute(1, 2, 0), torch.randn(2, 3, 9)[..., 1:5]):
        made = getattr(getattr(torch.ops.aten, op.split(".")[1]), op.split(".")[2])(x, *arguments)
        results = [made] if isinstance(made, torch.Tensor) else list(made)
        typed = tuple(tuple(a) if isinstance(a, list) else a for a in arguments)
        call = Call(op=op, arguments=(tensor_type(x), *typed), keywords=(), results=tuple(map(tensor_type, results)))
        rule = RULES[op].build(call)
        for place, result in enumerate(results):
            assert same(result.shape, viewed(rule, 0, place, x.stride()), result.stride())


def test_results_of_elementwise_operators_lie_as_those_that_pytorch_makes() -> None:
    for x in tensors():
        assert same(x.shape, elementwise(x.shape, [(x.shape, x.stride())]), x.tanh().stride())
        for y in (torch.randn(x.shape), x.mean(0, keepdim=True), torch.randn(x.shape[-1]), torch.randn(())):
            for one, other in ((x, y), (y, x)):
                made = one * other
                given = [(t.shape, t.stride()) for t in (one, other)]
                assert same(made.shape, elementwise(made.shape, given), made.stride()), given


def test_what_is_folded() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert folded(x.shape, x.stride(), kept=1)
    assert folded(x[..., :2].shape, x[..., :2].stride(), kept=1)
    turned = x.transpose(1, 2)
    assert not folded(turned.shape, turned.stride(), kept=2)
    assert spread((7, 2, 3), (2, 1), (1, 1)) == (0, 1, 0)
