"""On which addresses a process listens, by who launched it and what is asked for."""

import ipaddress
import os
import subprocess
import sys

import pytest

from planner.errors import RequestError
from runtime.comm.interfaces import interface_of, interfaces, loopback
from runtime.comm.rendezvous import interface_for, store_of, variables_of
from runtime.launchers import launched_by
from runtime.launchers.launched import Launched, is_loopback
from runtime.launchers.own import environment_of
from tests.distributed.listening import listening
from tests.distributed.ports import free_port
from tests.refusals import refused

OTHER = [one for one in interfaces() if not one.address.is_loopback and one.address.version == 4]


def launched(address: str, *, local: int | None = None, agent: bool = False) -> Launched:
    return Launched(
        launcher="test", rank=0, world=1, local_rank=0, local_world=local, hosts=None, address=address,
        port=free_port(), agent=agent,
    )  # fmt: skip


def bound(job: Launched, listen: str | None = None) -> set[str]:
    """The addresses on which the store of a job listens."""
    before = listening([os.getpid()])
    store = store_of(job, interface_for(job, listen))
    store.set("key", "value")
    assert store.get("key") == b"value"
    return {one.address for one in listening([os.getpid()]) - before}


def test_the_interfaces_of_this_machine() -> None:
    assert loopback().address == ipaddress.IPv4Address("127.0.0.1")
    assert interface_of(loopback().name) == interface_of("127.0.0.1") == interface_of("127.0.0.0/8") == loopback()
    for one in OTHER:
        assert interface_of(str(one.address)) == one
    with refused(RequestError, "--listen 203.0.113.77", "10.0.0.0/24"):
        interface_of("203.0.113.77")


def test_on_one_host_a_store_is_on_loopback_whatever_its_name() -> None:
    assert bound(launched("127.0.0.1")) == {"127.0.0.1"}
    assert bound(launched("some-host.example", local=1)) == {"127.0.0.1"}, "nobody else has to reach it"


def test_on_several_hosts_a_store_is_where_it_is_told() -> None:
    assert bound(launched("some-host.example"), "127.0.0.1") == {"127.0.0.1"}
    for one in OTHER[:1]:
        assert bound(launched(str(one.address))) == {str(one.address)}, "the address that all are told"
        assert bound(launched("some-host.example"), one.name) == {str(one.address)}
    assert interface_for(launched("some-host.example"), None) is None, "libraries choose"


def test_libraries_are_told_the_interface() -> None:
    assert variables_of(loopback()) == {
        "GLOO_SOCKET_IFNAME": loopback().name,
        "NCCL_SOCKET_IFNAME": f"={loopback().name}",
        "HCCL_IF_IP": "127.0.0.1",
    }


@pytest.mark.parametrize(("address", "wanted"), [("::1", True), ("127.9.0.1", True), ("localhost", True), ("a", False)])
def test_addresses_that_no_other_machine_reaches(address: str, wanted: bool) -> None:
    assert is_loopback(address) is wanted


def test_processes_of_plan_run_are_its_own_whoever_started_it() -> None:
    own = environment_of(1, 2, "/tmp/notes/store", 4711)
    around = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "RANK_TABLE_FILE": "none"}
    found = launched_by({**around, **own})
    assert found is not None
    assert (found.launcher, found.rank, found.world, found.local_rank, found.store) == (
        "plan run", 1, 2, 1, "/tmp/notes/store",
    )  # fmt: skip
    assert (own["MASTER_ADDR"], own["MASTER_PORT"], own["LOCAL_WORLD_SIZE"]) == ("127.0.0.1", "4711", "2")


@pytest.mark.parametrize("began", [False, True], ids=("first", "another began and was ended"))
def test_a_rank_ends_with_the_process_that_started_it(tmp_path, began: bool) -> None:
    """Also while its main thread waits in a call, and without a trace of the run."""
    script = (
        "import os, sys, subprocess, pathlib\n"
        "from runtime.processes.lifeline import held\n"
        "notes = pathlib.Path(sys.argv[1]); notes.mkdir()\n"
        "(notes / 'rank0.at').touch()\n"
        "rank = ('import pathlib, sys, time; from runtime.processes.lifeline import hold_on;'\n"
        "        'hold_on(pathlib.Path(sys.argv[1])); print(flush=True); time.sleep(600)')\n"
        "with held(notes):\n"
        "    words = [sys.executable, '-c', rank, str(notes)]\n"
        "    child = subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE)\n"
        "    child.stdout.readline()\n"
        f"    if {began}: notes.rename(f'{{notes}}.gone')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "notes")]
    # this returns when nobody has stderr open any more: the rank neither
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9, done.stderr
    assert list(tmp_path.iterdir()) == []
