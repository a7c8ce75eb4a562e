"""Every reader of text that others have written: its valid files, and the function with which commands read it.

A reader is called as a command calls it, between the same handlers of errors, so that what it ends with is the exit
code of `plan`. `read` is called for every mutant; `argv`, the whole command line, for mutants that were read.
"""

import contextlib
import io
import json
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import typer
import xxhash

from planner.cli.errors import FAULT, reporting
from planner.errors import PlannerError
from tests.fuzz.formats import BYTES, CSV, JSON, TENSORS, TOML, WORDS, YAML, Format

ROOT = Path(__file__).resolve().parents[2]
SEEDS = Path(__file__).parent / "seeds"
MODEL, HARDWARE = "llama-tiny", "cpu"
GUARD = 30.0
"""CPU seconds after which a mutant counts as endless; nothing that ends is told apart by them."""

ENDLESS = -1
GOOD = (0, 2, 3)
"""What reading a file may end with, whatever is in it."""


class EndlessError(BaseException):
    """A mutant that is still being read; no handler of errors catches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A reader: what it is called on is a file with the mutant. `argv` makes a whole command of that file."""

    name: str
    format: Format
    seeds: tuple[bytes, ...]
    read: Callable[[Path], object]
    argv: Callable[[Path], list[str]] | None = None
    file: str = ""
    dress: Callable[[bytes], bytes] = field(default=lambda content: content)


def outcome(read: Callable[[], object]) -> tuple[int, str]:
    """The exit code of a command that does this, and what it was where that is a fault."""
    try:
        with guarded(), reporting():
            read()
    except typer.Exit as error:
        return error.exit_code, ""
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1, ""
    except EndlessError:
        return ENDLESS, f"not read after {GUARD:g} s"
    except (Exception, RecursionError, MemoryError) as error:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = "" if where is None else f" ({Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno})"
        return FAULT, f"{type(error).__name__}: {error!s:.120}{place}"
    return 0, ""


@contextmanager
def guarded() -> Iterator[None]:
    """Ends what does not end."""

    def end(number: int, frame: FrameType | None) -> None:
        raise EndlessError

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, GUARD)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run_of(reader: Reader, content: bytes, folder: Path) -> tuple[int, str]:
    """What reading a mutant ends with."""
    path = written(reader, content, folder)
    return outcome(lambda: reader.read(path))


def command_of(reader: Reader, content: bytes, folder: Path) -> tuple[int, str]:
    """What the whole command ends with."""
    from planner.cli.main import app

    assert reader.argv is not None
    path = written(reader, content, folder)
    return outcome(lambda: app(reader.argv(path), prog_name="plan", standalone_mode=True))  # type: ignore[misc]


def written(reader: Reader, content: bytes, folder: Path) -> Path:
    """The file of a mutant."""
    path = folder / (reader.file or f"mutant{reader.format.suffix}")
    path.write_bytes(reader.dress(content))
    return path


def _seeds(*names: str) -> tuple[bytes, ...]:
    return tuple((SEEDS / name).read_bytes() for name in names)


def _json(*contents: object) -> tuple[bytes, ...]:
    return tuple(json.dumps(content, indent=1).encode() for content in contents)


# What the readers are called with


@cache
def _graph() -> Any:
    from planner.cli.tracing import traced
    from planner.models.zoo import build_model
    from planner.plan.binding.bind import prepare

    built = build_model(MODEL, dtype="float32")
    return prepare(traced(built))


@cache
def _facts(beside: str = "") -> Any:
    from planner.export.architecture import architecture_of
    from planner.export.target import Facts

    return Facts(layers=4, devices=4, architecture=architecture_of(MODEL, 128), beside=beside)


def _plan(path: Path) -> None:
    from planner.plan.binding.machine import machine_of
    from planner.plan.file import load_plan

    plan = load_plan(path)
    machine_of(plan.cluster, None)


def _model(path: Path) -> None:
    from planner.models.zoo import build_model

    build_model(str(path), dtype="float32", sequence_length=None)


def _profile(path: Path) -> None:
    from planner.strategy_search.job import machine_from

    machine_from(str(path), devices=4)


def _stack(path: Path) -> None:
    from hardware_profiles.stacks import parse_stack

    parse_stack(path.read_bytes(), str(path)).to_software()


def _runs(path: Path) -> None:
    from planner.validation import read_rows
    from planner.validation.request.configuration import run_of as configured

    for row in read_rows(path):
        try:
            configured(row)
        except PlannerError:
            continue


def _record(path: Path) -> None:
    from hardware_profiles import RunError, recorded

    recorded(RunError, path)


def _training_log(path: Path) -> None:
    from planner.plan.compare.training_log import ENGINES, read_log
    from planner.plan.file import load_plan

    plan = load_plan(ROOT / "tests" / "golden" / "plans" / "llama-tiny-4-cpu.json")
    for engine in ENGINES:
        try:
            read_log(path, engine, plan)
        except PlannerError:
            continue


def _trace(path: Path) -> None:
    from planner.plan.compare.kineto import read_trace

    read_trace(path)


def _run_record(path: Path) -> None:
    from hardware_profiles.run_record import load_run_record
    from planner.plan.compare.corrections import factors_of

    factors_of([load_run_record(path)])


def _measurements(path: Path) -> None:
    from costmodels.fit_machine import fit_machine
    from hardware_profiles import load_measurements

    fit_machine(load_measurements(path))


def _engine(name: str) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        from planner.api.texts import text_of
        from planner.export.description import ExportError
        from planner.export.guessing import guessed_engine
        from planner.export.models_of import model_of
        from planner.export.targets import TARGETS
        from planner.strategy_search.job import machine_from

        target, text = TARGETS[name], text_of(path)
        for found_in_the_file in (lambda: guessed_engine(text, TARGETS), lambda: model_of(name, text)):
            with contextlib.suppress(ExportError):
                found_in_the_file()
        beside = (SEEDS / "accelerate.sh").read_text(encoding="utf-8") if name == "accelerate" else ""
        description = target.read(text, _facts(beside)).description  # without the net of `plan import` around it
        machine_from(HARDWARE, devices=description.devices)

    return read


def _mindspore(path: Path) -> None:
    from planner.api.texts import bytes_of
    from planner.export.targets import OPERATOR_TARGETS

    graph, blocks = _graph()
    OPERATOR_TARGETS["mindspore"].read(bytes_of(path), graph, blocks, 4)


_PRODUCT = b"MatMul_model.layers.0.mlp.up_proj.weight"
_CUTS = bytes.fromhex("120e 0800 1204 08020801 1204 08010802")
_STRATEGIES = bytes([8, 0, 0x12, 2 + len(_PRODUCT) + len(_CUTS), 0x0A, len(_PRODUCT)]) + _PRODUCT + _CUTS
"""A strategy file of MindSpore as a protocol buffer: the cuts of one product."""


def _beside(path: Path) -> None:
    from planner.api.importing_operators import _beside as beside

    found = beside(path, "mindspore")
    if found is not None:
        found.running(*_graph())


def _manifest(path: Path) -> None:
    from runtime.checkpoint.manifest import read_manifest

    manifest = read_manifest(path.parent)
    manifest.tables_outside()
    manifest.written_under()


def _digested(content: bytes) -> bytes:
    """The content of a manifest under its digest, so that more than the digest is looked at."""
    try:
        found = json.loads(content)
        text = json.dumps(found, separators=(",", ":"))
    except (ValueError, RecursionError):
        return content
    return json.dumps({"digest": xxhash.xxh3_128_hexdigest(text.encode()), "content": found}).encode()


def _tensor_file(path: Path) -> None:
    from runtime.checkpoint.source import open_checkpoint

    source = open_checkpoint(path)
    for name in list(source.tensors)[:3]:
        source.read(name)


def _index(path: Path) -> None:
    from runtime.checkpoint.source import open_checkpoint

    (path.parent / "a.safetensors").write_bytes(TENSORS.dump(_HEADER))
    open_checkpoint(path.parent)


def _beside_weights(path: Path) -> None:
    """The config beside weights of transformers."""
    from runtime.checkpoint.naming import Naming, as_ours
    from runtime.checkpoint.source import Source

    source = Source(path=path.parent, tensors={}, files=())
    as_ours(source, Naming(parts=(), config={}, model_types=("llama",)))


def _rank_table(path: Path) -> None:
    from runtime.launchers import launched_by

    launched_by({"RANK_TABLE_FILE": str(path), "RANK_ID": "1"})


def _environment(path: Path) -> None:
    from runtime.launchers import launched_by

    found = _of_tree(path)
    if isinstance(found, dict):
        launched_by({str(name): _one(value) for name, value in found.items()})


def _one(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _of_tree(path: Path) -> object:
    """What is no JSON here is no case: these texts are not in files."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None


def _options(path: Path) -> None:
    found, known = _of_tree(path), _option_readers()
    for name, value in found.items() if isinstance(found, dict) else ():
        if name in known:
            known[name](_one(value))


@cache
def _option_readers() -> Mapping[str, Callable[[str], object]]:
    from hardware_profiles import compose, load_machine
    from planner.cli.commands.validate import _conditions
    from planner.cli.values import (
        parse_buckets,
        parse_count,
        parse_memory,
        parse_mesh,
        parse_places,
        parse_shards,
        placing_of,
    )
    from planner.models.overrides import parse_changes, split_reference
    from planner.strategy_search.request.offload import parse_offload
    from runtime.launchers.slurm import hosts_of
    from runtime.servers.addresses import parse_address

    return {
        "cluster": lambda text: compose("h100-80gb", text),
        "hardware": load_machine,
        "mesh": parse_mesh,
        "memory": parse_memory,
        "count": lambda text: parse_count("interleave", text),
        "buckets": parse_buckets,
        "place": lambda text: (placing_of([text]), parse_places([text])),
        "shard": lambda text: parse_shards([text]),
        "where": lambda text: _conditions([text]),
        "set": lambda text: parse_changes([text]),
        "model": split_reference,
        "offload": parse_offload,
        "hosts": hosts_of,
        "address": parse_address,
    }


def _progress(path: Path) -> None:
    from runtime.processes.progress import RECORD, report_of

    report_of(RECORD + path.read_text(encoding="utf-8", errors="replace"))


def _where(path: Path) -> None:
    from runtime.processes.hang import answer_of

    answer_of(path.read_text(encoding="utf-8", errors="replace"))


def _notes(path: Path) -> None:
    from runtime.processes.breakdown import failure_of

    failure_of(path.parent, ended={0: 1}, noise="")


def _record_of_a_run(path: Path) -> None:
    from runtime.run_folder.identity import read_record

    read_record(path.parent)


def _lock(path: Path) -> None:
    from runtime.run_folder.lock import held

    held(path)


def _devices(path: Path) -> None:
    from runtime.recovery.supervisor import devices_of

    devices_of(path.parent, 8)


def _tokens(path: Path) -> None:
    from runtime.data.tokens import TokensDataset

    TokensDataset(path, 4)


def _server_address(path: Path) -> None:
    from runtime.servers.addresses import Addresses

    addresses = Addresses(folder=path.parent, count=1)
    addresses.of(0)


_HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
    "b": {"dtype": "I64", "shape": [4], "data_offsets": [32, 64]},
}
_SAVED = {
    "format_version": 1,
    "kind": "sliced",
    "progress": {"step": 3, "updates": 3, "samples": 24, "seed": 0, "data": None, "guard": None},
    "optimizer": "adamw",
    "files": [{"name": "rank-0.safetensors", "bytes": 100, "checksum": "0" * 32}],
    "tensors": {"a": {"shape": [4, 2], "dtype": "float32", "cuts": [2, 1], "files": [0, 0]}},
    "tied": {"b": "a"},
    "plan": None,
    "names": "own",
}
_ENVIRONMENTS = (
    {"TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
     "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
    {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
     "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "1935474689"},
    {"SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_JOB_ID": "4711",
     "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_TASKS_PER_NODE": "4,3"},
)  # fmt: skip
_OPTIONS = {
    "cluster": "node=8@450,rack=4@50,cluster=16@25/2", "hardware": "h100-80gb[node=8,cluster@25]:32,a100-80gb:32",
    "mesh": "8x4", "memory": "64GiB", "count": "4", "buckets": "*attn*=0,*mlp*=1", "place": "tables.*=host",
    "shard": "*q_proj*=b,o", "where": "profile=h100-80gb", "set": "num_layers=40", "model": "llama8b+num_layers=40",
    "offload": "optimizer,weights", "hosts": "node[01-03,7],login", "address": "localhost:80",
}  # fmt: skip


def _rank_tables() -> tuple[bytes, ...]:
    servers = [
        {"server_id": name, "host_ip": "10.0.0.1", "device": [{"device_id": "0", "rank_id": str(rank)}]}
        for rank, name in enumerate(("a", "b"))
    ]
    groups = [{"instance_list": [{"rank_id": "0", "server_id": "a"}, {"rank_id": "1", "server_id": "b"}]}]
    return _json(
        {"version": "1.0", "status": "completed", "server_list": servers},
        {"status": "completed", "group_list": groups},
    )


def _measured() -> tuple[bytes, ...]:
    from hardware_profiles import dump_measurements
    from tests.unit.costmodels.test_fit_machine import made_up_measurements as measured

    found = measured()
    alone = replace(found, machine=replace(found.machine, processes=1), collectives=())
    return tuple(dump_measurements(one).encode() for one in (found, alone))


def _run_rows() -> tuple[bytes, ...]:
    from tests.unit.validation.runs import row, write

    with tempfile.TemporaryDirectory() as folder:
        dense = write(Path(folder) / "a.csv", row(), row(id="b", tp="1", dp="4")).read_bytes()
        experts = {"arch": "moe", "n_experts": "8", "topk": "2", "moe_ffn_hidden": "512", "n_params_B": ""}
        return dense, write(Path(folder) / "b.csv", row(**experts)).read_bytes()


def _array() -> bytes:
    found = io.BytesIO()
    np.save(found, np.arange(64, dtype=np.uint16))
    return found.getvalue()


def _records() -> tuple[bytes, ...]:
    from hardware_profiles import RunError, dump_records, recorded

    return (dump_records(RunError, recorded(RunError)[:3]).encode(),)


def _reports() -> tuple[bytes, ...]:
    from runtime.processes.progress import RECORD, RunSummary, StepReport, record_of
    from runtime.processes.stragglers import SlowRank

    step = StepReport(step=1, steps=4, loss=1.5, unsharded=None, seconds=0.1, samples=8, tokens=64)
    end = RunSummary(
        steps=4, data="random", seconds=0.1, samples=8, tokens=64, predicted_seconds=0.2, low_seconds=0.1,
        high_seconds=0.3, profile="cpu", elsewhere="", peak_bytes=(1.0, 2.0), peak_kind="allocated",
        predicted_peak_bytes=2.0, precision="fp32", difference=None, tolerance=1e-3, busy_seconds=(0.1, 0.2),
        slow=(SlowRank(rank=1, seconds=0.2, times=2.0),),
    )  # fmt: skip
    return tuple(record_of(report).removeprefix(RECORD).encode() for report in (step, end))


def _imports(name: str, format: Format, *seeds: str) -> Reader:
    def argv(path: Path) -> list[str]:
        at = ["--model", MODEL, "--hardware", HARDWARE, "--devices", "4"]
        return ["import", str(path), "--from", name, *at]

    return Reader(name=f"import {name}", format=format, seeds=_seeds(*seeds), read=_engine(name), argv=argv)


@cache
def readers() -> tuple[Reader, ...]:
    """All of them, in the order in which they are listed."""
    stacks = (ROOT / "hardware_profiles" / "stacks").glob("*.toml")
    configs = (ROOT / "tests" / "configs").glob("*/config.json")
    plans = ROOT / "tests" / "golden"
    return (
        Reader(
            name="plan",
            format=JSON,
            seeds=(
                (plans / "plans" / "llama-tiny-4-cpu.json").read_bytes(),
                (plans / "plans" / "gpt-tiny-8-h100-pipeline.json").read_bytes(),
                (plans / "version_1" / "gpt-tiny-8-h100-pipeline.json").read_bytes(),
            ),
            read=_plan,
            argv=lambda path: ["show", str(path)],
        ),
        Reader(
            name="config.json",
            format=JSON,
            seeds=tuple(path.read_bytes() for path in sorted(configs)),
            read=_model,
            file="config.json",
        ),
        Reader(
            name="profile",
            format=TOML,
            seeds=tuple((ROOT / "hardware_profiles" / f"{name}.toml").read_bytes() for name in ("cpu", "h100-80gb")),
            read=_profile,
            argv=lambda path: ["profiles", str(path)],
        ),
        Reader(name="stack", format=TOML, seeds=tuple(path.read_bytes() for path in sorted(stacks)), read=_stack),
        Reader(
            name="measured runs",
            format=CSV,
            seeds=_run_rows(),
            read=_runs,
            argv=lambda path: ["validate", str(path), "--processes", "1"],
        ),
        Reader(name="record of runs", format=CSV, seeds=_records(), read=_record),
        Reader(
            name="measured times",
            format=JSON,
            seeds=_measured(),
            read=_measurements,
            argv=lambda path: ["fit", str(path), "-o", str(path.with_suffix(".toml"))],
        ),
        Reader(name="trace of a profiler", format=JSON, seeds=_seeds("trace.json"), read=_trace),
        Reader(name="training log", format=WORDS, seeds=_seeds("train.log"), read=_training_log),
        Reader(
            name="record of a run",
            format=JSON,
            seeds=_seeds("run-record.json"),
            read=_run_record,
            argv=lambda path: ["fit", str(path), "-o", str(path.with_suffix(".toml"))],
        ),
        _imports("accelerate", YAML, "accelerate.yaml"),
        _imports("deepspeed", JSON, "deepspeed.json"),
        _imports("megatron", WORDS, "megatron.sh", "megatron-variables.sh"),
        _imports("mindspeed", WORDS, "mindspeed.sh"),
        _imports("mindformers", YAML, "mindformers.yaml"),
        _imports("nemo", WORDS, "nemo.py.txt"),
        _imports("torch", WORDS, "torch.py.txt"),
        _imports("torchtitan", TOML, "torchtitan.toml"),
        Reader(name="import mindspore", format=JSON, seeds=_seeds("mindspore.json"), read=_mindspore),
        Reader(name="import mindspore as protobuf", format=BYTES, seeds=(_STRATEGIES,), read=_mindspore),
        Reader(name="export.json", format=JSON, seeds=_seeds("beside.json"), read=_beside, file="export.json"),
        Reader(
            name="manifest", format=JSON, seeds=_json(_SAVED), read=_manifest, file="manifest.json", dress=_digested
        ),
        Reader(name="tensors", format=TENSORS, seeds=(TENSORS.dump(_HEADER),), read=_tensor_file),
        Reader(
            name="index of tensors",
            format=JSON,
            seeds=_json({"weight_map": {"a": "a.safetensors", "b": "a.safetensors"}}),
            read=_index,
            file="model.safetensors.index.json",
        ),
        Reader(
            name="config of weights",
            format=JSON,
            seeds=_json({"model_type": "llama", "rope_interleave": True}),
            read=_beside_weights,
            file="config.json",
        ),
        Reader(name="rank table", format=JSON, seeds=_rank_tables(), read=_rank_table),
        Reader(name="launchers", format=JSON, seeds=_json(*_ENVIRONMENTS), read=_environment),
        Reader(name="options", format=JSON, seeds=_json(_OPTIONS), read=_options),
        Reader(name="progress", format=JSON, seeds=_reports(), read=_progress),
        Reader(
            name="notes of ranks", format=JSON, seeds=_json({"code": 1, "message": "x"}), read=_notes, file="rank0.json"
        ),
        Reader(
            name="record of a run",
            format=JSON,
            seeds=_json(
                {"run": "0" * 32, "folder": "1" * 32, "inode": 1, "file": 2, "path": "/runs", "host": "a", "former": []}
            ),
            read=_record_of_a_run,
            file="run.json",
        ),
        Reader(
            name="lock of a run",
            format=JSON,
            seeds=_json(
                {
                    "holder": {"host": "a", "boot": "b", "namespace": "c", "pid": 1, "start": "2"},
                    "token": "0" * 32,
                    "since": "2026-01-01 00:00:00 UTC",
                    "inode": 1,
                }
            ),
            read=_lock,
            file="lock",
        ),
        Reader(name="devices", format=WORDS, seeds=(b"4\n",), read=_devices, file="devices"),
        Reader(name="server address", format=WORDS, seeds=(b"127.0.0.1:80",), read=_server_address, file="server-0.at"),
        Reader(name="tokens", format=BYTES, seeds=(bytes(64),), read=_tokens, file="tokens.bin"),
        Reader(name="tokens of numpy", format=BYTES, seeds=(_array(),), read=_tokens, file="tokens.npy"),
    )
