"""Matrix products in TF32, and all else in fp32: a precision of its own, in requests, plan files, prices and steps."""

from dataclasses import replace

import pytest
import torch

import planner
from hardware_profiles import PYTORCH, load_profile
from planner.api.planned import planned_graph
from planner.api.replanning import machine_by
from planner.errors import RequestError
from planner.export.description import ExportError
from planner.export.targets import TARGETS
from planner.plan.binding.machine import computing_in, machine_of
from planner.plan.compare.repricing import repriced
from planner.plan.file import dump_plan, parse_plan
from planner.pricing.kernels.call import multiplied_in
from runtime.step.narrow_products import narrow_products
from tests.contract.one_rank import one_rank
from tests.distributed import plans
from tests.refusals import refused
from tests.unit.export.test_fp8 import PLAIN


def test_operands_of_fp32_alone_are_multiplied_in_it() -> None:
    tf32, fp8 = (replace(PYTORCH, products=products) for products in ("tf32", "fp8"))
    assert [multiplied_in(tf32, dtype) for dtype in ("fp32", "bf16", "fp16")] == ["tf32", "bf16", "fp16"]
    assert [multiplied_in(fp8, dtype) for dtype in ("fp32", "bf16")] == ["fp8", "fp8"]
    assert multiplied_in(PYTORCH, "fp32") == "fp32"


@pytest.mark.slow
def test_a_plan_is_as_large_as_in_fp32_and_faster_and_its_file_says_it_once() -> None:
    job = {
        "devices": 2,
        "hardware": "h100-80gb",
        "global_batch": 512,
        "pinned": {"data": 2, "micro_batches": 4, "recompute": "none"},
    }
    found = {word: planner.search("llama-tiny", precision=word, **job).plan for word in ("fp32", "tf32")}
    fp32, tf32 = found["fp32"].prediction, found["tf32"].prediction
    assert tf32.step_seconds < fp32.step_seconds
    assert tf32.model_flops == fp32.model_flops
    assert dict(tf32.memory)["weights"] == dict(fp32.memory)["weights"]
    plan = found["tf32"]
    text = dump_plan(plan)
    assert text.count("tf32") == 1
    again = parse_plan(text)
    assert again == plan
    assert machine_of(again.cluster).software.products == "tf32"
    assert machine_of(found["fp32"].cluster).software.products == ""


def test_a_plan_keeps_its_products_on_another_machine() -> None:
    """Priced for a profile of another name, it was one in fp32."""
    plan = planner.search(
        "llama-tiny", "h100-80gb", devices=2, global_batch=8, precision="tf32", pinned={"data": 2, "micro_batches": 1}
    ).plan
    assert machine_by(plan, "h200-141gb").software.products == "tf32"
    model = planned_graph(plan, None)
    moved = repriced(plan, *model, load_profile("h200-141gb").with_software(PYTORCH).with_devices(2))
    assert moved.plan.cluster.products == "tf32"
    with refused(RequestError, "cpu", "tf32"):
        machine_by(plan, "cpu")


def test_devices_without_such_products_are_refused() -> None:
    for profile in ("cpu", "v100-32gb"):
        with refused(RequestError, profile, "tf32", "fp32"):
            computing_in(load_profile(profile), "tf32")
    with refused(RequestError, "cpu", "tf32"):
        planner.search("llama-tiny", devices=2, hardware="cpu", precision="tf32")


@pytest.mark.parametrize("name", ["megatron", "nemo", "deepspeed", "torchtitan", "accelerate", "torch", "mindspeed"])
def test_engines_are_not_told_of_it(name: str) -> None:
    with refused(ExportError, "tf32", "--precision fp32"):
        TARGETS[name].nearest(replace(PLAIN, precision="tf32"))


def test_it_is_switched_on_while_a_step_runs_and_taken_back() -> None:
    asked = torch.backends.cuda.matmul
    before = asked.fp32_precision
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of(4))
    plan = replace(plan, training=replace(plan.training, precision="tf32"))
    with one_rank("llama", plan, plans.traced("llama")) as (step, _):
        seen, compute = [], step.rank.compute
        step.rank.compute = lambda *args, **kwargs: (seen.append(asked.fp32_precision), compute(*args, **kwargs))[1]
        step(*plans.batch())
        step.evaluate(*plans.batch())
    assert seen == ["tf32", "tf32"]
    assert asked.fp32_precision == before


def test_it_is_taken_back_after_an_error() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    with pytest.raises(ZeroDivisionError), narrow_products("tf32"):
        raise ZeroDivisionError
    with narrow_products("fp32"):
        assert torch.backends.cuda.matmul.fp32_precision == before
    assert torch.backends.cuda.matmul.fp32_precision == before
