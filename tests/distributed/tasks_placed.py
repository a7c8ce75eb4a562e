"""Plans with tables outside of the devices, beside the plain model with sparse gradients."""

from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from planner.errors import CheckpointError, PlannerError
from planner.plan.file import parse_plan
from planner.plan.prediction.host_link import crossing_rows
from runtime.checkpoint.saving import Checkpoints
from runtime.checkpoint.spread import TABLE_PARTS
from runtime.checkpoint.tables import tables_file_of
from runtime.reference.unsharded import UnshardedStep
from runtime.servers.addresses import Addresses
from runtime.step.training_step import TrainingStep, parallelize
from tests.distributed import plans
from tests.distributed.tasks import CPU, SEED, known, relative
from tests.distributed.tasks_models import SETTINGS

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


Moved = tuple[dict[tuple[str, str], int], dict[tuple[str, str], int], tuple[int, int]]
"""Bytes of rows that cross the link of a device by pass and operator, as predicted and as they do; and bytes of rows
that the rank got and gave by way of the tables of its own host and of others, or of servers."""


def crossed(model: str, text: str, servers: tuple[str, int] | None) -> Moved:
    """What this rank moves in a step in which no id comes twice."""
    step = built(model, text, _addresses(servers))
    dense, fields, clicks = plans.inputs(model)
    different = dense, [torch.arange(len(field)) for field in fields], clicks
    step.prepare(*different)
    found: Counter[tuple[str, str]] = Counter()
    tables = step.rank.tables
    tables.crossed = lambda phase, operator, nbytes: found.update({(phase, operator): nbytes})
    step(*different)
    times = step.plan.training.micro_batches
    predicted = crossing_rows(step.rank.bound, step.place.stage, step.place.rank)
    traffic = [one.client.traffic for one in tables.all()]
    tables.close()
    moved = sum(one.pulled_bytes for one in traffic), sum(one.pushed_bytes for one in traffic)
    return {key: int(times * nbytes) for key, nbytes in predicted.items()}, dict(found), moved


State = tuple[list[float], dict[str, np.ndarray]]
"""Losses of two steps, and the whole state of the tables and the whole weights after them."""


def saved(model: str, text: str, folder: str, servers: tuple[str, int] | None) -> State:
    """Train two steps, save, and train two more."""
    step = built(model, text, _addresses(servers))
    for seed in range(2):
        step(*plans.inputs(model, seed=seed))
    checkpoints = Checkpoints(folder)
    checkpoints.save(step)
    found = _two_more(model, step)
    checkpoints.wait()
    return found


def restored(model: str, text: str, folder: str, servers: tuple[str, int] | None) -> State:
    """Train one step from other weights, as tables that are not restored would show, then go on from a checkpoint."""
    step = built(model, text, _addresses(servers))
    step(*plans.inputs(model, seed=9))
    found = Checkpoints(folder, read_only=True).restore(step)
    assert found is not None
    assert (found.step, step.steps) == (2, 2)
    return _two_more(model, step)


def _addresses(servers: tuple[str, int] | None) -> Addresses | None:
    return None if servers is None else Addresses(folder=Path(servers[0]), count=servers[1])


def _two_more(model: str, step: TrainingStep) -> State:
    losses = [step(*plans.inputs(model, seed=seed)) for seed in (2, 3)]
    tables, weights = step.rank.tables, {name: one.numpy() for name, one in step.full_parameters().items()}
    for name in tables.names if tables.all() else ():
        rows = np.arange(len(weights[name]))
        for part in TABLE_PARTS.values() if step.plan.training.optimizer == "adamw" else ():
            weights[f"{part}/{name}"] = tables.read(name, part, rows).numpy()
    tables.close()
    return losses, weights


def unwritable(model: str, text: str, folder: str) -> tuple[str, int]:
    """What saving says where rank 1 cannot write its share of the tables, and how many checkpoints there are."""
    step = built(model, text)
    step(*plans.inputs(model))
    checkpoints = Checkpoints(folder)
    if dist.get_rank() == 1:
        part = checkpoints._writable().make_part(1, checkpoints._token)
        (part / tables_file_of(1)).write_text("somebody was here")
    dist.barrier()
    checkpoints.save(step)
    try:
        checkpoints.wait()
    except CheckpointError as error:
        return str(error), len(list(Path(folder).glob("step-*")))
    return "", -1


def without_servers(model: str, text: str) -> str:
    """What is said where nobody says where the servers are."""
    try:
        built(model, text).prepare(*plans.inputs(model))
    except PlannerError as error:
        return str(error)
    return ""
