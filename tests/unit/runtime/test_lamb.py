"""LAMB on weights in pieces, on weights of zeros, and on narrow ones."""

import torch

from runtime.optimizers.lamb import Lamb

SETTINGS = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}


def stepped(weights: list[torch.Tensor], gradients: list[torch.Tensor], **more: object) -> list[torch.Tensor]:
    optimizer = Lamb(weights, **SETTINGS, **more)  # type: ignore[arg-type]
    for _ in range(3):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
    return weights


def test_pieces_with_the_sums_of_the_whole_take_its_step() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(6, 4, generator=generator) for _ in range(2))
    (whole,) = stepped([weight.clone()], [gradient])
    cut = [piece.clone() for piece in weight.split([1, 5])]
    pieces = stepped(cut, list(gradient.split([1, 5])), total=lambda squares: squares.sum(0).expand_as(squares))
    torch.testing.assert_close(torch.cat(pieces), whole)
    alone = torch.cat(stepped([piece.clone() for piece in weight.split([1, 5])], list(gradient.split([1, 5]))))
    assert not torch.allclose(alone, whole)


def test_a_step_is_as_long_as_the_weight() -> None:
    weight = torch.tensor([3.0, 4.0])
    (after,) = stepped([weight.clone()], [torch.tensor([1e-3, -2e-3])])
    longest = 5.0
    for _ in range(3):
        longest *= 1.1
    assert float((after - weight).norm()) <= longest - 5.0


def test_a_weight_of_zeros_takes_the_step_of_adam() -> None:
    (after,) = stepped([torch.zeros(3)], [torch.tensor([1.0, -1.0, 0.0])])
    assert torch.isfinite(after).all()
    assert after[0] < 0 < after[1]
    assert after[2] == 0
