"""What the workers do in the tests of copies in memory."""

import os
import shutil
from pathlib import Path

import torch.distributed as dist

from runtime.recovery.replica_folder import FOLDER
from runtime.recovery.state_replicas import StateReplicas
from runtime.run_folder.identity import Origin
from tests.distributed.tasks_saving import Settings, losses, plan_for, step_of, unequal

ORIGIN = Origin(run="1" * 32, folder="2" * 32)
Case = tuple[int | str, tuple[int, ...], Settings]


def goes_on(
    model: str, first: Case, then: Case | None, folder: str, per_host: int, gone: tuple[int, ...], damage: str
) -> tuple[int | None, list[float], list[float], list[str]]:
    """Train three steps with copies after each, lose the memory of some hosts, and go on, on the same plan or another.

    Returns the step from which it goes on (None: nothing is left), the losses from there of the run that was not
    interrupted and of the one that goes on, and the tensors of the two that differ in a bit afterwards (of the same
    plan).
    """
    os.environ[FOLDER] = f"{folder}/host-{dist.get_rank() // per_host}"
    whole = step_of(model, plan_for(model, *first), first[2])
    copies = StateReplicas(ORIGIN)
    for number in range(3):
        losses(model, whole, number, 1)
        copies.take(whole, data={"step": number + 1})
    dist.barrier()
    if dist.get_rank() == 0:
        _lose(Path(folder), gone, damage)
    dist.barrier()
    case = first if then is None else then
    again = step_of(model, plan_for(model, *case), case[2], seed=99)
    fresh = StateReplicas(ORIGIN)
    left = fresh.left()
    if left is None:
        return None, [], [], []
    found = fresh.restore(again, left)
    assert found.data == {"step": found.step}
    losses(model, again, found.step, 3 - found.step)
    wanted, after = losses(model, whole, 3, 2), losses(model, again, 3, 2)
    return found.step, wanted, after, unequal(whole, again) if then is None else []


def _lose(folder: Path, gone: tuple[int, ...], damage: str) -> None:
    for host in gone:
        shutil.rmtree(folder / f"host-{host}")
    if damage:
        path = next(iter(sorted(folder.glob(f"host-*/plan-run-*/{damage}"))))
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
