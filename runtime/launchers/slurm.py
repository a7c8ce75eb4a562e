"""Slurm's srun (https://slurm.schedmd.com/srun.html, output environment variables).

Reads SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID, SLURM_TASKS_PER_NODE, the node list of the step
(SLURM_STEP_NODELIST, else SLURM_JOB_NODELIST or SLURM_NODELIST), whose first host has the first process, and
SLURM_JOB_ID with SLURM_STEP_ID, from which the port is made. A batch script, an interactive shell and a step of one
task have these variables too: they are places from which processes are started, and no ranks.
"""

import itertools
import math
import re

from planner.errors import RequestError
from runtime.launchers.launched import (
    LOOPBACK,
    Environment,
    Launched,
    digits,
    meeting_point,
    rank_in,
    whole_number,
)

_NAME = "Slurm"
_STEPS = 0xFFFFFFF0  # numbers from here on are Slurm's own: batch scripts, interactive shells
_HOSTS = 2**17  # maximum hosts of a job
_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_STRIDE = 7919  # a prime: steps of one job, and consecutive jobs, get different ports


def read(environment: Environment) -> Launched | None:
    """A task of a step that srun has started."""
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    if not step.isdecimal() or len(step) > 10 or int(step) >= _STEPS or "SLURM_PROCID" not in environment:
        return None
    world = whole_number(environment, "SLURM_NTASKS", _NAME, 1)
    if world == 1:
        return None
    found = next((environment[name] for name in _LISTS if environment.get(name)), None)
    if found is None:
        raise RequestError(f"Slurm starts this process, but none of {', '.join(_LISTS)} lists the hosts")
    hosts = hosts_of(found)
    job = digits(environment.get("SLURM_JOB_ID", "")) + int(step) * _STRIDE
    address, port = meeting_point(environment, hosts[0] if len(hosts) > 1 else LOOPBACK, job)
    return Launched(
        launcher=_NAME,
        rank=rank_in(environment, "SLURM_PROCID", world, _NAME),
        world=world,
        local_rank=whole_number(environment, "SLURM_LOCALID", _NAME),
        local_world=_local_world(environment, len(hosts), world),
        hosts=len(hosts),
        address=address,
        port=port,
    )


def hosts_of(text: str) -> list[str]:
    """The hosts of a list in Slurm's short form, in order: `node[01-03,7],login` is node01, node02, node03, node7,
    login. Raises RequestError for anything else."""
    found: list[str] = []
    for entry in re.findall(r"(?:\[[^\[\]]*\]|[^\[\],])+", text):
        parts = [_numbers(bracket, text) if bracket else [plain] for bracket, plain in _PART.findall(entry)]
        if "[]" in entry:
            raise RequestError(f"'{text:.80}' is not a Slurm host list: '[]' has no numbers")
        if len(found) + math.prod(map(len, parts)) > _HOSTS:
            raise RequestError(f"'{text:.80}' is not a Slurm host list: it has more than {_HOSTS} hosts")
        found += ["".join(words) for words in itertools.product(*parts)]
    written = re.sub(r"\[[^\[\]]*\]", "", text)
    if not found or "[" in written or "]" in written:
        raise RequestError(f"'{text:.80}' is not a Slurm host list, as node[01-03,7],login")
    return found


def _numbers(bracket: str, text: str) -> list[str]:
    found: list[str] = []
    for word in bracket.split(","):
        match = re.fullmatch(r"(\d{1,12})(?:-(\d{1,12}))?", word.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            raise RequestError(f"'{text:.80}' is not a Slurm host list: '{word:.40}' is not a number or a range")
        if int(last) - int(first) > _HOSTS:
            raise RequestError(f"'{text:.80}' is not a Slurm host list: '{word}' has more than {_HOSTS}")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _local_world(environment: Environment, hosts: int, world: int) -> int | None:
    """Tasks on this node, from a list such as `4(x2),3`."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    node = digits(environment.get("SLURM_NODEID", ""))
    for count, times in re.findall(r"(\d{1,12})(?:\(x(\d{1,12})\))?", text):
        node -= int(times or 1)
        if node < 0:
            return int(count)
    return world if hosts == 1 else None
