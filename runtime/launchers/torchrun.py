"""torchrun, and torch's own variables set by hand."""

from planner.errors import RequestError
from runtime.launchers import own
from runtime.launchers.launched import Environment, Launched, meeting_point, rank_in, whole_number


def read(environment: Environment) -> Launched | None:
    """A process of a torchrun agent, on one host or several."""
    if "TORCHELASTIC_RUN_ID" not in environment or "RANK" not in environment:
        return None
    agents = whole_number(environment, "GROUP_WORLD_SIZE", "torchrun", 1)
    return _read(environment, "torchrun", agents)


def read_variables(environment: Environment) -> Launched | None:
    """A process whose RANK, WORLD_SIZE and so on were set by hand."""
    others = {"TORCHELASTIC_RUN_ID", own.STORE} & environment.keys()
    if others or not {"RANK", "WORLD_SIZE"} & environment.keys():
        return None
    return _read(environment, "RANK and WORLD_SIZE", 1)


def _read(environment: Environment, launcher: str, agents: int) -> Launched:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise RequestError(
            f"{' and '.join(missing)} not set, but other variables of torch.distributed are; set all for every"
            " process, or unset RANK and WORLD_SIZE to start the processes on this machine"
        )
    world = whole_number(environment, "WORLD_SIZE", launcher, 1)
    address, port = meeting_point(environment, "", 0)
    local = environment.get("LOCAL_WORLD_SIZE")
    return Launched(
        launcher=launcher,
        rank=rank_in(environment, "RANK", world, launcher),
        world=world,
        local_rank=whole_number(environment, "LOCAL_RANK", launcher) if "LOCAL_RANK" in environment else 0,
        local_world=None if local is None else whole_number(environment, "LOCAL_WORLD_SIZE", launcher, 1),
        hosts=None,
        address=address,
        port=port,
        agents=agents,
        agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
