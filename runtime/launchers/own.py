"""`plan run` itself, which starts one process per device of this machine (`runtime.processes.ranks`).

They meet in a file, in a folder that only its owner may enter, so no port is open for it. RANK, WORLD_SIZE and the
other variables are set for code that reads them; nothing listens at MASTER_ADDR:MASTER_PORT.
"""

from runtime.launchers.launched import LOOPBACK, Environment, Launched, meeting_point, rank_in, whole_number

STORE = "PLAN_RUN_STORE"
"""The variable with the path of the file in which the processes meet."""

_NAME = "plan run"


def environment_of(rank: int, world: int, store: str, port: int) -> dict[str, str]:
    """The variables of one of `world` processes, all on this machine. `port` is a free one, for MASTER_PORT."""
    own = Launched(
        launcher=_NAME, rank=rank, world=world, local_rank=rank, local_world=world, hosts=1, address=LOOPBACK, port=port
    )
    return {**own.environment(), STORE: store}


def read(environment: Environment) -> Launched | None:
    """A process of `plan run`."""
    if not environment.get(STORE):
        return None
    world = whole_number(environment, "WORLD_SIZE", _NAME, 1)
    rank = rank_in(environment, "RANK", world, _NAME)
    address, port = meeting_point(environment, LOOPBACK, 0)
    return Launched(
        launcher=_NAME,
        rank=rank,
        world=world,
        local_rank=rank,
        local_world=world,
        hosts=1,
        address=address,
        port=port,
        store=environment[STORE],
    )
