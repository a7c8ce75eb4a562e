"""The checker judges a plan by what it says now: hand edits are priced anew, and what does not hold is found."""

import math
from dataclasses import replace

import pytest

from planner.errors import PlanFileError
from planner.plan.compare.verify import verify
from planner.plan.file import dump_plan, parse_plan
from planner.plan.plan import Group, Plan
from planner.sharding.layout import REPLICATE, shard
from planner.sharding.stored import StoredParameter
from tests.refusals import refused
from tests.unit.plan.plans import BY_HAND, NAMES, content_of, edited, plan_named, put, verdict_of
from tests.unit.search.cases import BATCH, cluster_of, small_memory, traced

UP_PROJ = "model.layers.0.mlp.up_proj/linear"


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", [*NAMES, BY_HAND])
def test_a_plan_of_the_search_holds(name: str) -> None:
    verdict = verdict_of(plan_named(name))
    assert verdict.remarks == ()
    assert verdict.as_stated
    assert verdict.fits
    assert verdict.prediction == plan_named(name).prediction


def changed(name: str, operator: str, strategy: str) -> Plan:
    """A plan where one operator was given another strategy by hand."""
    groups = content_of(name)["groups"]
    at = next(index for index, group in enumerate(groups) if operator in group["operators"])
    assert groups[at]["operators"][operator] != strategy
    return parse_plan(edited(name, put("groups", at, "operators", operator, value=strategy)))


def test_an_edit_by_hand_is_priced_anew() -> None:
    plan = changed(BY_HAND, UP_PROJ, "b,-")
    verdict = verdict_of(plan)
    assert not verdict.as_stated
    assert verdict.fits
    assert verdict.prediction.step_seconds > plan.prediction.step_seconds
    text = "\n".join(verdict.remarks)
    assert (
        f"step_seconds is {verdict.prediction.step_seconds:.6g}, the file says {plan.prediction.step_seconds:.6g}"
        in text
    )
    mended = replace(plan, prediction=verdict.prediction)
    assert verdict_of(mended).as_stated
    again = parse_plan(dump_plan(mended))
    assert again == mended


def test_one_block_can_differ() -> None:
    """Splitting a group by hand gives one block a strategy of its own; it costs a fraction of changing all."""
    plan = plan_named(BY_HAND)
    at = next(index for index, group in enumerate(plan.groups) if group.blocks == 4)
    group = plan.groups[at]

    def piece(first: int, blocks: int, **strategies: tuple[str | None, ...]) -> Group:
        def of_block(name: str) -> str:
            return name.replace("layers.0", f"layers.{first}")

        operators = tuple(
            (of_block(name), strategies.get("up", s) if name == UP_PROJ else s) for name, s in group.operators
        )
        parameters = tuple((of_block(name), stored) for name, stored in group.parameters)
        return Group(name=f"from {first}", first_block=first, blocks=blocks, operators=operators, parameters=parameters)

    def with_groups(*groups: Group) -> Plan:
        return replace(plan, groups=(*plan.groups[:at], *groups, *plan.groups[at + 1 :]))

    same = verdict_of(with_groups(piece(0, 1), piece(1, 2), piece(3, 1)))
    assert same.as_stated
    one = verdict_of(with_groups(piece(0, 1), piece(1, 1, up=("b", None)), piece(2, 2)))
    everything = verdict_of(with_groups(piece(0, 4, up=("b", None))))
    before = plan.prediction.step_seconds
    assert before < one.prediction.step_seconds < everything.prediction.step_seconds
    rise, rise_of_all = (v.prediction.step_seconds - before for v in (one, everything))
    assert math.isclose(4 * rise, rise_of_all, rel_tol=1e-6)
    bound = {operator.operator.name: operator.strategy for operator in one.bound.operators}
    assert bound[UP_PROJ.replace("layers.0", "layers.1")] == (0, None)
    assert bound[UP_PROJ.replace("layers.0", "layers.2")] == bound[UP_PROJ] != (0, None)


def test_uncut_weights_take_the_bytes_that_they_have() -> None:
    plan = plan_named("two axes")
    parameter = "model.layers.0.mlp.up_proj.weight"
    at = next(index for index, group in enumerate(plan.groups) if parameter in dict(group.parameters))
    axes = len(plan.mesh.axes)
    copies = StoredParameter(weight=(REPLICATE,) * axes, gradient=(REPLICATE,) * axes, state=(REPLICATE,) * axes)
    cut = (shard(0),) * axes
    pieces = StoredParameter(weight=cut, gradient=cut, state=cut)

    def stored(layouts: StoredParameter) -> float:
        group = plan.groups[at]
        parameters = tuple((name, layouts if name == parameter else s) for name, s in group.parameters)
        groups = list(plan.groups)
        groups[at] = replace(group, parameters=parameters)
        memory = dict(verdict_of(replace(plan, groups=tuple(groups))).prediction.memory)
        return memory["weights"] + memory["gradients"] + memory["optimizer state"]

    numel = 4 * traced("llama-4").types[parameter].numel  # four blocks
    assert stored(copies) - stored(pieces) == pytest.approx(16 * numel * (1 - 1 / plan.mesh.size))


def test_what_does_not_fit_is_found() -> None:
    plan = plan_named("two axes")
    cluster = small_memory(cluster_of("h100-80gb", 16), plan.prediction.peak_bytes / 1e6)
    plan = replace(plan, cluster=replace(plan.cluster, digest=cluster.digest()))
    verdict = verify(plan, traced("llama-4"), BATCH, cluster)
    assert not verdict.fits
    assert any("capacity_bytes" in remark for remark in verdict.remarks)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("prediction", "step_seconds"), 1.0, "step_seconds is"),
        (("prediction", "low_seconds"), 1e-9, "low_seconds is"),
        (("prediction", "peak_bytes"), 1.0, "the file says 1"),
        (("prediction", "model_flops"), -1.0, "model_flops"),
        (("prediction", "samples_per_second"), 1.0, "samples_per_second"),
        (("prediction", "time", "forward"), 1.0, "time of forward"),
        (("prediction", "memory", "weights"), 1.0, "memory of weights"),
        (("prediction", "memory", "extra"), 1.0, "memory of extra is nan, the file says 1"),
        (("model", "parameters"), 7, "parameters is"),
    ],
)
def test_wrong_figures_are_found(path: tuple[str, ...], value: float, words: str) -> None:
    verdict = verdict_of(parse_plan(edited("two axes", put(*path, value=value))))
    assert not verdict.as_stated
    assert any(words in remark for remark in verdict.remarks), verdict.remarks


def test_files_that_say_nothing_of_an_interval_cost_what_they_say() -> None:
    plan = plan_named("two axes")
    older = replace(plan, prediction=replace(plan.prediction, low_seconds=None, high_seconds=None))
    assert verdict_of(older).as_stated


@pytest.mark.parametrize(("profile", "devices"), [("a100-80gb", 16), ("cpu", 16)])
def test_another_machine_is_refused(profile: str, devices: int) -> None:
    with refused(PlanFileError, "cluster", "h100-80gb", profile):
        verify(plan_named("two axes"), traced("llama-4"), BATCH, cluster_of(profile, devices))


def test_another_model_is_refused() -> None:
    with refused(PlanFileError, "llama-4", f"{plan_named('two axes').model.fingerprint[:19]}..."):
        verify(plan_named("two axes"), traced("llama-2"), BATCH, cluster_of("h100-80gb", 16))


def test_a_batch_that_no_longer_divides_is_named() -> None:
    """The strategies were legal for the old batch; the error speaks of samples and micro-batches, and what would do."""
    plan = plan_named(BY_HAND)
    for global_batch, micro_batches, facts in (
        (3, 1, (1, 3, 3, 2)),
        (8, 8, (8, 8, 1, 2, "micro_batches = 4", "global_batch = 16")),
    ):
        training = replace(plan.training, global_batch=global_batch, micro_batches=micro_batches)
        with refused(PlanFileError, *facts):
            verdict_of(replace(plan, training=training))
