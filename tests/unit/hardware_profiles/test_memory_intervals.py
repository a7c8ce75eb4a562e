"""Ends of intervals of peaks: what stands behind the margin that plans leave free."""

from hardware_profiles.memory_intervals import FEWEST, OTHER, TAIL, peak_spreads, table


def test_a_stack_of_few_runs_takes_the_ends_of_all() -> None:
    few = [("few", 1.0 + run / 100) for run in range(FEWEST - 1)]
    many = [("many", 0.9 + run / 100) for run in range(FEWEST)]
    found = peak_spreads([*few, *many])
    assert set(found) == {OTHER, "many"}
    assert found["many"].high == max(ratio for _, ratio in many)
    assert found[OTHER].runs == 2 * FEWEST - 1


def test_the_largest_of_the_fewest_runs_is_exceeded_by_no_more_than_the_tail() -> None:
    assert 1 / (FEWEST + 1) <= TAIL < 1 / FEWEST


def test_packaged_stacks_have_enough_runs() -> None:
    assert all(spread.runs >= FEWEST and spread.low < 1 < spread.high for spread in table().values())
