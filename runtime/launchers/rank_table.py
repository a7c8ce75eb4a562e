"""A rank table, the JSON file by which Ascend clusters describe their processes (RANK_TABLE_FILE).

    version 1.0, 1.2   server_list: [{server_id, host_ip?, device: [{rank_id, ..}, ..]}, ..]
    the older form     group_list: [{instance_list: [{rank_id, server_id, devices: [..]}, ..]}, ..]

Reads `status`, the servers with `server_id` (`host_ip`, where version 1.2 has it) and the `rank_id` of their devices.
RANK_ID says which of them this process is, unless another launcher does. Addresses and ports of devices are left to the
accelerator's library. Source: HCCL user guide, "Configuring resource information through the ranktable file" (templates
1 and 2), https://www.hiascend.com/document.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hardware_profiles.foreign import ForeignTextError, form_fault, parse_json, read_text
from planner.errors import RequestError
from runtime.launchers.launched import LOOPBACK, Environment, Launched, meeting_point, rank_in

VARIABLE = "RANK_TABLE_FILE"
_NAME = "a rank table"


class _Read(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)


_Rank = Annotated[int, Field(ge=0, le=2**31)]


class _Device(_Read):
    rank_id: _Rank


class _Server(_Read):
    server_id: str
    host_ip: str | None = None
    device: list[_Device]


class _Instance(_Read):
    rank_id: _Rank
    server_id: str


class _Group(_Read):
    instance_list: list[_Instance]


class _Table(_Read):
    status: str = "completed"
    server_list: list[_Server] = []
    group_list: list[_Group] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTable:
    """The server of every rank, in rank order, by its name and by its address in the table."""

    path: str
    servers: tuple[str, ...]
    addresses: tuple[str, ...]


def read(environment: Environment) -> Launched | None:
    """The process with the rank in RANK_ID of the table."""
    if not environment.get(VARIABLE):
        return None
    table = read_table(environment[VARIABLE])
    if "RANK_ID" not in environment:
        raise RequestError(
            f"{VARIABLE}={table.path} lists {len(table.servers)} processes, and nothing says which of them this is; set"
            f" RANK_ID to 0 ... {len(table.servers) - 1} for each, or unset {VARIABLE} to start them on this machine"
        )
    rank = rank_in(environment, "RANK_ID", len(table.servers), _NAME)
    here = [at for at, server in enumerate(table.servers) if server == table.servers[rank]]
    hosts = len(set(table.servers))
    address, port = meeting_point(environment, LOOPBACK if hosts == 1 else table.addresses[0], 0)
    return Launched(
        launcher=_NAME,
        rank=rank,
        world=len(table.servers),
        local_rank=here.index(rank),
        local_world=len(here),
        hosts=hosts,
        address=address,
        port=port,
    )


def read_table(path: str) -> RankTable:
    """A rank table from its file. Raises RequestError for one that cannot be read, is incomplete, or whose ranks are
    not 0, 1, 2, ..."""
    try:
        table = _Table.model_validate(parse_json(read_text(path)))
    except ForeignTextError as error:
        raise RequestError(f"{VARIABLE}={path}: {error}; give the rank table of the job, or unset it") from error
    except ValidationError as error:
        raise RequestError(f"{VARIABLE}={path}: {form_fault(error)}") from error
    if table.status != "completed":
        raise RequestError(f"{VARIABLE}={path}: its status is '{table.status}'; wait until it is 'completed'")
    return _ordered(path, _ranks(path, table))


def _ranks(path: str, table: _Table) -> list[tuple[int, str, str]]:
    """Rank, server and address of every process."""
    if bool(table.server_list) == bool(table.group_list):
        raise RequestError(f"{VARIABLE}={path}: give server_list, or group_list of the older form, and not both")
    found = [(d.rank_id, s.server_id, s.host_ip or s.server_id) for s in table.server_list for d in s.device]
    return found + [(i.rank_id, i.server_id, i.server_id) for g in table.group_list for i in g.instance_list]


def _ordered(path: str, found: Sequence[tuple[int, str, str]]) -> RankTable:
    counts = Counter(rank for rank, _, _ in found)
    twice = [rank for rank, count in counts.items() if count > 1]
    missing = [rank for rank in range(len(found)) if rank not in counts]
    if twice or missing or not found:
        wrong = (
            f"rank {twice[0]} is there {counts[twice[0]]} times" if twice else f"rank {(missing or [0])[0]} is missing"
        )
        raise RequestError(f"{VARIABLE}={path}: {wrong}; its {len(found)} devices need the ranks 0, 1, 2, ...")
    ordered = sorted(found)
    return RankTable(
        path=path, servers=tuple(s for _, s, _ in ordered), addresses=tuple(address for _, _, address in ordered)
    )
