"""Checksums of tensors, and what a rank by itself can check."""

import pytest
import torch

from planner.errors import StrategyError
from planner.plan.binding.bind import bind
from runtime.comm.device_mesh import Communicators, rank_mesh
from runtime.step.checking import LayoutCheck
from runtime.step.checksums import AT_ONCE, Checksums
from tests.distributed import plans
from tests.distributed.allocated import Allocated
from tests.refusals import refused

X = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)


def checksum(tensor: torch.Tensor, at_once: int | None = None) -> torch.Tensor:
    return Checksums(tensor.device, at_once).of(tensor)


def test_a_checksum_sees_values_places_and_what_is_not_finite() -> None:
    swapped = X.flatten().clone()
    swapped[[3, 7]] = swapped[[7, 3]]
    others = [
        X + 0.001,
        -X,
        swapped.view_as(X),
        X.transpose(0, 1),
        X.clone().index_fill_(2, torch.tensor([0]), torch.inf),
    ]
    sums = [tuple(checksum(tensor).tolist()) for tensor in (X, *others)]
    assert len(set(sums)) == len(sums)
    nan = X.clone().index_fill_(2, torch.tensor([0]), torch.nan)
    assert checksum(nan).equal(checksum(nan.clone()))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("at_once", [1, 4, 5, 23])
def test_a_checksum_does_not_depend_on_strides_or_on_pieces(dtype: torch.dtype, at_once: int) -> None:
    tensor = (X % 5).to(dtype)
    whole = checksum(tensor)
    assert checksum(tensor.transpose(0, 2).contiguous().transpose(0, 2)).equal(whole)
    torch.testing.assert_close(checksum(tensor, at_once), whole)


@pytest.mark.parametrize("transposed", [False, True])
def test_checksums_take_three_buffers_whatever_they_look_at(transposed: bool) -> None:
    """Before, each of a dozen steps made another tensor of a piece: a third of a GiB beside a model that fills its
    devices."""
    piece = AT_ONCE["cpu"]
    tensor = torch.ones(50, piece // 8, dtype=torch.float32)
    tensor = tensor.t() if transposed else tensor
    with Allocated() as peak:
        sums = Checksums(tensor.device)
        found = [sums.of(tensor) for _ in range(3)]
    assert found[0].tolist() == found[2].tolist()
    given = 4 * piece if transposed else 0  # pieces that lie otherwise are copied before they are read
    assert peak.most <= 3 * 8 * piece + 8 * 4093 + 1024 * 24 + given + 4096 + tensor.nbytes


def test_a_tensor_of_another_dtype_or_shape_is_named() -> None:
    plan = plans.make_plan(
        "gpt", plans.mesh_of(1), lambda name, rule, mesh: (None,), plans.store_zero1, plans.load_samples
    )
    bound = bind(plan, plans.traced("gpt"), plans.BATCH)
    place = rank_mesh(plan.mesh, torch.device("cpu"), known=Communicators())
    for moment, tensor, facts in (
        ((1, 0, 5, 1), X.double(), ("x", "float64 (2, 3, 4)", "float32 (2, 3, 4)", "a reason")),
        ((1, 0, 2, 1), X[0], ("x", "float32 (3, 4)", "float32 (2, 3, 4)", "a reason")),
    ):
        check = LayoutCheck(bound=bound, place=place)
        check.verify()
        check.expect(moment, tensor, "result 'x'", "a reason", ((2, 3, 4), "float32"))
        with refused(StrategyError, *facts):
            check.verify()
