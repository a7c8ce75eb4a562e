"""Whatever `plan` accepts runs, and computes what the model computes; what cannot is refused by `plan`."""

import pytest
from rich.console import Console

from planner.cli.options import Options
from planner.cli.requesting import request_of
from planner.errors import RequestError
from planner.graph.trace import trace
from planner.graph.tracing.on_meta import on_meta
from planner.plan.file import dump_plan, parse_plan
from planner.strategy_search.objectives import plan_for
from planner.strategy_search.variants import variants_of
from runtime import audit
from runtime.checkpoint.fused import opened_in_module
from runtime.checkpoint.offline import merge
from tests.contract.test_priced_is_emitted import cluster_of
from tests.distributed import brought, tasks_brought
from tests.refusals import refused

NAMED = ("whisper", "falcon_alibi", "clip", "mixed_dtypes", "index_add", "recurrent", "own_function", "masked")
OTHERS = (
    "falcon", "gpt_neo", "opt", "gemma2", "gemma3", "mpt", "phi", "stablelm", "gpt_neox", "olmo2", "siglip", "of_batch",
    "bloom", "granite_moe", "wav2vec2", "swin",
)  # fmt: skip


def planned(name: str, devices: int, *, apart: bool = False, **options: object) -> str:
    """The plan that `plan --model` makes, as the text of its file; where its fused weights are to be apart, the best of
    these plans."""
    given = Options(model=f"tests.distributed.brought:{name}", devices=devices, hardware="cpu", as_json=True, **options)
    request = request_of(given, Console(quiet=True))
    if apart:
        *_, request = variants_of(request)
    return dump_plan(plan_for(request, lambda _: None, lambda: False).plan)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMED, *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS)])
def test_a_planned_model_runs_on_one_process(name: str) -> None:
    assert tasks_brought.difference(planned(name, 1, global_batch=4)) < 1.0


@pytest.mark.cases(0, 0)
@pytest.mark.slow
@pytest.mark.parametrize("degree", ["data", "tensor"])
@pytest.mark.parametrize("name", [*NAMED, *OTHERS])
def test_a_planned_model_runs_on_two_processes(name: str, degree: str, pair) -> None:
    text = planned(name, 2, global_batch=4, **{degree: 2})
    assert max(pair.run("tasks_brought", "difference", text)) < 1.0


@pytest.mark.slow
@pytest.mark.cases(0)
@pytest.mark.parametrize(
    "how",
    [
        {"tensor": 2},
        pytest.param({"data": 2, "zero": 3, "micro_batches": 2, "optimizer": "lamb"}, marks=pytest.mark.thorough),
        pytest.param({"tensor": 2, "optimizer": "muon", "clip_norm": 1.0}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_weights_that_hold_several_matrices(how: dict[str, object], pair) -> None:
    text = planned("fused", 2, apart=True, global_batch=4, **how)
    assert "in_proj_weight[0]" in text
    assert max(pair.run("tasks_brought", "difference", text)) < 1.0


@pytest.mark.slow
@pytest.mark.thorough
def test_any_plan_loads_checkpoints_of_such_weights(tmp_path, pair) -> None:
    """And files of the module, with its own names, are written from them, which any plan loads."""
    cut = planned("fused", 2, apart=True, global_batch=4, tensor=2)
    whole = planned("fused", 2, global_batch=4, data=2)
    assert "gate_up.weight[0]" in cut
    assert "gate_up.weight[0]" not in whole
    pair.run("tasks_brought", "saved", cut, str(tmp_path / "own"))
    source = opened_in_module(tmp_path / "own")
    assert source.manifest is not None
    merged = merge(source, source.manifest, tmp_path / "merged")
    assert merged.tensors.keys() == brought.fused()[0].state_dict().keys()
    for name, weights in (("own", False), ("merged", True)):
        found = [pair.run("tasks_brought", "continued", text, str(tmp_path / name), weights) for text in (cut, whole)]
        assert max(difference for each in found for difference, _ in each) < 1.0
        assert found[0][0][1] == pytest.approx(found[1][0][1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.thorough
def test_replicas_of_such_weights_are_read_by_any_plan(tmp_path, pair) -> None:
    """In memory, as in files: an elastic run may go on with a plan that has whole weights, or the other way."""
    cut, whole = (planned("fused", 2, apart=apart, global_batch=2, data=2, zero=1) for apart in (True, False))
    assert "gate_up.weight[0]" in cut
    assert "gate_up.weight[0]" not in whole
    for number, (first, then) in enumerate([(cut, whole), (whole, cut)]):
        assert pair.run("tasks_brought", "replicas", first, then, str(tmp_path / str(number))) == [[], []]


MASKED: dict[str, dict[str, object]] = {
    "ring": {"context": 2, "context_by": "ring", "micro_batches": 2},
    "contiguous ring": {"context": 2, "context_by": "ring", "zigzag": False},
    "by heads": {"context": 2, "context_by": "heads"},
}


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("how", [*MASKED])
def test_masks_that_are_known_by_their_kind_are_cut(how: str, pair) -> None:
    text = planned("masked", 2, global_batch=4, **MASKED[how])
    assert text.count('"k@q"') == (2 if "ring" in how else 0)
    assert max(pair.run("tasks_brought", "difference", text)) < 1.0


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"data": 2, "zero": 3, "micro_batches": 2}, {"tensor": 2}], ids=str)
def test_branches_are_left_out_for_the_same_samples(degrees: dict[str, int], pair) -> None:
    text = planned("swin", 2, global_batch=8, **degrees)
    assert text.count("dropout") > 0
    assert max(pair.run("tasks_brought", "difference", text)) < 1.0


def test_a_weight_that_is_read_through_a_call_that_changes_nothing(pair) -> None:
    """The check of the first step takes its gradient of each micro-batch for that, and not for an older one."""
    text = planned("scaled", 2, global_batch=8, micro_batches=2, data=2)
    assert max(pair.run("tasks_brought", "difference", text)) < 1.0


@pytest.mark.cases(1)
@pytest.mark.parametrize("degrees", [{"tensor": 2}, {"data": 2, "zero": 3}], ids=str)
def test_products_that_are_written_as_einsum_are_cut_and_audited(degrees: dict[str, int], pair) -> None:
    text = planned("einsums", 2, global_batch=4, **degrees)
    assert max(pair.run("tasks_brought", "difference", text)) < 1.0
    plan, (module, inputs, _) = parse_plan(text), brought.einsums()
    (stage,) = audit(plan, trace(module, inputs), brought.BATCH, cluster_of(plan))
    assert stage.unequal == ()
    assert stage.peak == pytest.approx(stage.predicted_peak, rel=0.03)  # of 70 KB


@pytest.mark.cases(1)
@pytest.mark.parametrize("degrees", [{"data": 2, "zero": 3}, {"tensor": 2}], ids=str)
def test_what_no_gradient_comes_to_runs_and_is_audited(degrees: dict[str, int], pair) -> None:
    text = planned("beside", 2, global_batch=4, **degrees)
    assert max(pair.run("tasks_brought", "difference", text)) < 1.0
    plan, (module, inputs, _) = parse_plan(text), brought.beside()
    (stage,) = audit(plan, trace(module, inputs), brought.BATCH, cluster_of(plan))
    assert stage.unequal == ()


@pytest.mark.cases(0)
@pytest.mark.parametrize("degrees", [{"data": 2, "zero": 3}, {"tensor": 2}], ids=str)
def test_what_pytorch_asks_of_values_is_no_part_of_a_plan(degrees: dict[str, int], pair) -> None:
    text = planned("asking", 2, global_batch=4, **degrees)
    assert max(pair.run("tasks_brought", "difference", text)) < 1.0


@pytest.mark.cases(0)
@pytest.mark.parametrize("degrees", [{"data": 2, "zero": 1}, {"tensor": 2}], ids=str)
def test_the_ctc_loss_is_cut_by_samples_and_audited(degrees: dict[str, int], pair) -> None:
    text = planned("speech", 2, global_batch=4, **degrees)
    assert max(pair.run("tasks_brought", "difference", text)) < 1.0
    plan, (module, inputs, _) = parse_plan(text), brought.speech()
    (stage,) = audit(plan, trace(module, inputs), brought.BATCH, cluster_of(plan))
    assert stage.unequal == ()
    assert stage.peak == pytest.approx(stage.predicted_peak, rel=0.05)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "degrees",
    [
        {"data": 2, "zero": 3, "micro_batches": 2},
        {"tensor": 2, "micro_batches": 8},
        {"pipeline": 2, "micro_batches": 2},
    ],
    ids=str,
)
def test_images_of_known_sizes_are_cut_by_samples_and_audited(degrees: dict[str, int], pair) -> None:
    text = planned("images", 2, global_batch=8, **degrees)
    assert max(pair.run("tasks_brought", "difference", text)) < 1.0
    plan, (module, _, inputs) = parse_plan(text), brought.images()
    for stage in audit(plan, trace(on_meta(module), (), inputs), brought.BATCH, cluster_of(plan)):
        assert stage.unequal == ()
        assert stage.peak == pytest.approx(stage.predicted_peak, rel=0.05)


def test_a_batch_that_is_a_number_of_the_code_stays_in_every_micro_batch() -> None:
    assert '"micro_batches": 3' in planned("of_batch", 1, global_batch=6)
    with refused(RequestError, "global_batch = 5", 2, "4 and 6", "div"):
        planned("of_batch", 1, global_batch=5)
    with refused(RequestError, "micro_batches", 3):
        planned("of_batch", 1, global_batch=6, micro_batches=1)
