"""Wrong invocations: each is refused in one line that says what to do, with the right exit code and no traceback."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planner.cli.main import app

USER = """
import torch
from torch import nn

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x if x.sum() > 0 else -x).mean()

def branches(): return Branches(), (torch.zeros(4, 4),)
def raises(): raise RuntimeError("out of luck")
def leaves(): raise SystemExit(5)
"""
TINY = "--model llama-tiny --hardware cpu --devices 2"
GOOD = "good.json"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, traced_once: None) -> Path:
    """A folder with a good plan, with what can become of one, and with Python of a user's."""
    folder = tmp_path_factory.mktemp("files")
    made = CliRunner().invoke(app, [*TINY.split(), "-q", "-o", str(folder / GOOD)])
    assert made.exit_code == 0, made.stderr
    text = (folder / GOOD).read_text()
    edited = {
        "empty.json": "",
        "cut.json": text[: len(text) // 2],
        "newer.json": text.replace('"schema_version": 2', '"schema_version": 99'),
        "nan.json": re.sub('"gap": [^\n,]*', '"gap": NaN', text),
        "words.json": text.replace('"global_batch": 8', '"global_batch": "eight"'),
        "negative.json": text.replace('"global_batch": 8', '"global_batch": -8'),
        "long.json": text.replace('"global_batch": 8', '"global_batch": ' + "9" * 6000),
        "other.json": text.replace("llama-tiny", "gpt-tiny"),
        "list.json": "[1, 2]",
        "null.json": "null",
        "user.py": USER,
        "broken.py": "def (:",
    }
    for name, content in edited.items():
        assert content != text, name
        (folder / name).write_text(content)
    (folder / "binary.json").write_bytes(bytes(range(256)))
    (folder / "folder").mkdir()
    return folder


@pytest.fixture(autouse=True)
def inside(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    monkeypatch.setattr(sys, "path", list(sys.path))


CASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    # commands and options that there are not
    ("shwo good.json", ("unknown command 'shwo'", "did you mean show?")),
    ("good.json", ("'good.json' is a file", "plan show good.json")),
    ("--devces 4", ("no option '--devces'", "did you mean --devices", "plan --help")),
    ("show good.json --hardwrae cpu", ("plan show has no option '--hardwrae'", "did you mean --hardware or --rank?")),
    ("-m llama-tiny", ("no option '-m'", "plan --help")),
    ("show", ("missing argument 'plan_file'", "plan show --help")),
    ("show good.json --rank 64", ("rank 64: the plan has", "ranks 0 to")),
    ("show good.json good.json", ("unexpected extra argument", "plan show --help")),
    ("--model", ("'--model' requires an argument",)),
    ("estimate", ("missing --model",)),
    ("--devices 4 show good.json", ("--devices: options stand behind the command",)),
    # names that there are not
    ("--model lama-tiny", ("unknown model 'lama-tiny'", "did you mean llama-tiny")),
    ("--model ''", ("unknown model ''", "package.module:factory")),
    ("--model llama-tiny --hardware h100", ("'h100'", "did you mean h100-80gb")),
    ("--model llama-tiny --hardware folder", ("'folder'", "known:", "must end in .toml")),
    ("--model llama-tiny --software megatorn", ("'megatorn'", "did you mean megatron")),
    ("profiles h200", ("'h200'", "did you mean h200-141gb")),
    ("stacks nemmo", ("'nemmo'", "did you mean nemo")),
    (f"{TINY} --mode data_paralel", ("--mode 'data_paralel'", "did you mean data_parallel")),
    (f"{TINY} --search dynamic", ("--search 'dynamic'", "did you mean dynamic_programming")),
    (f"{TINY} --objective tme", ("--objective 'tme'", "did you mean time")),
    (f"{TINY} --optimizer adam", ("--optimizer 'adam'", "did you mean adamw")),
    (f"{TINY} --precision fp8", ("--precision 'fp8'", "bf16, fp16, fp32")),
    (f"{TINY} --recompute half", ("--recompute 'half'", "full, none, selective")),
    (f"{TINY} --schedule 1f1", ("schedule '1f1'", "did you mean 1f1b?")),
    (f"{TINY} --context 2 --context-by head", ("'head'", "did you mean heads?")),
    (f"{TINY} --gradients average", ("--gradients 'average'", "mean, sum")),
    (f"{TINY} --shard *q_prj*=b", ("unknown operator '*q_prj*'", "did you mean model.layers.0.self_attn.q_proj")),
    (f"{TINY} --shard *q_proj*=zz", ("has no factor 'zz'", "it has b, s, i, o")),
    (f"{TINY} --shard-from {GOOD}:*q_prj*", ("lists no operator", "did you mean model.layers.0.self_attn.q_proj")),
    (f"{TINY} --local-parameters *embed_tokns*", ("no parameter", "did you mean model.embed_tokens.weight?")),
    # numbers
    (f"{TINY} --top 0", ("--top 0: give a whole number from 1 to 1,000\n",)),
    ("--model llama-tiny --devices 0", ("--devices 0: give a whole number from 1 to 1,048,576\n",)),
    (f"{TINY} --time-limit soon", ("--time-limit soon: give a number of 0 or more\n",)),
    (f"{TINY} --context-by rings", ("--context-by 'rings'", "did you mean ring?")),
    ("--devices 8", ("missing --model NAME",)),
    ("--model llama-tiny --devices -4", ("--devices -4: give a whole number from 1 to 1,048,576\n",)),
    ("--model llama-tiny --devices 2.5", ("--devices 2.5: give a whole number from 1 to 1,048,576\n",)),
    ("--model llama-tiny --devices many", ("--devices many: give a whole number from 1 to 1,048,576\n",)),
    (
        "--model llama-tiny --devices 99999999999999999999",
        ("--devices 9999", "from 1 to 1,048,576\n"),
    ),
    (f"{TINY} --zero 4", ("--zero 4: give 0, 1, 2 or 3\n",)),
    (f"{TINY} --zero one", ("--zero one: give 0, 1, 2 or 3\n",)),
    (f"{TINY} --time-limit nan", ("--time-limit nan: give a number of 0 or more\n",)),
    (f"{TINY} --clip-norm 0", ("--clip-norm:", "more than 0")),
    (f"{TINY} --imbalance nan", ("imbalance: nan", "1 or more")),
    (f"{TINY} --imbalance 2", ("imbalance = 2", "no operator of this model routes to experts")),
    (f"{TINY} --memory-limit much", ("--memory-limit 'much'", "as in 64GiB")),
    (f"{TINY} --memory-limit 0", ("--memory-limit '0'", "above 0")),
    (f"{TINY} --planner-memory much", ("--planner-memory 'much'", "as in 64GiB")),
    (f"{TINY} --virtual-stages many", ("--virtual-stages 'many'", "auto")),
    (f"{TINY} --copies -1", ("--copies '-1'", "1 or more")),
    (f"{TINY} --mesh 2y1", ("--mesh '2y1'", "as in 8x4")),
    (f"{TINY} --buckets 25XB", ("--buckets '25XB'", "as in 25MiB")),
    (f"{TINY} --cluster node=2x", ("--cluster 'node=2x'", "as in node=8@300")),
    (f"{TINY} --shard nothing", ("--shard 'nothing'", "PATTERN=STRATEGY")),
    (f"{TINY} --shard *q_proj*=((2.5,1,1),(4,1))", ("--shard *q_proj*", "as in ((4,1,1),(1,2))")),
    # what does not divide or contradicts itself
    (f"{TINY} --tensor 3", ("tensor = 3 does not divide 2 devices", "nearest legal value is tensor = 2")),
    (f"{TINY} --pipeline 2 --tensor 2", ("pipeline = 2 x tensor = 2, 4, does not divide 2 devices", "pipeline = 1")),
    (
        "--model llama-tiny --hardware cpu --devices 8 --pipeline 8",
        ("has 4 blocks", "nearest legal value is pipeline = 4"),
    ),
    (f"{TINY} --micro-batches 5", ("micro_batches = 5", "global batch 8", "micro_batches = 4 and 8")),
    (f"{TINY} --micro-batch 1 --micro-batches 2", ("--micro-batch and --micro-batches", "give one")),
    (f"{TINY} --mesh 2 --data 2", ("--mesh and --data", "give one")),
    (f"{TINY} --pareto --top 3", ("--pareto and --top", "give one")),
    (f"{TINY} --context 2 --seq-len 127", ("a sequence of 127", "nearest legal values are 126 and 128")),
    (f"{TINY} --expert 2", ("expert = 2", "leave it at 1")),
    (f"{TINY} --search exhaustive", ("--search exhaustive", "use another solver")),
    (f"estimate {GOOD} --tensor 2", ("--tensor", "with a plan file give --hardware")),
    (f"estimate {GOOD} --devices 3", ("axis0 of size 3 does not divide",)),
    # models that cannot be planned
    ("--model user:branches --hardware cpu --devices 2", ("cannot be traced", "torch.where")),
    ("--model user:raises --hardware cpu --devices 2", ("RuntimeError: out of luck",)),
    ("--model user:leaves --hardware cpu --devices 2", ("exit code 5", "take the exit out")),
    ("--model user:branhces --hardware cpu", ("'branhces'", "did you mean branches or")),
    ("--model broken:model --hardware cpu", ("cannot import 'broken'", "SyntaxError")),
    ("--model folder --hardware cpu", ("unknown model 'folder'", "config.json")),
    # files that cannot be read, or are not what they should be
    ("show none.json", ("none.json: cannot be read", "give a plan file")),
    ("show folder", ("folder: cannot be read", "directory", "give a plan file")),
    ("show empty.json", ("empty.json: not valid JSON", "plan again")),
    ("show cut.json", ("cut.json: not valid JSON", "truncated", "plan again")),
    ("show binary.json", ("binary.json: cannot be read", "UTF-8", "give a plan file")),
    ("show newer.json", ("schema_version is 99", "plan again")),
    ("show nan.json", ("nan.json: provenance.gap", "finite", "undo the edit")),
    ("show words.json", ("training.global_batch", "valid integer", "undo the edit")),
    ("show negative.json", ("training.global_batch", "greater than or equal to 1", "undo the edit")),
    ("show long.json", ("a number is too long", "undo the edit")),
    ("show list.json", ("not a plan file", "-o FILE")),
    ("show null.json", ("not a plan file", "-o FILE")),
    ("verify other.json", ("other.json: the plan is for another graph of gpt-tiny", "plan it again")),
    (f"verify {GOOD} --hardware h100-80gb", ("is for profile cpu", "plan again")),
    ("audit cut.json", ("cut.json: not valid JSON",)),
    ("run empty.json", ("empty.json: not valid JSON",)),
    (f"run {GOOD} --timeout nan --steps 1", ("--timeout nan", "more than 0")),
    (f"run {GOOD} --workers -1", ("--workers -1: give a whole number of 0 or more\n",)),
    (f"{TINY} --shard-from none.json", ("none.json: cannot be read", "give a plan file")),
    ("fit none.json", ("none.json: cannot be read", "plan calibrate")),
    ("fit list.json", ("list.json: the file: it should be an object",)),
    ("calibrate -o .", ("--output .:", "must end in .toml")),
    ("validate none.csv", ("none.csv: cannot be read", "give a CSV file")),
    ("validate binary.json", ("UTF-8", "give a CSV file")),
    (f"validate {GOOD} --where profile", ("--where 'profile'", "COLUMN=VALUE")),
    # places that cannot be written
    (f"{TINY} -q -o folder", ("folder: cannot be written", "name another place")),
    (f"{TINY} -q -o {GOOD}/plan.json", (f"{GOOD}/plan.json: cannot be written", "name another place")),
    (f"estimate {GOOD} -q -o /proc/plan.json", ("/proc/plan.json: cannot be written", "name another place")),
)


def called(line: str) -> Any:
    words = [word.strip("'") for word in line.split(" ")]
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.cases(30)
@pytest.mark.parametrize(("line", "words"), CASES, ids=[line for line, _ in CASES])
def test_a_wrong_invocation_is_one_line_that_says_what_to_do(line: str, words: tuple[str, ...]) -> None:
    result = called(line)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("plan: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert all(word in result.stderr for word in words), result.stderr


@pytest.mark.parametrize("line", ["shwo", "--devces 4", "show", "show folder", f"{TINY} --zero 4"])
def test_with_json_every_refusal_is_an_object(line: str) -> None:
    result = called(f"{line} --json" if not line.startswith("show") else f"audit{line[4:]} --json")
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["kind"]) == (2, "bad input")
    assert result.stderr == f"plan: {error['message']}\n"


def test_too_little_memory_is_another_exit_code() -> None:
    result = called(f"{TINY} --memory-limit 1MiB")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "does not fit on 2 x cpu" in result.stderr


@pytest.mark.cases(1)
@pytest.mark.parametrize("words", ["--help", "profiles h100-80gb", "profiles --json"])
def test_a_reader_that_has_enough_is_no_error(words: str) -> None:
    """As in `plan profiles | head`: nothing is said, and the exit code is that of a shell."""
    root = str(Path(__file__).parents[3])
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "planner.cli.main", *words.split()]
    try:
        done = subprocess.run(
            command, env={"PYTHONPATH": root}, stdout=writes, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_fault_of_ours_is_one_line_and_a_file(tmp_path: Path) -> None:
    """A real process, in which a command breaks as none should."""
    broken = (
        "import planner.cli.main as it, planner.cli.planning as planning\n"
        "def breaks(*_): raise KeyError('nobody expected this')\n"
        "planning.make_plan = breaks\n"
        "it.main()\n"
    )
    command = [sys.executable, "-c", broken, "--model", "llama-tiny"]
    root = str(Path(__file__).parents[3])
    environment = {"PYTHONPATH": root, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (70, "")
    assert done.stderr.startswith("plan: a fault of the planner itself, not of yours: KeyError: 'nobody expected this'")
    assert done.stderr.count("\n") == 1, done.stderr
    (report,) = tmp_path.glob("plan-fault-*.txt")
    assert str(report) in done.stderr
    assert "Traceback" in report.read_text()
