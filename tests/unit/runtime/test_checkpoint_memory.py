"""By how much `plan checkpoint convert` and `merge` grow, measured in a process of their own, against what `--memory`
lets them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli.main import app
from planner.models.zoo import build_model
from planner.plan.file import load_plan
from runtime.checkpoint.manifest import plan_content
from runtime.checkpoint.offline import merge
from tests.unit.runtime.checkpoint_states import Memory, manifest_of

GIVEN = 32 * 2**20
MARGIN = 16 * 2**20
"""Of the allocator, and of what a larger model takes in Python; the size of the checkpoint has no part in it."""
SIZES = {
    "small": "gpt-tiny+hidden_size=64+num_layers=2+vocab_size=64",
    "big": "gpt-tiny+hidden_size=1280+num_layers=2+vocab_size=16384",
}
MEASURED = """
import json, sys
from typer.testing import CliRunner
from planner.cli.main import app

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

def called(*arguments):
    done = CliRunner().invoke(app, ["checkpoint", *arguments, "--memory", sys.argv[1]])
    assert done.exit_code == 0, done.output

found = {}
for size in ("small", "big"):
    called("convert", f"{size}-model", "--plan", f"{size}.json", "-o", f"{size}-slices")
    found[size] = peak()
    called("merge", f"{size}-slices", "-o", f"{size}-merged")
    found[size + " merged"] = peak()
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_memory_grows_by_no_more_than_it_may(tmp_path: Path) -> None:
    """A model of many times the memory that is given is converted, and merged under other names with its weights
    transposed. A small model before takes what is needed to begin."""
    sizes = {size: _written(tmp_path, size, reference) for size, reference in SIZES.items()}
    assert sizes["big"] > 6 * GIVEN
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, f"{GIVEN // 2**20}MiB"],
        capture_output=True, text=True, check=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    found = json.loads(done.stdout)
    before = found["small merged"] - sizes["small"]
    assert found["big"] - before < GIVEN + MARGIN
    assert found["big merged"] - before < GIVEN + MARGIN


@pytest.mark.parametrize(
    ("given", "words"), [("4MiB", "give 16MiB or more"), ("much", "--memory 'much' is not a size")]
)
def test_what_is_too_little_is_refused(given: str, words: str, tmp_path: Path) -> None:
    arguments = ["checkpoint", "merge", str(tmp_path), "-o", str(tmp_path / "out"), "--memory", given]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def _written(folder: Path, size: str, reference: str) -> int:
    """A plan of a model, and a merged checkpoint of it; its bytes."""
    plan = folder / f"{size}.json"
    made = CliRunner().invoke(
        app, ["--model", reference, "--hardware", "cpu", "--devices", "4", "--global-batch", "8", "-q", "-o", str(plan)]
    )
    assert made.exit_code == 0, made.output
    module = build_model(reference, dtype="float32", device="cpu").module
    state = Memory(contents={name: parameter.detach() for name, parameter in module.named_parameters()})
    manifest = replace(manifest_of(state), kind="merged", optimizer=None, plan=plan_content(load_plan(plan)))
    return merge(state, manifest, folder / f"{size}-model").bytes
