"""How fast checkpoints are saved and loaded, beside torch.save of the same bytes and torch.distributed.checkpoint.

Two processes hold the state of a Llama under AdamW, each half of it (ZeRO-3). Each way writes the same tensors, all in
one run, in turn, in an order drawn anew each round; the medians of the rounds are printed, how many times as long as
ours the others take, and the shortest round. Files go to the folder of temporary files (TMPDIR), and what is loaded was
written a moment before, so it comes from memory where the machine has enough of it. `on disk` waits until files are on
disk (fsync), as ours and torch.distributed.checkpoint do. All keep the files from before until the new ones are whole.
"""

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timing import extent

LAYERS = {"quick": 2, "usual": 4, "full": 16}
ROUNDS = {"quick": 3, "usual": 9, "full": 9}
PROCESSES = 2
_GB = 1e9
Way = dict[str, Callable[[], object]]  # what is done one after the other, and measured


def main() -> None:
    """Start the processes, of which the first prints."""
    with tempfile.TemporaryDirectory(prefix="bench-checkpoints-") as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(PROCESSES),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1",
            __file__, f"--extent={extent()}", f"--folder={folder}",
        ]  # fmt: skip
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def rank(folder: Path) -> None:
    """What each process does."""
    import torch.distributed as dist

    step, bytes_ = _trained()
    ways = [*_ours(step, folder), *_torch_save(step, folder), *_distributed(step, folder)]
    taken: dict[str, list[float]] = {name: [] for way in ways for name in way}
    for number in range(ROUNDS[extent()] + 1):  # the first does not count: all files are there after it
        order = random.Random(number).sample(ways, len(ways)) if number else ways  # what is loaded was saved before
        for way in order:
            if dist.get_rank() == 0:
                os.sync()  # what others have left to be written is not ours to wait for
            for name, work in way.items():
                dist.barrier()
                started = time.perf_counter()
                work()
                stalled = time.perf_counter() - started
                dist.barrier()
                if number:
                    whole = time.perf_counter() - started
                    taken[name].append(stalled if name.endswith("training waits") else whole)
    if dist.get_rank() == 0:
        _print(taken, bytes_)
    dist.barrier()
    dist.destroy_process_group()


def _print(taken: dict[str, list[float]], bytes_: int) -> None:
    print(
        f"{bytes_ / _GB:.2f} GB of state on {PROCESSES} processes, {os.cpu_count()} cores, in {tempfile.gettempdir()}"
    )
    for kind, ours in (("save", "save: ours, until whole"), ("load", "load: ours, checksums read")):
        for name, each in taken.items():
            if name.startswith(kind):
                value = statistics.median(each)
                ratio, rate = value / statistics.median(taken[ours]), bytes_ / value / _GB
                print(f"{name:<44} {value:7.3f} s {rate:6.2f} GB/s {ratio:5.2f} x ours   shortest {min(each):.3f} s")


def _trained() -> tuple[Any, int]:
    """A training step after its first step, and the bytes of its state on all ranks."""
    import torch
    import torch.distributed as dist

    import planner
    import runtime
    from planner.models.zoo import build_model
    from runtime.checkpoint.state import live_tensors

    changes = f"num_layers={LAYERS[extent()]}+hidden_size=1024+ffn_size=2816+vocab_size=8192"
    reference = f"llama-tiny+{changes}"
    found = planner.search(
        reference,
        "cpu",
        precision="fp32",
        devices=PROCESSES,
        seq_len=16,
        global_batch=2,
        pinned=planner.Pinned(zero=3, pipeline=1),
    )
    torch.manual_seed(0)
    built = build_model(reference, dtype="float32", device="cpu", sequence_length=16)
    step = runtime.parallelize(built.module, found.plans[0].plan)
    generator = torch.Generator().manual_seed(0)
    step(*(torch.randint(8192, (2, 16), generator=generator) for _ in range(2)))
    own = torch.tensor(sum(tensor.nbytes for tensor in live_tensors(step.rank).values()))
    dist.all_reduce(own)
    return step, int(own)


def _ours(step: Any, folder: Path) -> list[Way]:
    import runtime

    waiting = runtime.Checkpoints(folder / "waiting", keep=1, asynchronous=False)
    behind = runtime.Checkpoints(folder / "behind", keep=1)

    return [
        {"save: ours, until whole": lambda: waiting.save(step)},
        {
            "save: ours, asynchronous: training waits": lambda: behind.save(step),
            "save: ours, asynchronous: then until whole": behind.wait,
        },
        {
            "load: ours, checksums read": lambda: waiting.restore(step),
            "load: ours, without checksums": lambda: waiting.restore(step, verify=False),
        },
    ]


def _torch_save(step: Any, folder: Path) -> list[Way]:
    import torch
    import torch.distributed as dist

    from runtime.checkpoint.state import live_tensors

    own = live_tensors(step.rank)
    path = folder / f"{dist.get_rank()}.pt"

    def save(on_disk: bool) -> None:
        """The file before stays until this one is whole, as ours do."""
        fresh = path.with_suffix(".fresh")
        with open(fresh, "wb") as file:
            torch.save(own, file)
            if on_disk:
                file.flush()
                os.fsync(file.fileno())
        fresh.replace(path)

    def load() -> None:
        for name, tensor in torch.load(path, weights_only=True).items():
            own[name].copy_(tensor)

    return [
        {"save: torch.save, on disk": lambda: save(True), "load: torch.load": load},
        {"save: torch.save": lambda: save(False)},
    ]


def _distributed(step: Any, folder: Path) -> list[Way]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from runtime.checkpoint.state import live_tensors

    own = {f"{dist.get_rank()}/{name}": tensor for name, tensor in live_tensors(step.rank).items()}
    path = folder / "distributed"

    def save() -> None:
        dcp.save(own, storage_writer=dcp.FileSystemWriter(path, overwrite=True))

    return [
        {
            "save: torch.distributed.checkpoint, on disk": save,
            "load: torch.distributed.checkpoint": lambda: dcp.load(own, checkpoint_id=path),
        }
    ]


if __name__ == "__main__":
    folders = [word.removeprefix("--folder=") for word in sys.argv[1:] if word.startswith("--folder=")]
    if folders:
        rank(Path(folders[-1]))
    else:
        main()
