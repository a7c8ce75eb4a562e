"""What a host does for each parameter in an update, in units of an operator that it launches: the figure that
`planner.pricing.parameter_price.UPDATED` rounds.

    passes    seconds of the passes of small models of 24 blocks on a CPU, over the kernels that they launch
    update    seconds of the update over the parameters, with the kernels of it left out: gradients are found and handed
              to the optimizer, which lists them, and the weights are found that are written

    .venv/bin/python tests/benchmarks/bench_host.py
"""

import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from planner.cli.main import app
from planner.plan.binding.model_of import build_planned
from planner.plan.file import load_plan
from runtime import OptimizerSettings, parallelize
from runtime.profiling.launched_kernels import LaunchedKernels

SMALL = "--set num_layers=24 --set hidden_size=32 --set num_heads=2 --set vocab_size=64"
MODELS = (
    f"gpt-tiny {SMALL}",
    f"llama-tiny {SMALL} --set num_kv_heads=2 --set ffn_size=64",
    f"bert-tiny {SMALL}",
)
ASKED = "--precision bf16 --devices 1 --hardware cpu --recompute none --micro-batches 1 --seq-len 8 --global-batch 2"
STEPS = 40
KERNELS = ("_fused_adamw_", "_foreach_copy_", "_foreach_add_")
"""What an update launches."""

T = TypeVar("T")


def timed(call: Callable[..., T], took: list[float]) -> Callable[..., T]:
    """The same call, whose seconds are written down."""

    def other(*given: Any) -> T:
        began = time.perf_counter()
        made = call(*given)
        took.append(time.perf_counter() - began)
        return made

    return other


def main() -> None:
    torch.set_num_threads(1)
    for words in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plan.json"
            found = CliRunner().invoke(app, [*shlex.split(f"--model {words} {ASKED}"), "-o", str(file)])
            assert found.exit_code == 0, found.output
            plan = load_plan(file)
        built = build_planned(plan, None, device="cpu")
        step = parallelize(built.module, plan, optimizer=OptimizerSettings(fused=True))
        for _ in range(4):
            step(*built.args, **built.kwargs)
        with LaunchedKernels() as kernels:
            step.rank.accumulate(step.inputs_of(*built.args, **built.kwargs))
        step.rank.optimizer.step()
        passes, updates = list[float](), list[float]()
        step.rank.accumulate = timed(step.rank.accumulate, passes)  # type: ignore[method-assign]
        step.rank.optimizer.step = timed(step.rank.optimizer.step, updates)  # type: ignore[method-assign]
        nothing: dict[str, Any] = dict.fromkeys(KERNELS, lambda *_, **__: None)
        with mock.patch.multiple(torch, **nothing):
            for _ in range(STEPS):
                step(*built.args, **built.kwargs)
        each = statistics.median(passes) / kernels.found.total()
        own = statistics.median(updates) / len(step.rank.parameters)
        print(f"{words.split()[0]:12} {1e6 * each:6.1f} us a kernel {1e6 * own:6.1f} us a parameter {own / each:6.2f}")


if __name__ == "__main__":
    main()
