"""Dims that devices do not divide, padded: training as without, and checkpoints of the model as it is."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planner.cli.main import app
from tests.distributed.forked_ranks import forked_ranks
from tests.traced_once import traced_once

ODD = ("--model", "llama-tiny", "--set", "vocab_size=1001", "--set", "ffn_size=510", "--set", "num_layers=2",
       "--set", "hidden_size=192", "--set", "num_heads=6", "--set", "num_kv_heads=3")  # fmt: skip
JOB = (*ODD, "--hardware", "cpu", "--seq-len", "32", "--global-batch", "8", "--clip-norm", "0.5")


@pytest.mark.slow
@pytest.mark.thorough
def test_padded_weights_train_as_the_unsharded_model(tmp_path: Path) -> None:
    """Vocabulary, hidden elements and heads over four devices, the last of which has no head; then on two, from the
    same checkpoint, padded otherwise."""
    vocabulary = ("--pad", "lm_head.weight=4", "--pad", "*embed_tokens.weight=4")
    inside = ("--pad", "*gate_proj.weight=4", "--pad", "*k_proj.weight=128")
    four = ("--devices", "4", "--tensor", "4", *vocabulary, *inside)
    words = ("lm_head.weight=2", "*embed_tokens.weight=2", "*k_proj.weight=64")
    two = ("--devices", "2", "--tensor", "2", *(one for word in words for one in ("--pad", word)))
    for name, options in (("four.json", four), ("two.json", two)):
        call(tmp_path, *JOB, *options, "-o", name)
    first = called(tmp_path, "run", "four.json", "--steps", "3", "--save", "saved")
    then = called(tmp_path, "run", "two.json", "--steps", "5", "--resume", "saved")
    assert (first["agrees"], then["agrees"]) == (True, True)
    tensors = json.loads(call(tmp_path, "checkpoint", "inspect", "saved", "--json"))["tensors"]
    assert tensors["lm_head.weight"]["shape"] == [1001, 192]
    assert tensors["optimizer/exp_avg/model.layers.0.mlp.down_proj.weight"]["shape"] == [192, 510]
    assert tensors["model.layers.0.self_attn.o_proj.weight"]["shape"] == [192, 192]


def call(folder: Path, *words: str) -> str:
    before = Path.cwd()
    os.chdir(folder)
    try:
        with traced_once(), forked_ranks():
            done = CliRunner().invoke(app, [*words])
    finally:
        os.chdir(before)
    assert done.exit_code == 0, done.output
    return done.stdout


def called(folder: Path, *words: str) -> dict[str, Any]:
    return json.loads(call(folder, *words, "--json").splitlines()[-1])
