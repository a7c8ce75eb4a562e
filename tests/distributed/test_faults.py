"""Faults of commit dca0d43, one test or more for each: each fails there, by what it did, and passes now.

Said with what both have: the command line, sockets, files, and what a worker of parameter servers calls. So this file
can be copied into a checkout of that commit, and run there.
"""

import contextlib
import ipaddress
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from runtime.servers import Fleet, SparseOptimizer, Table, TableClient

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

ROOT = Path(__file__).resolve().parents[2]
PLAN = (sys.executable, "-m", "planner.cli.main")
DEADLINE = 600.0
ENDLESS = "100000"
ADDRESSES = 12 * 2**30
"""Bytes of address space of a command, so that none of them takes the machine down."""
LONGEST = 45
"""CPU seconds after which a command is killed; each ends in about half of them or less."""

TINY = ("--model", "llama-tiny", "--set", "num_layers=1", "--seq-len", "8", "--hardware", "cpu", "--global-batch", "4")
OWN = ("--hardware", "cpu", "--global-batch", "4", "-q", "-o", "plan.json")
MODELS = """
import torch
from torch import nn

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
BATCH, TOKENS = 2, 8


def ids():
    return torch.randint(3, 64, (BATCH, TOKENS))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.sides = nn.ModuleDict({"en/de": nn.Linear(8, 8)})

    def forward(self, x):
        return self.sides["en/de"](x).square().mean()


def named():
    return Named(), (torch.randn(BATCH, 8),)


class IndexAdd(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, rows):
        h = self.linear(x)
        return torch.zeros_like(h).index_add(0, rows, h).square().mean()


def index_add():
    return IndexAdd(), (torch.randn(BATCH, 8), torch.tensor([1, 1]))


class MixedDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.to(torch.bfloat16)
        self.norm.float()

    def forward(self, x):
        h = self.down(nn.functional.silu(self.up(x.bfloat16())))
        return self.norm(h.float()).square().mean() + h.float().square().mean()


def mixed_dtypes():
    return MixedDtypes(), (torch.randn(BATCH, 8),)


def falcon_alibi():
    import transformers

    more = {"vocab_size": 64, "alibi": True, "ffn_hidden_size": 64, "use_cache": False}
    config = transformers.FalconConfig(**SIZES, **more, bos_token_id=1, eos_token_id=2)
    return transformers.AutoModelForCausalLM.from_config(config), (), {"input_ids": ids(), "labels": ids()}


def whisper():
    import transformers

    sizes = {"layers": 1, "attention_heads": 4, "ffn_dim": 64}
    config = transformers.WhisperConfig(
        **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in sizes.items()},
        vocab_size=64, d_model=32, num_mel_bins=8, max_source_positions=8, max_target_positions=TOKENS, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False,
    )
    inputs = {"input_features": torch.randn(BATCH, 8, 16), "labels": ids()}
    return transformers.WhisperForConditionalGeneration(config), (), inputs


def clip():
    import transformers

    both = {**SIZES, "intermediate_size": 64, "projection_dim": 16}
    text = {**both, "vocab_size": 64, "max_position_embeddings": 32, "eos_token_id": 2}
    image = {**both, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=16)
    inputs = {"input_ids": ids(), "pixel_values": torch.randn(BATCH, 3, 8, 8), "return_loss": True}
    return transformers.CLIPModel(config), (), inputs


def mamba():
    import transformers

    config = transformers.MambaConfig(
        vocab_size=256, hidden_size=64, state_size=16, num_hidden_layers=1, use_cache=False
    )
    with torch.device("meta"):
        tokens = torch.zeros(BATCH, TOKENS, dtype=torch.long)
        return transformers.MambaForCausalLM(config), (), {"input_ids": tokens, "labels": tokens}


class Endless(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        while True:
            x = x * self.weight


def endless():
    return Endless(), (torch.zeros(4, 16),)


class Dims(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((8,) * 7))

    def forward(self, x):
        for _ in range(20):
            x = torch.tanh(x * self.weight) + x.transpose(2, 3)
        return x.sum()


def dims():
    return Dims(), (torch.zeros((8,) * 8, device="meta"),)
"""


# Commands.


@dataclass(frozen=True, slots=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    err: str


class Command:
    """`plan WORDS` in a folder, which all its processes bear as a mark; all of them are ended with it."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._mark = f"MARK={tempfile.mktemp(dir=folder)}".encode()
        self._files = [Path(tempfile.mktemp(dir=folder, suffix=suffix)) for suffix in (".out", ".err")]
        temporary = folder / "temporary"
        temporary.mkdir(exist_ok=True)
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "COLUMNS": "500"}
        environment = {**os.environ, **own, "MARK": self._mark.decode().removeprefix("MARK=")}
        environment.pop("PLAN_COPIES", None)
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self.process = subprocess.Popen(
                [*PLAN, *words], cwd=folder, env=environment, stdout=out, stderr=err, stdin=subprocess.DEVNULL
            )
        resource.prlimit(self.process.pid, resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End all processes, as a machine does that is switched off."""
        while found := self.processes():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.05)
        self.process.wait()

    def processes(self) -> list[int]:
        """Those that have not ended."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self._mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for something that the command does."""
        ends = time.monotonic() + DEADLINE
        while not done():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < ends, self.said()
            time.sleep(0.05)

    def ended(self) -> Said:
        """How it has ended."""
        try:
            self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no answer after {DEADLINE:g} s: {self.said()}")
        return self.said()

    def said(self) -> Said:
        """So far."""
        texts = [path.read_text() for path in self._files]
        code = self.process.poll()
        return Said(-1000 if code is None else code, *texts)


def plan(folder: Path, *words: str, addresses: int = ADDRESSES) -> Said:
    """How `plan WORDS` ends, which is killed after so many CPU seconds."""
    with Command(folder, *words) as command:
        pid = command.process.pid
        resource.prlimit(pid, resource.RLIMIT_AS, (addresses, addresses))
        resource.prlimit(pid, resource.RLIMIT_CPU, (LONGEST, LONGEST))
        ended = command.ended()
    assert ended.code != -signal.SIGKILL, f"no answer after {LONGEST} CPU seconds, {ended}"
    return ended


def steps(said: Said) -> list[int]:
    """Those that a run with --json has made."""
    lines = (json.loads(line) for line in said.out.splitlines() if line.startswith("{") and line.endswith("}"))
    return [int(line["step"]) for line in lines if line.get("event") == "step"]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plans of a tiny model, for one process and for two."""
    folder = tmp_path_factory.mktemp("plans")
    for name, devices in (("one.json", "1"), ("two.json", "2")):
        made = plan(folder, *TINY, "--devices", devices, "--data", devices, "-q", "-o", name)
        assert made.code == 0, made
    return folder


@pytest.fixture(scope="module")
def saved(plans: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a run has saved two checkpoints, in `runs`."""
    folder = tmp_path_factory.mktemp("saved")
    before = os.umask(0o022)
    try:
        words = ("--steps", "2", "--no-check", "--save", "runs", "--save-every", "1")
        made = plan(folder, "run", str(plans / "one.json"), *words)
    finally:
        os.umask(before)
    assert made.code == 0, made
    return folder


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with `models.py`."""
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


@pytest.fixture
def memory() -> Iterator[None]:
    """What runs that were killed leave in shared memory goes after the test."""
    before = set(Path("/dev/shm").glob("plan-run-*"))
    yield
    for path in set(Path("/dev/shm").glob("plan-run-*")) - before:
        shutil.rmtree(path, ignore_errors=True)


# Runs and their folders.


@pytest.mark.usefixtures("memory")
def test_copies_delete_nothing_that_is_not_theirs(plans: Path, tmp_path: Path) -> None:
    """The text in SAVE/run became part of a path, and the folder that it led to was deleted."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.txt").write_text("years of work")
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "run").write_text(f"x/{'../' * 10}{victim.relative_to('/')}")
    plan(tmp_path, "run", str(plans / "one.json"), "--steps", "1", "--no-check", "--save", "save", "--copies")
    assert victim.exists(), "the folder was deleted"
    assert (victim / "thesis.txt").exists(), "the files were deleted"


@pytest.mark.usefixtures("memory")
def test_a_copied_folder_does_not_go_on_from_the_other_run(plans: Path, tmp_path: Path) -> None:
    """It went on from the replicas of the run that it was copied from, at a step that it never had."""
    words = ("--no-check", "--json", "--copies", "--save-every", "5", "--save")
    one, other = tmp_path / "one", tmp_path / "other"
    with Command(tmp_path, "run", str(plans / "one.json"), "--steps", ENDLESS, *words, "one") as run:
        run.until(lambda: (one / "step-000005" / "manifest.json").exists())
        shutil.copytree(one, other, ignore=shutil.ignore_patterns(".*"))
        run.until(lambda: steps(run.said())[-1] >= 60)
    newest = max(int(path.name.removeprefix("step-")) for path in other.glob("step-*"))
    again = plan(tmp_path, "run", str(plans / "one.json"), "--steps", "60", *words, "other", "--continue")
    assert newest < 60
    assert not steps(again) or steps(again)[0] == newest + 1, again.out[:300]
    assert again.code == 2, (newest, again)
    assert "other" in again.err


def test_of_two_runs_into_one_folder_one_is_refused(plans: Path, tmp_path: Path) -> None:
    """Both ended with "saved"."""
    words = ("--no-check", "--save", "runs", "--steps", "50", "--save-every", "10")
    with (
        Command(tmp_path, "run", str(plans / "one.json"), *words) as one,
        Command(tmp_path, "run", str(plans / "one.json"), *words) as other,
    ):
        found = (one.ended(), other.ended())
    assert sorted(said.code for said in found) == [0, 2], found


def test_nobody_else_can_read_what_a_run_saves(saved: Path) -> None:
    """Weights, manifests and folders were readable for everybody."""
    found = [saved / "runs", *(saved / "runs").rglob("*")]
    assert len(found) > 5
    assert {str(path): oct(path.stat().st_mode & 0o777) for path in found if path.stat().st_mode & 0o077} == {}


def test_a_run_leaves_no_temporary_folder(saved: Path) -> None:
    """Each run left a folder torchelastic_* with the logs of its ranks."""
    assert [path.name for path in (saved / "temporary").iterdir() if "inductor" not in path.name] == []


def test_a_checkpoint_without_a_manifest_is_said(saved: Path, tmp_path: Path) -> None:
    """The newest one was stepped over in silence."""
    shutil.copytree(saved / "runs", tmp_path / "runs")
    (tmp_path / "runs" / "step-000002" / "manifest.json").unlink()
    shown = plan(tmp_path, "checkpoint", "inspect", "runs")
    assert shown.code == 0, shown
    assert "step-000002" in shown.out, "it is not mentioned"


# The network.


def test_a_run_listens_on_loopback_alone(plans: Path, tmp_path: Path) -> None:
    """The stores of torchrun listened on all addresses, and ran what anybody wrote into them."""
    found: set[tuple[str, int]] = set()
    words = ("run", str(plans / "two.json"), "--steps", "3", "--no-check")
    with Command(tmp_path, *words) as run:
        while run.process.poll() is None:
            found |= listening(run.processes())
            time.sleep(0.05)
        assert run.ended().code == 0, run.said()
    assert len(found) > 1, "each rank has a socket"
    assert sorted(one for one in found if not ipaddress.ip_address(one[0]).is_loopback) == []


def listening(processes: list[int]) -> set[tuple[str, int]]:
    """Addresses and ports on which processes take connections, as the kernel lists them."""
    own, found = set(), set()
    for process in processes:
        for path in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError):
                own.add(os.readlink(path))
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:  # listens
                address, _, port = words[1].partition(":")
                raw = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
                ip = ipaddress.ip_address(raw)
                mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
                found.add((str(mapped or ip), int(port, 16)))
    return found


# Parameter servers.

ROWS, WIDTH = 2000, 16
ITEMS = Table(name="items", rows=ROWS, width=WIDTH, optimizer=SparseOptimizer(name="sgd", learning_rate=1.0))
IDS, ONES = np.arange(ROWS), np.ones((ROWS, WIDTH), np.float32)


def room(pid: int, size: int) -> None:
    """A file of the process may have so many bytes: a full disk that needs no root."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_full_disk_does_not_spoil_the_log_of_a_parameter_server(tmp_path: Path) -> None:
    """Half a record was kept, the whole one appended behind it and acknowledged: the log could not be read again."""
    with Fleet(tmp_path, 1) as fleet, TableClient(fleet.addresses, [ITEMS], patience=20.0) as client:
        client.begin()
        client.push({"items": (IDS, ONES)})
        pid = fleet.pid(0)
        room(pid, (tmp_path / "server-0" / "log-000000").stat().st_size + ONES.nbytes // 2)
        later = threading.Timer(1.0, room, (pid, resource.RLIM_INFINITY))
        later.start()
        client.push({"items": (IDS, ONES)})  # is acknowledged, now or when there is room
        later.join()
        assert fleet.restarts == 0
        os.kill(pid, signal.SIGKILL)
        while not fleet.restarts or fleet.addresses.of(0) is None:
            fleet.check()  # raises what a server says that cannot start
            time.sleep(0.05)
        assert np.array_equal(client.whole("items"), -2 * ONES)


SHAPE = b'{"kind":"hello","fields":{},"arrays":[["a","<f4",[1180591620717411303424]]]}'


def stays(fleet: Fleet, client: TableClient) -> None:
    """The server is the process that it was, and its worker goes on."""
    client.push({"items": (IDS, ONES)})
    fleet.check()
    assert fleet.restarts == 0, "the server ended, and was started again"
    assert client.reconnections == 0


def tell(fleet: Fleet, data: bytes) -> None:
    """Say something as one who is no worker, until the server has read it or has had enough."""
    where = fleet.addresses.of(0)
    assert where is not None
    with socket.create_connection(where, timeout=30.0) as stranger, contextlib.suppress(OSError):
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(2**16):
            pass


def frame(header: bytes) -> bytes:
    """A whole frame with any header."""
    return struct.pack("<4sIQI", b"PSF1", len(header), 0, zlib.crc32(header)) + header


@pytest.mark.parametrize("header", [SHAPE, b"[" * 200_000], ids=["a shape of 2**70", "200,000 lists"])
def test_no_header_ends_a_parameter_server(header: bytes, tmp_path: Path) -> None:
    """Anybody who reached its port ended the process."""
    with Fleet(tmp_path, 1) as fleet, TableClient(fleet.addresses, [ITEMS]) as client:
        client.begin()
        tell(fleet, frame(header))
        stays(fleet, client)


def test_more_connections_than_descriptors_do_not_end_a_parameter_server(tmp_path: Path) -> None:
    """The process ended with "Too many open files"."""
    with Fleet(tmp_path, 1) as fleet, TableClient(fleet.addresses, [ITEMS]) as client:
        client.begin()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.prlimit(fleet.pid(0), resource.RLIMIT_NOFILE, (24, most))
        where = fleet.addresses.of(0)
        assert where is not None
        with contextlib.ExitStack() as open_ones:
            for _ in range(60):
                with contextlib.suppress(ConnectionError):
                    open_ones.enter_context(socket.create_connection(where, timeout=30.0))
            time.sleep(1.0)
            stays(fleet, client)


def test_a_parameter_server_keeps_no_large_frame_of_a_stranger(tmp_path: Path) -> None:
    """What anybody sent was kept in memory, up to 2 GiB a connection."""
    with Fleet(tmp_path, 1) as fleet, TableClient(fleet.addresses, [ITEMS]) as client:
        client.begin()
        where = fleet.addresses.of(0)
        assert where is not None
        before = resident(fleet.pid(0))
        with socket.create_connection(where, timeout=30.0) as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(struct.pack("<4sIQI", b"PSF1", 100, 2**31, 0))
            for _ in range(256):
                stranger.sendall(bytes(2**20))
        client.pull({"items": IDS})
        assert resident(fleet.pid(0)) - before < 64 * 2**20
        stays(fleet, client)


def resident(pid: int) -> int:
    """Bytes of memory that a process has had at most."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def test_a_parameter_server_sends_nothing_in_plain_text_to_other_hosts(tmp_path: Path) -> None:
    """Rows and the key went over the network as they were."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as looking:
        looking.connect(("192.0.2.1", 9))  # sends nothing
        host = looking.getsockname()[0]
    if ipaddress.ip_address(host).is_loopback:
        pytest.skip("this machine has no other address")
    words = (str(tmp_path), "--servers", "1", "--number", "0", "--listen", f"{host}:0", "--with-parent")
    server = subprocess.Popen(
        [sys.executable, "-m", "runtime.servers", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        while server.poll() is None:
            assert not (tmp_path / "server-0.at").exists(), "it listens without a certificate"
            time.sleep(0.05)
        assert server.returncode == 2
    finally:
        server.kill()
        server.communicate()


# Files of others.


def test_a_plan_file_runs_no_code(plans: Path, tmp_path: Path) -> None:
    """What it names as its model was imported and called."""
    content = json.loads((plans / "one.json").read_text())
    (tmp_path / "trap.py").write_text("open('imported', 'w')\ndef make():\n    open('called', 'w')\n")
    for reference in ("trap:make", "os:abort"):
        named = {**content, "model": {**content["model"], "reference": reference}}
        (tmp_path / "plan.json").write_text(json.dumps(named))
        shown = plan(tmp_path, "show", "plan.json")
        assert [name for name in ("imported", "called") if (tmp_path / name).exists()] == []
        assert shown.code == 2, shown


@pytest.mark.parametrize("field", ["batch", "outline"])
def test_a_falsified_plan_is_found(field: str, plans: Path, tmp_path: Path) -> None:
    """It verified as good."""
    content = json.loads((plans / "one.json").read_text())
    model = content["model"]
    false = {"batch": model["batch"] + 1, "outline": {**model["outline"], "inputs": {}}}
    assert plan(plans, "verify", "one.json").code == 0
    (tmp_path / "plan.json").write_text(json.dumps({**content, "model": {**model, field: false[field]}}))
    found = plan(tmp_path, "verify", "plan.json")
    assert found.code == 1, found
    assert field in found.out + found.err


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
DOUBLING = "\n".join(["A0=xx", *(f"A{n + 1}=$A{n}$A{n}" for n in range(40)), "torchrun --nproc-per-node 2 $A40"])


def _import(engine: str, name: str, text: str) -> tuple[str, str, tuple[str, ...]]:
    words = ("import", name, "--from", engine, "--model", "llama-tiny", "--hardware", "cpu", "--devices", "2")
    return name, text, words


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", json.dumps({**LLAMA, "num_attention_heads": "four"}), ("--model", "./config.json")),
        ("config.json", json.dumps({**LLAMA, "hidden_act": "nothing"}), ("--model", "./config.json")),
        _import("deepspeed", "deepspeed.json", "[" * 10_000),
        _import("accelerate", "accelerate.yaml", "[" * 10_000),
        _import("megatron", "train.sh", DOUBLING),
    ],
    ids=["heads as text", "an unknown activation", "nested JSON", "nested YAML", "doubling variables"],
)
def test_a_mistake_in_a_file_is_no_fault_of_ours(name: str, text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """It ended with exit code 70 and a request to report it."""
    (tmp_path / name).write_text(text)
    ended = plan(tmp_path, *words)
    assert ended.code == 2, ended
    assert ended.err.count("\n") == 1, ended


def test_validating_ends(tmp_path: Path) -> None:
    """A run with 1e30 layers was evaluated without end."""
    row = {
        "id": "a", "source": "paper", "profile": "a100-80gb", "device": "A100", "arch": "dense", "n_layers": "1e30",
        "hidden": "1024", "ffn_hidden": "4096", "n_heads": "16", "n_kv_heads": "16", "head_dim": "64", "vocab": "50257",
        "seq_len": "512", "n_devices": "8", "precision": "bf16", "tp": "2", "sp": "False", "cp": "1", "ep": "1",
        "pp": "2", "vpp": "1", "dp": "2", "zero_stage": "1", "micro_batch": "2", "global_batch": "16",
        "n_params_B": "", "recompute": "full", "iter_time_s": "0.1", "peak_mem_GB": "4", "rank_group": "one",
        "tier": "A", **dict.fromkeys(("model", "n_experts", "topk", "moe_ffn_hidden", "distributed_optimizer"), ""),
        **dict.fromkeys(("recompute_detail", "precision_detail", "flash_attention", "flag", "other_flags"), ""),
        "tokens_per_s_per_device": "",
    }  # fmt: skip
    (tmp_path / "runs.csv").write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    ended = plan(tmp_path, "validate", "runs.csv", "--processes", "1")
    assert ended.code in (0, 1, 2), ended
    assert "n_layers" in ended.out + ended.err


# Models.


def test_a_module_with_a_slash_in_its_name_is_saved(models: Path) -> None:
    """It was trained, and could not be saved."""
    assert plan(models, "--model", "models:named", "--devices", "1", *OWN).code == 0
    run = ("run", "plan.json", "--model", "models:named", "--no-check", "--save", "runs")
    ended = plan(models, *run, "--steps", "1")
    assert ended.code == 0, ended
    ended = plan(models, *run, "--steps", "2", "--continue")
    assert ended.code == 0, ended


@pytest.mark.parametrize("name", ["mamba", "endless"])
def test_a_limit_of_time_is_kept(name: str, models: Path) -> None:
    """A tiny Mamba, and a forward pass without end, were planned on and on."""
    ended = plan(models, "--model", f"models:{name}", "--devices", "8", "--time-limit", "20", *OWN)
    assert ended.code == {"mamba": 0, "endless": 3}[name], ended


def test_memory_that_does_not_suffice_is_no_fault_of_ours(models: Path) -> None:
    """It ended with exit code 70 and a request to report it."""
    words = ("--model", "models:dims", "--mesh", "4x8x8", "--devices", "256", "--hardware", "h100-80gb", "-q")
    ended = plan(models, *words, addresses=3 * 2**30)
    assert ended.code == 3, ended
    assert ended.err.count("\n") == 1, ended


@pytest.mark.parametrize("name", ["index_add", "mixed_dtypes", "falcon_alibi", "whisper", "clip"])
def test_a_model_is_planned_and_runs(name: str, models: Path) -> None:
    """It was refused, or planned and then refused."""
    made = plan(models, "--model", f"models:{name}", "--devices", "1", *OWN)
    assert made.code == 0, made
    ended = plan(models, "run", "plan.json", "--model", f"models:{name}", "--steps", "2")
    assert ended.code == 0, ended


# Defaults.


def test_gradients_are_reduced_in_buckets_where_nothing_is_asked(tmp_path: Path) -> None:
    """Each parameter was reduced by itself, unless --buckets was given."""
    asked = {"default.json": (), "auto.json": ("--buckets", "auto"), "none.json": ("--buckets", "none")}
    seconds = {}
    for name, words in asked.items():
        made = plan(tmp_path, *TINY, "--devices", "2", "--data", "2", *words, "-q", "-o", name)
        assert made.code == 0, made
        seconds[name] = json.loads((tmp_path / name).read_text())["prediction"]["step_seconds"]
    assert seconds["default.json"] == seconds["auto.json"] < seconds["none.json"]
