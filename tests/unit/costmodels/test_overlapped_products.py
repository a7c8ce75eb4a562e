"""Chunks of a collective and its product: as an event simulation has them, and never less than either alone."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from costmodels import CostModelError, arriving_time, leaving_time
from tests.refusals import refused

SECONDS = st.floats(0.0, 10.0)
CHUNKS = st.integers(1, 8)


def simulated(sent: Sequence[float], product: Sequence[float], *, arrives: bool, under: float) -> float:
    """One link and one device, each of which takes its chunks in order as soon as they are there."""
    link = device = 0.0
    for one, other in zip(sent, product, strict=True):
        if arrives:
            link += one
            device = max(device, link) + other
        else:
            device += other
            link = max(link, device) + one
    return max(link, device + under)


@given(SECONDS, SECONDS, CHUNKS, SECONDS)
def test_it_is_what_a_simulation_says(product: float, sent: float, chunks: int, under: float) -> None:
    both = [sent] * chunks, [product] * chunks
    assert abs(arriving_time(product, sent, chunks, under) - simulated(*both, arrives=True, under=under)) < 1e-9
    assert abs(leaving_time(product, sent, chunks, under) - simulated(*both, arrives=False, under=under)) < 1e-9


@given(SECONDS, SECONDS, CHUNKS, SECONDS)
def test_no_more_is_hidden_than_the_shorter(product: float, sent: float, chunks: int, under: float) -> None:
    apart = chunks * (product + sent) + under
    for found in (arriving_time(product, sent, chunks, under), leaving_time(product, sent, chunks, under)):
        assert max(chunks * product + under, chunks * sent) - 1e-9 <= found <= apart + 1e-9


def test_one_chunk_hides_only_what_leaves_under_other_work() -> None:
    assert arriving_time(2.0, 3.0, 1, 4.0) == 9.0
    assert leaving_time(2.0, 3.0, 1, 0.0) == 5.0
    assert leaving_time(2.0, 3.0, 1, 4.0) == 6.0


def test_no_chunk_is_an_error() -> None:
    with refused(CostModelError, 0):
        arriving_time(1.0, 1.0, 0)
    with refused(CostModelError, 0):
        leaving_time(1.0, 1.0, 0)
