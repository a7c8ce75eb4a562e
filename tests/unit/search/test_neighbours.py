"""Numbers nearby that divide better than those that were asked for: which they are, and what is said of them."""

import pytest

import planner
from planner.report.search import neighbour_text
from planner.strategy_search.refinement.neighbours import WORTH, better_batch, better_devices, divided
from planner.strategy_search.request.space import FREE, Pinned
from planner.strategy_search.result import SearchResult
from tests.unit.search.cases import cluster_of, traced


@pytest.mark.parametrize(
    ("batch", "devices", "better"),
    [(97, 8, 96), (100, 8, 96), (103, 8, 104), (97, 512, 96), (96, 8, None), (64, 512, None), (5, 8, None), (7, 8, 8)],
)
def test_the_nearest_batch_of_which_the_devices_share_most(batch: int, devices: int, better: int | None) -> None:
    assert better_batch(batch, devices) == better


@pytest.mark.parametrize(
    ("devices", "better"), [(7, 8), (8, None), (56, 64), (88, 96), (1000, 1024), (24, None), (1, None)]
)
def test_the_nearest_number_of_devices_that_cuts_most_of_the_weights(devices: int, better: int | None) -> None:
    """Weights of 32 x 64 and the like, on nodes of 8."""
    found = better_devices(traced("llama-4"), cluster_of("h100-80gb", devices))
    assert (None if found is None else found.devices) == better


def test_weights_are_divided_along_all_of_their_dims() -> None:
    assert divided(traced("chain"), 32) == 1.0
    assert divided(traced("chain"), 7) == pytest.approx(1 / 7)


def _searched(batch: int, pinned: Pinned = FREE) -> SearchResult:
    return planner.search("bert-large+num_layers=2", "a100-80gb", devices=8, global_batch=batch, pinned=pinned)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_batch_that_divides_badly_has_a_better_one_beside_it() -> None:
    odd, even = _searched(17), _searched(16)
    (near,) = odd.neighbours
    assert (near.global_batch, near.devices) == (16, 8)
    assert even.plan.prediction.step_seconds <= near.step_seconds * (1 + 1e-9)
    assert near.samples_per_second == pytest.approx(16 / near.step_seconds)
    assert near.gain == pytest.approx(near.samples_per_second / odd.plan.prediction.samples_per_second - 1)
    assert near.gain > WORTH
    assert not even.neighbours
    assert not _searched(17, Pinned(micro_batches=1)).neighbours  # as was decided


def test_what_is_said_is_no_more_than_what_was_found() -> None:
    said = neighbour_text((97, 8), (96, 8), 9.879, 0.17146)
    assert "97 samples on 8 devices" in said
    assert "--global-batch 96" in said
    assert "at most 9.88 s" in said
    assert "at least 17.1% more samples a second" in said
    said = neighbour_text((352, 88), (384, 96), 29.46, 0.0949)
    assert "--devices 96 --global-batch 384" in said
    assert "9.4% more samples a second on each device" in said
