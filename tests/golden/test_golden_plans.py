"""The search still writes the same plan files.

A refactoring leaves these files alone. A change of the cost model, of a profile or of the search changes some of them:
look at the difference (`git diff tests/golden`), and keep it if it is what was meant. To write them anew:

    python -m tests.golden.test_golden_plans
"""

import json
from pathlib import Path
from typing import Any

import pytest

from hardware_profiles import load_profile
from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.compare.repricing import repriced
from planner.plan.compare.verify import verify
from planner.plan.file import dump_plan, load_plan, parse_plan, save_plan
from planner.plan.outline import model_reference
from planner.plan.plan import PRECISIONS
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import FREE, Pinned
from planner.strategy_search.search import search

FOLDER = Path(__file__).parent / "plans"
REQUESTS: dict[str, tuple[str, str, int, int, str, Pinned]] = {
    "llama-tiny-4-cpu": ("llama-tiny", "cpu", 4, 16, "fp32", FREE),
    "gpt-tiny-8-h100-pipeline": (
        "gpt-tiny",
        "h100-80gb",
        8,
        32,
        "bf16",
        Pinned(pipeline=2, mesh=(4,), recompute="full"),
    ),
    "llama8b-8-h100": ("llama8b", "h100-80gb", 8, 32, "bf16", Pinned(pipeline=1, mesh=(2, 4), micro_batches=8)),
    "gpt2-16-ascend": ("gpt2", "ascend-910b-64gb", 16, 64, "bf16", Pinned(pipeline=1, mesh=(2, 8), micro_batches=2)),
    "deepseek-v2-lite-16-h800": (
        "deepseek-v2-lite",
        "h800-80gb",
        16,
        64,
        "bf16",
        Pinned(pipeline=2, data=8, expert=8, zero=1, micro_batch=1),
    ),
}


def request_of(name: str) -> SearchRequest:
    model, profile, devices, global_batch, precision, pinned = REQUESTS[name]
    built = build_model(model, dtype=PRECISIONS[precision])
    graph = trace(built.module, built.args, built.kwargs)
    return SearchRequest(
        graph=graph,
        batch=built.batch,
        model=model_reference(graph, name=model, sequence_length=built.sequence_length, batch=built.batch),
        cluster=load_profile(profile).with_devices(devices),
        global_batch=global_batch,
        precision=precision,
        pinned=pinned,
    )


def rounded(content: Any) -> Any:
    """Numbers to nine digits: processors round sums differently in the last ones."""
    if isinstance(content, dict):
        return {key: rounded(value) for key, value in content.items()}
    if isinstance(content, list):
        return [rounded(value) for value in content]
    return float(f"{content:.9g}") if isinstance(content, float) else content


@pytest.mark.cases(1, 3)
@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_the_plan_is_the_same(name: str) -> None:
    request = request_of(name)
    path = FOLDER / f"{name}.json"
    found, wanted = json.loads(dump_plan(search(request).plan)), json.loads(path.read_text(encoding="utf-8"))
    assert rounded(found) == rounded(wanted), "see the top of this file"
    verdict = verify(load_plan(path), request.graph, request.batch, request.cluster)
    assert verdict.as_stated, verdict.remarks
    assert verdict.fits


def test_a_file_of_version_1_is_read_and_written_as_version_2() -> None:
    """It says the same as its successor did, and holds; single stages, of which it says nothing, are no remark."""
    name = "gpt-tiny-8-h100-pipeline"
    request = request_of(name)
    plan = load_plan(FOLDER.parent / "version_1" / f"{name}.json")
    assert (plan.schema_version, plan.virtual_stages, plan.prediction.stages) == (2, 1, ())
    assert {(group.blocks > 0, group.recomputation) for group in plan.groups} == {(False, "none"), (True, "full")}
    assert parse_plan(dump_plan(plan)) == plan
    again = repriced(plan, request.graph, request.batch, request.cluster).plan  # figures change with the profile
    assert (again.groups, again.stages, again.inputs) == (plan.groups, plan.stages, plan.inputs)
    verdict = verify(again, request.graph, request.batch, request.cluster)
    assert verdict.as_stated, verdict.remarks


def test_every_file_has_its_request() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(REQUESTS)


if __name__ == "__main__":
    for requested in REQUESTS:
        save_plan(search(request_of(requested)).plan, FOLDER / f"{requested}.json")
