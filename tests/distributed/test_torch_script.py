"""The script that `plan export --to torch` writes, run on 4 processes: the losses of the unsharded model."""

import os
import subprocess
import sys
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from planner.export.architecture import architecture_of
from planner.export.description import Description, Kept
from planner.export.target import Job
from planner.export.targets import TARGETS
from planner.models.zoo import build_model
from planner.sharding.update import Update

STEPS, RATE, CLIP = 3, 0.5, 0.7
ONE = Description(
    layers=(4,), full=(0,), selective=(0,), precision="fp32", optimizer="sgd", sequence_length=128, micro_batches=4,
    update=Update(clip_norm=CLIP),
)  # fmt: skip
TWO = replace(ONE, layers=(1, 3), full=(0, 2), selective=(0, 0))
CASES = {
    "data": replace(ONE, data=4),
    "ZeRO 2": replace(ONE, data=4, zero=2),
    "ZeRO 3": replace(ONE, data=4, zero=3, full=(1,), selective=(2,), kept=Kept(calls=("attention",))),
    "HSDP": replace(ONE, data=4, zero=2, replicas=2),
    "tensor": replace(ONE, tensor=4, micro_batch=4, sequence_parallel=True),
    "whole norms": replace(ONE, tensor=2, data=2, micro_batch=2),
    "tensor and data": replace(ONE, tensor=2, data=2, zero=3, micro_batch=2, sequence_parallel=True),
    "pipeline and data": replace(TWO, data=2, zero=2, micro_batch=2),
    "pipeline and tensor": replace(TWO, tensor=2, schedule="gpipe", micro_batch=4, sequence_parallel=True),
    "virtual stages": replace(
        ONE, layers=(1,) * 4, full=(0,) * 4, selective=(0,) * 4, virtual_stages=2, schedule="interleaved_1f1b",
        data=2, micro_batch=2,
    ),
}  # fmt: skip


@cache
def losses_of_the_model(rate: float = RATE) -> tuple[float, ...]:
    """Of the zoo's model on the same weights and samples, 16 a step."""
    module, vocabulary = build_model("llama-tiny", dtype="float32", device="cpu").module, 1024
    for name, parameter in module.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.removeprefix("model.").encode()))
        whole = torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator)
        parameter.data = torch.ones_like(whole) if "norm" in name else whole
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=rate), []
    for step in range(STEPS):
        tokens = torch.randint(vocabulary, (16, 129), generator=torch.Generator().manual_seed(step))
        loss = module(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return tuple(losses)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_the_script_trains_as_the_unsharded_model(name: str, tmp_path: Path) -> None:
    description = CASES[name]
    assert description.devices == 4
    assert TARGETS["torch"].nearest(description) == ()
    job = Job(model="llama-tiny", description=description, architecture=architecture_of("llama-tiny", 128), per_node=4)
    for file, text in TARGETS["torch"].write(job).items():
        (tmp_path / file).write_text(text)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    done = subprocess.run(
        [*launcher, str(tmp_path / "train.py"), "--steps", str(STEPS), "--rate", str(RATE)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert losses == pytest.approx(losses_of_the_model(), abs=3e-5)


@pytest.mark.thorough
def test_updates_move_the_losses() -> None:
    """What is compared moves with the updates by much more than it may differ."""
    moved = zip(losses_of_the_model()[1:], losses_of_the_model(0.0)[1:], strict=True)
    assert all(abs(one - other) > 1e-3 for one, other in moved)
