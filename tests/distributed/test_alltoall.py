"""Plans for links or backends without the all-to-all compute what the unsharded model does, and call none."""

import pytest

from tests.distributed.conftest import WorkerPool


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "sizes"), [("llama", (2, 2)), ("mixture", (4,)), ("deepseek", (2, 2))])
def test_random_plans_without_it(pool: WorkerPool, model: str, sizes: tuple[int, ...]) -> None:
    assert max(pool.run("tasks_alltoall", "errors", model, sizes, [1, 2, 3])[0]) < 1e-4


@pytest.mark.slow
def test_the_same_plans_call_it_where_they_may(pool: WorkerPool) -> None:
    assert pool.run("tasks_alltoall", "calls", "llama", (2, 2), 1)[0] > 0
