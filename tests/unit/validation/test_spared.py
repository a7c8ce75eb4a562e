"""What saves memory beside the degrees of a run: by its words, by its recipe, and inferred from what fits."""

from dataclasses import replace
from pathlib import Path

import pytest

from planner.models.dimensions import TRACED_BATCH
from planner.plan.binding.bind import bind
from planner.plan.plan import Prediction
from planner.plan.prediction.predict import predict
from planner.validation.frameworks.recipes import spared_by_recipe, virtual_stages_by_recipe
from planner.validation.pricing.evaluate import evaluate_chunk
from planner.validation.pricing.spared_plans import fewest_recomputed, spared_plan
from planner.validation.reading.row_files import read_rows
from planner.validation.reading.rows import Row
from planner.validation.request.configuration import run_of
from planner.validation.results.summary import summarise
from planner.validation.spared import Spared
from tests.unit.validation.runs import row, write

BRIDGE = "Megatron-Bridge perf archive {} NeMo Container"


def cells(**values: str) -> Row:
    return Row(line=2, values=values)


def recipe(release: str, model: str, profile: str, precision: str = "fp8", zero: str = "1") -> Spared | None:
    return spared_by_recipe(
        cells(
            source=BRIDGE.format(release),
            model=model,
            profile=profile,
            precision=precision,
            zero_stage=zero,
        )
    )


def test_recipes_of_megatron_bridge() -> None:
    assert recipe("26.04", "LLAMA3_70B", "gb200-186gb", zero="3") == Spared(offloaded=40)
    assert recipe("25.09", "LLAMA3_70B", "b200-180gb", zero="3") == Spared(recomputed=5)
    assert recipe("25.11", "LLAMA3_70B", "b200-180gb", zero="3") == Spared(offloaded=5)
    assert recipe("26.04", "LLAMA3_70B", "gb200-186gb") == Spared()
    assert recipe("26.02", "DeepSeekV3", "gb200-186gb") == Spared(but=("mla_up_proj",))
    assert recipe("26.04", "DeepSeekV3", "gb200-186gb") == Spared(but=("mlp",))
    assert recipe("25.09", "DeepSeekV3 (dropless)", "h100-80gb", "bf16") == Spared(but=("mla_up_proj", "mlp"))
    assert recipe("26.02", "GPT OSS 120B", "b200-180gb", "bf16") == Spared(remade=("normalisation", "experts"))
    assert recipe("26.04", "LLAMA3_70B [LoRA Performance]", "gb200-186gb") is None
    assert spared_by_recipe(cells(source="MosaicML", model="LLAMA3_70B", profile="h100-80gb")) is None


def test_virtual_stages_that_a_table_leaves_out() -> None:
    nemotron = {"model": "Nemotron4 340b BF16", "pp": "8", "vpp": "1"}
    assert virtual_stages_by_recipe(cells(source="NVIDIA DGXC benchmarking recipes v25.04", **nemotron)) == 12
    assert virtual_stages_by_recipe(cells(source="NVIDIA DGXC benchmarking recipes v25.05", **nemotron)) is None
    llama = {"source": "NeMo 24.07 perf table", "model": "LLAMA2-13B", "pp": "4", "date": "2024-08-09"}
    assert virtual_stages_by_recipe(cells(**llama)) == 10
    assert virtual_stages_by_recipe(cells(**llama, vpp="5")) is None


def test_blocks_that_are_recomputed_lie_between_none_and_all(tmp_path: Path) -> None:
    (found,) = read_rows(write(tmp_path / "runs.csv", row(recompute_detail="full (block n=1)")))
    run = run_of(found)
    assert run.spared == Spared(recomputed=1)
    assert run.pinned.recompute == "none"
    (found,) = read_rows(write(tmp_path / "runs.csv", row(recompute_detail="full (block n=2)")))
    assert run_of(found).pinned.recompute == "full"  # two blocks are all of a stage


def test_what_must_have_been_recomputed_is_inferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.validation.pricing import evaluate, priced_run

    (found,) = read_rows(write(tmp_path / "runs.csv", row(recompute="", n_layers="6", micro_batch="4", n_params_B="")))
    run = run_of(found)
    cluster, _ = evaluate.machine_of(found, run)
    assert run.untold
    graph = evaluate.traced(run.job.model)
    monkeypatch.setattr(evaluate, "traced", lambda model: graph)
    plan = priced_run._searched(run, cluster, graph)

    def priced(spared: Spared) -> Prediction:
        return predict(bind(spared_plan(plan, spared, graph, TRACED_BATCH), graph, TRACED_BATCH), cluster)

    some = [priced(Spared(recomputed=count)) for count in range(4)]
    assert [one.step_seconds for one in some] == sorted(one.step_seconds for one in some)
    peaks = [one.peak_bytes for one in some]
    assert peaks == sorted(peaks, reverse=True)
    away = priced(Spared(offloaded=1))
    assert away.peak_bytes < peaks[0]
    limit = (peaks[1] + peaks[2]) / 2  # two of the three blocks of each rank must go
    inferred = fewest_recomputed(plan, graph, TRACED_BATCH, cluster, lambda one: one.peak_bytes <= limit)
    assert inferred is not None
    assert (inferred[0], inferred[2]) == (2, some[2])
    assert fewest_recomputed(plan, graph, TRACED_BATCH, cluster, lambda one: one.peak_bytes < peaks[-1]) is None

    (whole,) = evaluate_chunk([found])
    assert not whole.inferred
    needed = whole.needed_bytes
    assert needed is not None
    less = replace(cluster, device=replace(cluster.device, memory=needed - 1))
    (told,) = evaluate_chunk([found], lambda machine: replace(machine, device=less.device))
    assert told.inferred
    assert told.feasible
    assert summarise([told, whole]).whole.inferred == 1
