"""Checkpoints on real processes: what is resumed goes on bit by bit, under any plan it goes on."""

import json
import os
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from planner.cli.main import app
from tests.distributed.forked_ranks import forked_ranks
from tests.long_lists import first

CASES = {
    "dense": ("llama", 3, (2, 2), {}),
    "zero1": ("llama", "zero1", (4,), {}),
    "zero2": ("llama", "zero2", (4,), {"micro_batches": 2}),
    "zero3": ("llama", "zero3", (4,), {}),
    "megatron": ("llama", "megatron", (2, 2), {"optimizer": "lamb", "update": {"clip_norm": 0.5}}),
    "whole parameters": (
        "llama", "megatron", (2, 2), {"update": {"zero_by": "parameters", "moment_dtype": "bf16"}, "half": True},
    ),
    "parameter servers": (
        "llama", "megatron", (2, 2), {"update": {"zero_by": "servers", "moment_dtype": "bf16"}, "half": True},
    ),
    "padded": ("llama-odd", "zero3", (4,), {"padded": (("*gate_proj.weight", 4),)}),
    "padded shards": ("llama-uneven", "zero1", (4,), {}),
    "padded shards offloaded": ("llama-uneven", "zero1", (4,), {"offloaded": True}),
    "mixture": ("mixture", 5, (2, 2), {}),
    "buffers after a step": ("balanced", 2, (2,), {"stages": (1, 1)}),
    "running statistics": ("resnet", 1, (2, 2), {"optimizer": "sgd"}),
    "dropout": ("dropping", 4, (2, 2), {"micro_batches": 2}),
    "uneven pipeline": ("llama4", 7, (2,), {"stages": (3, 1), "micro_batches": 4}),
    "virtual stages": (
        "llama4", 8, (2,),
        {"stages": (1, 1, 1, 1), "virtual_stages": 2, "schedule": "interleaved_1f1b", "micro_batches": 4},
    ),
    "tied over stages": ("llama-one", 9, (2,), {"stages": (1, 1), "micro_batches": 2}),
    "narrow with masters": ("llama", "zero1", (4,), {"half": True, "update": {"moment_dtype": "bf16"}}),
    "narrow without masters": ("llama", "zero3", (4,), {"half": True, "update": {"master_weights": False}}),
    "narrow momentum": ("llama", "zero3", (4,), {"optimizer": "muon", "update": {"moment_dtype": "bf16"}}),
    "offloaded": ("llama", "zero1", (4,), {"offloaded": True, "half": True, "update": {"moment_dtype": "bf16"}}),
    "offloaded without masters": (
        "llama4", 6, (2,),
        {"offloaded": True, "stages": (2, 2), "half": True, "optimizer": "sgd", "update": {"master_weights": False}},
    ),
    "offloaded weights": ("llama4", "zero1", (4,), {"offloaded": True, "weights": True, "half": True}),
    "offloaded weights of stages": ("llama4", "zero3", (2,), {"weights": True, "stages": (2, 2), "micro_batches": 2}),
    "own parameters": ("llama", "own norms", (4,), {"update": {"local_parameters": ("*norm*",)}}),
    "stale weights": ("llama4", 6, (2,), {"stages": (2, 2), "schedule": "pipedream_2bw", "micro_batches": 4}),
    "stashed weights": ("llama4", 6, (2,), {"stages": (2, 2), "schedule": "pipedream", "micro_batches": 4}),
}  # fmt: skip


USUAL = (
    "zero3", "padded", "padded shards", "mixture", "uneven pipeline", "tied over stages", "narrow with masters",
    "stale weights",
)  # fmt: skip
"""Cases that are not among the long lists."""


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("case", [*USUAL, *first(0, [case for case in CASES if case not in USUAL])])
def test_what_is_resumed_goes_on_bit_by_bit(pool, tmp_path: Path, case: str) -> None:
    model, kind, sizes, settings = CASES[case]
    for wanted, found, unequal in pool.run(
        "tasks_saving", "resumed", model, kind, sizes, settings, str(tmp_path), True
    ):
        assert found == wanted
        assert unequal == []
    assert {path.stat().st_mode & 0o077 for path in tmp_path.rglob("*")} == {0}, "files are for their owner alone"


MOVES = {
    "ZeRO to pipeline": ("llama4", ("zero3", (4,), {}), (3, (2,), {"stages": (3, 1), "micro_batches": 2})),
    "pipeline to tensor": ("llama4", (5, (2,), {"stages": (1, 3)}), ("megatron", (2, 2), {})),
    "whole parameters to slices": (
        "llama-one", ("whole", (2,), {"stages": (1, 1), "update": {"zero_by": "parameters"}}), ("zero1", (4,), {}),
    ),
    "experts": ("mixture", (2, (4,), {}), (9, (2, 2), {})),
    "tied over stages": ("llama-one", (4, (2,), {"stages": (1, 1)}), (1, (2, 2), {})),
    "sums in other orders": (
        "llama4", ("zero1", (4,), {"optimizer": "sgd"}),
        (6, (2,), {"stages": (2, 2), "optimizer": "sgd", "micro_batches": 2}),
    ),
    "offloaded to device": ("llama", ("zero1", (4,), {"offloaded": True}), ("zero3", (2, 2), {})),
    "offloaded weights to device": ("llama4", ("zero1", (4,), {"weights": True}), ("zero3", (2, 2), {})),
    "offloaded weights from device": ("llama4", ("zero3", (2, 2), {}), ("zero1", (4,), {"weights": True})),
    "with masters": ("llama", ("zero1", (4,), {"half": True}), ("zero3", (2, 2), {"half": True})),
    "to narrow moments": (
        "llama", ("zero1", (4,), {"half": True}),
        ("zero3", (2, 2), {"half": True, "offloaded": True, "update": {"moment_dtype": "bf16"}}),
    ),
    "to wide moments": (
        "llama", ("zero3", (2, 2), {"half": True, "update": {"moment_dtype": "bf16"}}), ("zero1", (4,), {"half": True}),
    ),
}  # fmt: skip


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("case", first(2, list(MOVES)))
def test_another_plan_goes_on_from_the_same_weights(pool, tmp_path: Path, case: str) -> None:
    model, first, then = MOVES[case]
    allowed = 2e-2 if first[2].get("half") else 1e-5
    for wanted, found, apart in pool.run("tasks_saving", "moved", model, first, then, str(tmp_path)):
        assert apart == 0.0
        assert found == pytest.approx(wanted, rel=allowed)


def test_all_ranks_hear_of_one_that_cannot_write(pool, tmp_path: Path) -> None:
    found = pool.run("tasks_saving", "failing", str(tmp_path / "runs"))
    for rank, (waited, stepped, saved, count) in enumerate(found):
        assert "rank-00002.safetensors: cannot be written: File exists" in waited
        assert (stepped != "") == (saved != "") == (rank in (0, 2))  # the rank itself, and the one that finishes
        assert count == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["manifest.json", "rank-00001.safetensors"])
def test_a_damaged_file_is_refused_on_every_rank_and_nothing_has_changed(pool, tmp_path: Path, name: str) -> None:
    found = pool.run("tasks_saving", "refused", str(tmp_path), name)
    assert len({said for said, _ in found}) == 1
    for said, changed in found:
        assert f"{name}: " in said  # the byte that is changed may be in a string, or between
        assert "damaged" in said or "no JSON" in said or "not valid JSON" in said
        assert changed == []


def _plan(folder: Path, *words: str) -> Result:
    with pytest.MonkeyPatch.context() as patch, forked_ranks():
        patch.chdir(folder)
        return CliRunner().invoke(app, words)


def _losses(done: Result) -> list[float]:
    assert done.exit_code == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    return [report["loss"] for report in reports if report["event"] == "step"]


DATASET = """
import torch
class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, number):
        drawn = torch.randint(1024, (129,))  # of a generator that is seeded for each sample
        return drawn[:-1], drawn[1:]
def tokens():
    return Tokens()
"""


@pytest.fixture
def interrupted(tmp_path: Path) -> tuple[Path, tuple[str, ...], list[float]]:
    """A folder with a run of three steps, the command of that run but for its steps, and its losses."""
    folder = tmp_path
    (folder / "reading.py").write_text(DATASET)
    search = ("--model", "llama-tiny", "--seq-len", "128", "--devices", "2", "--hardware", "cpu", "--global-batch", "8")
    assert _plan(folder, *search, "-o", "two.json").exit_code == 0
    saving = (*RUN, "--save", "runs/a", "--save-every", "2", "--keep", "2", "--continue")
    losses = _losses(_plan(folder, *saving, "--no-check", "--steps", "3"))
    there = sorted(path.name for path in (folder / "runs/a").iterdir())
    assert there == ["run.json", "step-000002", "step-000003"]
    return folder, saving, losses


RUN = ("run", "two.json", "--dataset", "reading:tokens", "--shuffle", "--seed", "3", "--json")


@pytest.mark.slow
@pytest.mark.thorough
def test_plan_run_goes_on_where_it_stopped(interrupted: tuple[Path, tuple[str, ...], list[float]]) -> None:
    """On two ranks, with data that is shuffled; resumed losses are those of a run that was not interrupted, bit by bit,
    and the unsharded model beside it goes on too."""
    folder, saving, first = interrupted
    whole = _losses(_plan(folder, *RUN, "--no-check", "--steps", "5"))
    done = _plan(folder, *saving, "--steps", "5")
    assert first + _losses(done) == whole
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["steps"], summary["agrees"]) == (2, True)
    assert summary["resumed"] == "runs/a/step-000003, step 3"
    assert summary["saved"] == "runs/a/step-000005"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_cannot_be_resumed_is_said(interrupted: tuple[Path, tuple[str, ...], list[float]]) -> None:
    folder, saving, _ = interrupted
    assert len(_losses(_plan(folder, *saving, "--no-check", "--steps", "5"))) == 2
    again = _plan(folder, *RUN, "--steps", "5", "--resume", "runs/a")
    assert again.exit_code == 2
    assert "is of step 5, and --steps 5 counts from the start of training; give --steps 6 or more" in again.stderr
    over = _plan(folder, *saving, "--no-check", "--steps", "5")
    assert (over.exit_code, over.stdout) == (0, "")
    assert "nothing is left to do: runs/a/step-000005 is of step 5, the last step of --steps" in over.stderr
    forgotten = _plan(folder, "run", "two.json", "--seed", "3", "--steps", "6", "--resume", "runs/a", "--no-check")
    assert forgotten.exit_code == 2
    assert "was trained on a dataset and would continue on synthetic data; give its --dataset" in forgotten.stderr
    with open(folder / "runs/a/step-000005/rank-00001.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    damaged = _plan(folder, *saving, "--no-check", "--steps", "6")
    assert damaged.exit_code == 2
    assert "resume from the checkpoint before it with --resume runs/a/step-000004 --save runs/a" in damaged.stderr
