"""mpirun of Open MPI (https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html).

Reads OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE. No variable gives the host of the first process, so on
several hosts MASTER_ADDR must be set (`mpirun -x MASTER_ADDR=HOST`). The port is made from the job number in
PMIX_NAMESPACE.
"""

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

_NAME = "Open MPI"
_OWN = "OMPI_COMM_WORLD_"


def read(environment: Environment) -> Launched | None:
    """A process of mpirun."""
    if not {f"{_OWN}RANK", f"{_OWN}SIZE"} & environment.keys():
        return None
    world = whole_number(environment, f"{_OWN}SIZE", _NAME, 1)
    rank = rank_in(environment, f"{_OWN}RANK", world, _NAME)
    local_world = whole_number(environment, f"{_OWN}LOCAL_SIZE", _NAME, 1)
    if local_world < world and not environment.get("MASTER_ADDR"):
        raise RequestError(
            f"mpirun started {local_world} of {world} processes on this host, and Open MPI tells none where the first"
            " one is; give mpirun -x MASTER_ADDR=HOST with the host of rank 0"
        )
    address, port = meeting_point(environment, LOOPBACK, digits(environment.get("PMIX_NAMESPACE", "")))
    return Launched(
        launcher=_NAME,
        rank=rank,
        world=world,
        local_rank=whole_number(environment, f"{_OWN}LOCAL_RANK", _NAME),
        local_world=local_world,
        hosts=1 if local_world == world else None,
        address=address,
        port=port,
    )
