"""Nothing follows a step of a real pipeline that was left in the middle.

The rank that fails says so at once. Others wait for it as long as its process lives, and fail when that has ended."""

from collections.abc import Iterator

import pytest

from tests.distributed.conftest import WorkerPool


@pytest.fixture
def own() -> Iterator[WorkerPool]:
    """Two processes that nobody else asks anything: what they sent each other is on its way."""
    workers = WorkerPool(2)
    yield workers
    workers.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize(("failing", "passes"), [(0, 0), (0, 2), (1, 1)])
@pytest.mark.parametrize("schedule", ["1f1b", "eager_1f1b"])
def test_all_ranks_say_what_to_do(own: WorkerPool, schedule: str, failing: int, passes: int) -> None:
    settings = {"micro_batches": 4, "schedule": schedule}
    own._start()
    for connection in own._connections:
        connection.send(("tasks_aborted", "aborted", ("llama64", settings, failing, passes)))
    assert own._connections[1 - failing].poll(45), "the other rank goes on waiting"
    kind, said, _ = own._connections[1 - failing].recv()
    own._processes[failing].join(5)
    assert (kind, own._processes[failing].exitcode) == ("done", 0), said
    assert said[0]  # in words of gloo
    for after in said[1:]:
        assert after.startswith("RunError: an earlier step was aborted by RuntimeError")
        assert "start the processes again" in after
