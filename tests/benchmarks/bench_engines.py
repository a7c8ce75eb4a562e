"""The table of docs/exports.md: for models and engines the best plan that the engine can be told, beside the free one.

Each plan is found with `engine=`, written by the exporter of that engine, and read back; a row says so where what is
read is not what was written, or where something was given up. CPU seconds are those of the search for the engine alone.
"quick" has Llama 3 8B, "usual" what is found soon, "full" all. Names of models after the options run
these alone, and names of engines their rows beside the free plan: bench_engines.py --extent=full llama70b torch
"""

import sys
import time
from dataclasses import dataclass

from timing import extent

import planner
from planner import SearchResult
from planner.api.exporting import Way, export_of
from planner.engines.spaces import SPACES
from planner.errors import PlannerError
from planner.export.target import Facts
from planner.plan.binding.machine import machine_of
from planner.plan.layout.roles import roles
from planner.plan.words import plan_words
from planner.report.units import bytes_text, percent_text, seconds_text

PROFILE = "h100-80gb"
EXPERTS = (
    "megatron",
    "megatron-bridge",
    "nemo",
    "mindspeed",
    "deepspeed",
    "accelerate",
    "torch",
    "torchtitan",
    "mindformers",
)
MODELS: dict[str, tuple[int, tuple[str, ...]]] = {
    "llama8b": (8, tuple(SPACES)),
    "gpt3-175b": (128, ("megatron", "megatron-bridge", "nemo", "mindspeed", "deepspeed", "accelerate", "torch")),
    "llama70b": (64, tuple(SPACES)),
    "mixtral-8x7b": (64, EXPERTS),
    "deepseek-v3": (
        2048,
        ("megatron", "megatron-bridge", "nemo", "mindspeed", "deepspeed", "accelerate", "torchtitan", "torch"),
    ),
}
"""Devices, and the engines that know the model."""
WITHIN = {"quick": ("llama8b",), "usual": ("llama8b", "gpt3-175b"), "full": tuple(MODELS)}
LIMIT = 1800.0  # seconds of one search; none takes half of it on a quiet machine


@dataclass(frozen=True, kw_only=True)
class Found:
    """A plan and the CPU seconds of its search."""

    result: SearchResult
    seconds: float


def found(traced: planner.TracedModel, devices: int, engine: str | None) -> Found:
    started = time.process_time()
    result = planner.search(traced, PROFILE, devices=devices, engine=engine, time_limit=LIMIT)
    return Found(result=result, seconds=time.process_time() - started)


def read_back(result: SearchResult, engine: str, traced: planner.TracedModel) -> str:
    """What became of a plan that was written and read: "equal", or what did not."""
    plan = result.plan
    given = export_of(plan, engine, machine_of(plan.cluster), traced.graph, traced.batch, Way())
    if given.searched:
        return "lies outside"
    if given.steps:
        return "but " + ", ".join(step.what for step in given.steps)
    target, description = given.target, given.job.description
    files = target.write(given.job)
    facts = Facts(
        layers=sum(description.layers),
        devices=description.devices,
        architecture=target.architecture_of(plan.model.reference, plan.model.sequence_length),
        beside=files.get(target.beside or "", ""),
        experts=description.expert is not None,
        sequence_length=plan.model.sequence_length,
    )
    return "equal" if target.read(files[target.main], facts).description == description else "differs"


def words(result: SearchResult) -> str:
    """`data 2 x tensor 4 x pipeline 8, ZeRO 1, recomputed: none`."""
    told = plan_words(result.bound, roles(result.bound))
    stages = [stage.blocks for stage in result.plan.stages]
    even = len(set(stages)) == 1
    parts = [told["degrees"]]
    if told["expert"] not in ("none", "1", ""):
        parts.append(f"experts over {told['expert']}")
    if len(stages) > 1:
        parts.append(f"{len(stages)} stages of {stages[0] if even else f'{min(stages)} to {max(stages)}'} blocks")
    return ", ".join([*parts, f"ZeRO {told['ZeRO']}", f"recomputed: {told['recomputation']}"])


def row(model: str, devices: int, name: str, one: Found, more: str, read: str) -> str:
    plan = one.result.plan
    figures = (
        seconds_text(plan.prediction.step_seconds), more, bytes_text(plan.prediction.peak_bytes),
        percent_text(one.result.gap), words(one.result), read, f"{one.seconds:.0f} s",
    )  # fmt: skip
    return f"| {model} on {devices} | {name} | `{plan.cluster.software}` | {' | '.join(figures)} |"


def table_of(model: str, only: list[str]) -> None:
    """The rows of a model, as they are found: of all engines that know it, or of `only` these."""
    devices, engines = MODELS[model]
    engines = tuple(engine for engine in engines if not only or engine in only)
    traced = planner.trace(model)
    free = found(traced, devices, None)
    print(row(model, devices, "free", free, "", ""), flush=True)
    for engine in engines:
        try:
            one = found(traced, devices, engine)
            read = read_back(one.result, engine, traced)
        except PlannerError as error:
            print(f"| {model} on {devices} | `--for {engine}` | | none | | | | {error} | | |", flush=True)
            continue
        more = f"{one.result.plan.prediction.step_seconds / free.result.plan.prediction.step_seconds - 1:+.1%}"
        print(row(model, devices, f"`--for {engine}`", one, more, read), flush=True)


def main() -> None:
    """The table, as Markdown."""
    named = [word for word in sys.argv[1:] if not word.startswith("--")]
    print("| model | plan | stack | step | against the free plan | memory | gap | what it is | read back | search |")
    print("|---" * 10 + "|")
    for model in [name for name in named if name in MODELS] or WITHIN[extent()]:
        table_of(model, [name for name in named if name in SPACES])


if __name__ == "__main__":
    main()
