"""`plan advise`: a configuration, what it takes, what to change in it, and the file with that changed."""

from pathlib import Path
from typing import Any

import pytest

TINY = ("--model", "llama-tiny", "--hardware", "cpu", "--time-limit", "20")
TOML = """# our first run
[training]
seq_len = 128
local_batch_size = 1  # as many as fit
global_batch_size = 64

[parallelism]
tensor_parallel_degree = 1

[activation_checkpoint]
mode = "full"  # to be safe
"""
SCRIPT = """#!/bin/bash
# our first run
MBS=1  # as many as fit
ARGS=(
    --num-layers 4 --hidden-size 256 --num-attention-heads 8 --ffn-hidden-size 512 --swiglu  # the model
    --tensor-model-parallel-size 1
    --micro-batch-size $MBS
    --global-batch-size 64
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-distributed-optimizer
    --seq-length 128
)
torchrun --nproc-per-node 4 pretrain_gpt.py ${ARGS[@]}
"""


def advised(plan: Any, here: Path, name: str, text: str, *arguments: str) -> tuple[dict[str, Any], str]:
    (here / name).write_text(text)
    content = plan.json("advise", name, *TINY, *arguments, "-o", f"better-{name}")
    return content, (here / f"better-{name}").read_text()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "text", "comments", "arguments"),
    [
        ("train.toml", TOML, ("# our first run", "# as many as fit", "# to be safe"), ("--devices", "4")),
    ],
)
def test_what_is_changed_saves_and_the_rest_stays(
    plan: Any, here: Path, name: str, text: str, comments: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    content, written = advised(plan, here, name, text, *arguments)
    saved = sum(change["saved_seconds"] for change in content["changes"])
    assert saved == pytest.approx(content["now"]["step_seconds"] - content["best"]["step_seconds"])
    assert saved > 0
    assert content["best"]["fits"]
    assert all(comment in written for comment in comments)
    assert len(set(written.splitlines()) - set(text.splitlines())) <= 6
    again = plan.json("import", f"better-{name}", *TINY[:4], *arguments)
    assert again["step_seconds"] == pytest.approx(content["best"]["step_seconds"])


@pytest.mark.slow
@pytest.mark.thorough
def test_a_script_is_changed_in_its_options(plan: Any, here: Path) -> None:
    (here / "train.sh").write_text(SCRIPT)
    content = plan.json("advise", "train.sh", *TINY, "-o", "better.sh")
    again = plan.json("import", "better.sh", *TINY[:4])
    assert again["step_seconds"] == pytest.approx(content["best"]["step_seconds"])
    assert len(set(SCRIPT.splitlines()) - set((here / "better.sh").read_text().splitlines())) <= 6


def test_a_file_of_nobody_is_refused(plan: Any, here: Path) -> None:
    (here / "notes.txt").write_text("call the plumber")
    assert "--from" in plan.refused("advise", "notes.txt")
    (here / "empty.sh").write_text("torchrun pretrain_gpt.py")
    assert "no argument of Megatron-LM" in plan.refused("advise", "empty.sh", "--from", "megatron")
    (here / "ds_config.json").write_text('{"train_batch_size": 8}')
    assert "--model" in plan.refused("advise", "ds_config.json")


def test_a_file_without_lengths_is_priced_with_those_that_one_says(plan: Any, here: Path) -> None:
    (here / "fsdp.yaml").write_text("distributed_type: FSDP\nnum_processes: 4\nmixed_precision: bf16\n")
    given = ("import", "fsdp.yaml", *TINY[:4])
    long, short = plan.json(*given), plan.json(*given, "--seq-len", "64")
    assert (long["sequence_length"], short["sequence_length"]) == (128, 64)
    assert short["peak_bytes"] < long["peak_bytes"]
    assert "one sample of 64 tokens" in short["notes"][0]
    (here / "train.sh").write_text(SCRIPT)
    assert "128 tokens" in plan.refused("import", "train.sh", *TINY[:4], "--seq-len", "64")
