"""What the workers do in the tests of runs that roll back, or that are resumed with a guard: whole runs of `train`."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from planner.errors import PlannerError
from planner.graph.trace import trace
from planner.sharding.update import Update
from runtime.launch.training import train
from runtime.processes.progress import StepReport
from runtime.run_settings import RunSettings
from tests.distributed import plans
from tests.distributed.tasks import SEED
from tests.distributed.tasks_checking import Fragile, fragile_batch

Batches = Sequence[float]
"""The offset of one token of each global batch: 0 trains, -100 gives a NaN, 5.5 a loss that leaps."""
Settings = dict[str, object]
_OFFSETS = "TEST_OFFSETS"


def model() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A factory for `--model`."""
    torch.manual_seed(SEED)
    return Fragile(), fragile_batch(torch.float32, 0.0)


def data() -> TensorDataset:
    """A factory for `--dataset`: batches that differ, with the offsets that the environment says."""
    drawn = torch.Generator().manual_seed(SEED)
    offsets = [tuple(map(float, word.split(":"))) for word in os.environ[_OFFSETS].split()]
    tokens, levels = [], []
    for number in range(1 + int(max(number for number, _ in offsets))):
        found = torch.randint(4, plans.VOCABULARY, (plans.BATCH, plans.SEQUENCE), generator=drawn)
        for at, offset in offsets:
            if at == number:
                tokens.append(found)
                levels.append(fragile_batch(torch.float32, offset)[1])
    return TensorDataset(torch.cat(tokens), torch.cat(levels))


def run(
    batches: dict[int, float], plan: tuple[tuple[int, ...], int, Settings], settings: Settings
) -> tuple[list[tuple[int, float, int | None]], str, bytes]:
    """Step, loss and step that was gone back to of each batch of a run on the batches of these numbers, with what ended
    it; and the checkpoint of its last step, file by file."""
    os.environ[_OFFSETS] = " ".join(f"{number}:{offset}" for number, offset in sorted(batches.items()))
    sizes, seed, how = plan
    module, example = model()
    made = plans.random_plan("fragile", plans.mesh_of(*sizes), seed, graph=trace(module, example), **how)
    made = replace(made, training=replace(made.training, update=Update(buckets="none")))
    given = RunSettings(**{"model": f"{__name__}:model", "dataset": f"{__name__}:data", **settings})  # type: ignore[arg-type]
    found, said = [], ""
    try:
        for report in train(made, given):
            if isinstance(report, StepReport):
                found.append((report.step, report.loss, report.back_to))
                assert report.difference < 1e-4, report
    except PlannerError as error:
        said = f"{type(error).__name__}: {error}"
    return found, said, _last(given)


def _last(settings: RunSettings) -> bytes:
    if settings.save is None:
        return b""
    dist.barrier()
    last = Path(settings.save) / f"step-{settings.steps:06d}"
    return b"".join(path.read_bytes() for path in sorted(last.glob("*.safetensors")))


def resumed(
    batches: dict[int, float], plan: tuple[tuple[int, ...], int, Settings], settings: Settings, stop: int
) -> tuple[list[tuple[int, float, int | None]], list[tuple[int, float, int | None]]]:
    """What a run does after step `stop`, and what another one does that goes on from its checkpoint of that step."""
    whole, said, _ = run(batches, plan, settings)
    assert not said, said
    folder = Path(str(settings["save"]))
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.glob("step-*"):
            if int(path.name.removeprefix("step-")) > stop:
                shutil.rmtree(path)
    dist.barrier()
    again, said, _ = run(batches, plan, {**settings, "go_on": True})
    assert not said, said
    return whole, again
