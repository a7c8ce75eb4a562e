"""Plans with tables outside of the devices, beside the plain model with sparse gradients."""

from pathlib import Path

import plans
import torch.distributed as dist
from tasks import CPU, SEED, known, relative
from tasks_models import SETTINGS

from planner.errors import PlannerError
from planner.plan.file import parse_plan
from runtime.checkpoint.saving import Checkpoints
from runtime.servers.addresses import Addresses
from runtime.training_step import TrainingStep, parallelize
from runtime.unsharded import UnshardedStep

STEPS = 6


def built(model: str, text: str, servers: Addresses | None = None) -> TrainingStep:
    return parallelize(
        plans.build(model),
        parse_plan(text),
        optimizer=SETTINGS,
        traced=plans.traced(model),
        device=CPU,
        known=known(),
        seed=SEED,
        servers=servers,
    )


def training(model: str, given: list[str], folders: list[str]) -> list[tuple[float, float, int, int]]:
    """Under each plan the worst error of the losses of some steps and of the weights after them, the bytes of the
    tables on this rank's host, and how many rows this rank pulled. Servers are in `folders`, one for each plan, if any
    are."""
    found = []
    for number, text in enumerate(given):
        servers = Addresses(folder=Path(folders[number]), count=2) if folders else None
        step = built(model, text, servers)
        module = plans.build(model)
        plain = UnshardedStep(module, step.plan.training, SETTINGS, frozenset(range(99)))
        batches = [plans.inputs(model, seed=seed) for seed in range(STEPS)]
        losses = [(step(*one), plain(one, {})) for one in batches]
        weights, wanted = step.full_parameters(), dict(module.named_parameters())
        assert weights.keys() == wanted.keys()
        tables = step.rank.tables
        pulled = sum(one.client.traffic.pulled_rows for one in tables.all())
        errors = [relative(weights[name], wanted[name].detach()) for name in wanted]
        found.append((max(abs(a - b) / abs(b) for a, b in losses), max(errors), tables.host_bytes(), pulled))
        tables.close()
    return found


def held(model: str, text: str) -> list[str]:
    """What of a model this rank has on its device: parameters, and states of the optimizer by their shapes."""
    step = built(model, text)
    step(*plans.inputs(model))
    names = sorted(step.rank.parameters)
    states = [str(tuple(state.shape)) for state in step.rank.optimizer.states()]
    step.rank.tables.close()
    return [*names, *states]


def refusals(model: str, text: str, folder: str) -> list[str]:
    """What is said where there are no servers, and where a checkpoint is to be saved."""
    found = []
    try:
        built(model, text.replace('"host"', '"servers"')).prepare(*plans.inputs(model))
    except PlannerError as error:
        found.append(str(error))
    step = built(model, text)
    step(*plans.inputs(model))
    try:
        Checkpoints(folder).save(step)
    except PlannerError as error:
        found.append(str(error))
    dist.barrier()
    return found
