"""Plans for other numbers of devices: found, kept, and refused where there can be none."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import planner.strategy_search.search
from planner.cli.main import app
from planner.errors import RequestError, RunError
from planner.plan.file import load_plan
from planner.plan.plan import Plan
from planner.sharding.update import Update
from planner.strategy_search.analysis.around import undecided
from runtime.recovery.replanning import Plans, Range, range_of
from tests.refusals import refused


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A plan of a tiny model for four devices of a CPU."""
    path = tmp_path_factory.mktemp("first") / "plan.json"
    options = ("--devices", "4", "--hardware", "cpu", "--global-batch", "8", "--data", "4", "-q", "-o", str(path))
    result = CliRunner().invoke(app, ["--model", "llama-tiny", *options])
    assert result.exit_code == 0, result.stderr
    return load_plan(path)


@pytest.mark.thorough
def test_a_plan_for_fewer_devices_trains_the_same(first: Plan, tmp_path: Path) -> None:
    plans = Plans(first, tmp_path, Range(least=2, most=4))
    found = plans.most(3)
    assert found.cluster.devices == 3
    assert found.model == first.model
    for name in ("global_batch", "precision", "optimizer"):
        assert getattr(found.training, name) == getattr(first.training, name)
    assert undecided(found.training.update) == undecided(first.training.update)
    assert plans.most(4) is first
    assert plans.most(9) is first
    assert load_plan(plans.path(3)) == found


@pytest.mark.thorough
def test_what_was_found_is_kept(first: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Plans(first, tmp_path, Range(least=2, most=4)).plan(2)

    def never(*_: object) -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr(planner.strategy_search.search, "search", never)
    assert Plans(first, tmp_path, Range(least=2, most=4)).plan(2) == found
    other = replace(first, training=replace(first.training, global_batch=16))
    with pytest.raises(AssertionError, match="searched again"):
        Plans(other, tmp_path, Range(least=2, most=4)).plan(2)


@pytest.mark.thorough
def test_where_no_plan_fits_fewer_devices_are_tried(first: Plan, tmp_path: Path) -> None:
    plans = Plans(first, tmp_path, Range(least=2, most=4))
    plans._known[3] = RequestError("8 samples are not divided by 3")
    assert plans.most(3).cluster.devices == 2
    plans._known[2] = RequestError("does not fit")
    with refused(RunError, "--elastic 2:4", "2 devices", "does not fit"):
        plans.most(3)
    with refused(RunError, "--elastic 2:4", "1 devices"):
        plans.most(1)


def test_a_plan_for_a_profile_of_ones_own_has_none_for_fewer_devices(first: Plan, tmp_path: Path) -> None:
    mine = replace(first, cluster=replace(first.cluster, profile="mine"))
    with refused(RunError, "--elastic", "mine", "packaged profile"):
        Plans(mine, tmp_path, Range(least=2, most=4)).most(2)


def test_what_cannot_be_elastic_is_refused(first: Plan, tmp_path: Path) -> None:
    with refused(RequestError, "--elastic 1:2", 4, 4, "1:4"):
        Plans(first, tmp_path, Range(least=1, most=2))
    with refused(RequestError, "--elastic", "pipedream", "--schedule 1f1b"):
        Plans(replace(first, schedule="pipedream"), tmp_path, Range(least=1, most=4))
    own = replace(first, training=replace(first.training, update=Update(buckets="none", local_parameters=("*.bias",))))
    with refused(RequestError, "--elastic", "*.bias"):
        Plans(own, tmp_path, Range(least=1, most=4))
    summed = replace(first, training=replace(first.training, update=Update(buckets="none", gradients="sum")))
    with refused(RequestError, "--elastic", "--gradients sum", "--gradients mean"):
        Plans(summed, tmp_path, Range(least=1, most=4))


@pytest.mark.parametrize("text", ["4", "0:2", "4:2", "a:b", "2:", "-1:3", "2:4:8", "99999999999:99999999999"])
def test_ranges_that_are_none(text: str) -> None:
    with refused(RequestError, f"--elastic {text}", "2:4"):
        range_of(text)


def test_a_range() -> None:
    assert range_of("2:4") == Range(least=2, most=4)
    assert str(range_of(" 8:8 ")) == "8:8"
