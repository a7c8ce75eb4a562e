"""Plans that cannot be executed are refused on every rank, with the numbers that clash."""

import pytest


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("stages", "RequestError", ["for 8 devices", "2 stages", "4 processes run"]),
        ("world", "RequestError", ["for 2 devices", "4 processes run"]),
        ("fingerprint", "PlanFileError", ["another graph", "fingerprint"]),
        ("ranks", "RequestError", ["the ranks were given different batches", "runtime.loader"]),
        ("batch", "RequestError", ["(3, 8)", "(4, 8)", "global batch of 4"]),
    ],
)
def test_a_plan_that_cannot_run_is_refused(pool, case: str, kind: str, words: list[str]) -> None:
    for name, message in pool.run("tasks", "refusal", case):
        assert name == kind, message
        assert all(word in message for word in words), message


def test_a_failing_rank_ends_the_pool_and_shows_its_traceback(pool) -> None:
    with pytest.raises(pytest.fail.Exception, match="rank 2 has a problem"):
        pool.run("tasks", "raise_on_one_rank")
    assert pool.run("tasks", "refusal", "stages")[0][0] == "RequestError", "the next test gets a new pool"
