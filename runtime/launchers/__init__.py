"""Finds out who launched this process: `plan run`, torchrun, mpirun of Open MPI, srun of Slurm, a rank table, or a user
who set the variables.

    launcher ── environment variables ──> Launched ── RANK, WORLD_SIZE, MASTER_ADDR, .. ──> torch.distributed

Launchers may be nested: srun starts one torchrun agent on every node, or mpirun starts its daemons through Slurm. The
innermost launcher knows the processes; variables of an outer one must agree with it, and a contradiction is refused.
"""

from collections.abc import Callable, Mapping

from planner.errors import RequestError
from runtime.launchers import open_mpi, own, rank_table, slurm, torchrun
from runtime.launchers.launched import Environment, Launched

__all__ = ["LAUNCHERS", "Launched", "launched_by"]

LAUNCHERS: Mapping[str, Callable[[Environment], Launched | None]] = {
    "torchrun": torchrun.read,
    "plan_run": own.read,
    "variables": torchrun.read_variables,
    "open_mpi": open_mpi.read,
    "slurm": slurm.read,
    "rank_table": rank_table.read,
}
"""From the innermost to the outermost."""


def launched_by(environment: Environment) -> Launched | None:
    """The description that the launcher of this process gives; None where no launcher started it, so that it may start
    others.

    Raises RequestError for variables that are missing or wrong, and where two launchers contradict each other.
    """
    inner = torchrun.read(environment)
    if inner is None and (started := own.read(environment)) is not None:
        return started  # its processes are on this machine, whichever launcher started their parent
    if inner is not None:
        for outer in (open_mpi.read(environment), slurm.read(environment)):
            if outer is not None:
                _check_agents(inner, outer)
    else:
        mpi = open_mpi.read(environment)
        task = (
            slurm.read(environment) if mpi is None else None
        )  # mpirun's daemons are Slurm tasks, its processes are not
        inner = mpi or task
        if inner is None:
            inner = torchrun.read_variables(environment)
        else:
            _check_variables(environment, inner)
    return _with_table(environment, inner)


def _check_agents(inner: Launched, outer: Launched) -> None:
    if inner.agents != outer.world:
        raise RequestError(
            f"two launchers at once: {outer.launcher} started {outer.world} processes, and in each torchrun starts"
            f" processes for {inner.agents} host{'' if inner.agents == 1 else 's'}; start one torchrun on each host"
            f" with --nnodes {outer.world}, or leave torchrun out"
        )


def _check_variables(environment: Environment, inner: Launched) -> None:
    """Scripts may set RANK and WORLD_SIZE from a launcher's variables; they must then agree with them."""
    for name, said in (("RANK", inner.rank), ("WORLD_SIZE", inner.world)):
        if name in environment and environment[name].strip() != str(said):
            raise RequestError(
                f"two launchers at once: {inner.launcher} says rank {inner.rank} of {inner.world}, and"
                f" {name}={environment[name]}; unset RANK and WORLD_SIZE"
            )


def _with_table(environment: Environment, inner: Launched | None) -> Launched | None:
    """The process by its rank table, where no launcher describes it; else the table must have as many processes."""
    if inner is None:
        return rank_table.read(environment)
    if environment.get(rank_table.VARIABLE):
        table = rank_table.read_table(environment[rank_table.VARIABLE])
        if len(table.servers) != inner.world:
            raise RequestError(
                f"{rank_table.VARIABLE}={table.path} lists {len(table.servers)} processes, and {inner.launcher} started"
                f" {inner.world}; unset {rank_table.VARIABLE}, or start as many"
            )
    return inner
