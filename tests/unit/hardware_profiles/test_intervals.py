"""Intervals around predictions, from the errors of published runs."""

import math
import random

import pytest

from hardware_profiles import profile_names
from hardware_profiles.intervals import (
    FEWEST,
    NEW,
    TAIL,
    dump_spreads,
    is_known,
    machines_of,
    spread_of,
    spreads_of,
    table,
)
from tests.benchmarks import bench_sources


def normal(count: int, width: float, seed: int = 0) -> list[float]:
    made = random.Random(seed)
    return [made.gauss(0.0, width) for _ in range(count)]


def test_a_class_has_the_quantiles_of_its_runs() -> None:
    errors = [("a100-80gb", False, math.log(value), "one") for value in (0.5, *[1.0] * 98, 2.0)]
    one = spread_of("a100-40gb", False, spreads_of(errors))
    assert (one.low, one.high) == pytest.approx((1.0, 1.0))
    assert one.runs == 100


@pytest.mark.parametrize("width", [0.05, 0.2])
def test_as_many_of_further_runs_lie_inside_as_should(width: float) -> None:
    one = spread_of("h100-80gb", False, spreads_of(("h100-80gb", False, e, "one") for e in normal(400, width)))
    further = normal(4000, width, seed=1)
    share = sum(one.low <= math.exp(error) <= one.high for error in further) / len(further)
    assert share == pytest.approx(1 - 2 * TAIL, abs=0.05)


def test_a_source_with_many_runs_does_not_decide_alone() -> None:
    """Of 100 runs that are right and four that are not: whoever asks may have a source like either."""
    errors = [("a100-80gb", False, 0.0, "many")] * 100 + [("a100-80gb", False, math.log(2.0), "few")] * 4
    assert spread_of("a100-80gb", False, spreads_of(errors)).high == pytest.approx(2.0)
    assert spread_of("a100-80gb", False, spreads_of([(*one[:3], "all") for one in errors])).high == pytest.approx(1.0)


def test_sources_that_differ_widen_the_intervals_of_other_machines() -> None:
    """The means of dense runs on GPUs are pooled; how much runs of one source scatter is each family's own."""
    quiet = [("h100-80gb", False, error, "quiet") for error in normal(50, 0.01)]
    apart = [("a100-80gb", False, mean + e, f"{mean}") for mean in (-0.2, 0.2) for e in normal(50, 0.1)]
    alone, beside = spread_of("h100-80gb", False, spreads_of(quiet)), spreads_of([*quiet, *apart])
    assert alone.high < 1.03 < 1.2 < spread_of("h100-80gb", False, beside).high
    assert spread_of("h100-80gb", False, beside).high < spread_of("a100-80gb", False, beside).high


def test_the_mean_of_few_runs_says_little() -> None:
    """A run that is 0.3 off where runs of one source differ by 0.2 is taken for chance."""
    errors = [("a100-80gb", False, error, str(at % 4)) for at, error in enumerate(normal(400, 0.2))]
    known = spread_of("a100-80gb", False, spreads_of(errors)).high
    assert spread_of("a100-80gb", False, spreads_of([*errors, ("h100-80gb", False, 0.3, "one")])).high < 1.05 * known


def test_what_nobody_measured_is_twice_as_uncertain() -> None:
    spreads = spreads_of([("a100-80gb", False, error, "one") for error in normal(200, 0.1)])
    known, other = spread_of("a100-80gb", False, spreads), spread_of("my-machine", False, spreads)
    assert math.log(other.high) == pytest.approx(2 * math.log(known.high))
    assert math.log(other.low) == pytest.approx(2 * math.log(known.low))
    assert spread_of("a100-80gb", True, spreads) == other  # no runs with experts
    few = [("a100-80gb", True, 0.0, "one")] * (FEWEST - 1)
    assert ("ampere", True) not in spreads_of([*few, *(("h100-80gb", False, e, "one") for e in normal(50, 0.1))])


def test_a_source_that_is_not_known_has_the_spread_of_first_predictions() -> None:
    """Three sources that nobody had looked at were off by -30, 0 and +30%, those that are known by nothing."""
    known = [("h100-80gb", False, error, "known") for error in normal(50, 0.01)]
    first = [("a100-80gb", False, mean + e, f"{mean}") for mean in (-0.3, 0.0, 0.3) for e in normal(30, 0.02)]
    spreads = spreads_of(known, first)
    own, new = spread_of("h100-80gb", False, spreads, known=True), spread_of("h100-80gb", False, spreads)
    assert own.high < 1.03
    assert (new.low, new.high) == pytest.approx((math.exp(-0.3), math.exp(0.3)), rel=0.05)
    assert (own.runs, new.runs) == (50, 90)
    other = spread_of("my-machine", False, spreads)
    assert (other.low, other.high, other.runs) == (new.low, new.high, 0)  # twice the known ones is less


def test_experts_have_the_spread_of_all_first_predictions() -> None:
    known = [("h100-80gb", at % 2 == 0, error, "known") for at, error in enumerate(normal(50, 0.01))]
    dense = [("h100-80gb", False, 0.1, "dense")] * 3
    sparse = [("h100-80gb", True, -0.5, "sparse"), *[("ascend-910b-64gb", False, -0.2, "npu")] * 3]
    spreads = spreads_of(known, [*dense, *sparse])
    assert spread_of("h100-80gb", False, spreads).runs == 3
    assert spread_of("h100-80gb", True, spreads).runs == 7


def test_intervals_hold_in_sources_that_were_left_out() -> None:
    """What the issue of the interval asks: of runs of sources that the interval has not seen, predicted first."""
    inside = [bench_sources.new_left_out(name) for name in {source for *_, source in bench_sources.first_errors()}]
    share = sum(map(sum, inside)) / sum(map(len, inside))
    by_source = sum(sum(some) / len(some) for some in inside) / len(inside)
    assert 0.75 <= share <= 0.85
    assert 0.75 <= by_source <= 0.85
    few = [some for some in inside if sum(some) < 0.6 * len(some)]
    assert len(few) <= 5  # eight where ends were quantiles of means and deviations, which was 8% wider


def test_the_interval_holds_in_draws_that_it_is_not_made_of() -> None:
    inside = bench_sources.held_back()
    assert len(inside) == 170
    assert sum(sum(some) / len(some) for some in inside.values()) / len(inside) >= 0.74


def test_the_interval_of_new_sources_is_the_shortest_that_holds_most_of_most() -> None:
    """Ten sources of ten runs each: one is far off, and of the others a run each."""
    near = [("h100-80gb", False, at / 100, f"{source}") for source in range(9) for at in range(9)]
    far = [("h100-80gb", False, 1.0, f"{source}") for source in range(9)]
    other = [("h100-80gb", False, -1.0, "other")] * 10
    found = spreads_of(near, [*near, *far, *other])[NEW, False]
    assert found.low == 1.0
    assert found.high == pytest.approx(math.exp(0.08))  # 0.05 holds 60% of each, but 54% in the mean
    alone = spreads_of(near, [("h100-80gb", False, 0.1, "one")])[NEW, False]
    assert (alone.low, alone.high) == pytest.approx((1.0, math.exp(0.1)))  # a prediction is in its own interval


def test_known_sources_are_those_of_the_published_runs() -> None:
    assert is_known("FlagPerf")
    assert is_known(" flagperf ")
    assert not is_known("InternEvo training performance")
    assert not is_known("")


def test_the_packaged_table_holds_for_every_profile() -> None:
    for profile in profile_names():
        for experts in (False, True):
            one = spread_of(profile, experts)
            assert 0.2 < one.low < one.high < 5
    assert machines_of("cpu") == "other"
    assert dump_spreads(table()).splitlines()[0] == "machines,experts,runs,low,high"
