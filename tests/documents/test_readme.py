"""Every command of the README and of the pages that it leads to does what it is there for, in order and in one folder,
and so do their Python blocks.

Commands are the indented lines that start with `plan`, and the lists in its text. Where one names what a reader has and
we have not, something else takes its place (`STANDS_FOR`); some are run smaller (`SMALLER`).

What a command prints is shown below it, and must be what it prints: a line `...` stands for any lines. Left open is
what depends on the machine (`OPEN`).
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planner.cli.main import app
from tests.distributed.forked_ranks import forked_ranks
from tests.long_lists import rarely

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/deciding.md",
    "docs/questions.md",
    "docs/models-and-machines.md",
    "docs/plans.md",
    "docs/how-it-works.md",
    "docs/python.md",
    "docs/tutorial.md",
    "docs/how-to.md",
)
"""In the order in which their commands are run; a command that stands twice is run once."""

README = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)

COMMANDS = tuple(dict.fromkeys(re.findall(r"^(?: {4}| {8})(plan .*)$", README, re.MULTILINE)))
LISTS = tuple(dict.fromkeys(re.findall(r"`(plan (?:models|profiles|stacks)(?: NAME)?(?: --fit)?)`", README)))
SHOWN = dict(re.findall(r"^    (plan .*)\n\n```text\n((?:(?!```).*\n)*)```", README, re.MULTILINE))
"""What is printed, by the command that prints it."""

WIDTH = 120
"""Columns of the terminal that is shown."""

BLOCKS = tuple(re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL))
FIRST_PLAN, SEARCH, TRAINING, FUNCTIONS = BLOCKS

STANDS_FOR = {
    "path/to/config.json": "config.json",
    "package.module:factory": "mine:factory",
    "plan import train.toml": "plan import titan/train.toml",
    "plan advise train.toml": "plan advise titan/train.toml",
    "models NAME": "models llama8b",
    "profiles NAME": "profiles h100-80gb",
    "stacks NAME": "stacks nemo",
}
"""What is written for a reader, and what is here."""

_BY_HAND = "plan --model llama70b --devices 64 --tensor 8 --pipeline 8 --zero 1 -o llama70b-64-by-hand.json"
_TWO = "plan --model llama-tiny --devices 2 --hardware cpu --global-batch 16 -o two.json"
_TINY = "plan --model llama-tiny --devices 4 --hardware cpu -o tiny.json"
_SAVED = "plan run tiny.json --steps 4 --save runs/tiny --save-every 2 --continue --no-check"

FIRST = {
    "plan audit llama70b-64.json": (_TINY,),
    "plan prove llama70b-64.json": (_TINY,),
    "plan run tiny.json --steps 20 --save runs/tiny --save-every 10 --continue --no-check": (_TINY,),
    "plan run two.json --steps 30 --resume runs/tiny --no-check": (_TINY, _SAVED, _TWO),
    "plan checkpoint merge runs/tiny -o tiny-model": (_TINY, _SAVED),
    "plan explain llama70b-64.json": (_TWO,),
    "plan explain llama70b-64.json '*.mlp.up_proj'": (_TWO,),
    "plan run plan.json --model package.module:factory": (
        "plan --model mine:factory --devices 2 --hardware cpu -o plan.json",
    ),
    "plan diff llama70b-64.json llama70b-64-by-hand.json": ("plan --model llama70b --devices 64", _BY_HAND),
    "plan export llama70b-64.json --to megatron -o run --nearest": (_BY_HAND,),
    "plan advise train.toml --devices 64 -o better.toml": (
        "plan export llama70b-64.json --to torchtitan -o titan --nearest",
    ),
    "plan import train.toml --from torchtitan --model llama70b --devices 64 -o theirs.json": (
        "plan export llama70b-64.json --to torchtitan -o titan --nearest",
    ),
}
"""What a reader has done before."""

SMALLER = {
    # ten seconds of steps each
    "plan run tiny.json --steps 20 --save runs/tiny --save-every 10 --continue --no-check": _SAVED,
    "plan run two.json --steps 30 --resume runs/tiny --no-check": (
        "plan run two.json --steps 6 --resume runs/tiny --no-check"
    ),
    # a minute, in searches of their own; tests/unit/cli/test_report.py has what they find
    "plan report llama70b-64.json -o report.html": "plan report llama70b-64.json -o report.html --time-limit 2",
    "plan report llama70b-64.json --tokens 15T --price 2.5": (
        "plan report llama70b-64.json --tokens 15T --price 2.5 --no-search"
    ),
    "plan report llama70b-64.json -o report.html --tokens 15T --price 2.5": (
        "plan report llama70b-64.json -o report.html --tokens 15T --price 2.5 --no-search"
    ),
    # half a minute; audits of plans at full size are in tests/contract/test_audit_at_size.py
    "plan audit llama70b-64.json": "plan audit tiny.json",
    # a minute; with 64 devices it is in tests/distributed/test_proving.py
    "plan prove llama70b-64.json": "plan prove tiny.json",
    # a minute, in searches of their own; with 64 devices it is in tests/unit/cli/test_explain.py
    "plan explain llama70b-64.json": "plan explain two.json",
    # a minute of searches around the plan, in tests/unit/cli/test_explain.py
    "plan explain llama70b-64.json '*.mlp.up_proj'": "plan explain two.json '*.mlp.up_proj'",
    # as long as the plan without it
    "plan --model llama8b --devices 8 --moment-dtype bf16": (
        "plan --model llama-tiny --devices 2 --hardware cpu --moment-dtype bf16"
    ),
    # half a minute each; on as many devices in tests/unit/search/test_mixed.py and tests/unit/cli/test_software.py
    "plan --model llama70b --hardware h100-80gb:32,a100-80gb:32,between@12.5 -o mixed.json": (
        "plan --model llama8b --hardware h100-80gb:8,a100-80gb:8,between@12.5 -o mixed.json"
    ),
    "plan --model llama70b --devices 64 --software nemo -o nemo.json": (
        "plan --model llama8b --devices 8 --software nemo -o nemo.json"
    ),
    # prices a dozen plans between this one and what the engine can say
    "plan export llama70b-64.json --to megatron -o run --nearest": (
        "plan export llama70b-64-by-hand.json --to megatron -o run --nearest"
    ),
    # the search of the first plan once more; tests/unit/cli/test_searching.py has what --top and --explain print
    "plan --model llama70b --devices 64 --top 3 --explain -o best.json": (
        "plan --model llama8b --devices 8 --top 3 --explain -o best.json"
    ),
    # half a minute; tests/unit/cli/test_lists_of_plans.py has what is on a front
    "plan --model llama-tiny --devices 4 --hardware cpu --pareto": (
        "plan --model llama-tiny --devices 2 --hardware cpu --micro-batches 1 --pareto"
    ),
    # a minute; tests/unit/test_comparing.py has what comes out
    "plan compare --model llama70b --devices 64 --hardware h100,h200,b200 --tokens 15T"
    " --price h100=2.5,h200=3.5,b200=5": (
        "plan compare --model llama-tiny --devices 2 --hardware h100,h200,b200 --tokens 15T"
        " --price h100=2.5,h200=3.5,b200=5"
    ),
    "plan capacity --model llama8b --hardware h100 --days 30 --tokens 1T --price 2.5": (
        "plan capacity --model llama-tiny --hardware cpu --days 1 --tokens 5B --price 2.5 --global-batch 64"
    ),
    # two searches of half a minute; tests/unit/cli/test_advise.py has what is advised
    "plan advise train.toml --devices 64 -o better.toml": (
        "plan advise train.toml --devices 64 -o better.toml --time-limit 8"
    ),
}
"""Commands that take long, and what is run in their place."""

RARELY = (
    # searches the space of an engine for a plan that lies outside; tests/unit/export has that on small models
    "plan export llama70b-64.json --to megatron -o run --nearest",
    # prices plans of 80 blocks on the way; tests/unit/cli/test_diff.py compares plans of all kinds
    "plan diff llama70b-64.json llama70b-64-by-hand.json",
)
"""Commands that take longest and show nothing of their kind that other tests do not: exhaustive."""

FIRST_PAGE = (ROOT / PAGES[0]).read_text(encoding="utf-8")

CASES = [
    case for one in (*COMMANDS, *LISTS) for case in (rarely([one]) if one in RARELY or one not in FIRST_PAGE else [one])
]
"""The commands of the README in the thorough list, those of the other pages among the exhaustive ones."""

FAILS = {"plan estimate --model llama8b --devices 8 --zero 2 --recompute none": 3}
"""Exit codes of those that show how something is refused."""

OPEN = {
    "plan run": r"(?<=machine has )(?:[^,:]*, )?[0-9]+ cores?|[0-9][0-9.,]*(?:e[-+][0-9]+)?",  # its name, losses, times
    "plan estimate --model llama8b": r"It would fit with: .*",  # what was found in the time that there was
    "plan": r"(?<= in )[0-9.]+ s(?= \()|(?<=\()[0-9.]+ s(?= in all\))",  # how long the search took
}
"""What may differ from what a page shows, by how a command begins; the first that fits counts."""

MINE = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, tokens, labels):
        return nn.functional.mse_loss(self.down_proj(nn.functional.silu(self.up_proj(tokens))), labels)


def factory():
    return Net(), (torch.zeros(16, 64), torch.zeros(16, 64))
"""

SCRIPT = """\
import torch
from mine import Net

torch.manual_seed(0)
model, dataset = Net(), torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randn(64, 64))
{block}
print(loss)
"""


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    """Ranks start as quickly as they can."""
    with forked_ranks():
        yield


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all, as a reader has."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "mine.py").write_text(MINE)
    small = json.loads((ROOT / "tests/configs/llama/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(small | {"max_position_embeddings": 2048}))
    return folder


@pytest.fixture
def here(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of all, as the current one, from which modules can be imported."""
    monkeypatch.chdir(shared)
    monkeypatch.syspath_prepend(shared)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    yield shared
    sys.modules.pop("mine", None)


def run(command: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    for written, meant in STANDS_FOR.items():
        command = command.replace(written, meant)
    _, *arguments = shlex.split(command)
    result = CliRunner(env={"COLUMNS": str(WIDTH)}).invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_commands_are_found_and_those_named_here_are_among_them() -> None:
    assert len(COMMANDS) > 20
    assert len(LISTS) >= 5
    assert len(SHOWN) >= 7
    assert set(SHOWN) <= set(COMMANDS) - set(SMALLER)
    assert set(FIRST) | set(SMALLER) | set(FAILS) | set(RARELY) <= set(COMMANDS)
    assert [written for written in STANDS_FOR if written not in README] == []


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("command", CASES)
def test_a_command_runs(here: Path, command: str) -> None:
    for before in FIRST.get(command, ()):
        code, output = run(before)
        assert code == 0, output
    code, output = run(SMALLER.get(command, command))
    assert code == FAILS.get(command, 0), output
    assert output
    if command in SHOWN:
        missing = not_printed(SHOWN[command], output, command)
        assert missing == "", f"a page shows what is not printed:\n{missing}\nPrinted is:\n{output}"


def not_printed(shown: str, output: str, command: str) -> str:
    """The first part of what is shown, between lines that stand for others, which is not printed after those before
    it; empty where all are. Lines that a page breaks are taken as one."""
    opened = next(pattern for start, pattern in OPEN.items() if command.startswith(start))

    def comparable(text: str) -> str:
        return " ".join(re.sub(opened, "#", line.rstrip()) for line in text.splitlines() if line.strip())

    left = comparable(output)
    for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
        wanted = comparable(part)
        if wanted not in left:
            return part
        left = left[left.index(wanted) + len(wanted) :]
    return ""


def test_what_is_not_printed_is_noticed() -> None:
    output = "a 1\n\nb  2\nevaluated 3 of 4 in 5.0 s (6.1 s in all)\n"
    for shown, missing in (
        ("a 1\n\nb  2\n", ""),
        ("...\nb  2\nevaluated 3 of 4 in 7 s (8 s in all)\n", ""),
        ("a 1\n...\nevaluated 3 of 4 in 7 s (8 s in all)\n", ""),
        ("a 2\n...\nb  2\n", "a 2\n"),
        ("b  2\n...\na 1\n", "a 1\n"),
        ("b 2\n", "b 2\n"),
        ("evaluated 2 of 4 in 5.0 s (6.1 s in all)\n", "evaluated 2 of 4 in 5.0 s (6.1 s in all)\n"),
    ):
        assert not_printed(shown, output, "plan --model llama70b") == missing


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("block", [FIRST_PLAN, FUNCTIONS], ids=["README", "python.md"])
def test_what_is_done_from_python_runs(here: Path, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block, {})
    assert capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_search_from_python_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import mine  # of the folder

    module, (tokens, labels) = mine.factory()
    names: dict[str, Any] = {"module": module, "tokens": tokens, "labels": labels}
    exec(SEARCH, names)
    assert names["result"].plans
    assert capsys.readouterr().out


@pytest.mark.exhaustive
def test_training_from_python_runs(here: Path) -> None:
    import mine  # of the folder

    import planner

    module, example = mine.factory()
    result = planner.search(module, "cpu", devices=2, args=example, global_batch=16, precision="fp32")
    planner.save_plan(result.plan, "plan.json")
    Path("train.py").write_text(SCRIPT.format(block=TRAINING))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(".") == 2, done.stdout  # a loss of each rank, however their lines mix
