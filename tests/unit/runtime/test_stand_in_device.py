"""Branches of the runtime for devices with streams, on a stand-in that PyTorch makes of PrivateUse1 without a device.

A stand-in is registered for a whole process, so the test has one of its own. It has streams and events, all of them
done at once; tensors on it have no memory (docs/running.md, "Without a device").
"""

import subprocess
import sys

REGISTERED = """
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("stand_in")
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
