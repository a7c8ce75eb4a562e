"""Dims that devices do not divide, padded: training as without, and checkpoints of the model as it is."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from planner.cli.main import app
from tests.distributed.forked_ranks import forked_ranks

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


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_padded_batch_trains_as_the_unsharded_model_on_its_samples(tmp_path: Path) -> None:
    """13 samples on four devices in two micro-batches of 8 and 5, from a file of tokens of which every rank reads its
    own; then on two stages of two devices, from the same checkpoint."""
    small = ("--model", "llama-tiny", "--set", "num_layers=2", "--set", "hidden_size=64", "--set", "vocab_size=256")
    job = (
        *small,
        "--hardware",
        "cpu",
        "--devices",
        "4",
        "--seq-len",
        "32",
        "--global-batch",
        "13",
        "--clip-norm",
        "0.5",
    )
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 256, 80 * 33).astype(np.uint16))
    for name, options in (
        ("first.json", ("--data", "4", "--micro-batches", "2", "--pad", "batch=8")),
        ("then.json", ("--data", "2", "--pipeline", "2", "--micro-batches", "3", "--pad", "batch=6", "--zero", "1")),
    ):
        call(tmp_path, *job, *options, "-o", name)
    first = called(tmp_path, "run", "first.json", "--steps", "2", "--dataset", "tokens.npy", "--save", "saved")
    then = called(tmp_path, "run", "then.json", "--steps", "4", "--dataset", "tokens.npy", "--resume", "saved")
    assert (first["agrees"], then["agrees"]) == (True, True)
    audited = json.loads(call(tmp_path, "audit", "first.json", "--json"))
    assert audited["agrees"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_a_padded_batch_in_fp8_trains_as_the_unsharded_model_on_its_samples(tmp_path: Path, recipe: str) -> None:
    """What is behind them are copies of the last one, whose gradients are zero: of a tensor or a row no element is
    larger. Five samples of 24 tokens are blocks of 32 that end inside of a sample: the scale of the last block may be
    that of copies of its first tokens, which tells less than the casts of fp32 sums in another order do (1e-5)."""
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 256, 80 * 25).astype(np.uint16))
    small = ("--model", "llama-tiny", "--set", "num_layers=2", "--set", "hidden_size=64", "--set", "vocab_size=256")
    job = (*small, "--hardware", "cpu", "--devices", "2", "--seq-len", "24", "--global-batch", "5", "--fp8", recipe)
    call(tmp_path, *job, "--data", "2", "--micro-batches", "1", "--pad", "batch=6", "-o", "plan.json")
    found = called(tmp_path, "run", "plan.json", "--steps", "4", "--dataset", "tokens.npy")
    assert found["difference"] < 1e-4
    assert found["agrees"]


def call(folder: Path, *words: str) -> str:
    before = Path.cwd()
    os.chdir(folder)
    try:
        with forked_ranks():
            done = CliRunner().invoke(app, [*words])
    finally:
        os.chdir(before)
    assert done.exit_code == 0, done.output
    return done.stdout


def called(folder: Path, *words: str) -> dict[str, Any]:
    return json.loads(call(folder, *words, "--json").splitlines()[-1])
