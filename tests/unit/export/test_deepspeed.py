"""What DeepSpeed does with a configuration beyond parsing it: rules of deepspeed/runtime/engine.py, which exports
follow (0.19.8, and edaa7221 of 22 August 2026)."""

import json
from dataclasses import replace
from typing import Any

import pytest

from planner.export.description import Description
from planner.export.launching import priced_only
from planner.export.target import Job
from planner.export.targets import TARGETS
from planner.sharding.update import PLAIN
from tests.unit.export.descriptions import facts_of, job_of

DEEPSPEED = TARGETS["deepspeed"]
ALONE = Description(layers=(32,), full=(0,), selective=(0,), sequence_length=8192)
PARAMETER = replace(PLAIN, gradient_dtype="parameter")


def nearest(description: Description) -> Description:
    losses = DEEPSPEED.nearest(description)
    return losses[-1].description if losses else description


def job(description: Description) -> Job:
    return replace(job_of(description, "llama8b"), overlapped=("gathers", "reductions"))


def content(description: Description) -> dict[str, Any]:
    """The configuration of what is nearest, which is read back equal."""
    d = nearest(description)
    text = DEEPSPEED.write(job(d))["ds_config.json"]
    assert DEEPSPEED.read(text, facts_of(d, "llama8b")).description == d
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("update", [PLAIN, PARAMETER])
@pytest.mark.parametrize("degrees", [{"data": 8}, {"tensor": 8, "vocabulary_parallel": False}, {}])
def test_sums_of_gradients_have_the_dtype_of_the_model_without_zero(
    precision: str, update: Any, degrees: dict[str, Any]
) -> None:
    """_do_optimizer_sanity_check: "unsupported mix of model_dtype and grad_accum_dtype", where ZeRO is off."""
    update = PLAIN if precision == "fp32" else update
    found = content(replace(ALONE, precision=precision, update=update, **degrees))
    sums = found.get("data_types", {}).get("grad_accum_dtype", "fp32")
    assert found["zero_optimization"]["stage"] == (0 if sums == precision else 1)
    assert sums == (precision if update is PARAMETER else "fp32")


def test_zero_1_stands_for_none_over_several_devices() -> None:
    (loss,) = DEEPSPEED.nearest(replace(ALONE, data=8))
    assert (loss.what, loss.here, loss.description.zero) == ("ZeRO", "0", 1)
    assert DEEPSPEED.nearest(replace(ALONE, data=8, update=PARAMETER)) == ()


@pytest.mark.parametrize(("change", "overlaps"), [
    ({"zero": 1}, False), ({"zero": 1, "update": PARAMETER}, True), ({"zero": 1, "states_at": "host"}, True),
    ({"zero": 1, "precision": "fp16"}, True), ({"zero": 2}, True), ({"zero": 3}, True),
    ({"zero": 1, "layers": (16, 16), "full": (0, 0), "selective": (0, 0)}, False),
])  # fmt: skip
def test_reductions_overlap_where_the_optimizer_does_that(change: dict[str, Any], overlaps: bool) -> None:
    """The BF16_Optimizer of ZeRO 1 in bf16 with sums in fp32 reduces at the end of a step (allreduce_gradients), and
    pipelines switch the overlap off (_configure_zero_optimizer)."""
    wanted = replace(ALONE, data=8, micro_batches=4, **change)
    assert content(wanted)["zero_optimization"].get("overlap_comm", False) == overlaps
    plain = replace(job(nearest(wanted)), overlapped=())
    assert "overlap_comm" not in DEEPSPEED.write(plain)["ds_config.json"]
    told = priced_only(DEEPSPEED, job(nearest(wanted)))
    assert told == (() if overlaps else ("reductions of gradients overlapped with the backward pass",))
