"""Optimizers, clipping, buckets and the dtypes of gradients, against the model that is not sharded."""

import itertools

import pytest

from planner.sharding.update import Update

TOLERANCE = 1e-4
KINDS = {
    "megatron": (2, 2),
    "zero1": (4,),
    "zero2": (2, 2),
    "zero3": (4,),
    "hybrid": (2, 2),
    "random7": (2, 2),
}
CLIP = 0.5
BUCKETS = (2048, 100_000, (3, 9), (("*proj*", 1), ("*norm*", 2)))


def train(pool, *arguments: object) -> tuple[float, list[float]]:
    found = pool.run("updates", "train", *arguments)
    assert len({tuple(norms) for _, norms in found}) == 1, "ranks disagree"
    return max(error for error, _ in found), found[0][1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("clip", [None, CLIP])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb", "muon"])
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_equal_the_unsharded_optimizer(pool, kind: str, optimizer: str, clip: float | None) -> None:
    error, norms = train(pool, "llama", kind, KINDS[kind], optimizer, Update(buckets="none", clip_norm=clip))
    assert error < TOLERANCE
    assert clip is None or max(norms) > clip, "nothing was clipped"


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("kind", "optimizer"), [("hybrid", "adamw"), ("random7", "lamb")])
def test_clipped_steps_in_buckets_equal_the_unsharded_optimizer(pool, kind: str, optimizer: str) -> None:
    error, norms = train(pool, "llama", kind, KINDS[kind], optimizer, Update(clip_norm=CLIP, buckets=4096), 2, (), 5)
    assert error < TOLERANCE
    assert max(norms) > CLIP


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize(
    ("kind", "model", "stages"),
    [
        ("megatron", "llama", ()),
        ("zero3", "llama", ()),
        pytest.param("zero1", "gpt4", (2, 2), marks=pytest.mark.thorough),
        pytest.param("random7", "llama", (), marks=pytest.mark.thorough),
        pytest.param("zero2", "mixture", (), marks=pytest.mark.thorough),
    ],
)
def test_matrices_in_pieces_are_updated_as_whole_ones(pool, kind: str, model: str, stages: tuple[int, ...]) -> None:
    """Those of tensor parallelism and of ZeRO, which devices share out among them; fewer than there are devices; those
    of experts, and of blocks of several stages."""
    mesh = (2,) if stages else KINDS.get(kind, (2, 2))
    error, norms = train(pool, model, kind, mesh, "muon", Update(clip_norm=CLIP, buckets=4096), 2, stages, 5)
    assert error < TOLERANCE
    assert max(norms) > CLIP


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize(
    ("model", "sizes", "optimizer", "stages", "buckets", "owners"),
    [
        ("llama", (2, 2), "lamb", (), 4096, "parameters"),
        pytest.param("llama", (2, 2), "muon", (), 4096, "parameters", marks=pytest.mark.thorough),
        pytest.param("gpt4", (2,), "adamw", (2, 2), "none", "parameters", marks=pytest.mark.thorough),
        pytest.param("llama", (4,), "adamw", (), "none", "servers", marks=pytest.mark.thorough),
        ("llama", (2, 2), "adamw", (), 4096, "servers"),
        pytest.param("gpt4", (2,), "sgd", (2, 2), 4096, "servers", marks=pytest.mark.thorough),
    ],
)
def test_owners_of_whole_parameters_equal_the_unsharded_optimizer(
    pool, model: str, sizes: tuple[int, ...], optimizer: str, stages: tuple[int, ...], buckets: int | str, owners: str
) -> None:
    """Copies on both axes, on one for what the other cuts; a weight that two stages share; states of one of the copies,
    and on parameter servers."""
    kind = "megatron" if owners == "parameters" and not stages else "whole"
    update = Update(clip_norm=CLIP, buckets=buckets, zero_by=owners)
    error, norms = train(pool, model, kind, sizes, optimizer, update, 2, stages, 5)
    assert error < TOLERANCE
    assert max(norms) > CLIP


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("optimizer", ["lamb", pytest.param("adamw", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("stages", [(2, 2), pytest.param((1, 1, 1, 1), marks=pytest.mark.thorough)], ids=str)
def test_stages_that_share_a_parameter_count_it_once(pool, stages: tuple[int, ...], optimizer: str) -> None:
    update = Update(clip_norm=CLIP, buckets=4096)
    error, norms = train(pool, "gpt4", "zero1", (4 // len(stages),), optimizer, update, 2, stages, 5)
    assert error < TOLERANCE
    assert max(norms) > CLIP


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(
    ("kind", "micro_batches", "stages", "scale"),
    [
        ("zero1", 1, (), 4.0),
        ("megatron", 2, (), 4.0),
        pytest.param("zero3", 2, (1, 1), 4.0, marks=pytest.mark.thorough),
    ],
)
def test_summed_gradients(pool, kind: str, micro_batches: int, stages: tuple[int, ...], scale: float) -> None:
    """Micro-batches times pieces of the samples; SGD feels it."""
    sizes = {"zero1": (4,), "megatron": (2, 2), "zero3": (2,)}[kind]
    update = Update(buckets="none", gradients="sum")
    error, _ = train(pool, "llama", kind, sizes, "sgd", update, micro_batches, stages, 3, scale)
    assert error < TOLERANCE


BUCKETED = list(itertools.product(KINDS, [(1, ()), (2, ()), (2, (1, 1))]))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "micro_batches", "stages"),
    [
        pytest.param(kind, *parts, marks=pytest.mark.thorough if at % 3 == at // 3 % 3 else pytest.mark.exhaustive)
        for at, (kind, parts) in enumerate(BUCKETED)
    ],
    ids=str,
)
def test_buckets_change_no_sum(pool, kind: str, micro_batches: int, stages: tuple[int, ...]) -> None:
    sizes = KINDS[kind]
    if stages:
        sizes = (2,) if len(sizes) == 1 else (2, 1)
    check_buckets(pool, kind, sizes, micro_batches, stages)


def test_buckets_start_before_the_backward_pass_is_over(pool) -> None:
    check_buckets(pool, "zero1", (2,), 2, (1, 1))


def check_buckets(pool, kind: str, sizes: tuple[int, ...], micro_batches: int, stages: tuple[int, ...]) -> None:
    for differences, early in pool.run("updates", "alike", "llama", kind, sizes, list(BUCKETS), micro_batches, stages):
        assert max(differences) < 1e-6
        if kind in ("zero1", "hybrid"):
            assert all(early), "nothing went behind the backward pass"


def test_the_backward_pass_waits_for_no_bucket_that_is_summed(pool) -> None:
    for started, waited in pool.run("updates", "waited", "llama", "megatron", (2, 2), 2048):
        assert started > 3
        assert waited == 0


DTYPES = {"mixed": ("float32", "bfloat16"), "fp32": ("float32", "float32"), "parameter": ("bfloat16", "bfloat16")}
HALVES = [
    *itertools.product(("zero2", "zero1"), DTYPES, ("adamw",), (True,)),
    ("zero3", "fp32", "adamw", True),
    ("zero3", "parameter", "lamb", False),
    ("zero1", "mixed", "adamw", False),
    ("zero1", "mixed", "lamb", False),
]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("kind", "word", "optimizer", "masters"),
    [
        case
        if case[:2] in (("zero2", "fp32"), ("zero3", "parameter"))
        else pytest.param(*case, marks=pytest.mark.thorough)
        for case in HALVES
    ],
)
def test_gradients_have_the_dtype_that_is_said(pool, kind: str, word: str, optimizer: str, masters: bool) -> None:
    update = Update(gradient_dtype=word, master_weights=masters, clip_norm=1.0, buckets=4096)
    worst, sums, kept, states, reduced = pool.run("updates", "half", kind, (4,), optimizer, update)[0]
    each_use, once = DTYPES[word][1], DTYPES[word][0]
    assert worst < 2e-2
    assert sums == [f"torch.{once}"]
    assert kept == ["torch.float32" if masters else "torch.bfloat16"]
    assert states == ["torch.float32"]
    assert reduced == ([] if kind == "zero1" else [f"torch.{each_use}"])


def test_ranks_with_other_values_are_found_or_get_those_of_the_first(pool) -> None:
    for message, _ in pool.run("updates", "other_values", False):
        assert message.startswith("ranks hold different values of 'model.embed_tokens.weight' and of ")
        assert "or plan with broadcast" in message
    for meta in (False, True):
        for message, away in pool.run("updates", "other_values", True, meta):
            assert (message, away) == ("", 0.0)


def test_local_parameters_are_each_ranks_own(pool) -> None:
    found = pool.run("updates", "local", "model.layers.0.mlp.up_proj.weight", (4,))
    for away, different, (norm,), whole in found:
        assert away < 1e-7
        assert different
        assert norm == pytest.approx(whole, rel=1e-5)
