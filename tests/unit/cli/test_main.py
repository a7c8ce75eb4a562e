"""The command line: exit codes, one line per error, clean JSON, and a plan file that is the same every time."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hardware_profiles import load_software
from planner.cli.main import app
from planner.plan.file import load_plan
from planner.plan.plan import PLANNER_VERSION
from planner.report.units import bytes_text, count_text, digits_text, percent_text, seconds_text

TINY = ("--model", "llama-tiny", "--hardware", "cpu")
FAST = (*TINY, "--devices", "2", "--mesh", "2", "--micro-batches", "2")
UP_PROJ = "model.layers.0.mlp.up_proj/linear"

MODELS = """
import torch
from torch import nn

class Mlp(nn.Module):
    def __init__(self, layers=4, width=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
    def forward(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return (x - y).pow(2).mean()

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.rows = nn.Linear(16, 16), nn.Embedding(10, 16)
    def forward(self, ids, *, x, scale):
        return ((self.linear(x) + self.rows(ids)) * scale).pow(2).mean()

class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.rows = nn.Linear(16, 16), nn.Parameter(torch.zeros(4, 16))
    def forward(self, x):
        return (self.linear(x) + self.rows).pow(2).mean()

class SecondDim(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        q = self.linear(x).transpose(0, 1)
        return torch.softmax(q @ q.transpose(1, 2), -1).mean()

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        return self.linear(x)

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        return self.linear(x * 2 if x.sum() > 0 else x).mean()

class Strange(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        return self.noise(self.linear(x)).mean()
    def noise(self, x):
        return x * torch.rand_like(x)

class Rolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        gated = nn.functional.glu(self.linear(x))
        return (gated.logcumsumexp(0) * torch.trace(gated @ gated.t())).mean()

class Glued(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        return nn.functional.glu(self.linear(x)).mean()

def floats(*shape):
    return torch.zeros(*shape)

def mlp(): return Mlp(), (floats(4, 16), floats(4, 16))
def single(): return Mlp(1), (floats(4, 16), floats(4, 16))
def named(): return Named(), (torch.zeros(4, dtype=torch.int64),), dict(x=floats(4, 16), scale=torch.zeros(()))
def fixed(): return Fixed(), (floats(4, 16),)
def second_dim(): return SecondDim(), (floats(8, 4, 16),)
def one_sample(): return Mlp(), (floats(1, 16), floats(1, 16))
def no_loss(): return Whole(), (floats(4, 16),)
def branches(): return Branches(), (floats(4, 16),)
def no_rule(): return Strange(), (floats(4, 16),)
def by_trial(): return Rolled(), (floats(8, 16),)
def glued(): return Glued(), (floats(8, 16),)
def raises(): raise ValueError("no\\nluck")
def wrong(): return 3
def no_inputs(): return Mlp(), ()
def huge(): return Mlp(2, 200_000), (floats(4, 200_000), floats(4, 200_000))
number = 3
"""


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder with models of the user's; the import path is as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "usermodels.py").write_text(MODELS)
    yield tmp_path
    sys.modules.pop("usermodels", None)


def plan(*arguments: str) -> Outcome:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(code=result.exit_code, out=result.stdout, err=result.stderr)


def refused(*arguments: str, code: int = 2) -> str:
    """The one line on stderr of a command that must fail."""
    outcome = plan(*arguments)
    assert (outcome.code, outcome.out) == (code, ""), outcome
    assert outcome.err.startswith("plan: ")
    assert outcome.err.count("\n") == 1, outcome.err
    return outcome.err


def made(*arguments: str, output: str = "plan.json") -> dict[str, Any]:
    outcome = plan(*arguments, "--json", "-o", output)
    assert (outcome.code, outcome.err) == (0, ""), outcome
    content = json.loads(outcome.out)
    assert isinstance(content, dict)
    return content


def test_the_main_job_as_json(folder: Path) -> None:
    content = made(*TINY, "--devices", "4")
    assert list(content) == [
        "schema_version", "model", "parameters", "hardware", "cluster", "software", "devices", "groups",
        "sequence_length",
        "global_batch", "precision", "optimizer", "update", "step_seconds", "objective_seconds", "low_seconds",
        "high_seconds", "peak_bytes", "high_peak_bytes", "capacity_bytes",
        "tokens_per_second_per_device", "samples_per_second", "model_flops_utilisation", "degrees",
        "virtual_stages", "schedule", "slices", "interleave", "tensor_overlap", "expert_overlap",
        "sequence_parallel", "optimizer_sharding",
        "micro_batches", "recomputation", "offload", "mesh",
        "time_seconds", "memory_bytes", "offloaded_bytes", "objective", "search", "plans", "explanation", "plan_file",
    ]  # fmt: skip
    assert content["schema_version"] == 3
    assert (content["model"], content["hardware"], content["devices"]) == ("llama-tiny", "cpu", 4)
    assert (content["global_batch"], content["precision"], content["sequence_length"]) == (16, "fp32", 128)
    assert sum(content["time_seconds"].values()) == pytest.approx(content["step_seconds"])
    assert sum(content["memory_bytes"].values()) == pytest.approx(content["peak_bytes"])
    assert content["samples_per_second"] == pytest.approx(16 / content["step_seconds"])
    assert content["tokens_per_second_per_device"] == pytest.approx(16 * 128 / content["step_seconds"] / 4)
    product = 1
    for degree in ("data", "tensor", "context", "pipeline", "replicated"):
        product *= content["degrees"][degree]
    assert product == 4
    assert list(content["search"]) == [
        "algorithm", "status", "gap", "bound_seconds", "usual_gap", "less_known", "assumed", "covered",
        "configurations", "evaluated", "solved", "search_seconds", "total_seconds", "placements", "stopped",
        "stopped_by", "certificate", "simpler",
    ]  # fmt: skip
    gap = content["search"]["gap"]  # of sums: of plans close to the least one the fastest is taken
    assert 0 <= gap < 0.05
    assert content["search"]["status"] == ("optimal" if gap < 1e-9 else "feasible")
    longer = max(content["step_seconds"], content["objective_seconds"])
    assert content["search"]["bound_seconds"] == pytest.approx(longer * (1 - gap))
    assert content["plans"][0]["step_seconds"] == content["step_seconds"]
    assert (len(content["plans"]), content["explanation"]) == (1, None)
    written = load_plan(folder / content["plan_file"])
    assert written.prediction.step_seconds == content["step_seconds"]
    assert written.prediction.peak_bytes == content["peak_bytes"] < content["capacity_bytes"]


def test_the_same_request_writes_the_same_bytes(folder: Path) -> None:
    made(*FAST, output="first.json")
    made(*FAST, output="new/folder/second.json")
    assert (folder / "first.json").read_bytes() == (folder / "new" / "folder" / "second.json").read_bytes()


@pytest.mark.usefixtures("searched_once")
def test_the_file_is_named_after_the_request(folder: Path) -> None:
    assert plan(*FAST, "-q") == Outcome(code=0, out="", err="")
    assert (folder / "llama-tiny-2.json").is_file()
    assert plan("--model", "usermodels:mlp", "--hardware", "cpu", "--devices", "2", "-q").code == 0
    assert (folder / "usermodels-mlp-2.json").is_file()


@pytest.mark.usefixtures("searched_once")
def test_the_report_is_text_on_stdout(folder: Path) -> None:
    outcome = plan(*FAST, "-o", "$my plan.json")
    assert (outcome.code, outcome.err) == (0, "")
    for words in ("llama-tiny", "2 x cpu", "Parallelism", "degrees", "step time", "peak memory"):
        assert words in outcome.out
    assert "plan run '$my plan.json'" in outcome.out
    assert "\x1b" not in outcome.out
    shown = plan("show", "$my plan.json")
    assert shown.code == 0
    step = next(line for line in outcome.out.splitlines() if "step time" in line)
    assert step in shown.out


@pytest.mark.usefixtures("searched_once")
def test_a_pipeline_is_shown_stage_by_stage(folder: Path) -> None:
    """Equal neighbours in one row; no table for one stage; what differs from the file is named."""
    options = ("--mesh", "1", "--pipeline", "4", "--micro-batches", "1", "--recompute", "full")
    outcome = plan(*TINY, "--devices", "4", *options, "-o", "plan.json")
    assert (outcome.code, outcome.err) == (0, "")
    lines = [line.strip() for line in outcome.out.splitlines()]
    start = lines.index("Pipeline stages")
    rows = [line.split()[0] for line in lines[start + 2 : lines.index("", start)]]
    assert rows == ["0", "1", "3"]
    assert lines[start + 3].split()[:3] == ["1", "to", "2"]
    assert "recomputation" in outcome.out
    assert "Pipeline stages" not in plan(*FAST, "-o", "single.json").out
    text = (folder / "plan.json").read_text(encoding="utf-8")
    content = json.loads(text)
    content["prediction"]["stages"][2]["peak_bytes"] += 1e6
    (folder / "plan.json").write_text(json.dumps(content), encoding="utf-8")
    assert "stage 2: peak_bytes is" in plan("verify", "plan.json").out


@pytest.mark.usefixtures("searched_once")
def test_some_blocks_can_be_recomputed_by_hand(folder: Path) -> None:
    """Split the group of the blocks of a plan: show says so, and verify prices it anew."""
    made(*FAST, "--recompute", "full")
    content = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    at = next(index for index, group in enumerate(content["groups"]) if group["blocks"])
    group = content["groups"][at]
    attention = next(name for name in group["operators"] if name.endswith("attention"))
    rest = json.loads(json.dumps(group).replace("layers.0", "layers.1"))
    group.update(blocks=1, recomputation="selective", kept=[attention])
    rest.update(first_block=1, blocks=3)
    content["groups"].insert(at + 1, rest)
    (folder / "plan.json").write_text(json.dumps(content), encoding="utf-8")
    shown = plan("show", "plan.json")
    assert shown.code == 0, shown.err
    assert "3 of 4 blocks fully, 1 keeps attention" in shown.out
    assert "time of recomputation is" in shown.out
    assert plan("verify", "plan.json").code == 1


def test_what_is_asked_for_is_kept(folder: Path) -> None:
    options = ("--mesh", "1x2", "--pipeline", "2", "--micro-batches", "4", "--recompute", "full", "--optimizer", "sgd")
    made(*TINY, "--devices", "4", *options, "--precision", "bf16", "--seq-len", "64", "--global-batch", "8")
    found = load_plan(folder / "plan.json")
    assert (found.mesh.sizes, found.pipeline, found.training.micro_batches) == ((2,), 2, 4)
    words = {group.recomputation for group in found.groups if group.blocks}
    assert (words, found.training.optimizer, found.training.precision) == ({"full"}, "sgd", "bf16")
    assert (found.model.sequence_length, found.training.global_batch) == (64, 8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "lama-tiny"), ("unknown model 'lama-tiny'", "did you mean llama-tiny", "package.module:factory")),
        (("--model", "zzzzzz"), ("unknown model 'zzzzzz'", "Your own model: --model package.module:factory")),
        (("--model", ""), ("unknown model ''",)),
        (("--model", "llama\n\x1b[31mtiny"), ("llama\\n\\x1b[31mtiny",)),
        (("--model", "llama-tiny", "--hardware", "h1000"), ("'h1000'", "h100-80gb")),
        (("--model", "llama-tiny", "--hardware", "none.toml"), ("none.toml", "h100-80gb")),
        (("--model", "llama-tiny", "--devices", "12"), ("12 devices", "8 and 16")),
        ((*TINY, "--search", "dynamic"), ("--search 'dynamic'", "did you mean dynamic_programming")),
        ((*TINY, "--precision", "fp4"), ("--precision 'fp4'", "bf16, fp16, fp32, fp8")),
        ((*TINY, "--optimizer", "adam"), ("--optimizer 'adam'", "did you mean adamw")),
        ((*TINY, "--recompute", "some"), ("--recompute 'some'", "full, none")),
        ((*TINY, "--mesh", "2y3"), ("--mesh '2y3'", "as in 8x4")),
        ((*TINY, "--mesh", "0x8"), ("--mesh '0x8'",)),
        ((*TINY, "--mesh", "9" * 5000), ("is not a mesh",)),
        ((*TINY, "--mesh", "\u0663"), ("is not a mesh",)),
        ((*TINY, "--mesh", "2x2x2x2x2"), ("2x2x2x2x2 has 5 axes", "at most four")),
        ((*TINY, "--devices", "8", "--mesh", "3"), ("mesh = 3 has 3 devices", "mesh = 2 and 4")),
        (
            (*TINY, "--devices", "4", "--pipeline", "3"),
            ("pipeline = 3 does not divide 4 devices", "pipeline = 2 and 4"),
        ),
        ((*TINY, "--devices", "8", "--micro-batches", "5"), ("global batch 32", "micro_batches = 5")),
        (("--model", "gpt-tiny", "--hardware", "cpu", "--seq-len", "129"), ("gpt-tiny", "128 tokens", "129 is longer")),
        ((*TINY, "--seq-len", str(2**31)), ("Llama cannot be traced", "overflowed")),
        ((*FAST, "-o", "/tmp"), ("/tmp: cannot be written",)),
        ((*FAST, "-o", "usermodels.py/plan.json"), ("usermodels.py/plan.json: cannot be written",)),
    ],
)
def test_bad_options_are_one_line(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    message = refused(*arguments)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "arguments",
    [
        ("--devices", "0"),
        ("--devices", "-4"),
        ("--devices", "many"),
        ("--devices", str(10**30)),
        ("--global-batch", "0"),
        ("--global-batch", str(10**30)),
        ("--seq-len", "0"),
        ("--seq-len", str(10**30)),
        ("--pipeline", "0"),
        ("--micro-batches", "0"),
        ("--nonsense",),
    ],
)
def test_impossible_numbers_are_refused_with_the_option(arguments: tuple[str, ...]) -> None:
    outcome = plan(*TINY, *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert arguments[0] in outcome.err
    assert "Traceback" not in outcome.err


def test_errors_as_json() -> None:
    outcome = plan("--model", "lama-tiny", "--json")
    assert outcome.code == 2
    error = json.loads(outcome.out)
    assert list(error) == ["schema_version", "error"]
    assert outcome.out.count("\n") == 1, "plan run prints an object a line, its error too"
    assert error["error"]["kind"] == "bad input"
    assert outcome.err == f"plan: {error['error']['message']}\n"


@pytest.mark.slow
def test_nothing_fits() -> None:
    arguments = ("--model", "usermodels:huge", "--hardware", "cpu", "--devices", "2")
    outcome = plan(*arguments, "-o", "plan.json", "--json")
    assert outcome.code == 3
    message = outcome.err
    assert message.startswith("plan: ")
    assert message.count("\n") == 1, message
    assert re.search(
        r"usermodels:huge does not fit on 2 x cpu: the leanest plan evaluated needs [\d.]+ GiB per device", message
    )
    assert re.search(r"[\d.]+ GiB more than the 3\.\d GiB that a margin of [\d.]+% leaves of 4\.0 GiB", message)
    assert re.search(
        r"It would fit with: .*\d+ devices and as many samples \(--devices (\d+) --global-batch \1; [\d.]+ m?s a step,"
        r" [\d.,]+ samples/s per device\)",
        message,
    )
    assert not Path("plan.json").exists()
    error = json.loads(outcome.out)["error"]
    assert error["kind"] == "infeasible"
    planned = 4 * 2**30 / load_software("pytorch").peak_high
    assert error["needed_bytes"] - error["missing_bytes"] == pytest.approx(planned)
    assert error["changes"][0]["step_seconds"] > 0


@pytest.mark.cases(2)
@pytest.mark.parametrize("factory", ["mlp", "single", "named"])
@pytest.mark.parametrize("global_batch", ["8", "3"])
def test_a_model_of_the_user(factory: str, global_batch: str) -> None:
    options = ("--hardware", "cpu", "--devices", "2", "--global-batch", global_batch)
    content = made("--model", f"usermodels:{factory}", *options)
    assert content["sequence_length"] is None
    assert content["tokens_per_second_per_device"] is None
    assert content["global_batch"] == int(global_batch)
    verified = plan("verify", "plan.json")
    assert (verified.code, verified.err) == (0, "")
    assert verified.out.startswith("legal; ")
    assert "samples/s per device" in plan("show", "plan.json").out


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("usermodels:no_loss", ("shape (4, 16)", "return the scalar loss")),
        ("usermodels:branches", ("Branches cannot be traced", "must not branch on tensor values")),
        (
            "usermodels:no_rule",
            ("draws random numbers by aten.rand_like.default (at ", "pass the numbers in as inputs"),
        ),
        ("usermodels:raises", ("usermodels:raises raised ValueError: no\\nluck",)),
        ("usermodels:wrong", ("(module, args)", "returned int")),
        ("usermodels:no_inputs", ("no example tensor",)),
        ("usermodels:mpl", ("factory in usermodels 'mpl'", "did you mean mlp")),
        ("usermodels:number", ("factory in usermodels 'number'",)),
        ("usermodels:", ("factory in usermodels ''",)),
        ("usermodel:mlp", ("cannot import 'usermodel'", "No module named 'usermodel'")),
        (":mlp", ("cannot import ''",)),
        ("..usermodels:mlp", ("cannot import '..usermodels'",)),
    ],
)
def test_models_of_the_user_that_cannot_be_planned(model: str, words: tuple[str, ...]) -> None:
    message = refused("--model", model, "--hardware", "cpu", "--devices", "2", "--global-batch", "8")
    assert all(word in message for word in words), message


@pytest.mark.parametrize(("model", "samples"), [("fixed", 4), ("second_dim", 8), ("one_sample", 1)])
def test_models_that_compute_with_one_batch_are_planned_with_micro_batches_of_it(model: str, samples: int) -> None:
    outcome = plan("--model", f"usermodels:{model}", "--hardware", "cpu", "--devices", "2", "--global-batch", "8")
    assert outcome.code == 0, outcome
    made = load_plan(Path(f"usermodels-{model}-2.json"))
    assert made.training.global_batch == samples * made.training.micro_batches


def test_the_length_of_a_factory_is_its_own() -> None:
    assert "--seq-len does not apply to usermodels:mlp" in refused("--model", "usermodels:mlp", "--seq-len", "8")


def test_no_pipeline_without_blocks() -> None:
    message = refused("--model", "usermodels:single", "--hardware", "cpu", "--devices", "2", "--pipeline", "2")
    assert "usermodels:single cannot be cut into 2 pipeline stages" in message
    assert "two or more of them equal" in message
    assert "here no two layers in a row compute alike" in message


@pytest.mark.usefixtures("searched_once")
def test_a_plan_edited_by_hand_is_judged_anew(folder: Path) -> None:
    made(*FAST)
    assert plan("verify", "plan.json").code == 0
    before = plan("show", "plan.json").out
    content = json.loads((folder / "plan.json").read_text())
    group = next(group for group in content["groups"] if UP_PROJ in group["operators"])
    group["operators"][UP_PROJ] = "-" if group["operators"][UP_PROJ] != "-" else "o"
    (folder / "plan.json").write_text(json.dumps(content))
    verified = plan("verify", "plan.json")
    assert (verified.code, verified.err) == (1, "")
    assert "differs from the file: step_seconds is" in verified.out
    shown = plan("show", "plan.json")
    assert shown.code == 0
    assert "changed since it was priced" in shown.out
    assert before.splitlines() != shown.out.splitlines()[: len(before.splitlines())]


@pytest.mark.usefixtures("searched_once")
@pytest.mark.parametrize("command", ["show", "verify"])
def test_bad_plan_files_are_one_line_that_names_them(command: str, folder: Path) -> None:
    made(*FAST)
    text = (folder / "plan.json").read_text()
    bad: dict[str, tuple[str, str]] = {
        "truncated.json": (text[: len(text) // 2], "truncated"),
        "version.json": (text.replace('"schema_version": 2', '"schema_version": 3'), "schema_version is 3"),
        "graph.json": (text.replace("sha256:", "sha256:0"), "another graph of llama-tiny"),
        "strategy.json": (text.replace(f'"{UP_PROJ}": "', f'"{UP_PROJ}": "zz'), UP_PROJ),
        "model.json": (text.replace("llama-tiny", "lama-tiny"), "did you mean llama-tiny"),
        "profile.json": (text.replace('"cpu"', '"cpus"'), "did you mean cpu"),
        "length.json": (text.replace('"sequence_length": 128', '"sequence_length": null'), "sequence_length"),
        "control.json": (text.replace("llama-tiny", "llama\\n\\u001b[31mtiny"), "control character"),
        "empty.json": ("", "it is empty"),
        "run.json": ('{"kind": "measured run", "schema_version": 2}', "of the kind 'measured run'; give a plan file"),
        "deep.json": ("[" * 100_000, "nested too deeply"),
    }
    for name, (content, words) in bad.items():
        assert content != text
        (folder / name).write_text(content)
        message = refused(command, name)
        assert message.startswith(f"plan: {name}: ")
        assert words in message, message
    (folder / "binary.json").write_bytes(bytes(range(256)))
    for name, words in (("binary.json", "not UTF-8"), (".", "directory"), ("none.json", "No such file")):
        message = refused(command, name)
        assert name in message
        assert words in message


def test_help_and_version() -> None:
    for arguments in (("--help",), ("-h",), ("show", "-h"), ("verify", "--help"), ("run", "-h"), ("models", "-h")):
        outcome = plan(*arguments)
        assert (outcome.code, outcome.err) == (0, "")
        assert ("Usage" if len(arguments) > 1 else "Examples") in outcome.out
    assert plan("--version") == Outcome(code=0, out=f"plan {PLANNER_VERSION}\n", err="")
    nothing = plan()
    assert nothing.code == 2
    assert "--model" in nothing.out
    assert plan("shwo").code == plan("show").code == 2


def test_lists() -> None:
    models = plan("models")
    assert models.code == 0
    for name in ("llama-tiny", "llama70b", "gpt3-175b"):
        assert name in models.out
    profiles = plan("profiles")
    assert profiles.code == 0
    assert "h100-80gb" in profiles.out
    assert "datasheet" in plan("profiles", "h100-80gb").out
    assert "did you mean cpu" in refused("profiles", "cpuu")


@pytest.mark.exhaustive
def test_a_real_process_without_colour(folder: Path) -> None:
    """What a shell sees: exit codes, and no escape sequence where NO_COLOR is set, even on request of colour."""
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root, "NO_COLOR": "1", "FORCE_COLOR": ""}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "planner.cli.main", *arguments]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    done = run(*FAST, "-o", "plan.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    broken = run("--model", "usermodels:branches", "--hardware", "cpu", "--devices", "2")  # torch has a lot to say too
    assert (broken.returncode, broken.stdout) == (2, "")
    assert broken.stderr.startswith("plan: ")
    assert broken.stderr.count("\n") == 1, broken.stderr


def test_a_plan_file_that_was_cut_off_is_refused(folder: Path) -> None:
    (folder / "plan.json").write_text("{")
    assert refused("verify", "plan.json").startswith("plan: plan.json: not valid JSON")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (seconds_text(29.14), "29.1 s"),
        (seconds_text(0.0312), "31.2 ms"),
        (seconds_text(0.00087), "870 µs"),
        (seconds_text(12345.6), "12,346 s"),
        (seconds_text(-18.4), "-18.4 s"),
        (seconds_text(-1.2e-3), "-1.2 ms"),
        (seconds_text(999.7), "1,000 s"),
        (seconds_text(0.9997), "1 s"),
        (seconds_text(0.0009997), "1 ms"),
        (bytes_text(77.2 * 2**30), "77.2 GiB"),
        (bytes_text(3.1 * 2**20), "3.1 MiB"),
        (bytes_text(2**10), "1.0 KiB"),
        (bytes_text(12), "12 B"),
        (count_text(70.6e9), "70.6B"),
        (count_text(124e6), "124M"),
        (count_text(999.7e6), "1B"),
        (count_text(7), "7"),
        (percent_text(0.517), "51.7%"),
        (digits_text(0.01254), "0.0125"),
        (digits_text(2345.6), "2,346"),
        (digits_text(999.7), "1,000"),
    ],
)
def test_numbers_for_people(text: str, expected: str) -> None:
    assert text == expected


TRIAL = ("--model", "usermodels:by_trial", "--hardware", "cpu", "--devices", "2", "--global-batch", "8")


def test_rules_found_by_trial_are_shown_and_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    outcome = plan(*TRIAL, "--micro-batches", "1", "-o", "trial.json")
    assert outcome.code == 0, outcome
    assert re.fullmatch(
        r"note: aten.trace.default, called in module '\(root\)' \(at \S+usermodels.py:\d+\), is not split: no split of"
        r" its operands recombines to its result\n",
        outcome.err,
    )
    assert "Rules found by trial (times are assumed: one pass over the tensors)" in outcome.out
    assert re.search(r"aten.glu.default +d0 x0d1 -> d0 y0d1 +d0 +\(root\)", outcome.out)
    assert [text.partition("(")[0] for text, _ in load_plan(folder / "trial.json").rules] == [
        "aten.glu.default", "aten.logcumsumexp.default", "aten.trace.default",
    ]  # fmt: skip
    shown = plan("show", "trial.json")
    assert (shown.code, "Rules found by trial" in shown.out) == (0, True)
    assert plan("verify", "trial.json", "--model", "usermodels:by_trial").code == 0


def test_a_plan_with_rules_found_by_trial_is_exported_and_searched_again(folder: Path) -> None:
    made("--model", "usermodels:glued", "--hardware", "cpu", "--devices", "2", output="trial.json")
    for command in (
        ("export", "trial.json", "--to", "torchtitan", "--nearest", "-o", "titan"),
        ("compare", "trial.json", "--engines", "torchtitan,torch"),
        ("replan", "trial.json", "--hardware", "h100"),
    ):
        outcome = plan(*command)
        assert outcome.code == 0, outcome


def test_a_cold_and_a_warm_cache_give_the_same_plan(folder: Path) -> None:
    options = (*TRIAL, "--micro-batches", "1", "--rule-cache", "rules")
    contents = [made(*options, output=f"{name}.json") for name in ("cold", "warm")]
    made(*TRIAL, "--micro-batches", "1", output="none.json")
    assert len(list((folder / "rules").iterdir())) == 3
    assert len({(folder / f"{name}.json").read_bytes() for name in ("cold", "warm", "none")}) == 1
    assert contents[0]["discovered"] == contents[1]["discovered"]
    assert [(each["op"], each["factors"], bool(each["reason"])) for each in contents[0]["discovered"]] == [
        ("aten.glu.default", ["d0"], False),
        ("aten.logcumsumexp.default", ["d0"], False),
        ("aten.trace.default", [], True),
    ]


def test_a_batch_that_an_operator_by_trial_depends_on_cannot_be_changed() -> None:
    said = refused(*TRIAL, "--micro-batches", "2", "-q")
    assert re.search(r"the batch cannot be changed: logcumsumexp \(at \S+usermodels.py:\d+\) depends on", said), said


def test_a_rule_of_a_plan_file_that_does_not_hold_is_refused(folder: Path) -> None:
    made(*TRIAL, "--micro-batches", "1", output="trial.json")
    text = (folder / "trial.json").read_text()
    (folder / "trial.json").write_text(text.replace('"d0 x0d1 -> d0 y0d1"', '"d0 x0d1 -> d0"'))
    assert "the rule expects 1 dims, the tensor has shape (8, 8)" in refused(
        "verify", "trial.json", "--model", "usermodels:by_trial"
    )
    content = json.loads(text)
    summed = next(rule for call, rule in content["rules"].items() if "logcumsumexp" in call)
    assert summed["text"] == "x0d0 d0 -> y0d0 d0"
    summed.update(text="d1 d0 -> d1 d0", blocked=[], scratch=[])
    (folder / "trial.json").write_text(json.dumps(content))
    message = refused("verify", "trial.json", "--model", "usermodels:by_trial")
    assert "the rule 'd1 d0 -> d1 d0' does not hold for aten.logcumsumexp.default(float32[8,8], 0)" in message
    assert "plan again" in message
