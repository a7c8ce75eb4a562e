"""The wording of refusals, word for word: one for each kind of error, and for each form that a refusal takes.

Other tests ask for the kind of an error, the option or name, and the numbers (tests/refusals.py). So a better sentence
changes the code and one file, messages.txt: look at the difference (`git diff tests/golden`), and keep it if it reads
better. To write the file anew:

    python -m tests.golden.test_messages
"""

import contextlib
import errno
import itertools
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import planner
import runtime
from costmodels import CostModelError, collective_time
from hardware_profiles import HardwareProfileError, compose, load_profile, parse_measurements
from hardware_profiles.foreign import parse_json, read_text
from planner.cli.main import app
from planner.cli.values import parse_buckets
from planner.errors import PlannerError
from planner.export.architecture import architecture_of
from planner.export.target import Facts
from planner.export.targets import TARGETS
from planner.graph.call import Call
from planner.graph.operator_graph import Operator, OperatorGraph, TensorType, WrittenRule
from planner.graph.trace import trace
from planner.limits import check, limited, room
from planner.models.experts.router import Router, Routing
from planner.models.zoo import build_model
from planner.plan.file import load_plan, parse_plan, save_plan
from planner.sharding.layout import local_shape, parse_layout
from planner.sharding.rule import Rule, named_strategy
from planner.sharding.rules import RULES, rule_of
from planner.sharding.rules.written import build_written
from planner.strategy_search.request.offload import parse_offload
from planner.strategy_search.request.space import Pinned
from planner.validation.reading.row_files import read_rows
from planner.validation.request.configuration import run_of
from runtime.auditing.audit import audit
from runtime.checkpoint.source import open_checkpoint
from runtime.guard_settings import GuardSettings
from runtime.launchers import launched_by
from runtime.recovery.replanning import range_of
from runtime.run_folder.identity import read_record
from runtime.servers.addresses import Addresses, make_key
from runtime.servers.client import TableClient
from runtime.servers.disk import SystemDisk
from runtime.servers.frames import Frame
from runtime.servers.sparse_optimizers import SparseOptimizer
from runtime.servers.storage import Storage
from runtime.step.finiteness import check_gradients
from runtime.step.guard import LossGuard
from tests.unit.validation.runs import row, write

FILE = Path(__file__).parent / "messages.txt"
PLAN = (Path(__file__).parent / "plans" / "llama-tiny-4-cpu.json").read_text(encoding="utf-8")
LLAMA = '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'
CPU = torch.device("cpu")
FACTS = Facts(layers=80, devices=None, architecture=architecture_of("llama70b", None))
TINY = "--model llama-tiny --hardware cpu --devices 2"

Case = Callable[[Path], object]
"""What is refused, in a folder of its own, in which the process is."""

COMMANDS = (
    "shwo plan.json",
    "plan.json",
    "--devces 4",
    "show",
    "--devices 8",
    "estimate",
    "--devices 4 show plan.json",
    "--model lama-tiny",
    f"{TINY} --optimizer adam",
    f"{TINY} --recompute half",
    f"{TINY} --top 0",
    f"{TINY} --memory-limit much",
    f"{TINY} --interleave -1",
    f"{TINY} --cluster node=2x",
    f"{TINY} --shard nothing",
    f"{TINY} --micro-batch 1 --micro-batches 2",
    f"{TINY} --pareto --top 3",
    "estimate plan.json --tensor 2",
    "run plan.json --timeout nan",
    "calibrate -o .",
    "validate none.csv",
    "validate plan.json --where profile",
)

CHEAP: dict[str, Case] = {
    # names
    "unknown module": lambda folder: build_model("absent:net", dtype="float32"),
    "unknown profile": lambda folder: load_profile("h200"),
    "unknown dtype of a device": lambda folder: load_profile("h100-80gb").device.peak("int4"),
    "unknown level of a network": lambda folder: compose("h100-80gb", "nodes=8,cluster"),
    "unknown collective": lambda folder: collective_time("gossip", 1.0, load_profile("cpu").group(1, 1)),
    "unknown value of an option": lambda folder: parse_offload("optimiser"),
    "unknown column": lambda folder: read_rows(write(folder / "runs.csv", row()), {"tire": "A"}),
    "unknown factor": lambda folder: named_strategy(rule("relu.default", (4, 6)), ["q"], "operator 'x'"),
    "absent package": lambda folder: without_transformers(file(folder, "config.json", LLAMA)),
    # numbers and forms
    "value out of range": lambda folder: GuardSettings(spike_factor=1.0),
    "values that do not go together": lambda folder: SparseOptimizer(name="sgd", row_steps=True),
    "experts that do not divide": lambda folder: Router(8, Routing(chosen=2, groups=3)),
    "devices that do not divide": lambda folder: load_profile("h100-80gb").with_devices(20),
    "dim that does not divide": lambda folder: local_shape((12,), parse_layout("S0,S0"), (2, 4)),
    "layout that is none": lambda folder: parse_layout("R,X"),
    "range that is none": lambda folder: range_of("4:2"),
    "value that has several forms": lambda folder: parse_buckets("some"),
    "rule that does not fit its call": lambda folder: written("d0 d1 -> d1 d0"),
    "launcher that sets only some variables": lambda folder: launched_by({"WORLD_SIZE": "4", "MASTER_ADDR": "a"}),
    # files
    "plan that is not there": lambda folder: load_plan(folder / "none.json"),
    "plan that is a folder": lambda folder: load_plan(folder),
    "plan that was cut off": lambda folder: parse_plan(PLAN[:1000]),
    "plan of a newer version": lambda folder: parse_plan(edited('"schema_version": 2', '"schema_version": 3')),
    "plan with an unknown key": lambda folder: parse_plan(edited('"stages"', '"colour": 3, "stages"')),
    "plan with a number out of range": lambda folder: parse_plan(edited('"global_batch": 16', '"global_batch": -8')),
    "plan with a number that does not divide": lambda folder: parse_plan(edited('"devices": 4', '"devices": 5')),
    "plan with an unknown schedule": lambda folder: parse_plan(edited('"schedule": "1f1b"', '"schedule": "1f1"')),
    "plan that cannot be written": lambda folder: save_plan(parse_plan(PLAN), folder),
    "plan on a full disk": lambda folder: saved(folder, "fsync", errno.ENOSPC),
    "plan on a disk that is read only": lambda folder: saved(folder, "replace", errno.EROFS),
    "profile that is no TOML": lambda folder: load_profile(file(folder, "mine.toml", "id = ")),
    "measurements that are no JSON": lambda folder: parse_measurements("not JSON", "times.json"),
    "file that is not there": lambda folder: read_text(folder / "none"),
    "file that is nested too deeply": lambda folder: parse_json("[" * 70 + "]" * 70),
    "file of tokens": lambda folder: runtime.TokensDataset(file(folder, "odd.bin", "abc"), 5),
    "checkpoint that is not there": lambda folder: open_checkpoint(folder / "none"),
    "checkpoint that is damaged": lambda folder: open_checkpoint(file(folder, "manifest.json", "{").parent),
    "run without a name": lambda folder: read_record(file(folder, "run.json", "{}").parent),
    "key that others can read": lambda folder: readable(folder).key(),
    "servers that do not run": lambda folder: Addresses(folder=folder, count=2).key(),
    "settings of another engine": lambda folder: TARGETS["accelerate"].read("distributed_type: TPU", FACTS),
    "run that cannot be planned": lambda folder: run_of(*read_rows(write(folder / "runs.csv", row(n_kv_heads="5")))),
    # limits, and what happens in a run
    "limit of time": lambda folder: out_of_time(),
    "limit of memory": lambda folder: out_of_memory(),
    "audit of an asynchronous plan": lambda folder: audited("pipedream"),
    "gradient that is not finite": lambda folder: infinite(),
    "loss that leaps": lambda folder: leaping(),
    "server that does not answer": lambda folder: unanswered(folder),
    "log on a full disk": lambda folder: logged(folder, errno.ENOSPC),
    "log on a broken disk": lambda folder: logged(folder, errno.EIO),
}

OF_A_GRAPH: dict[str, Case] = {
    "devices that are not divided": lambda folder: searched(pinned=Pinned(tensor=3)),
    "global batch that does not divide": lambda folder: searched(pinned=Pinned(micro_batches=5)),
    "blocks that are too few": lambda folder: searched(pinned=Pinned(pipeline=8)),
    "decisions that contradict each other": lambda folder: searched(pinned=Pinned(mesh=(2,), tensor=2)),
    "unknown operator of the model": lambda folder: searched(shard=(planner.shard("*.nothing", "b"),)),
    "unknown strategy": lambda folder: searched(shard=(planner.shard("*.0/linear", "q"),)),
    "chunks that nothing can be in": lambda folder: searched(pinned=Pinned(tensor=1, tensor_overlap=2)),
    "model that does not fit": lambda folder: searched(memory_limit=100.0),
    "search without time": lambda folder: searched(time_limit=0.0),
    "operator without a rule": lambda folder: rule_of(layers(), sorting()),
}


def file(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def edited(old: str, new: str) -> str:
    assert old in PLAN, old
    return PLAN.replace(old, new, 1)


def saved(folder: Path, call: str, number: int) -> None:
    with patch.object(os, call, side_effect=OSError(number, os.strerror(number))):
        save_plan(parse_plan(PLAN), folder / "plan.json")


def without_transformers(config: Path) -> None:
    with patch.dict(sys.modules, {"transformers": None}):
        build_model(str(config), dtype="float32")


def call(op: str, *shapes: tuple[int, ...]) -> Call:
    """A call of an operator whose result has the shape of the first operand."""
    types = tuple(TensorType(shape=shape, dtype="float32") for shape in shapes)
    return Call(op=op, arguments=types, keywords=(), results=types[:1])


def rule(op: str, *shapes: tuple[int, ...]) -> Rule:
    return RULES[f"aten.{op}"].build(call(f"aten.{op}", *shapes))


def written(text: str) -> Rule:
    return build_written(call("mine.op.default", (4, 6)), WrittenRule(text=text))


def readable(folder: Path) -> Addresses:
    file(folder, "key", "secret").chmod(0o644)
    return Addresses(folder=folder, count=1)


def unanswered(folder: Path) -> None:
    make_key(folder)
    TableClient(Addresses(folder=folder, count=1), [], patience=0.02)


def out_of_time() -> None:
    ticks = itertools.count()
    with limited(seconds=0.0, clock=lambda: float(next(ticks))):
        check()


def out_of_memory() -> None:
    with limited(memory=4.0 * 2**30, resident=lambda: 2.0**30):
        room(3.5 * 2**30, "a table")


def audited(schedule: str) -> None:
    graph: Any = None  # not looked at
    next(audit(replace(parse_plan(PLAN), schedule=schedule), graph, 4, load_profile("cpu")))


def infinite() -> None:
    weight: Any = SimpleNamespace(name="weight", gradient=torch.tensor([1.0, math.inf]))
    check_gradients([weight], 3, CPU)


def leaping() -> None:
    guard = LossGuard(GuardSettings(on_spike="stop", spike_window=1), CPU)
    guard.judge(1, 1.0, [])
    guard.judge(2, 100.0, [])


def logged(folder: Path, number: int) -> None:
    storage = Storage(folder, 0, 1)
    storage.open()
    with patch.object(SystemDisk, "write", side_effect=OSError(number, os.strerror(number))):
        storage.append(Frame(kind="ready", fields={"table": "users"}))


class Layers(nn.Module):
    """Blocks of one linear layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).relu()
        return x.mean()


@cache
def layers() -> OperatorGraph:
    return trace(Layers(), (torch.zeros(4, 8),))


def sorting() -> Operator:
    """An operator of that graph as another one, which the table of rules lacks."""
    return replace(layers().operators[0], op="aten.sort.default")


def searched(**settings: Any) -> None:
    planner.search(layers(), "cpu", devices=2, batch=4, global_batch=8, precision="fp32", **settings)


@contextlib.contextmanager
def inside() -> Iterator[Path]:
    """A new folder with a plan in it, which is the current one; what imports add to their path goes."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name), patch.object(sys, "path", list(sys.path)):
        folder = Path(name).resolve()
        file(folder, "plan.json", PLAN)
        yield folder


def said(case: Case) -> str:
    """The kind of a refusal and its message, in which its folder is called DIR, and lines here N."""
    with inside() as folder:
        try:
            case(folder)
        except (PlannerError, HardwareProfileError, CostModelError) as error:
            message = f"{type(error).__name__}: {error}".replace(str(folder), "DIR")
            return re.sub(rf"{Path(__file__)}:\d+", "THIS FILE:N", message)
    raise AssertionError("nothing was refused")


def printed(line: str) -> str:
    """What a command that is refused writes to stderr."""
    with inside() as folder:
        result = CliRunner().invoke(app, line.split())
    assert isinstance(result.exception, SystemExit), result.exception
    return result.stderr.removesuffix("\n").replace(str(folder), "DIR")


def kinds() -> set[str]:
    """The names of all errors of ours that have messages for people."""
    found: set[str] = set()
    left: list[type[Exception]] = [PlannerError, HardwareProfileError, CostModelError]
    while left:
        for kind in left.pop().__subclasses__():
            if not kind.__module__.startswith("tests"):
                found.add(kind.__name__)
                left.append(kind)
    return found | {"CostModelError"}


@cache
def golden() -> dict[str, str]:
    """What the file has: the message of each title."""
    blocks = FILE.read_text(encoding="utf-8").removesuffix("\n").split("\n\n")
    return {title: message for title, _, message in (block.partition("\n") for block in blocks)}


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_says_the_same(line: str) -> None:
    assert printed(line) == golden()[f"$ plan {line}"], "see the top of this file"


@pytest.mark.parametrize("name", CHEAP)
def test_a_refusal_says_the_same(name: str) -> None:
    assert said(CHEAP[name]) == golden()[f"# {name}"], "see the top of this file"


@pytest.mark.slow
def test_refusals_of_a_graph_say_the_same() -> None:
    found = {f"# {name}": said(case) for name, case in OF_A_GRAPH.items()}
    assert found == {title: golden()[title] for title in found}, "see the top of this file"


def test_every_message_has_its_case_and_every_kind_of_error_its_message() -> None:
    assert list(golden()) == [*(f"$ plan {line}" for line in COMMANDS), *(f"# {name}" for name in CHEAP | OF_A_GRAPH)]
    assert kinds() - {message.partition(":")[0] for message in golden().values()} == set()


if __name__ == "__main__":
    blocks = [f"$ plan {line}\n{printed(line)}" for line in COMMANDS]
    blocks += [f"# {name}\n{said(case)}" for name, case in (CHEAP | OF_A_GRAPH).items()]
    FILE.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
