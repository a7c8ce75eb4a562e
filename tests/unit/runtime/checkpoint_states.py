"""States of small models, whole and in memory, and plans that they are written under: no processes are needed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch

from planner.errors import CheckpointError
from planner.models.zoo import build_model
from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.layout.stage_cut import cut_stage
from planner.plan.plan import Plan
from runtime.checkpoint.manifest import FORMAT_VERSION, Manifest, Progress, SavedFile, SavedTensor
from runtime.checkpoint.offline import convert, merge
from runtime.checkpoint.regions import Region, whole
from runtime.checkpoint.spread import StateOfPlan
from runtime.checkpoint.tensor_files import dtype_of
from runtime.parameters.kept_buffers import buffer_homes
from tests.distributed import plans

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Whole tensors in memory, read like a checkpoint."""

    contents: Mapping[str, torch.Tensor]
    path: Path = Path("memory")
    files: tuple[SavedFile, ...] = ()
    manifest: Manifest | None = None
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        return {
            name: SavedTensor(
                shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."), cuts=(1,) * t.dim(), files=(0,)
            )
            for name, t in self.contents.items()
        }

    def read(self, name: str, region: Region | None = None, into: torch.Tensor | None = None) -> torch.Tensor:
        tensor = self.contents[name]
        box = whole(tensor.shape) if region is None else region
        found = tensor[box.within(whole(tensor.shape))]
        return found if into is None else into.copy_(found)

    def check(self, share: Callable[[int], bool] = lambda number: True) -> None:
        pass

    def release(self) -> None:
        pass


def plan_of(model: str, kind: int | str, sizes: tuple[int, ...], **settings: object) -> Plan:
    mesh = plans.mesh_of(*sizes)
    if isinstance(kind, str):
        return plans.hand_plan(kind, model, mesh, **settings)
    return plans.random_plan(model, mesh, kind, **settings)


def bound_of(model: str, plan: Plan) -> BoundPlan:
    return bind(plan, plans.traced(model), plans.BATCH)


def homes_of(model: str, bound: BoundPlan) -> dict[str, tuple[int, ...]]:
    cuts = [cut_stage(bound, stage) for stage in range(len(bound.plan.stages))]
    return buffer_homes(plans.build(model), bound, cuts)


@cache
def state_of(model: str) -> Memory:
    """A state with values that are all different, of a run with AdamW after 7 steps."""
    bound = bound_of(model, plan_of(model, "zero3", (1,)))
    module = plans.build(model)
    buffers = dict(module.named_buffers())
    known = {
        name: (tuple(buffers[name].shape), str(buffers[name].dtype).removeprefix("torch."), (0,))
        for name in homes_of(model, bound)
    }
    generator, found = torch.Generator().manual_seed(0), {}
    for spread in StateOfPlan(bound=bound).tensors(MOMENTS, 7, known):
        drawn = torch.rand(spread.shape, generator=generator, dtype=torch.float64) * 100
        found[spread.name] = drawn.to(dtype_of(spread.dtype))
    return Memory(contents=found)


def manifest_of(state: Memory) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        kind="sliced",
        progress=Progress(step=7, updates=7, samples=28, seed=3, data={"epoch": 1}),
        optimizer="adamw",
        files=(),
        tensors=dict(state.tensors),
    )


def write(model: str, plan: Plan, folder: Path, most: int = 1000) -> Manifest:
    """The state of a model as the ranks of a plan keep it."""
    bound, state = bound_of(model, plan), state_of(model)
    return convert(state, manifest_of(state), bound, homes_of(model, bound), folder, most)


def refusal(work: object) -> str:
    """What the CheckpointError says that some work raises."""
    try:
        work()  # type: ignore[operator]
    except CheckpointError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def wider(plan: Plan, **training: object) -> Plan:
    return replace(plan, training=replace(plan.training, **training))


def write_model(folder: Path, reference: str) -> None:
    """A merged checkpoint of a model of the zoo."""
    torch.manual_seed(0)
    module = build_model(reference, dtype="float32", device="cpu").module
    state = Memory(contents=dict(module.named_parameters()))
    merge(state, replace(manifest_of(state), kind="merged", optimizer=None), folder)
