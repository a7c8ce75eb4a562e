"""Who has launched a process is read from its environment, completely or not at all."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from planner.errors import RequestError
from runtime.launchers import LAUNCHERS, launched_by
from runtime.launchers.rank_table import read_table
from runtime.launchers.slurm import hosts_of
from tests import refusals

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "1935474689",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_TASKS_PER_NODE": "4,3",
}  # fmt: skip


def table_of(path: Path, servers: Mapping[str, list[int]], **more: object) -> str:
    listed = [
        {"server_id": server, "device": [{"device_id": str(at), "rank_id": str(rank)} for at, rank in enumerate(ranks)]}
        for server, ranks in servers.items()
    ]
    path.write_text(json.dumps({"version": "1.0", "status": "completed", "server_list": listed, **more}))
    return str(path)


def refused(environment: Mapping[str, str]) -> str:
    with pytest.raises(RequestError) as caught:
        launched_by(environment)
    return str(caught.value)


def test_nobody_has_launched_a_process_without_variables() -> None:
    assert launched_by({"PATH": "/bin", "MASTER_PORT": "29500", "SLURM_JOB_ID": "3", "SLURM_NTASKS": "8"}) is None


@pytest.mark.parametrize(
    ("environment", "text", "place"),
    [
        (TORCHRUN, "started by torchrun: 8 processes, which meet at node0:29500", (5, 8, 1, 4)),
        (OPEN_MPI, "started by Open MPI: 4 processes on 1 host, which meet at 127.0.0.1:24689", (2, 4, 2, 4)),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "3000"},
            "started by Open MPI: 4 processes, which meet at node0:3000",
            (2, 4, 2, 2),
        ),
        (SLURM, "started by Slurm: 7 processes on 2 hosts, which meet at gpu07:19711", (5, 7, 1, 3)),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "80"},
            "started by RANK and WORLD_SIZE: 1 process, which meet at a:80",
            (0, 1, 0, None),
        ),
    ],
)
def test_a_launcher_is_read(environment: dict[str, str], text: str, place: tuple[int, int, int, int | None]) -> None:
    found = launched_by(environment)
    assert found is not None
    assert found.text() == text
    assert (found.rank, found.world, found.local_rank, found.local_world) == place
    assert launched_by({**environment, **found.environment()}) is not None, "what it sets contradicts nothing"


def test_every_reader_leaves_the_environments_of_others_alone() -> None:
    known = {"torchrun": TORCHRUN, "open_mpi": OPEN_MPI, "slurm": SLURM}
    for name, environment in known.items():
        assert [other for other, read in LAUNCHERS.items() if read(environment) is not None] == [name]


def test_launchers_inside_each_other() -> None:
    inside_srun = launched_by({**TORCHRUN, **SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"})
    assert inside_srun is not None
    assert (inside_srun.launcher, inside_srun.rank) == ("torchrun", 5)
    daemons = launched_by({**OPEN_MPI, **SLURM})  # mpirun starts a daemon on each host through srun
    assert daemons is not None
    assert (daemons.launcher, daemons.world) == ("Open MPI", 4)


@pytest.mark.parametrize(
    "more",
    [{"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": ""}, {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}],
    ids=["batch script", "no step", "lone task"],
)
def test_what_is_no_task_of_slurm_may_start_processes_itself(more: dict[str, str]) -> None:
    assert launched_by({**SLURM, **more}) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({**TORCHRUN, **OPEN_MPI}, ["two launchers at once", "Open MPI started 4", "for 2 hosts", "--nnodes 4"]),
        ({**OPEN_MPI, "RANK": "1"}, ["two launchers at once", "Open MPI says rank 2 of 4", "RANK=1"]),
        ({**SLURM, "WORLD_SIZE": "8"}, ["two launchers at once", "rank 5 of 7", "WORLD_SIZE=8"]),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "a"}, ["RANK and MASTER_PORT not", "unset"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ["2 of 4 processes", "mpirun -x MASTER_ADDR=HOST"]),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, ["OMPI_COMM_WORLD_RANK is not set"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, ["OMPI_COMM_WORLD_RANK=4", "0 to 3"]),
        ({**SLURM, "SLURM_LOCALID": "one"}, ["SLURM_LOCALID=one", "whole number"]),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, ["SLURM_STEP_NODELIST", "hosts"]),
        ({**OPEN_MPI, "MASTER_PORT": "70000"}, ["MASTER_PORT=70000", "65535"]),
    ],
)
def test_contradictions_are_named(environment: dict[str, str], words: list[str]) -> None:
    message = refused(environment)
    assert all(word in message for word in words), message


def test_a_job_needs_a_process_for_every_device() -> None:
    found = launched_by(OPEN_MPI)
    assert found is not None
    found.check(4)
    with refusals.refused(RequestError, 8, "Open MPI", 4, 8):
        found.check(8)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node3", ["node3"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-10,3],login", ["node08", "node09", "node10", "node3", "login"]),
        ("r[1-2]n[01-02]-ib,x", ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib", "x"]),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert hosts_of(text) == hosts


@pytest.mark.parametrize("text", ["", "node[3-1]", "node[1-", "node[]", "node[a]", "node1-2]"])
def test_what_is_no_list_of_hosts(text: str) -> None:
    with refusals.refused(RequestError, f"'{text}'"):
        hosts_of(text)


def test_a_rank_table(tmp_path: Path) -> None:
    path = table_of(tmp_path / "table.json", {"10.0.0.2": [2, 3], "10.0.0.1": [0, 1]})
    found = launched_by({"RANK_TABLE_FILE": path, "RANK_ID": "3", "MASTER_PORT": "4000"})
    assert found is not None
    assert found.text() == "started by a rank table: 4 processes on 2 hosts, which meet at 10.0.0.1:4000"
    assert (found.rank, found.local_rank, found.local_world) == (3, 1, 2)
    assert refused({"RANK_TABLE_FILE": path}).endswith(
        "set RANK_ID to 0 ... 3 for each, or unset RANK_TABLE_FILE to start them on this machine"
    )
    assert "RANK_ID=4" in refused({"RANK_TABLE_FILE": path, "RANK_ID": "4"})
    assert launched_by({**OPEN_MPI, "RANK_TABLE_FILE": path}) is not None
    assert "lists 4 processes, and Slurm started 7" in refused({**SLURM, "RANK_TABLE_FILE": path})


def test_other_forms_of_a_rank_table(tmp_path: Path) -> None:
    older, newer = tmp_path / "older.json", tmp_path / "newer.json"
    instances = [{"rank_id": str(r), "server_id": f"10.0.0.{r}", "devices": [{"device_id": "0"}]} for r in (1, 0)]
    older.write_text(json.dumps({"status": "completed", "group_list": [{"instance_list": instances}]}))
    assert read_table(str(older)).addresses == ("10.0.0.0", "10.0.0.1")
    servers = [{"server_id": f"node_{r}", "host_ip": f"10.0.1.{r}", "device": [{"rank_id": r}]} for r in (0, 1)]
    newer.write_text(json.dumps({"version": "1.2", "server_list": servers, "super_pod_list": []}))
    found = read_table(str(newer))
    assert (found.servers, found.addresses) == (("node_0", "node_1"), ("10.0.1.0", "10.0.1.1"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ('{"server_list": [{"device": []}]}', "server_list.0.server_id"),
        ('{"server_list": []}', "give server_list, or group_list"),
        ('{"status": "initializing"}', "its status is 'initializing'"),
        (
            '{"server_list": [{"server_id": "a", "device": [{"rank_id": 0}, {"rank_id": 0}]}]}',
            "rank 0 is there 2 times",
        ),
        ('{"server_list": [{"server_id": "a", "device": [{"rank_id": 1}]}]}', "rank 0 is missing"),
    ],
)
def test_a_rank_table_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    message = refused({"RANK_TABLE_FILE": str(path), "RANK_ID": "0"})
    assert words in message, message
    assert "No such file" in refused({"RANK_TABLE_FILE": str(tmp_path / "none"), "RANK_ID": "0"})
