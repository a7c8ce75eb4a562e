"""Laws of the time of experts, and what it is made of."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from costmodels import (
    CostModelError,
    ExpertsShape,
    best_rate,
    experts_backward_time,
    experts_time,
    matmul_time,
    once_share,
)
from hardware_profiles import load_profile
from tests.refusals import refused

DEVICE = load_profile("h100-80gb").device
MIXTRAL = ExpertsShape(tokens=4096.0, choices=2.0, experts=8.0, width=14336.0, hidden=4096.0)
SHAPES = [
    ExpertsShape(tokens=float(tokens), choices=float(choices), experts=float(count), width=float(width), hidden=2048.0)
    for tokens, choices, count, width in itertools.product((1, 7, 512, 8192), (1, 8), (1, 8, 128), (64, 768))
]


def seconds(shape: ExpertsShape) -> float:
    backward = experts_backward_time(shape, "bf16", DEVICE, rows=True, weights=True)
    return float(experts_time(shape, "bf16", DEVICE) + backward)


def test_most_of_a_large_one_are_its_products() -> None:
    rows = 4096 * 2 / 8
    products = matmul_time(rows, 2 * 14336, 4096, 8, "bf16", DEVICE) + matmul_time(rows, 4096, 14336, 8, "bf16", DEVICE)
    assert products < experts_time(MIXTRAL, "bf16", DEVICE) < 1.2 * products


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_more_takes_longer_but_not_more_than_its_share(shape: ExpertsShape) -> None:
    for name in ("tokens", "choices", "width"):
        for factor in (2, 3):
            larger = replace(shape, **{name: factor * getattr(shape, name)})
            assert seconds(shape) <= seconds(larger) * (1 + 1e-12)
    for factor in (2, 3, 16):
        assert seconds(replace(shape, tokens=factor * shape.tokens)) <= factor * seconds(shape) * (1 + 1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_is_faster_than_the_best_rate(shape: ExpertsShape) -> None:
    work = 6 * shape.tokens * shape.choices * shape.width * shape.hidden
    assert seconds(shape) >= 3 * work / best_rate("experts", "bf16", DEVICE)


@pytest.mark.parametrize("shape", SHAPES[::7], ids=str)
def test_one_first_matrix_takes_less_than_two_and_more_than_half(shape: ExpertsShape) -> None:
    for fused in (False, True):
        one, two = (replace(shape, first=first, fused=fused) for first in (1, 2))
        assert 0.5 * seconds(two) < seconds(one) < seconds(two)


def test_imbalance_is_that_much_more_rows() -> None:
    times = [seconds(replace(MIXTRAL, imbalance=imbalance)) for imbalance in (1.0, 1.5, 2.0)]
    assert times == sorted(times)
    assert times[2] == pytest.approx(2 * times[0], rel=0.15)
    with refused(CostModelError, 0.5):
        experts_time(replace(MIXTRAL, imbalance=0.5), "bf16", DEVICE)


def test_rows_that_come_element_by_element_pass_through_memory_with_an_index_for_each() -> None:
    """38 bytes of each element of 8192 rows in both passes."""
    more = seconds(replace(MIXTRAL, besides=(38.0, 38.0))) - seconds(MIXTRAL)
    assert more > 2 * 38 * 8192 * 4096 / DEVICE.memory_bandwidth


def test_slower_products_lengthen_products_alone() -> None:
    """Forward, and in the backward pass the gradients of rows and of weights; copies and activations stay."""
    rows = 4096 * 2 / 8
    products = matmul_time(rows, 2 * 14336, 4096, 8, "bf16", DEVICE) + matmul_time(rows, 4096, 14336, 8, "bf16", DEVICE)
    slower = replace(MIXTRAL, slower=1.5)
    more = experts_time(slower, "bf16", DEVICE) - experts_time(MIXTRAL, "bf16", DEVICE)
    assert more == pytest.approx(0.5 * products, rel=1e-9)
    for wanted in ({"rows": True, "weights": False}, {"rows": False, "weights": True}):
        copies = experts_backward_time(MIXTRAL, "bf16", DEVICE, rows=False, weights=False)
        once, half_more = (experts_backward_time(one, "bf16", DEVICE, **wanted) - copies for one in (MIXTRAL, slower))
        assert half_more == pytest.approx(1.5 * once, rel=1e-9)


def test_gradients_are_paid_for_one_by_one() -> None:
    rows, weights, both = (
        float(experts_backward_time(MIXTRAL, "bf16", DEVICE, rows=wants_rows, weights=wants_weights))
        for wants_rows, wants_weights in ((True, False), (False, True), (True, True))
    )
    copies = rows + weights - both
    assert 0 < copies < min(rows, weights) < both


def test_arrays_are_as_good_as_numbers() -> None:
    names = ("tokens", "choices", "experts", "width", "hidden")
    together = ExpertsShape(**{name: np.array([getattr(shape, name) for shape in SHAPES]) for name in names})
    found = np.asarray(experts_time(together, "bf16", DEVICE))
    assert found == pytest.approx([experts_time(shape, "bf16", DEVICE) for shape in SHAPES], rel=1e-12)


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize(("groups", "chosen_groups"), [(1, 1), (4, 2), (4, 3), (2, 1)])
def test_rows_that_are_sent_once_are_counted_case_by_case(parts: int, groups: int, chosen_groups: int) -> None:
    """Three choices among eight experts in the chosen groups, each as likely: the parts that have any of them."""
    sent = []
    for some in itertools.combinations(range(groups), chosen_groups):
        legal = [expert for expert in range(8) if expert * groups // 8 in some]
        hits = [len({expert * parts // 8 for expert in three}) for three in itertools.product(legal, repeat=3)]
        sent.append(sum(hits) / len(hits))
    assert once_share(3, parts, groups, chosen_groups) * 3 == pytest.approx(sum(sent) / len(sent))


def test_groups_that_do_not_divide_parts_limit_nothing() -> None:
    assert once_share(8, 6, 4, 2) == once_share(8, 6)
    assert once_share(1, 5) == pytest.approx(1.0)
