"""Sequences that are split: attention by a ring, by heads, by both, alone and together with other parallelism. Loss and
gradients are those of the model that was not split."""

from typing import Any

import pytest
import torch

from planner.strategy_search.request.space import Pinned
from tests.distributed.hops import work_of_hops
from tests.long_lists import first, pairs, rarely

TOLERANCE = 1e-5
KEY_HEADS = ("llama", "llama-heads", "llama-one", "llama-two")  # grouped, as many as heads, one, fewer than devices
SPLITS: dict[str, dict[str, Any]] = {
    "ring": {"context": 4, "context_by": "ring"},
    "contiguous ring": {"context": 4, "context_by": "ring", "zigzag": False},
    "hybrid": {"context": 4, "context_by": "hybrid", "ulysses": 2},
    "heads": {"context": 4, "context_by": "heads"},
    "ring of 2": {"context": 2, "context_by": "ring"},
    "2 by heads": {"context": 2, "context_by": "heads"},
}
WITH: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "sequence parallel": {"tensor": 2, "sequence_parallel": True},
    "ZeRO 3": {"data": 2, "zero": 3},
    "ZeRO 1, all recomputed": {"data": 2, "zero": 1, "recompute": "full"},
    "ZeRO 2, some recomputed": {"data": 2, "zero": 2, "recompute": "selective"},
    "pipeline": {"pipeline": 2, "micro_batches": 2},
}
INSIDE = {"ring": "k@q", "hybrid": "k@q", "contiguous ring": "k@q", "ring of 2": "k@q"}
ALONE = dict.fromkeys(
    (
        ("llama", "ring"),
        ("llama-two", "heads"),
        ("llama-one", "hybrid"),
        *((m, s) for m in KEY_HEADS for s in list(SPLITS)[:4]),
    )
)
USUAL = ("llama", "ring of 2", "ZeRO 2, some recomputed")
TOGETHER = [
    USUAL,
    *(
        case if needed else rarely([case])[0]
        for case, needed in pairs(KEY_HEADS, list(SPLITS)[4:], WITH)
        if case != USUAL
    ),
]


def check(found: list[tuple[float, set[str], list[str]]], split: str) -> None:
    for error, factors, orders in found:
        assert error < TOLERANCE
        assert ("k@q" in factors) == (split in INSIDE)
        assert ("zigzag" in orders) == (split in INSIDE and split != "contiguous ring")


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("model", "split"), first(2, ALONE))
def test_a_sequence_that_is_split_changes_nothing(pool, model: str, split: str) -> None:
    check(pool.run("tasks_context", "parity", model, 4, Pinned(**SPLITS[split], micro_batches=4)), split)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("model", "split", "other"), first(1, TOGETHER))
def test_nor_does_it_together_with_other_parallelism(pool, model: str, split: str, other: str) -> None:
    check(pool.run("tasks_context", "parity", model, 4, Pinned(**{**SPLITS[split], **WITH[other]})), split)


@pytest.mark.thorough
def test_tensor_parallelism_over_more_devices_than_key_heads(pool) -> None:
    """Every device has the query heads of one key head, and reads that one of keys that are whole."""
    for error, factors, _ in pool.run("tasks_context", "parity", "llama-two", 4, Pinned(tensor=4)):
        assert error < TOLERANCE
        assert factors == {"r"}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("model", KEY_HEADS)
def test_pairs_of_devices(pair, model: str) -> None:
    for split in ("ring of 2", "2 by heads"):
        check(pair.run("tasks_context", "parity", model, 2, Pinned(**SPLITS[split], micro_batches=4)), split)


@pytest.mark.thorough
def test_an_axis_in_zigzag_order_reads_as_the_same_plan_in_contiguous_order(pool) -> None:
    """What a plan file says of the order is all there is to it."""
    pinned = Pinned(context=4, context_by="ring", micro_batches=4)
    for error, _, orders in pool.run("tasks_context", "parity", "llama", 4, pinned, "contiguous"):
        assert error < TOLERANCE
        assert orders == ["contiguous"]


NUMERICS = [
    ((2, 4, 2, 16, 8, 8), True, True, torch.float32),
    ((1, 4, 4, 16, 8, 6), True, True, torch.float64),  # values that are narrower than keys: no fused kernel
    ((2, 4, 1, 16, 8, 8), False, False, torch.float32),
    ((2, 4, 2, 16, 8, 8), True, False, torch.float32),
    ((1, 6, 2, 8, 4, 8), False, False, torch.float64),
    ((2, 4, 2, 64, 16, 16), True, True, torch.bfloat16),
    ((2, 4, 2, 32, 8, 8), {"back": 5, "ahead": 0, "prefix": 0}, True, torch.float64),
    ((1, 4, 4, 32, 8, 6), {"back": None, "ahead": 0, "prefix": 9}, True, torch.float64),
    ((2, 4, 1, 32, 8, 8), {"back": 9, "ahead": 3, "prefix": 0}, False, torch.float64),
]


@pytest.mark.parametrize(("shape", "causal", "zigzag", "dtype"), NUMERICS, ids=str)
def test_a_ring_computes_what_attention_to_everything_does(
    pool, shape: tuple[int, ...], causal: bool | dict[str, int | None], zigzag: bool, dtype: torch.dtype
) -> None:
    most = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    for errors in pool.run("tasks_context", "ring_numerics", shape, causal, zigzag, dtype):
        assert max(errors) < most, errors


def test_pieces_in_zigzag_order_come_back_in_natural_order(pool) -> None:
    assert all(pool.run("tasks_context", "reordered", 16))


def test_in_zigzag_order_every_hop_of_every_device_is_the_same_work() -> None:
    balanced = work_of_hops(4, 8, zigzag=True)
    assert {work for hops in balanced for work in hops} == {32.0}
    uneven = [sum(hops) for hops in work_of_hops(4, 8, zigzag=False)]
    assert uneven == [(2 * place + 1) * 32.0 for place in range(4)]
    assert sum(uneven) == sum(map(sum, balanced))
