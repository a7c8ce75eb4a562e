"""What a plan file says of gradients, what it may not say, and what is meant where it says nothing."""

from dataclasses import replace
from typing import Any

import pytest

from planner.errors import PlanFileError, StrategyError
from planner.plan.file import dump_plan, parse_plan
from planner.plan.words import gradient_words
from planner.sharding.layout import parse_layout
from planner.sharding.stored import own_copies
from planner.sharding.update import PLAIN, Buckets, Update, sample_pieces
from tests.refusals import refused
from tests.unit.plan.plans import edited, plan_named, put, verdict_of

EVERYTHING = Update(
    gradients="sum",
    gradient_dtype="parameter",
    master_weights=False,
    moment_dtype="bf16",
    clip_norm=0.5,
    broadcast=True,
    buckets=2**25,
    local_parameters=("*router*", "bias"),
)


def with_update(update: Update) -> Any:
    plan = plan_named("one axis")
    return replace(plan, training=replace(plan.training, update=update))


@pytest.mark.parametrize("buckets", ["none", 4096, (20, 35), (("*attn*", 1), ("*mlp*", 0))], ids=str)
def test_an_update_reads_back_exactly(buckets: Buckets) -> None:
    plan = with_update(replace(EVERYTHING, buckets=buckets))
    text = dump_plan(plan)
    assert parse_plan(text) == plan
    assert dump_plan(parse_plan(text)) == text


def test_what_is_as_ever_is_not_said() -> None:
    text = dump_plan(with_update(PLAIN))
    assert "clip_norm" not in text
    assert parse_plan(text).training.update == PLAIN
    changed = dump_plan(with_update(Update(buckets="none", clip_norm=1.0)))
    assert len(set(changed.splitlines()) ^ set(text.splitlines())) <= 3, "it diffs well"


@pytest.mark.parametrize(
    ("key", "value", "facts"),
    [
        ("gradients", "max", ("training.gradients", "max", "mean", "sum")),
        ("gradient_dtype", "fp8", ("training.gradient_dtype", "fp8", "mixed", "fp32", "parameter")),
        ("moment_dtype", "fp8", ("training.moment_dtype", "fp8", "fp32", "bf16")),
        ("clip_norm", 0.0, ("training.clip_norm", 0.0, 0)),
        ("buckets", "auto", ("training.buckets", "auto")),
        ("buckets", "some", ("training.buckets", "some", "none", "auto")),
        ("buckets", [5, 5], ("training.buckets", "5, 5", 1)),
        ("buckets", [], ("training.buckets", "none")),
        ("buckets", 0, ("training.buckets.str",)),
        ("local_parameters", "bias", ("training.local_parameters",)),
    ],
)
def test_what_cannot_be_is_refused_by_name(key: str, value: object, facts: tuple[object, ...]) -> None:
    with refused(PlanFileError, *facts):
        parse_plan(edited("one axis", put("training", key, value=value)))


def test_local_parameters_are_neither_cut_nor_reduced() -> None:
    name = "first.weight"
    plan = with_update(Update(buckets="none", local_parameters=(name,)))
    with refused(StrategyError, "first.weight", "P"):
        verdict_of(stored_as(plan, name, replace(own_copies(1), gradient=parse_layout("R"))))
    verdict_of(stored_as(plan, name, own_copies(1)))
    with refused(PlanFileError, "training.local_parameters", "router"):
        verdict_of(with_update(Update(buckets="none", local_parameters=("router",))))


def stored_as(plan: Any, name: str, stored: Any) -> Any:
    groups = tuple(
        replace(group, parameters=tuple((n, stored if n == name else s) for n, s in group.parameters))
        for group in plan.groups
    )
    assert groups != plan.groups or any((name, stored) in group.parameters for group in plan.groups)
    return replace(plan, groups=groups)


def test_samples_are_cut_along_the_first_dim() -> None:
    layouts = [parse_layout("S0,R,S0"), parse_layout("S0,S1,R")]
    assert sample_pieces(layouts, (2, 3, 5)) == 10
    assert sample_pieces([], (2, 3)) == 1
    assert Update(buckets="none", gradients="sum").seed(4, 10) == 10.0
    assert PLAIN.seed(4, 10) == 0.25


def test_words_for_people() -> None:
    assert gradient_words(PLAIN) == ""
    assert gradient_words(EVERYTHING) == (
        "; gradients summed, in the dtype of the weights, clipped to norm 0.5, in buckets of 32 MiB; no master weights;"
        " moments in bf16; weights of rank 0 broadcast at the start; each device has its own *router*, bias"
    )
    assert gradient_words(Update(buckets=2**30)) == "; gradients in buckets of 1,024 MiB"
    assert gradient_words(Update(buckets=(20, 35))) == "; gradients in buckets that end at parameter 20, 35"
    many = gradient_words(Update(buckets=tuple(range(5, 100, 5))))
    assert many == "; gradients in 20 buckets that end at parameter 5, 10, ..., 95"
    assert gradient_words(Update(buckets=(("a", 1), ("b", 1), ("c", 2)))) == "; gradients in 2 buckets by name"
