"""Kernels that a host is said to launch in a step, beside those that the runtime launches: counted below autograd, on
tensors without data."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hardware_profiles import PYTORCH, load_profile
from planner.cli.main import app
from planner.graph.trace import trace
from planner.graph.tracing.on_meta import on_meta
from planner.plan.binding.bind import bind
from planner.plan.binding.model_of import build_planned
from planner.plan.file import load_plan
from planner.plan.prediction.predict import stated_costs
from runtime.auditing.imitation import imitated_inputs, imitated_step
from runtime.profiling.launched_kernels import LaunchedKernels

NEAR = 0.1
"""Not priced are most operators of a loss, copies of views, and the sums of the gradients of what several products
read, as queries, keys and values; more of BERT's, whose projections are apart."""

GPT = "--model gpt2-medium --set num_layers=6 --set hidden_size=64 --set num_heads=4 --seq-len 32"
QWEN = "--model qwen2.5-0.5b --set num_layers=6 --set hidden_size=64 --set num_heads=4 --set num_kv_heads=2"
MODELS = {
    "llama": ("--model llama-tiny --set num_layers=6 --seq-len 32", NEAR),
    "gpt": (GPT, NEAR),
    "qwen": (f"{QWEN} --set ffn_size=128 --set head_size=16 --seq-len 32", NEAR),
    "bert": ("--model bert-large --set num_layers=6 --set hidden_size=64 --set num_heads=4 --seq-len 32", 0.12),
}


def launched(words: str, folder: Path) -> tuple[float, int, int]:
    """Kernels of the passes of a step that are priced, those that are launched, and those of its update."""
    file = folder / "plan.json"
    asked = shlex.split(f"{words} --devices 1 --hardware h200 --recompute none")
    result = CliRunner().invoke(app, [*asked, "-o", str(file)])
    assert result.exit_code == 0, result.output
    plan, cluster = load_plan(file), load_profile("h200-141gb").with_devices(1)
    built = build_planned(plan, None)
    traced = trace(on_meta(built.module), built.args, built.kwargs)
    (cost,) = stated_costs(bind(plan, traced, built.batch), cluster)
    each = cluster.device.host_latency * PYTORCH.host
    priced = plan.training.micro_batches * sum(one.host for one in cost.launches.values()) / each
    with imitated_step(plan, traced, built.batch, 0, fused=True) as step:
        inputs = imitated_inputs(step, traced, built.batch)
        for _ in range(2):  # the first one makes room for moments
            with LaunchedKernels() as passes:
                step.optimizer.reduction.begin()
                step.accumulate(inputs)
            with LaunchedKernels() as update:
                step.optimizer.step()
    return priced, passes.found.total(), update.found.total()


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", MODELS)
def test_as_many_kernels_are_priced_as_the_runtime_launches(model: str, tmp_path: Path) -> None:
    words, near = MODELS[model]
    priced, passes, update = launched(f"{words} --global-batch 2 --micro-batches 1", tmp_path)
    assert priced == pytest.approx(passes, rel=near)
    assert update < 5  # few kernels update all weights


@pytest.mark.thorough
def test_gradients_of_every_micro_batch_are_added_up(tmp_path: Path) -> None:
    priced, passes, _ = launched(f"{GPT} --global-batch 6 --micro-batches 3", tmp_path)
    assert priced == pytest.approx(passes, rel=NEAR)
