"""Padding that is asked for from Python, and what engines say to it."""

import pytest

import planner
from planner.errors import RequestError
from tests.refusals import refused

JOB = {"devices": 4, "global_batch": 97, "seq_len": 32, "time_limit": 60}


@pytest.mark.slow
def test_a_batch_is_padded_from_python() -> None:
    degrees = {"data": 4, "tensor": 1, "pipeline": 1, "micro_batches": 1, "zero": 0, "recompute": "none"}
    job = {**JOB, "update": {"gathers": "each"}}
    plan = planner.search("llama-tiny", "cpu", pinned=degrees, pad={"batch": 4}, **job).plan
    assert (plan.training.global_batch, plan.training.padded_batch) == (97, 100)
    with pytest.warns(
        UserWarning, match=r"pinned=\{'data': 4\} does not divide the global batch 97, which gets 3 samples"
    ):
        same = planner.search("llama-tiny", "cpu", pinned=degrees, **job).plan
    assert same.training == plan.training
    with refused(RequestError, "data", 4, 97, "pad={'batch': 4}"):
        planner.search("llama-tiny", "cpu", pinned=degrees, pad={"batch": 1}, **job)


@pytest.mark.parametrize(
    ("pad", "facts"),
    [({"batch": 0}, ("batch", 0)), ({"lm_head.weight": "4"}, ("lm_head.weight", "4")), ("all", ("pad", "all", "auto"))],
)
def test_what_is_no_padding_is_refused_by_name(pad: object, facts: tuple[object, ...]) -> None:
    with refused(RequestError, *facts):
        planner.search("llama-tiny", "cpu", pad=pad, **JOB)


def test_one_of_two_ways_to_pad_the_batch() -> None:
    with refused(RequestError, "pad", "batch", "update", "padding_samples"):
        planner.search("llama-tiny", "cpu", pad={"batch": 4}, update={"padding_samples": 3}, **JOB)


@pytest.mark.parametrize("engine", ["megatron", "deepspeed", "torchtitan"])
def test_engines_are_given_the_nearest_batches(engine: str) -> None:
    degrees = {"data": 4, "micro_batches": 2}
    with refused(RequestError, engine, 97, 96, 104):
        planner.search("llama-tiny", "h100", pinned=degrees, engine=engine, pad={"batch": 8}, **JOB)
    with refused(RequestError, engine, "pad auto"):
        planner.search("llama-tiny", "h100", engine=engine, pad="auto", **JOB)


@pytest.mark.thorough
@pytest.mark.slow
def test_batches_of_replicas_are_not_padded_where_that_is_left_to_the_search() -> None:
    """18 samples divide among two replicas; padded to 20 for four devices, one would have fewer."""
    plan = planner.search(
        "llama-tiny", "cpu", devices=4, seq_len=32, global_batch=18, pad="auto", per_replica=["*cross_entropy*=2"]
    ).plan
    assert (plan.training.update.replicas, plan.training.update.padding_samples) == (2, 0)
