"""How much of what processes send travels while they compute: steps on a slow network, beside what is predicted.

Processes live in network namespaces that veths join, held to a bandwidth (`namespaces`), and talk by gloo. For each way
to divide a small model its plan is timed without overlap and with what the runtime has, at bandwidths at which what a
rank sends would take a quarter, half and all of the time that its step takes on a link without a limit:

    work      seconds of a step without a limit               sent         bytes / bandwidth, as the veth counts bytes
    exposed   seconds of a step at a bandwidth, less work     overlapped   1 - exposed / exposed by the plan that waits

What the plan that waits exposes is what is sent where all ranks send at once; in a pipeline, and where experts are
exchanged, one waits for the other, and it is more. The prediction is that of the packaged profile `cpu` with the
products of a `slow_device` and one link, on which the plan that waits exposes as large a share of its work: a share,
not a rate.

Two processors run up to four processes, and gloo moves bytes on threads of theirs. An accelerator computes without
them, so ranks imitate one (`slow_device`): a product is computed, and its rank sleeps until it would be done at a set
rate, a tenth or less of a core's; of four ranks, which have half a core each, at half of it. Ranks that are set up have
a high priority: they sleep most of the time, and what else the machine does is not to hold up their bytes. Plans take
turns, and of each the least disturbed step counts; on a machine that others keep busy, shares at a quarter of the work
are still off by tens of points, as softirqs of the kernel, which move the bytes, wait for a processor too. Beside it
stands the step that somebody would write by hand for the same degrees with DTensor and FSDP2, or
DistributedDataParallel, on the same link and device; transfers between stages and experts have no such step.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from namespaces import INTERFACE, Network, network, why_not
from overlap_runs import BY_HAND, WAITING
from slow_device import RATE
from timing import extent

import planner
from hardware_profiles import PYTORCH, Cluster, load_profile
from planner.graph.operator_graph import OperatorGraph
from planner.models.zoo import build_model
from planner.plan.compare.repricing import repriced
from planner.plan.file import save_plan
from planner.plan.plan import Plan
from planner.sharding.update import Update
from planner.strategy_search.request.space import Pinned
from runtime.launchers.own import environment_of

HERE = Path(__file__).resolve().parent
ROUNDS = {"quick": 1, "usual": 2, "full": 5}
SHARES = (0.25, 0.5, 1.0)
"""Of the work, what is sent takes."""
UNLIMITED = 1e12  # bytes a second

Variant = tuple[int, Update]
"""Micro-batches in turn, and what becomes of weights and gradients."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to divide a model, as it waits and as it overlaps."""

    name: str
    ranks: int
    pinned: Mapping[str, Any]
    waits: Variant
    overlaps: Variant
    model: str = "llama-tiny"
    global_batch: int = 16
    late: bool = False  # whether what waits reduces gradients behind the backward pass, and receives when it needs it
    schedule: str = "1f1b"  # where it overlaps
    chunks: int = 1  # of collectives under their products, where it overlaps
    experts: bool = False  # whether experts are exchanged under other work, where it overlaps
    by_hand: str = ""  # the way of `overhead_runs` to write it by hand

    @property
    def rate(self) -> float:
        """FLOP/s of the device of a rank."""
        return RATE * 2 / self.ranks


ALONE, BLOCK, AHEAD = (Update(buckets="none", gathers=how) for how in ("each", "block", "ahead"))
BUCKETS = Update(buckets=1 << 20, gathers="each")
FOUR_PARTS = {"micro_batches": 4}
TWO_PARTS = {"micro_batches": 2}  # as few as take turns: their messages are the larger
WHOLE = {"micro_batches": 1}
CASES = (
    Case(
        name="TP 2",
        ranks=2,
        pinned={"tensor": 2, **TWO_PARTS},
        waits=(1, ALONE),
        overlaps=(2, ALONE),
        by_hand="parallel",
    ),
    Case(
        name="SP 2",
        ranks=2,
        pinned={"tensor": 2, "sequence_parallel": True, **TWO_PARTS},
        waits=(1, ALONE),
        overlaps=(2, ALONE),
        by_hand="parallel",
    ),
    Case(
        name="TP 2 chunks",
        ranks=2,
        pinned={"tensor": 2, **WHOLE},
        waits=(1, ALONE),
        overlaps=(1, ALONE),
        chunks=2,
        by_hand="parallel",
    ),
    Case(
        name="SP 2 chunks",
        ranks=2,
        pinned={"tensor": 2, "sequence_parallel": True, **WHOLE},
        waits=(1, ALONE),
        overlaps=(1, ALONE),
        chunks=2,
        by_hand="parallel",
    ),
    Case(
        name="ZeRO-3 2",
        ranks=2,
        pinned={"data": 2, "zero": 3},
        waits=(1, BLOCK),
        overlaps=(1, AHEAD),
        by_hand="parallel",
    ),
    Case(
        name="ZeRO-3 4",
        ranks=4,
        pinned={"data": 4, "zero": 3},
        waits=(1, BLOCK),
        overlaps=(1, AHEAD),
        by_hand="parallel",
    ),
    Case(
        name="DP 2",
        ranks=2,
        pinned={"data": 2, "zero": 0},
        waits=(1, BUCKETS),
        overlaps=(1, BUCKETS),
        late=True,
        by_hand="ddp",
    ),
    Case(
        name="PP 2",
        ranks=2,
        pinned={"pipeline": 2, **FOUR_PARTS},
        waits=(1, ALONE),
        overlaps=(1, ALONE),
        late=True,
        schedule="eager_1f1b",
    ),
    Case(
        name="TP 2 x DP 2",
        ranks=4,
        pinned={"tensor": 2, "data": 2, **TWO_PARTS},
        waits=(1, BUCKETS),
        overlaps=(2, BUCKETS),
        late=True,
        by_hand="parallel",
    ),
    Case(
        name="experts 2",
        ranks=2,
        pinned={"data": 2, "expert": 2, **TWO_PARTS},
        waits=(1, ALONE),
        overlaps=(2, ALONE),
        model="mixtral-tiny",
        experts=True,
    ),
)
"""What overlaps today: micro-batches in turn under tensor parallelism and dense messages beside experts, collectives of
tensor parallelism in chunks under their products, weights ahead and gradients behind under ZeRO-3, buckets under the
backward pass under data parallelism, experts under another micro-batch, transfers between stages with receives posted
ahead and a warm-up that covers them. What waits for these is 1F1B that receives when it needs it."""


def main() -> None:
    """Print a row for each case and bandwidth, and how far the predicted shares are off."""
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return
    print("seconds of the least disturbed step, and the share of what the plan that waits exposes that is overlapped")
    print(
        f"{'':12}{'link':>12}{'sent/work':>11}{'waits':>9}{'exposed/sent':>14}{'overlaps':>10}{'overlapped':>12}"
        f"{'predicted':>11}{'by hand':>9}{'over it':>9}"
    )
    errors = []
    named = [word.removeprefix("--case=") for word in sys.argv[1:] if word.startswith("--case=")]
    usual = CASES if extent() != "quick" else CASES[:2]
    for case in [one for one in CASES if one.name in named] or usual:
        errors += measured(case, ROUNDS[extent()])
    mean, most = 100 * statistics.mean(errors), 100 * max(errors)
    print(f"predicted shares are off by {mean:.0f} points in the mean, {most:.0f} at most")


def measured(case: Case, rounds: int) -> list[float]:
    """Print the rows of a case; how far the predicted shares of its overlap are off."""
    graph, batch = traced(case.model)
    plans = {
        "waits": planned(case, case.waits, 1),
        "overlaps": planned(case, case.overlaps, case.chunks, experts=case.experts, schedule=case.schedule),
    }
    late = "waits" + WAITING * case.late
    errors = []
    with tempfile.TemporaryDirectory() as folder, network(case.ranks) as net:
        for name, plan in plans.items():
            save_plan(plan, Path(folder) / f"{name}.json")
        if case.by_hand:
            own = {"way": case.by_hand, **{axis: case.pinned.get(axis, 1) for axis in ("tensor", "data")}}
            (Path(folder) / BY_HAND).write_text(json.dumps(own), encoding="utf-8")
        names = (late, "overlaps", BY_HAND) if case.by_hand else (late, "overlaps")
        with ranks_of(net, folder, case.rate) as told:
            sent = {name: told(name, 1, warms_up=True)[1] for name in names}["overlaps"]
            base = least(told, names, rounds)
            for share in SHARES:
                bandwidth = sent / (share * base[1])
                net.limit(bandwidth)
                steps = least(told, names, rounds)
                waits, exposed, *_ = (step - own for step, own in zip(steps, base, strict=True))
                overlapped = 1 - exposed / waits
                foreseen = predicted(plans, graph, batch, waits / base[1], base[1], case)
                errors.append(abs(overlapped - foreseen))
                beside = f"{steps[2]:>9.3f}{steps[1] / steps[2]:>9.2f}" if case.by_hand else ""
                print(
                    f"{case.name:12}{bandwidth / 1e6:>7.1f} MB/s{share:>11.0%}{steps[0]:>9.3f}"
                    f"{waits / (sent / bandwidth):>14.2f}{steps[1]:>10.3f}{overlapped:>12.0%}{foreseen:>11.0%}{beside}",
                    flush=True,
                )
    return errors


def least(told: "Told", names: Sequence[str], rounds: int) -> list[float]:
    """The least seconds of a step of each plan, which take turns."""
    found = [[told(name, 1)[0] for name in names] for _ in range(rounds)]
    return [min(one) for one in zip(*found, strict=True)]


def planned(case: Case, variant: Variant, chunks: int, *, experts: bool = False, schedule: str = "1f1b") -> Plan:
    """The best plan of a case, which gathers and takes turns as said, with so many chunks of tensor parallelism, and
    with `experts` exchanged under other work."""
    interleave, update = variant
    pinned = Pinned(
        **case.pinned, recompute="none", schedule=schedule, interleave=1, virtual_stages=1, tensor_overlap=chunks,
        expert_overlap=experts,
    )  # fmt: skip
    plan = planner.search(
        case.model, "cpu", devices=case.ranks, global_batch=case.global_batch, precision="fp32", pinned=pinned,
        update=update,
    ).plan  # fmt: skip
    others = 0 if interleave > 1 else None  # operators beside experts, where micro-batches do not take turns
    overlap = tuple((name, count if others is None else others) for name, count in plan.training.expert_overlap)
    return replace(plan, training=replace(plan.training, interleave=interleave, expert_overlap=overlap))


def traced(model: str) -> tuple[OperatorGraph, int]:
    """The graph of a model, and the samples of its example."""
    from planner.graph.trace import trace

    built = build_model(model, dtype="float32", sequence_length=None)
    return trace(built.module, built.args, built.kwargs), built.batch


def predicted(
    plans: Mapping[str, Plan], graph: OperatorGraph, batch: int, share: float, work: float, case: Case
) -> float:
    """The share of what the plan that waits exposes that the other one hides, by the cost model, on a device as slow as
    these, whose step takes `work` seconds, and a link on which what waits exposes this share of the work, as here: the
    bytes of gloo are not those of a ring, its reduce-scatter sends twice as many. Where it waits late, everything
    is priced as waited for."""

    def seconds(name: str, bandwidth: float) -> float:
        cluster = linked(case, bandwidth)
        if case.late and name == "waits":
            cluster = cluster.with_software(replace(PYTORCH, name="waits"))  # which hides nothing by itself
        return repriced(plans[name], graph, batch, cluster).plan.prediction.step_seconds

    free = {name: seconds(name, UNLIMITED) for name in plans}
    scale = free["overlaps"] / work  # seconds of the profile for one here
    whole = share * work * scale
    tried = 1e7
    bandwidth = tried * (seconds("waits", tried) - free["waits"]) / whole  # what waits is in proportion to it
    return 1 - (seconds("overlaps", bandwidth) - free["overlaps"]) / whole


def linked(case: Case, bandwidth: float) -> Cluster:
    """The packaged profile of CPU processes with the devices of a case, and links of so many bytes a second."""
    cluster = load_profile("cpu").with_devices(case.ranks)
    device = cluster.device
    slower = dict(device.peak_flops)["fp32"] / case.rate
    efficiencies = tuple(
        (name, one if name in ("matmul", "attention") else replace(one, compute=one.compute * slower))
        for name, one in device.efficiencies
    )
    device = replace(device, peak_flops=(("fp32", case.rate),), efficiencies=efficiencies)
    levels = tuple(replace(level, bandwidth=bandwidth) for level in cluster.levels)
    return replace(cluster, device=device, levels=levels)


class Told:
    """The ranks of a network, which time what they are told to."""

    def __init__(self, net: Network, inputs: list[IO[str]], output: IO[str], rate: float) -> None:
        self._net, self._inputs, self._output, self._rate = net, inputs, output, rate

    def __call__(self, name: str, rounds: int, *, warms_up: bool = False) -> tuple[float, float]:
        """The least seconds of a step of a plan, and the bytes that the rank that sends most sends in one. One that
        `warms_up` is as quick as the processors are."""
        before = self._bytes()
        for one in self._inputs:
            one.write(f"{name} {rounds} {UNLIMITED if warms_up else self._rate}\n")
            one.flush()
        answer = self.answer()
        sent = max(after - first for after, first in zip(self._bytes(), before, strict=True))
        return min(answer["seconds"]), sent / rounds

    def answer(self) -> dict[str, Any]:
        """The next line of the first rank. Raises RuntimeError where there is none."""
        line = self._output.readline()
        if not line:
            raise RuntimeError("a rank ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def _bytes(self) -> list[int]:
        counter = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        read = [self._net.command(rank, ["cat", counter]) for rank in range(len(self._inputs))]
        return [int(subprocess.run(one, capture_output=True, text=True, check=True).stdout) for one in read]


@contextmanager
def ranks_of(net: Network, folder: str, rate: float) -> Iterator[Told]:
    """The ranks of a network, each in its namespace, with devices of a rate; none is left when this ends."""
    world, store = len(net.ranks), os.path.join(folder, "store")
    path = os.pathsep.join((str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")))
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in range(world):
            own = environment_of(rank, world, store, 29500)
            environment = {**os.environ, **own, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            command = net.command(rank, [sys.executable, "-u", str(HERE / "overlap_runs.py"), folder])
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, env=environment, text=True))
        first = started[0].stdout
        assert first is not None
        told = Told(net, [one.stdin for one in started if one.stdin is not None], first, rate)
        told.answer()
        yield told
        for one in started:
            assert one.stdin is not None
            one.stdin.close()
        for one in started:
            one.wait(timeout=60)
    finally:
        for one in started:
            one.kill()
            one.wait()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; the namespaces are gone")
