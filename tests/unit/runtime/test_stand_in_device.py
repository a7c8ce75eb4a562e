"""Branches of the runtime for devices with streams, on a stand-in that PyTorch makes of PrivateUse1 without a device.

A stand-in is registered for a whole process, so every test has one of its own (`stand_in_device`).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner import save_plan, search

REGISTERED = """
import torch
from tests.unit.runtime.stand_in_device import register

registered = register()
"""

PLAN = """
import json, sys
import torch.distributed as dist
from planner import load_plan
from planner.graph.trace import trace
from planner.models.zoo import build_model
from runtime.comm.device_mesh import current_device
from runtime.data.datasets import synthetic_batch
from runtime.step.arguments import Arguments
from runtime.step.training_step import parallelize

plan, rank, world = load_plan(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if world > 1:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[4]}", rank=rank, world_size=world)


def model():
    torch.manual_seed(0)
    return build_model("llama-tiny+num_layers=2", dtype="float32", device="cpu", sequence_length=16)


example = model()
graph = trace(example.module, example.args, example.kwargs)


def steps(device, lowered):
    built = model()
    traced = None if lowered and device.type == "stand_in" else graph
    step = parallelize(built.module, plan, device=device, lowered=lowered, traced=traced)
    step.prepare(*built.args, **built.kwargs)
    shapes = Arguments(args=tuple(built.args), kwargs=built.kwargs).tensors()
    batches = [
        synthetic_batch(shapes, batch=built.batch, samples=4, bounds=built.bounds, seed=0, step=at) for at in range(2)
    ]
    losses = [float(step(*batch)) for batch in batches]
    weights = step.full_parameters()
    places = sorted({weight.device.type for weight in weights.values()})
    total = sum(float(weight.cpu().double().abs().sum()) for weight in weights.values())
    return [places, [*losses, float(step.evaluate(*batches[0])), total]]


for lowered in (True, False):
    print(json.dumps([steps(torch.device("cpu"), lowered), steps(current_device(0), lowered)]))
"""

DEVICE = """
from planner.errors import RequestError
from runtime.comm.device_mesh import current_device

print(current_device(0))
try:
    current_device(1)
except RequestError as error:
    print(str(error).partition(":")[0])
"""

LANES = """
from runtime.offload.copy_streams import Lane, here

device, done, streams = torch.device("stand_in:0"), [], []


class Noted(torch.Stream):
    def record_event(self):
        streams.append("recorded")
        return super().record_event()


inward, outward = Lane(device), Lane(device)
inward._stream = Noted(device)
fetched = inward.run(lambda: done.append("fetch"), [here(device)])
stored = outward.run(lambda: done.append("store"), [fetched])
stored.wait()
print(*done, *streams, type(stored._issued.result()).__name__)
"""

PASSES = """
from runtime.executor.alternation import Alternation

set_stream, streams, done = torch.accelerator.set_stream, [], []
torch.accelerator.set_stream = lambda stream: (streams.append(stream.device.type), set_stream(stream))
passes = Alternation(torch.device("stand_in:0"))


def one(name):
    for at in range(2):
        done.append(f"{name}{at}")
        passes.switch()


passes.run(lambda: one("back"), lambda: one("forward"))
print(*done, *streams)
"""


def test_a_process_takes_its_device_copies_wait_for_events_and_a_thread_goes_on_in_the_stream() -> None:
    program = "".join((REGISTERED, DEVICE, LANES, PASSES))
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.splitlines()) == (
        0,
        [
            "stand_in:0",
            "process 1 of this machine has no device",
            "fetch store recorded Event",
            "back0 forward0 back1 forward1 stand_in",
        ],
    ), run.stderr


@pytest.mark.cases(1, 1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("pinned", "processes"),
    [
        ({"recompute": "none"}, 1),
        ({"recompute": "full"}, 1),
        ({"tensor": 2, "sequence_parallel": True, "interleave": 2}, 2),
        ({"data": 2, "zero": 3}, 2),
    ],
    ids=str,
)
def test_a_plan_trains_and_evaluates_on_it_as_on_the_host(
    pinned: dict[str, object], processes: int, tmp_path: Path
) -> None:
    """Both executors: tensors are on the device all the time, losses and weights those of the host. One of them traces
    the model on its way to the device, the others know its graph."""
    asked = {"devices": processes, "global_batch": 4, "precision": "fp32", "seq_len": 16}
    plan = search("llama-tiny+num_layers=2", "cpu", **asked, pinned={"micro_batches": 2, **pinned}).plan
    save_plan(plan, tmp_path / "plan.json")
    words = [sys.executable, "-c", REGISTERED + PLAN, str(tmp_path / "plan.json")]
    started = [
        subprocess.Popen(
            [*words, str(rank), str(processes), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        ended = [one.communicate(timeout=300) for one in started]
    finally:
        for one in started:
            one.kill()
    for one, (output, errors) in zip(started, ended, strict=True):
        assert one.returncode == 0, errors
        assert len(output.splitlines()) == 2
        for line in output.splitlines():
            (host, expected), (device, found) = json.loads(line)
            assert (host, device) == (["cpu"], ["stand_in"])
            assert found == pytest.approx(expected, rel=1e-6)
