"""Places in the groups of a plan, without other processes."""

from weakref import WeakValueDictionary

import pytest

import runtime
from planner.errors import RequestError
from runtime.comm import groups
from tests.contract.one_rank import one_rank
from tests.distributed import plans
from tests.refusals import refused


def test_places_in_a_plan_of_many_ranks() -> None:
    """Rank 1 of 2 x 2 in the second of two stages: rank 6 of all."""
    plan = plans.hand_plan("megatron", "llama", plans.mesh_of(2, 2), stages=(1, 1))
    with one_rank("llama", plan, plans.traced("llama"), stage=1) as (step, _):
        assert step.groups.ranks("world") == tuple(range(8))
        assert step.groups.ranks("pipeline") == (2, 6)
        assert step.groups.ranks("data") == (4, 6)
        assert step.groups.ranks("tensor") == (6, 7)
        places = {name: (runtime.get_rank(name), runtime.get_group_size(name)) for name in step.groups.names}
        assert places["pipeline"] == (1, 2)
        assert places["tensor"] == (0, 2)
        assert places["context"] == (0, 1)
        assert (runtime.get_rank(), runtime.get_group_size()) == (6, 8)
        assert runtime.get_group("context") is None
        with refused(RequestError, "tensors", "tensor"):
            runtime.get_rank("tensors")


def test_without_a_plan_there_is_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_LAST", WeakValueDictionary())  # steps of other tests may still be there
    assert (runtime.get_rank(), runtime.get_group_size()) == (0, 1)
    variables = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "80"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (runtime.get_rank(), runtime.get_group_size()) == (2, 4)
    with refused(RequestError, "data", "runtime.parallelize"):
        runtime.get_group_size("data")
    with refused(RequestError, "world", "runtime.parallelize"):
        runtime.get_group("world")
