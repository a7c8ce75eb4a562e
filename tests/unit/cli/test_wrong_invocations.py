"""Wrong invocations: each is refused in one line that names what was given and what would do, with the right exit code
and no traceback."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hardware_profiles
from planner.cli import entry
from planner.cli.main import app, main
from tests.refusals import says

pytestmark = pytest.mark.usefixtures("searched_once")

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
EXPERTS = "--model mixtral-tiny --devices 4"
GOOD = "good.json"
CPU = Path(hardware_profiles.__file__).with_name("cpu.toml")
ABSENT = os.strerror(errno.ENOENT)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, traced_once: None) -> Path:
    """A folder with a good plan, with what can become of one, and with Python of a user's."""
    folder = tmp_path_factory.mktemp("files")
    words = f"{TINY} --mesh 2 --micro-batches 1 -q -o".split()
    made = CliRunner().invoke(app, [*words, str(folder / GOOD)])
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
        "mine.toml": CPU.read_text(),
        "null.json": "null",
        "user.py": USER,
        "broken.py": "def (:",
    }
    for name, content in edited.items():
        assert content != text, name
        (folder / name).write_text(content)
    (folder / "binary.json").write_bytes(bytes(range(256)))
    (folder / "folder").mkdir()
    (folder / "configs").mkdir()
    (folder / "configs" / "config.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def inside(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    monkeypatch.setattr(sys, "path", list(sys.path))


CASES: tuple[tuple[str, tuple[object, ...]], ...] = (
    # commands and options that there are not
    ("shwo good.json", ("shwo", "show")),
    ("good.json", ("good.json", "plan show good.json")),
    ("llama-tiny", ("llama-tiny", "plan --model llama-tiny")),
    ("--devces 4", ("--devces", "--devices", "plan search --help")),
    ("show good.json --hardwrae cpu", ("plan show", "--hardwrae", "--hardware", "plan show --help")),
    ("-m llama-tiny", ("-m", "plan search --help")),
    ("show", ("plan_file", "plan show --help")),
    ("show good.json --rank 64", ("rank 64", 2, 0, 1)),
    ("show good.json good.json", ("good.json", "plan show --help")),
    ("--model", ("--model", "plan search --help")),
    ("estimate", ("--model NAME",)),
    ("--devices 4 show good.json", ("--devices", "plan show --devices")),
    ("export good.json --to mindspore -o out --nearest", ("--nearest", "mindspore", "leave it out")),
    ("export good.json --to mindspore -o out --hardware cpu", ("--hardware cpu", "mindspore", "leave it out")),
    ("export good.json --to megatron -o out --nearest --tolerance 5%", ("--tolerance 5%", "--nearest")),
    ("compare --model llama-tiny --devices 2 --trace trace.json", ("--trace", "plan compare PLAN")),
    ("compare good.json run.json --engines megatron --clock cpu", ("a record", "--clock cpu", "plan compare PLAN")),
    # names that there are not
    ("--model lama-tiny", ("lama-tiny", "llama-tiny", "--model package.module:factory")),
    ("--model ''", ("''", "--model package.module:factory")),
    ("--model llama-tiny --hardware h1000", ("h1000", "h100-80gb")),
    ("--model llama-tiny --hardware ''", ("--hardware", "leave it out")),
    (f"{TINY} --mode ''", ("--mode", "''", "data_parallel")),
    ("--model llama-tiny --hardware folder", ("folder", "cpu", ".toml")),
    ("--model llama-tiny --software megatorn", ("megatorn", "megatron")),
    ("profiles h2000", ("h2000", "h200-141gb")),
    ("stacks nemmo", ("nemmo", "nemo")),
    (f"{TINY} --mode data_paralel", ("--mode", "data_paralel", "data_parallel")),
    (f"{TINY} --search dynamic", ("--search", "dynamic", "dynamic_programming")),
    (f"{TINY} --objective tme", ("--objective", "tme", "time")),
    (f"{TINY} --optimizer adam", ("--optimizer", "adam", "adamw")),
    (f"{TINY} --precision fp4", ("--precision", "fp4", "bf16, fp16, fp32, fp8")),
    (f"{TINY} --fp8 tensorwise --slices 2 --pipeline 2", ("slices", "tensorwise", "rowwise_with_gw_hp")),
    (f"{TINY} --fp8 blocks", ("--fp8", "blocks", "rowwise, rowwise_with_gw_hp, tensorwise")),
    (f"{TINY} --fp8 rowwise --fp8-history 16", ("fp8_history", "16", "fp8 = delayed")),
    (f"{TINY} --fp8-margin 2", ("fp8_margin", "2", "fp8 = delayed")),
    (f"{TINY} --fp8 delayed --schedule pipedream_2bw --pipeline 2", ("fp8", "delayed", "steps before others")),
    (f"{EXPERTS} --for megatron --place auto", ("--for megatron", "place auto", "leave it out")),
    (f"{EXPERTS} --for megatron --zero-by auto", ("--for megatron", "zero_by auto", "leave it out")),
    (f"{EXPERTS} --for megatron --fp8 delayed", ("--for megatron", "experts in fp8", "fp8_experts")),
    (f"{EXPERTS} --for megatron --fp8 delayed --fp8-experts --fp8-dispatch", ("--for megatron", "fp8_dispatch")),
    (f"{TINY} --fp8 rowwise --fp8-left-out *.nothing", ("fp8_left_out", "*.nothing")),
    (f"{TINY} --fp8-left-out *.nothing", ("fp8_left_out", "*.nothing", "recipe")),
    (f"{TINY} --recompute half", ("--recompute", "half", "full, none, selective")),
    (f"{TINY} --schedule 1f1", ("schedule", "1f1", "1f1b")),
    (f"{TINY} --context 2 --context-by head", ("--context-by", "head", "heads")),
    (f"{TINY} --gradients average", ("--gradients", "average", "mean, sum")),
    (f"{TINY} --moment-dtype fp8", ("--moment-dtype", "fp8", "bf16, fp32")),
    (f"{TINY} --moment-dtype bf16 --place *=host", ("--moment-dtype", "bf16", "tables")),
    (f"{TINY} --shard *q_prj*=b", ("--shard *q_prj*", "model.layers.0.self_attn.q_proj/linear")),
    (f"{TINY} --shard *q_proj*=zz", ("model.layers.0.self_attn.q_proj/linear", "zz", "b, s, i, o")),
    (
        f"{TINY} --shard-from {GOOD}:*q_prj*",
        (f"--shard-from {GOOD}:*q_prj*", "model.layers.0.self_attn.q_proj/linear"),
    ),
    (
        f"{TINY} --local-parameters *embed_tokns*",
        ("local_parameters", "*embed_tokns*", "model.embed_tokens.weight"),
    ),
    (f"{TINY} --buckets *atn*=0,*mlp*=1", ("buckets", "*atn*=0", "parameter")),
    (f"{TINY} --buckets 20,500", ("buckets", 500, 39, 0)),
    ("--model dlrm-tiny --hardware cpu --devices 2 --offload activations", ("--offload", "activations", "blocks")),
    # numbers
    (f"{TINY} --set num_layers=-3", ("--set num_layers=-3", "llama-tiny", 1)),
    (f"{TINY} --top 0", ("--top 0", 1, "1,000")),
    ("--model llama-tiny --devices 0", ("--devices 0", 1, "1,048,576")),
    (f"{TINY} --time-limit soon", ("--time-limit soon", 0)),
    (f"{TINY} --context-by rings", ("--context-by", "rings", "ring")),
    ("--devices 8", ("--model NAME", "plan models")),
    ("--model llama-tiny --devices -4", ("--devices -4", 1, "1,048,576")),
    ("--model llama-tiny --devices 2.5", ("--devices 2.5", 1, "1,048,576")),
    ("--model llama-tiny --devices many", ("--devices many", 1, "1,048,576")),
    (
        "--model llama-tiny --devices 99999999999999999999",
        ("--devices 99999999999999999999", 1, "1,048,576"),
    ),
    (f"{TINY} --zero 4", ("--zero 4", 0, 1, 2, 3)),
    (f"{TINY} --zero one", ("--zero one", 0, 1, 2, 3)),
    (f"{TINY} --time-limit nan", ("--time-limit nan", 0)),
    (f"{TINY} --clip-norm 0", ("--clip-norm", 0.0, 0)),
    (f"{TINY} --imbalance nan", ("imbalance", "nan", 1)),
    (f"{TINY} --imbalance 2", ("imbalance = 2",)),
    ("checkpoint merge . -o made --max-file inf", ("--max-file", "inf", 0)),
    ("checkpoint merge . -o made --max-file 0", ("--max-file", 0, 0)),
    (f"{TINY} --memory-limit much", ("--memory-limit", "much", "64GiB")),
    (f"{TINY} --memory-limit 0", ("--memory-limit", 0, 0, "64GiB")),
    (f"{TINY} --planner-memory much", ("--planner-memory", "much", "64GiB")),
    (f"{TINY} --virtual-stages many", ("--virtual-stages", "many", 1, "auto")),
    (f"{TINY} --interleave -1", ("--interleave", -1, 1, "auto")),
    (f"{TINY} --mesh 2y1", ("--mesh", "2y1", "8x4")),
    (f"{TINY} --buckets 25XB", ("--buckets", "25XB", "25MiB")),
    (f"{TINY} --cluster node=2x", ("--cluster", "node=2x", "node=8@300,cluster@25/2")),
    (f"{TINY} --shard nothing", ("--shard", "nothing", "PATTERN=STRATEGY")),
    (
        f"{TINY} --shard *q_proj*=((2.5,1,1),(4,1))",
        ("--shard *q_proj*=((2.5,1,1),(4,1))", "((4,1,1),(1,2))"),
    ),
    # what does not divide or contradicts itself
    (f"{TINY} --tensor 3", ("tensor = 3", 2, "tensor = 2")),
    (f"{TINY} --pipeline 2 --tensor 2", ("pipeline = 2", "tensor = 2", 4, 2, "pipeline = 1", "tensor = 1")),
    ("--model llama-tiny --hardware cpu --devices 8 --pipeline 8", ("llama-tiny", 4, "pipeline = 8", "pipeline = 4")),
    (f"{TINY} --micro-batches 5", ("micro_batches = 5", 8, "micro_batches = 4 and 8", "global_batch = 5 and 10")),
    (f"{TINY} --micro-batch 1 --micro-batches 2", ("--micro-batch", "--micro-batches")),
    (f"{TINY} --mesh 2 --data 2", ("--mesh", "--data")),
    (f"{TINY} --pareto --top 3", ("--pareto", "--top")),
    (f"{TINY} --write-all", ("--write-all", "--top N", "--pareto")),
    (f"{TINY} --context 2 --seq-len 127", (2, 127, 126, 128, "context = 1")),
    (f"{TINY} --expert 2", ("expert = 2", 1)),
    (f"{TINY} --search exhaustive", ("--search exhaustive", "choice_limit=5000000")),
    (f"estimate {GOOD} --tensor 2", ("--tensor", GOOD, "--hardware")),
    (f"estimate {GOOD} --devices 3", (GOOD, 8, "data", 3, 9)),
    # models that cannot be planned
    ("--model user:branches --hardware cpu --devices 2", ("Branches", "user.py:10", "torch.where")),
    ("--model user:raises --hardware cpu --devices 2", ("user:raises", "RuntimeError", "out of luck")),
    ("--model user:leaves --hardware cpu --devices 2", ("--model", 5)),
    ("--model user:branhces --hardware cpu", ("user", "branhces", "branches")),
    ("--model broken:model --hardware cpu", ("--model broken:model", "SyntaxError")),
    ("--model folder --hardware cpu", ("folder", "--model path/to/config.json")),
    # files that cannot be read, or are not what they should be
    ("show none.json", ("none.json", ABSENT, "-o FILE")),
    ("show folder", ("folder", "directory", "-o FILE")),
    ("show empty.json", ("empty.json", "it is empty")),
    ("show cut.json", ("cut.json", "JSON")),
    ("show binary.json", ("binary.json", "UTF-8", "-o FILE")),
    ("show newer.json", ("newer.json", "schema_version", 99, 1, 2)),
    ("show nan.json", ("nan.json", "provenance.gap", "NaN")),
    ("show words.json", ("words.json", "training.global_batch")),
    ("show negative.json", ("negative.json", "training.global_batch", 1)),
    ("show long.json", ("long.json", 6000)),
    ("show list.json", ("list.json", "schema_version", "-o FILE")),
    ("show null.json", ("null.json", "schema_version", "-o FILE")),
    ("verify other.json", ("other.json", "gpt-tiny", "wte.weight")),
    (f"show {GOOD} --rank 0 --layouts", ("--layouts", "--rank 0")),
    (f"verify {GOOD} --hardware h100-80gb", (GOOD, "cluster", "cpu", "h100-80gb")),
    ("audit cut.json", ("cut.json", "JSON")),
    ("run empty.json", ("empty.json", "it is empty")),
    (f"run {GOOD} --timeout nan --steps 1", ("--timeout nan", 0)),
    (f"run {GOOD} --workers -1", ("--workers -1", 0)),
    (f"{TINY} --shard-from none.json", ("none.json", ABSENT, "-o FILE")),
    ("fit none.json", ("none.json", ABSENT, "plan calibrate")),
    ("fit list.json", ("list.json", "object")),
    ("calibrate -o .", ("--output .", ".toml")),
    ("validate none.csv", ("none.csv", ABSENT, "CSV")),
    ("validate binary.json", ("binary.json", "UTF-8", "CSV")),
    (f"validate {GOOD} --where profile", ("--where", "profile", "COLUMN=VALUE")),
    # places that cannot be written
    (f"{TINY} -q -o folder", ("folder", os.strerror(errno.EISDIR))),
    (f"{TINY} -q -o {GOOD}/plan.json", (f"{GOOD}/plan.json", os.strerror(errno.ENOTDIR))),
    (f"estimate {GOOD} -q -o /proc/plan.json", ("/proc/plan.json", ABSENT)),
    # files that are read are not overwritten
    ("estimate --model ./null.json -q -o null.json", ("null.json", "is read here", "another file")),
    ("--model configs --hardware cpu -q -o configs/config.json", ("configs/config.json", "is read here")),
    ("--model llama-tiny --hardware mine.toml -q -o mine.toml", ("mine.toml", "is read here")),
    ("import list.json --from deepspeed -o list.json", ("list.json", "is read here")),
    (f"{TINY} --for megatron".replace("--model", "estimate --model"), ("plan search", "--software")),
)


def called(line: str) -> Any:
    words = [word.strip("'") for word in line.split(" ")]
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.cases(30, 10)
@pytest.mark.parametrize(("line", "facts"), CASES, ids=[line for line, _ in CASES])
def test_a_wrong_invocation_is_one_line_that_says_what_to_do(line: str, facts: tuple[object, ...]) -> None:
    result = called(line)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("plan: ")
    assert result.stderr.count("\n") == 1, result.stderr
    says(result.stderr, *facts)


@pytest.mark.parametrize("line", ["shwo", "--devces 4", "show", "show folder", f"{TINY} --zero 4"])
def test_with_json_every_refusal_is_an_object(line: str) -> None:
    result = called(f"{line} --json" if not line.startswith("show") else f"audit{line[4:]} --json")
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["kind"]) == (2, "bad input")
    assert result.stderr == f"plan: {error['message']}\n"


@pytest.mark.slow
def test_too_little_memory_is_another_exit_code() -> None:
    result = called(f"{TINY} --mesh 2 --micro-batches 1 --memory-limit 1MiB")
    assert (result.exit_code, result.stdout) == (3, "")
    says(result.stderr, "2 x cpu")


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


def test_characters_that_stdout_does_not_have_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr("planner.cli.main.app", lambda **_: print("870 µs"))
    main()
    stdout.flush()
    assert stdout.buffer.getvalue() == b"870 \\xb5s\n"  # type: ignore[attr-defined]


def test_ctrl_c_while_the_commands_are_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pressed:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "planner.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "planner.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Pressed, *sys.meta_path])
    with pytest.raises(SystemExit) as left:
        entry.main()
    assert left.value.code == 130
    assert capsys.readouterr() == ("", "plan: interrupted\n")


def test_a_full_disk_under_stdout_is_no_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("planner.cli.main.app", full)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    assert capsys.readouterr().err == f"plan: stdout: cannot be written: {os.strerror(errno.ENOSPC)}\n"


def test_a_fault_of_ours_is_one_line_and_a_file(tmp_path: Path) -> None:
    """A real process, in which a command breaks as none should."""
    broken = (
        "import planner.cli.main as it, planner.cli.commands.plan as planning\n"
        "def breaks(*_): raise KeyError('nobody expected this')\n"
        "planning.make_plan = breaks\n"
        "it.main()\n"
    )
    command = [sys.executable, "-c", broken, "--model", "llama-tiny"]
    root = str(Path(__file__).parents[3])
    environment = {"PYTHONPATH": root, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (70, "")
    assert done.stderr.startswith("plan: ")
    assert done.stderr.count("\n") == 1, done.stderr
    (report,) = tmp_path.glob("plan-fault-*.txt")
    says(done.stderr, "KeyError", "nobody expected this", report)
    assert "Traceback" in report.read_text()
