"""Products by einsum keep their tensors as they came, and have the gradients of PyTorch's."""

import pytest
import torch

from runtime.ops.contraction import product

CALLS = [
    ("bsh,ehf->bsef", (2, 3, 4), (5, 4, 6)),
    ("bhqk,bkhd->bqhd", (2, 3, 4, 5), (2, 5, 3, 6)),
    ("...i,oi->...o", (2, 3, 4), (5, 4)),
    ("bld,dn->bldn", (2, 3, 4), (4, 5)),
    ("ij,jk", (2, 3), (3, 4)),
    ("ij,ij->i", (2, 3), (2, 1)),  # summed, and of one element there
    ("ij,ij->ij", (2, 3), (2, 1)),  # broadcast
    ("ij,jk->k", (2, 3), (3, 4)),  # summed in one alone
    ("bseh,bse->bsh", (2, 3, 4, 5), (2, 3, 4)),  # a gradient without a sum
    ("abc,cb->a", (2, 3, 4), (4, 3)),
    ("abc,cb->a", (2, 3, 4), (4, 1)),
    (",->", (), ()),
    ("bii,bj->ji", (2, 3, 3), (2, 4)),
]


@pytest.mark.parametrize(("equation", "first", "second"), CALLS, ids=[equation for equation, *_ in CALLS])
@pytest.mark.parametrize("taking", [(True, True), (True, False), (False, True)], ids=["both", "first", "second"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_results_and_gradients_are_those_of_pytorch(
    equation: str, first: tuple[int, ...], second: tuple[int, ...], taking: tuple[bool, bool], dtype: torch.dtype
) -> None:
    tensors = [torch.randn(shape, dtype=dtype) for shape in (first, second)]
    made = []
    for function in (torch.einsum, lambda text, *given: product(text, given)):
        given = [one.clone().requires_grad_(wants) for one, wants in zip(tensors, taking, strict=True)]
        result = function(equation, *given)
        result.square().sum().abs().backward()
        made.append((result.detach(), *(one.grad for one in given)))
    for expected, found in zip(*made, strict=True):
        assert (expected is None) == (found is None)
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert made[0][0].stride() == made[1][0].stride()


def test_what_is_kept_are_the_tensors_themselves() -> None:
    """PyTorch keeps a permuted copy of the second, which no collective could bring again."""
    a, b = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 4, 6, requires_grad=True)

    def kept(function: object) -> set[int]:
        found: set[int] = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            found.add(tensor.untyped_storage().data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            assert callable(function)
            function()
        return found

    own = {a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr()}
    assert kept(lambda: product("bsh,ehf->bsef", (a, b))) == own
    assert kept(lambda: torch.einsum("bsh,ehf->bsef", a, b)) != own
