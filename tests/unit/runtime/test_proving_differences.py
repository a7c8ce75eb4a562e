"""How far what ranks compute is from what it should be: what is missing, zero or no number counts as different."""

import math

import pytest
import torch

from runtime.proving.differences import Differences, changes, floor_of, is_something, together, worst

WANTED = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1e-9])}


def test_the_worst_tensor_is_named() -> None:
    found = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([1e-9])}
    assert worst(found, WANTED) == (pytest.approx(0.1), "a")
    assert together(found, WANTED) == pytest.approx(0.1)


def test_rounding_of_what_is_nearly_zero_does_not_count() -> None:
    found = {"a": WANTED["a"], "b": torch.tensor([2e-9])}
    assert worst(found, WANTED)[0] == pytest.approx(1.0)
    assert worst(found, WANTED, floor_of(WANTED))[0] < 1e-4


def test_what_is_missing_is_infinitely_different() -> None:
    assert worst({"a": WANTED["a"]}, WANTED) == (math.inf, "b")
    assert together({"a": WANTED["a"], "c": WANTED["b"]}, WANTED) == math.inf
    assert worst({"a": torch.zeros(3), "b": WANTED["b"]}, WANTED) == (math.inf, "a")


def test_zeros_and_no_numbers_prove_nothing() -> None:
    zeros = {"a": torch.zeros(2)}
    assert not is_something(zeros)
    assert not is_something({"a": torch.tensor([math.nan])})
    assert together(zeros, zeros) == math.inf
    assert is_something(changes({"a": torch.ones(2)}, zeros))


@pytest.mark.parametrize(("precision", "gradient", "failures"), [
    ("fp64", 1e-5, ()), ("fp32", 1e-5, ()), ("fp32", 1e-2, ("gradient",)),
    ("fp64", 1e-2, ("gradient",)), ("bf16", 1e-2, ()), ("bf16", 0.5, ("gradient",)),
    ("fp64", math.nan, ("gradient",)), ("fp64", math.inf, ("gradient",)),
])  # fmt: skip
def test_what_is_too_far(precision: str, gradient: float, failures: tuple[str, ...]) -> None:
    found = Differences(
        precision=precision, steps=2, parameters=2, loss=1e-7, gradient=gradient, worst_gradient="a", change=None,
        worst_change="", buffer=None,
    )  # fmt: skip
    assert found.failures == failures
    assert found.agrees == (not failures)


@pytest.mark.parametrize(("fp8", "gradient", "agrees"), [(True, 0.2, True), (False, 0.2, False), (True, 0.5, False)])
def test_gradients_in_16_bits_may_differ_by_more_in_fp8(fp8: bool, gradient: float, agrees: bool) -> None:
    found = Differences(
        precision="bf16", steps=2, parameters=2, loss=1e-7, gradient=gradient, worst_gradient="a", change=None,
        worst_change="", buffer=None, fp8=fp8,
    )  # fmt: skip
    assert found.agrees == agrees
