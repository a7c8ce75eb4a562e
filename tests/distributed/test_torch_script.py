"""The script that `plan export --to torch` writes, run on 4 processes: the losses of the unsharded model."""

import os
import re
import subprocess
import sys
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from planner.export.architecture import architecture_of
from planner.export.description import Description
from planner.export.target import Job
from planner.export.targets import TARGETS
from planner.models.experts.router import Router
from planner.models.zoo import build_model
from planner.plan.layout.kept import Kept
from planner.sharding.update import Update
from tests.distributed.ports import free_port

STEPS, RATE, CLIP = 3, 0.5, 0.7
ONE = Description(
    layers=(4,), full=(0,), selective=(0,), precision="fp32", optimizer="sgd", sequence_length=128, micro_batches=4,
    update=Update(buckets="none", clip_norm=CLIP),
)  # fmt: skip
TWO = replace(ONE, layers=(1, 3), full=(0, 2), selective=(0, 0))
IN_A_V = replace(ONE, layers=(1,) * 4, full=(0,) * 4, selective=(0,) * 4, virtual_stages=2, schedule="zb_v")
FIVE = replace(ONE, layers=(5,))
LLAMA = "llama-tiny"
LATENT = "deepseek-tiny+sequence_length=128+balance_loss=0.1+balance_speed=0.05"  # more than published: it shows
LATENT_2 = (
    "deepseek-tiny+sequence_length=128+q_rank=0+sigmoid_scores=False+normalised_weights=False+weight_scale=16.0"
    "+groups_by=1+balance_loss=0.1+balance_speed=0.0"
)
CASES: dict[str, Description | tuple[str, Description]] = {
    "data": replace(ONE, data=4),
    "ZeRO 1": replace(ONE, data=4, zero=1),
    "ZeRO 2": replace(ONE, data=4, zero=2),
    "ZeRO 3": replace(ONE, data=4, zero=3, full=(1,), selective=(2,), kept=Kept(calls=("attention",))),
    "HSDP": replace(ONE, data=4, zero=2, replicas=2),
    "tensor": replace(ONE, tensor=4, micro_batch=4, sequence_parallel=True),
    "whole norms": replace(ONE, tensor=2, data=2, micro_batch=2),
    "tensor and data": replace(ONE, tensor=2, data=2, zero=3, micro_batch=2, sequence_parallel=True),
    "pipeline and data": replace(TWO, data=2, zero=1, micro_batch=2),
    "pipeline and tensor": replace(TWO, tensor=2, schedule="gpipe", micro_batch=4, sequence_parallel=True),
    "virtual stages": replace(
        ONE, layers=(1,) * 4, full=(0,) * 4, selective=(0,) * 4, virtual_stages=2, schedule="interleaved_1f1b",
        data=2, micro_batch=2,
    ),
    "zero bubble in a V": replace(IN_A_V, data=2, zero=1, micro_batch=2),
    "both ways at once": replace(IN_A_V, tensor=2, schedule="dualpipe_v", full=(1, 0, 0, 1), micro_batch=4),
    "GPT, tensor": ("gpt-tiny+vocab_size=1001", replace(ONE, tensor=4, micro_batch=4, sequence_parallel=True)),
    "GPT, pipeline": ("gpt-tiny", replace(TWO, data=2, zero=1, micro_batch=2)),
    "GPT, context": ("gpt-tiny", replace(ONE, heads=2, data=2, zero=3, micro_batch=2, full=(2,))),
    "context and tensor": (LLAMA, replace(ONE, heads=2, tensor=2, zero=2, micro_batch=4, sequence_parallel=True)),
    "ring": replace(ONE, ring=4, zigzag=True, zero=1, micro_batch=4),
    "ring, GPT and data": ("gpt-tiny", replace(ONE, ring=2, zigzag=True, data=2, zero=3, micro_batch=2, full=(2,))),
    "ring and pipeline": replace(TWO, ring=2, zigzag=True, zero=1, micro_batch=4),
    "ring and tensor": (
        LLAMA,
        replace(
            ONE, ring=2, zigzag=True, tensor=2, zero=2, micro_batch=4, sequence_parallel=True, selective=(2,),
            kept=Kept(calls=("attention",)),
        ),
    ),
    "experts, ring": (
        "mixtral-tiny", replace(ONE, ring=2, zigzag=True, data=2, zero=2, micro_batch=2, expert=4, full=(2,)),
    ),
    "norms of heads": (
        "llama-tiny+qk_norm=True+tied_embeddings=True",
        replace(ONE, tensor=2, data=2, micro_batch=2, sequence_parallel=True),
    ),
    "biases": ("llama-tiny+qkv_bias=True", replace(TWO, tensor=2, micro_batch=4, sequence_parallel=True)),
    "Gemma": (
        "llama-tiny+gelu=True+scaled_embeddings=True+tied_embeddings=True+head_size=64", replace(ONE, data=4, zero=3),
    ),
    "experts": ("mixtral-tiny", replace(ONE, data=4, zero=3, expert=2)),
    "experts, context": ("mixtral-tiny", replace(ONE, heads=2, data=2, zero=2, micro_batch=2, expert=4, full=(2,))),
    "experts, copies": ("mixtral-tiny", replace(ONE, data=4, expert=2)),
    "experts, HSDP": ("mixtral-tiny", replace(ONE, data=4, zero=2, replicas=2, expert=4)),
    "experts, pipeline": (
        "mixtral-tiny+dense_layers=1+shared_size=128", replace(TWO, data=2, zero=1, micro_batch=2, expert=1),
    ),
    "latent attention": (LATENT, replace(FIVE, data=4, zero=3, expert=4, full=(3,))),
    "latent attention, context": (LATENT, replace(FIVE, heads=2, data=2, zero=2, micro_batch=2, expert=2)),
    "latent attention, ring and pipeline": (
        LATENT, replace(FIVE, layers=(2, 3), full=(1, 2), selective=(0, 0), ring=2, zigzag=True, zero=1,
            micro_batch=4, expert=2),
    ),
    "latent attention, copies": (LATENT, replace(FIVE, data=4, expert=2)),
    "latent attention of V2": (
        LATENT_2, replace(FIVE, layers=(1, 1, 1, 2), full=(0, 1, 0, 1), selective=(0,) * 4, virtual_stages=2,
            schedule="interleaved_1f1b", data=2, zero=1, micro_batch=2, expert=2),
    ),
}  # fmt: skip
NAMES = {
    "wte": "embed_tokens", "wpe": "embed_positions", "h": "layers", "ln_1": "input_layernorm", "ln_f": "norm",
    "c_attn": "self_attn.qkv_proj", "attn_proj": "self_attn.o_proj", "ln_2": "post_attention_layernorm",
    "c_fc": "mlp.up_proj", "mlp_proj": "mlp.down_proj",
}  # fmt: skip
"""Of the script, by those of the zoo's GPT."""


def case(name: str) -> tuple[str, Description]:
    """The model of a case, and its description."""
    found = CASES[name]
    return found if isinstance(found, tuple) else (LLAMA, found)


@cache
def losses_of_the_model(rate: float = RATE, model: str = LLAMA) -> tuple[float, ...]:
    """Of the zoo's model on the same weights and samples, 16 a step."""
    module = build_model(model, dtype="float32", device="cpu").module
    architecture = architecture_of(model, None, every=True, latent=True)
    assert architecture is not None
    vocabulary = architecture.vocabulary
    for theirs, parameter in module.named_parameters():
        name = ".".join(NAMES.get(word, word) for word in theirs.removeprefix("model.").split("."))
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator)
        constant = "norm" in name or name.endswith("bias")
        parameter.data = torch.full_like(whole, float(name.endswith("weight"))) if constant else whole
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=rate), []
    for step in range(STEPS):
        tokens = torch.randint(vocabulary, (16, 129), generator=torch.Generator().manual_seed(step))
        loss = module(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        for router in (one for one in module.modules() if isinstance(one, Router)):
            after = router.after_step(dict(router.named_buffers()))
            router.load_state_dict({**router.state_dict(), **after})
        losses.append(loss.item())
    return tuple(losses)


WARNED = re.compile(r"^\[rank\d\]:W", re.MULTILINE)  # of torch's own log
OPTIONS = ["--steps", str(STEPS), "--rate", str(RATE)]
ONE_AFTER_THE_OTHER = """
import contextlib, os, runpy, sys

os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # a store has the keys of the script before
folders, options = sys.argv[1].split(os.pathsep), sys.argv[2:]
for port, folder in (found.split("@") for found in folders):
    os.environ["MASTER_PORT"] = port
    sys.path[0], sys.argv = folder, ["train.py", *options]
    sys.modules.pop("model", None)
    with open(f"{folder}/said{os.environ['RANK']}", "w") as said, contextlib.redirect_stdout(said):
        runpy.run_path(f"{folder}/train.py", run_name="__main__")
"""
"""Runs the scripts of several folders, each with the port at which its ranks meet: starting processes is what costs."""


def write(name: str, folder: Path) -> None:
    model, description = case(name)
    assert description.devices == 4
    assert TARGETS["torch"].nearest(description) == ()
    architecture = architecture_of(model, 128, every=True, latent=True)
    job = Job(model=model, description=description, architecture=architecture, per_node=4)
    for file, text in TARGETS["torch"].write(job).items():
        (folder / file).write_text(text)


def torchrun(*words: str) -> str:
    """What four ranks print."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *words], capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "arning" not in done.stderr, done.stderr[-6000:]
    assert not WARNED.search(done.stderr), done.stderr[-6000:]
    return done.stdout


def check(said: str, model: str = LLAMA) -> None:
    losses = [float(line.rpartition(" ")[2]) for line in said.splitlines() if line.startswith("step ")]
    assert losses == pytest.approx(losses_of_the_model(model=model), abs=3e-5)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What the script of each case but the first one prints."""
    folders = {name: tmp_path_factory.mktemp("script") for name in list(CASES)[1:]}
    for name, folder in folders.items():
        write(name, folder)
    driver = tmp_path_factory.mktemp("driver") / "driver.py"
    driver.write_text(ONE_AFTER_THE_OTHER)
    torchrun(str(driver), os.pathsep.join(f"{free_port()}@{folder}" for folder in folders.values()), *OPTIONS)
    return {
        name: "".join(path.read_text() for path in sorted(folder.glob("said*"))) for name, folder in folders.items()
    }


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_script_is_run_by_torchrun(tmp_path: Path) -> None:
    write(next(iter(CASES)), tmp_path)
    check(torchrun(str(tmp_path / "train.py"), *OPTIONS))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", list(CASES)[1:])
def test_the_script_trains_as_the_unsharded_model(name: str, said: Mapping[str, str]) -> None:
    check(said[name], case(name)[0])


@pytest.mark.slow
@pytest.mark.thorough
def test_updates_move_the_losses() -> None:
    """What is compared moves with the updates by much more than it may differ."""
    moved = zip(losses_of_the_model()[1:], losses_of_the_model(0.0)[1:], strict=True)
    assert all(abs(one - other) > 1e-3 for one, other in moved)
