"""What the workers do in the tests of checkpoints."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from planner.errors import CheckpointError
from planner.graph.trace import trace
from planner.plan.plan import Plan
from planner.sharding.mesh import Mesh
from planner.sharding.stored import StoredParameter, own_copies
from runtime.checkpoint.folder import part_of
from runtime.checkpoint.saving import Checkpoints
from runtime.checkpoint.state import live_tensors
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.step.training_step import TrainingStep, parallelize
from tests.distributed import plans
from tests.distributed.offloading import mixed, of_blocks, offloaded, staying
from tests.distributed.tasks import CPU, SEED, known

Settings = dict[str, object]


def plan_for(model: str, kind: int | str, sizes: tuple[int, ...], settings: Settings) -> Plan:
    """A plan by hand or at random; `half` has weights in bfloat16, `update` changes what becomes of gradients,
    `offloaded` says that some states are on the host and some on a disk, `weights` that those of blocks are on the
    host."""
    given = dict(settings)
    half, update, away = given.pop("half", False), given.pop("update", {}), given.pop("offloaded", False)
    weights = of_blocks("host") if given.pop("weights", False) else staying
    if half:
        given["graph"] = trace(plans.build(model).bfloat16(), plans.inputs(model))
    mesh = plans.mesh_of(*sizes)
    if kind == "own norms":
        plan = plans.make_plan(model, mesh, plans.on_samples, _own_norms, plans.load_samples, **given)
    elif isinstance(kind, str):
        plan = plans.hand_plan(kind, model, mesh, **given)
    else:
        plan = plans.random_plan(model, mesh, kind, **given)
    training = replace(plan.training, update=replace(plan.training.update, **update))
    return offloaded(replace(plan, training=training), mixed if away else staying, weights=weights)


def _own_norms(name: str, shape: tuple[int, ...], mesh: Mesh) -> StoredParameter:
    return own_copies(len(mesh.axes)) if "norm" in name else plans.store_zero1(name, shape, mesh)


def step_of(model: str, plan: Plan, settings: Settings, seed: int = SEED) -> TrainingStep:
    module = plans.build(model)
    module = module.bfloat16() if settings.get("half") else module
    graph = trace(module, plans.inputs(model)) if settings.get("half") else plans.traced(model)
    optimizer = OptimizerSettings(learning_rate=1e-2)
    step = parallelize(module, plan, optimizer=optimizer, traced=graph, device=CPU, known=known(), seed=seed)
    step.prepare(*plans.inputs(model, samples=plan.training.global_batch))
    return step


def losses(model: str, step: TrainingStep, first: int, count: int) -> list[float]:
    samples = step.plan.training.global_batch
    return [step(*plans.inputs(model, seed=number, samples=samples)) for number in range(first, first + count)]


def resumed(
    model: str, kind: int | str, sizes: tuple[int, ...], settings: Settings, folder: str, asynchronous: bool
) -> tuple[list[float], list[float], list[str]]:
    """Losses of steps 3 to 5 of a run that was never interrupted, of one that goes on after step 2, and the tensors of
    the two that differ in a bit afterwards."""
    plan = plan_for(model, kind, sizes, settings)
    whole = step_of(model, plan, settings)
    checkpoints = Checkpoints(folder, asynchronous=asynchronous)
    losses(model, whole, 0, 2)
    checkpoints.save(whole, data={"epoch": 3})
    wanted = losses(model, whole, 2, 3)
    checkpoints.wait()
    again = step_of(model, plan, settings, seed=SEED + 1)
    found = checkpoints.restore(again)
    assert found is not None
    assert (found.step, found.samples, found.seed) == (2, 2 * plan.training.global_batch, SEED)
    assert found.data == {"epoch": 3}
    assert again.steps == 2
    return wanted, losses(model, again, 2, 3), unequal(whole, again)


def unequal(first: TrainingStep, other: TrainingStep) -> list[str]:
    one, two = live_tensors(first.rank), live_tensors(other.rank)
    assert one.keys() == two.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, two[name])]


def moved(
    model: str,
    first: tuple[int | str, tuple[int, ...], Settings],
    then: tuple[int | str, tuple[int, ...], Settings],
    folder: str,
) -> tuple[list[float], list[float], float]:
    """Losses of two plans after the same checkpoint, written under the first of them; the worst difference between the
    whole weights that each of them has then."""
    steps = [step_of(model, plan_for(model, *one), one[2]) for one in (first, then)]
    checkpoints = Checkpoints(folder)
    losses(model, steps[0], 0, 2)
    checkpoints.save(steps[0])
    checkpoints.wait()
    checkpoints.restore(steps[1])
    before = [step.full_parameters() for step in steps]
    worst = max(float((before[0][name] - before[1][name]).abs().max()) for name in before[0])
    return losses(model, steps[0], 2, 2), losses(model, steps[1], 2, 2), worst


def failing(folder: str) -> tuple[str, str, str, int]:
    """What saving says where one rank cannot write: when it is waited for, at the next step of this rank, at the next
    save; and how many checkpoints there are."""
    step = step_of("llama", plan_for("llama", "zero3", (4,), {}), {})
    checkpoints = Checkpoints(folder)
    losses("llama", step, 0, 1)
    if dist.get_rank() == 2:
        part = part_of(Path(folder), 1, checkpoints._token)
        checkpoints._own.make_part(1, checkpoints._token)
        (part / "rank-00002.safetensors").write_text("somebody was here")
    dist.barrier()
    checkpoints.save(step)
    said = [_said(work) for work in (checkpoints.wait, step.before_step, lambda: checkpoints.save(step))]
    return (*said, len(list(Path(folder).glob("step-*"))))


def refused(folder: str, name: str) -> tuple[str, list[str]]:
    """What restoring says after a bit of a file was flipped, and which tensors have changed all the same."""
    step = step_of("llama", plan_for("llama", "zero1", (4,), {}), {})
    checkpoints = Checkpoints(folder, asynchronous=False)
    losses("llama", step, 0, 1)
    path = checkpoints.save(step)
    losses("llama", step, 1, 1)
    if dist.get_rank() == 3:
        content = bytearray((path / name).read_bytes())
        content[len(content) // 2] ^= 4
        (path / name).write_bytes(content)
    dist.barrier()
    before = {tensor_name: tensor.clone() for tensor_name, tensor in live_tensors(step.rank).items()}
    said = _said(lambda: checkpoints.restore(step))
    after = live_tensors(step.rank)
    assert step.steps == 2
    return said, [tensor_name for tensor_name, tensor in before.items() if not torch.equal(tensor, after[tensor_name])]


def _said(work: Callable[[], object]) -> str:
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return ""
