"""One device: its profile by `plan calibrate`, then steps of GPT and Llama that were predicted beforehand, beside plain
PyTorch. `make bench ONLY=device` on a machine with an accelerator; without one it does the same on a CPU process, with
small models.

    predicted    `plan --devices 1` with the profile that was just made: seconds of a step
    measured     `plan run`, one process (NCCL or HCCL on accelerators): the median step, the peak; losses are compared
                 with the unsharded model
    live         what `plan audit` says of the bytes that live at most, which is what an accelerator counts
    compiled     the same with `--compile`
    fp8          the same job with `--precision fp8`, where the device multiplies in it
    by hand      the module, autocast in 16 bits, `torch.optim.AdamW(fused)`, in a process of its own

To reach on an accelerator: times within 5%, peaks within 3%. `--profile FILE` takes a profile that is there, and
`--by-hand JSON` is how the benchmark calls itself. "quick": two models and a quick calibration.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
WARM = 3
"""Steps by hand that do not count."""
HEADS = (
    ("predicted", 11),
    ("measured", 11),
    ("error", 8),
    ("peak", 11),
    ("live", 8),
    ("compiled", 10),
    ("by hand", 9),
)
LONGEST = 1800.0
"""Seconds of a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on one device, and samples of a step."""

    model: str
    changed: tuple[str, ...]
    length: int
    batch: int

    @property
    def reference(self) -> str:
        """As `planner.models.zoo.build_model` takes it."""
        return "+".join((self.model, ",".join(self.changed))) if self.changed else self.model

    @property
    def words(self) -> str:
        return f"{self.reference}, {self.batch} x {self.length}"


ON_ACCELERATORS = (
    Case(model="llama8b", changed=("num_layers=2",), length=4096, batch=2),
    Case(model="gpt2-medium", changed=(), length=1024, batch=8),
    Case(model="llama8b", changed=("num_layers=4",), length=2048, batch=1),
    Case(model="llama8b", changed=("num_layers=4",), length=8192, batch=2),
    Case(model="gpt2-xl", changed=("num_layers=24",), length=1024, batch=8),
)
ON_PROCESSORS = (
    Case(model="llama-tiny", changed=(), length=128, batch=4),
    Case(model="gpt-tiny", changed=(), length=128, batch=4),
    Case(model="llama-tiny", changed=("num_layers=8",), length=256, batch=2),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--extent", choices=("quick", "usual", "full"), default="usual")
    parser.add_argument("--profile", type=Path, help="a profile of this device, in place of a new one")
    parser.add_argument("--by-hand", help="a case, as JSON: time it by hand and print what it takes")
    asked = parser.parse_args()
    if asked.by_hand:
        given = json.loads(asked.by_hand)
        print(json.dumps(by_hand(Case(**{**given, "changed": tuple(given["changed"])}))))
        return
    kind = accelerator()
    print(f"{device_words(kind)}; torch {torch.__version__}, {datetime.now(UTC):%d %B %Y}")
    if kind == "cpu":
        print(
            "no accelerator: one process of a CPU, small models, fp32; what accelerators are to reach says nothing here"
        )
    quick = asked.extent == "quick"
    cases = ON_PROCESSORS if kind == "cpu" else ON_ACCELERATORS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = asked.profile.resolve() if asked.profile else calibrated(folder, quick=quick)
        print(" " * 40 + "".join(f"{word:>{width}}" for word, width in HEADS))
        for case in cases[: 2 if quick else None]:
            report(case, folder, profile, kind)


def report(case: Case, folder: Path, profile: Path, kind: str) -> None:
    """Print the row of a case, and that of fp8 where the device has it."""
    whole = measured(case, folder, profile)
    if isinstance(whole, str):
        print(f"{case.words:40}{whole}", flush=True)
        return
    compiled = measured(case, folder, profile, "--compile", "--no-check")
    alone = subprocess.run(
        [sys.executable, __file__, "--by-hand", json.dumps(asdict(case))],
        env=environment(), text=True, capture_output=True, timeout=LONGEST, check=False,
    )  # fmt: skip
    seconds = float(whole["seconds"])
    hand = f"{seconds / json.loads(alone.stdout)['seconds']:.2f}" if alone.returncode == 0 else "-"
    print(f"{case.words:40}{columns(whole)}{ratio(compiled, seconds)}{hand:>9}", flush=True)
    if kind != "cpu":
        narrow = measured(case, folder, profile, precision="fp8")
        print(f"{'  fp8':40}{narrow if isinstance(narrow, str) else columns(narrow)}", flush=True)


def columns(found: dict[str, Any]) -> str:
    """Predicted and measured seconds; the measured peak, and what is predicted to live beside it."""
    predicted, seconds = float(found["predicted_seconds"]), float(found["seconds"])
    peak, live = max(found["peak_bytes"]), float(found["live_bytes"])
    return (
        f"{1e3 * predicted:>8.1f} ms{1e3 * seconds:>8.1f} ms{predicted / seconds - 1:>+8.1%}"
        f"{peak / 2**30:>7.2f} GiB{live / peak - 1:>+8.1%}"
    )


def ratio(found: dict[str, Any] | str, seconds: float) -> str:
    """Of the seconds of another run over these."""
    return f"{'-':>10}" if isinstance(found, str) else f"{float(found['seconds']) / seconds:>10.2f}"


def measured(case: Case, folder: Path, profile: Path, *options: str, precision: str = "") -> dict[str, Any] | str:
    """The summary of `plan run` for the plan of a case, with its `live_bytes`, or why there is none, in a line."""
    plan = folder / "plan.json"
    changed = [word for one in case.changed for word in ("--set", one)]
    job = ["--model", case.model, *changed, "--devices", "1", "--hardware", str(profile), "--seq-len", str(case.length)]
    job += ["--global-batch", str(case.batch), "--micro-batches", "1", "--recompute", "none", "-o", str(plan)]
    made = called(*job, *(["--precision", precision] if precision else []))
    if made.returncode:
        return last_line(made.stderr)
    ran = called("run", str(plan), "--steps", str(STEPS), "--json", *options)
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] | None = next((one for one in lines if one.get("event") == "summary"), None)
    if ran.returncode or found is None:
        return last_line(ran.stderr or ran.stdout)
    audited = called("audit", str(plan), "--json")
    if not audited.stdout.startswith("{"):
        return last_line(audited.stderr)
    (stage,) = json.loads(audited.stdout)["stages"]
    return {**found, "live_bytes": sum(stage["predicted_live_bytes"].values())}


def calibrated(folder: Path, *, quick: bool) -> Path:
    """The profile of one process of this machine, made now."""
    profile, began = folder / "device.toml", time.perf_counter()
    done = called("calibrate", "--nproc", "1", "-o", str(profile), *(["--quick"] if quick else []))
    if done.returncode:
        raise SystemExit(f"plan calibrate: {last_line(done.stderr)}")
    print(f"calibrated in {time.perf_counter() - began:.0f} s")
    return profile


def by_hand(case: Case) -> dict[str, float]:
    """Median seconds of a step of plain PyTorch, and its peak in bytes where the device counts that."""
    from planner.models.zoo import build_model
    from runtime.data.datasets import synthetic_batch
    from runtime.step.arguments import Arguments

    kind = accelerator()
    torch.manual_seed(0)
    built = build_model(case.reference, dtype="float32", device="cpu", sequence_length=case.length)
    module = built.module.to(kind)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    example, took = Arguments(args=tuple(built.args), kwargs=built.kwargs), list[float]()
    for step in range(WARM + STEPS):
        drawn = synthetic_batch(
            example.tensors(), batch=built.batch, samples=case.batch, bounds=built.bounds, seed=0, step=step
        )
        batch = example.with_tensors([value.to(kind) for value in drawn])
        began = time.perf_counter()
        with torch.autocast(kind, torch.bfloat16, enabled=kind != "cpu"):
            loss = module(*batch.args, **batch.kwargs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        took.append(time.perf_counter() - began)
    return {"seconds": statistics.median(took[WARM:])}


def accelerator() -> str:
    """The type of the device that is there: "cuda", "npu", else "cpu"."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def device_words(kind: str) -> str:
    if kind == "cpu":
        return f"one process, {platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return str(torch.get_device_module(kind).get_device_name(0))


def called(*words: str) -> subprocess.CompletedProcess[str]:
    """A command of `plan`."""
    command = [sys.executable, "-m", "planner.cli.main", *words]
    return subprocess.run(
        command, env=environment(), text=True, capture_output=True, timeout=LONGEST, check=False
    )  # fmt: skip


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1][:160]


if __name__ == "__main__":
    main()
