"""Linear layers in fp8, as engines are told of them, and as their settings are read."""

from dataclasses import replace

import pytest

from planner.api.carrying import Subject, asked_like
from planner.engines.spaces import SPACES
from planner.export.description import Description
from planner.export.targets import TARGETS
from planner.fp8_recipes import RECIPES
from planner.graph.fp8 import NO_FP8, Fp8
from planner.plan.layout.kept import Kept
from planner.strategy_search.within import within
from tests.unit.export.descriptions import facts_of, job_of
from tests.unit.plan.plans import plan_named
from tests.unit.search.cases import BATCH, cluster_of, traced

KEPT = "model.layers.*.self_attn.k_proj.weight"
PLAIN = Description(
    layers=(4,), full=(0,), selective=(0,), precision="bf16", sequence_length=128, micro_batches=4, micro_batch=2,
    data=2, tensor=2, sequence_parallel=True, zero=3, vocabulary_parallel=True,
)  # fmt: skip


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ("blockwise", "delayed")])
@pytest.mark.parametrize("left_out", [(), (KEPT,)])
def test_torchtitan_is_told_the_recipe_and_what_is_left_out(recipe: str, left_out: tuple[str, ...]) -> None:
    target, fp8 = TARGETS["torchtitan"], Fp8(recipe=recipe, left_out=left_out)
    losses = target.nearest(replace(PLAIN, fp8=fp8))
    assert not [loss for loss in losses if "fp8" in loss.what]
    description = losses[-1].description if losses else replace(PLAIN, fp8=fp8)
    text = target.write(job_of(description, "llama-tiny"))[target.main]
    reading = target.read(text, facts_of(description, "llama-tiny"))
    assert (reading.description.fp8, reading.unmodelled) == (fp8, ())


def test_torchtitan_gathers_weights_in_fp8_with_scales_of_tensors() -> None:
    target, fp8 = TARGETS["torchtitan"], Fp8(recipe="tensorwise", gathered=True)
    losses = target.nearest(replace(PLAIN, fp8=fp8))
    assert not [loss for loss in losses if "fp8" in loss.what]
    description = losses[-1].description if losses else replace(PLAIN, fp8=fp8)
    text = target.write(job_of(description, "llama-tiny"))[target.main]
    assert "enable_fsdp_float8_all_gather = true\nprecompute_float8_dynamic_scale_for_fsdp = true" in text
    reading = target.read(text, facts_of(description, "llama-tiny"))
    assert (reading.description.fp8, reading.description.update.gathers) == (fp8, "block")
    assert not [note for note in reading.notes if "float8" in note]


@pytest.mark.parametrize(
    ("name", "zero", "recipe"),
    [("megatron", 1, "delayed"), ("megatron", 1, "tensorwise"), ("megatron", 2, "delayed"), ("nemo", 3, "tensorwise")],
)
def test_weights_that_are_stored_whole_are_not_gathered_in_fp8_by_layers(name: str, zero: int, recipe: str) -> None:
    """Without Megatron-FSDP `--fp8-param-gather` is about weights that are stored in fp8, whole, and gathered once a
    step. Other engines on Megatron are not told."""
    losses = TARGETS[name].nearest(replace(PLAIN, fp8=Fp8(recipe=recipe, gathered=True), zero=zero))
    assert [loss.description.fp8 for loss in losses if "gathered in fp8" in loss.what] == [Fp8(recipe=recipe)]


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_megatron_fsdp_gathers_weights_in_fp8(recipe: str) -> None:
    target, fp8 = TARGETS["megatron"], Fp8(recipe=recipe, gathered=True)
    description = replace(PLAIN, fp8=fp8)
    losses = target.nearest(description)
    assert not [loss for loss in losses if "fp8" in loss.what]
    description = losses[-1].description if losses else description
    text = target.write(job_of(description, "llama-tiny"))[target.main]
    assert "--fp8-param-gather" in text
    reading = target.read(text, facts_of(description, "llama-tiny"))
    assert (reading.description.fp8, reading.description.update.gathers) == (fp8, "block")
    assert "fp8-param-gather" not in " ".join((*reading.unread, *reading.unmodelled))
    assert [note for note in reading.notes if "stored in fp8" in note]
    whole = text.replace("--use-megatron-fsdp", "")
    reading = target.read(whole, facts_of(description, "llama-tiny"))
    assert reading.description.fp8 == Fp8(recipe=recipe)
    assert [note for note in reading.notes if "once a step, in 16 bits" in note]
    plain = target.write(job_of(replace(description, fp8=Fp8(recipe=recipe)), "llama-tiny"))[target.main]
    assert "--fp8-param-gather" not in plain


def test_megatron_has_scales_of_tensors_for_all_layers() -> None:
    target = TARGETS["megatron"]
    description = replace(PLAIN, fp8=Fp8(recipe="tensorwise"), zero=1)
    losses = target.nearest(description)
    description = losses[-1].description if losses else description
    text = target.write(job_of(description, "llama-tiny"))[target.main]
    assert "--fp8-format hybrid" in text
    assert "--fp8-recipe tensorwise" in text
    assert target.read(text, facts_of(description, "llama-tiny")).description.fp8 == Fp8(recipe="tensorwise")
    blocks = target.read(text.replace("tensorwise", "blockwise"), facts_of(description, "llama-tiny"))
    assert blocks.description.fp8 == NO_FP8
    assert any("fp8-format" in what for what in blocks.unmodelled)
    less = target.nearest(replace(description, fp8=Fp8(recipe="tensorwise", left_out=(KEPT,))))
    assert [loss.description.fp8 for loss in less if "fp8" in loss.what] == [Fp8(recipe="tensorwise")]


@pytest.mark.parametrize("name", ["megatron", "nemo", "megatron-bridge"])
@pytest.mark.parametrize(
    "fp8", [Fp8(recipe="delayed"), Fp8(recipe="delayed", history=64, margin=2), Fp8(recipe="mxfp8")]
)
def test_engines_on_transformer_engine_have_its_recipes(name: str, fp8: Fp8) -> None:
    target, description = TARGETS[name], replace(PLAIN, fp8=fp8, zero=1)
    losses = target.nearest(description)
    assert not [loss for loss in losses if "fp8" in loss.what]
    description = losses[-1].description if losses else description
    text = target.write(job_of(description, "llama8b"))[target.main]
    reading = target.read(text, facts_of(description, "llama8b"))
    assert (reading.description.fp8, reading.unmodelled) == (fp8, ())
    assert not [word for word in reading.unread if "fp8" in word]


@pytest.mark.parametrize("name", ["megatron", "nemo", "megatron-bridge"])
@pytest.mark.parametrize(("recipe", "given_up"), [("delayed", 1), ("tensorwise", 0)])
def test_norms_are_not_computed_again_beside_delayed_scales(name: str, recipe: str, given_up: int) -> None:
    """Megatron-LM refuses that at its start."""
    norms = replace(PLAIN, fp8=Fp8(recipe=recipe), zero=1, selective=(4,), kept=Kept(but=("normalisation",)))
    losses = TARGETS[name].nearest(norms)
    assert [loss.what for loss in losses].count("selective recomputation") == given_up


@pytest.mark.parametrize("name", ["megatron", "nemo", "megatron-bridge"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8"])
def test_engines_on_transformer_engine_compute_experts_in_fp8_too(name: str, recipe: str) -> None:
    target, fp8 = TARGETS[name], Fp8(recipe=recipe, experts=True)
    description = replace(PLAIN, fp8=fp8, zero=1, expert=2)
    losses = target.nearest(description)
    assert not [loss for loss in losses if "fp8" in loss.what]
    description = losses[-1].description if losses else description
    text = target.write(job_of(description, "mixtral-8x7b"))[target.main]
    assert target.read(text, facts_of(description, "mixtral-8x7b")).description.fp8 == fp8
    for other, kept in ((replace(fp8, experts=False), NO_FP8), (replace(fp8, dispatch=True), fp8)):
        losses = target.nearest(replace(description, fp8=other))
        assert [loss.description.fp8 for loss in losses if "fp8" in loss.what] == [kept]


def test_delayed_scales_of_the_last_step_alone_are_a_history_of_one() -> None:
    """What Megatron-LM does unless told otherwise, whatever the length of its history."""
    target, description = TARGETS["megatron"], replace(PLAIN, fp8=Fp8(recipe="delayed", history=64), zero=1)
    text = target.write(job_of(description, "llama-tiny"))[target.main]
    newest = text.replace("--fp8-amax-compute-algo max", "--fp8-amax-compute-algo most_recent")
    assert newest != text
    read = target.read(newest, facts_of(description, "llama-tiny"))
    assert read.description.fp8 == Fp8(recipe="delayed", history=1)


def test_megatron_is_told_of_lines_of_32_elements() -> None:
    target, description = TARGETS["megatron"], replace(PLAIN, fp8=Fp8(recipe="mxfp8"), zero=1)
    losses = target.nearest(description)
    assert not [loss for loss in losses if "fp8" in loss.what]
    description = losses[-1].description if losses else description
    text = target.write(job_of(description, "llama-tiny"))[target.main]
    assert "--fp8-format e4m3" in text
    assert "--fp8-recipe mxfp8" in text
    assert target.read(text, facts_of(description, "llama-tiny")).description.fp8 == Fp8(recipe="mxfp8")
    hybrid = target.read(text.replace("format e4m3", "format hybrid"), facts_of(description, "llama-tiny"))
    assert any("priced as e4m3, with gradients in e4m3" in note for note in hybrid.notes)


def test_torchtitan_is_told_nothing_of_blocks_and_of_experts() -> None:
    nearest = TARGETS["torchtitan"].nearest
    for fp8, kept in (
        (Fp8(recipe="blockwise", experts=True), NO_FP8),
        (Fp8(recipe="rowwise", experts=True, dispatch=True), Fp8(recipe="rowwise")),
    ):
        assert [loss.description.fp8 for loss in nearest(replace(PLAIN, fp8=fp8)) if "fp8" in loss.what] == [kept]


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in ("torchtitan", "mindspore")])
def test_an_engine_that_is_told_nothing_of_it_gives_it_up(name: str) -> None:
    losses = TARGETS[name].nearest(replace(PLAIN, fp8=Fp8(recipe="rowwise"), tensor=1, data=4, sequence_parallel=False))
    assert [loss.description.fp8 for loss in losses if "fp8" in loss.what] == [NO_FP8]


@pytest.mark.parametrize("fp8", [Fp8(recipe="delayed", gathered=True), Fp8(recipe="delayed", left_out=(KEPT,))])
def test_engines_are_searched_for_what_they_have_of_a_plan(fp8: Fp8) -> None:
    """How weights are gathered, and layers that a search has left out, are none that somebody asked an engine for."""
    plan, machine = plan_named("two axes"), cluster_of("h100-80gb", 16)
    training = replace(plan.training, precision="bf16", fp8=fp8)
    subject = Subject(model=plan.model, graph=traced("llama-4"), batch=BATCH, cluster=machine)
    request = asked_like(subject, training, space=SPACES["megatron"])
    assert within(SPACES["megatron"], request).fp8 == Fp8(recipe="delayed")
    assert asked_like(subject, training).fp8 == fp8
