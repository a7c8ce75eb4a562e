"""How close the search comes to what it proves: models of several kinds on 8 to 4,096 devices of several machines, with
memory as it is and scarce.

    step     seconds of the best plan, as its schedule runs it
    gap      how far, relatively, the bound of the search is below that
    CPU s    of the whole, the model traced

"none" is a proof, too: nothing fits. `--extent=quick` takes every eighth case, "usual" every third; `--only=TEXT` those
with TEXT in their name. `--markdown` prints the table of docs/search.md.
"""

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from timing import cpu_seconds, extent

from planner.api.searching import search
from planner.errors import InfeasibleError
from planner.strategy_search.result import SearchResult

WITHIN = 0.01
"""The gap that is aimed at; 0.3% in the median."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on so many devices, of which each may fill so many GiB, or all it has, and gets so many samples of a
    step, or as many as the search takes where nobody says."""

    model: str
    hardware: str
    devices: int
    memory: float | None = None
    samples: int | None = None

    @property
    def name(self) -> str:
        scarce = "" if self.memory is None else f", {self.memory:g} GiB each"
        batch = "" if self.samples is None else f", {self.samples} samples each"
        return f"{self.model} on {self.devices:,} {self.hardware}{scarce}{batch}"


def cases() -> Iterator[Case]:
    """Every model on the machines and numbers of devices on which people would train it."""
    for devices in (8, 64, 512):
        for hardware in ("a100-80gb", "h100-80gb", "ascend-910b-64gb"):
            yield Case(model="llama8b", hardware=hardware, devices=devices)
    for devices in (64, 256, 1024, 4096):
        for hardware in ("a100-80gb", "h100-80gb", "ascend-910b-64gb"):
            yield Case(model="llama70b", hardware=hardware, devices=devices)
    for memory in (24.0, 40.0, 64.0):
        yield Case(model="llama8b", hardware="h100-80gb", devices=8, memory=memory)
        yield Case(model="llama70b", hardware="h100-80gb", devices=64, memory=memory)
    for devices in (64, 96, 512):
        for hardware in ("h100-80gb", "b200-180gb"):
            yield Case(model="mixtral-8x7b", hardware=hardware, devices=devices)
    for devices in (32, 256):
        for hardware in ("h100-80gb", "ascend-910b-64gb"):
            yield Case(model="deepseek-v2-lite", hardware=hardware, devices=devices)
    for devices in (128, 512, 1024):
        for hardware in ("a100-80gb", "h100-80gb"):
            yield Case(model="gpt3-175b", hardware=hardware, devices=devices)
    for model in ("bert-large", "gpt2-xl", "vit-h14"):
        for devices in (8, 64):
            for hardware in ("a100-80gb", "h100-80gb"):
                yield Case(model=model, hardware=hardware, devices=devices)
                if model == "vit-h14":
                    yield Case(model=model, hardware=hardware, devices=devices, samples=4)
    for model in ("t5-large", "resnet50"):
        for devices in (8, 64):
            yield Case(model=model, hardware="h100-80gb", devices=devices)
            if model == "resnet50":
                yield Case(model=model, hardware="h100-80gb", devices=devices, samples=4)
    for hardware in ("h100-80gb", "gb200-186gb"):
        yield Case(model="llama405b", hardware=hardware, devices=1024)


def searched(case: Case) -> tuple[float, SearchResult | None]:
    """CPU seconds of a search, tracing included, and what it found, if anything fits."""

    def work() -> SearchResult | None:
        memory = None if case.memory is None else case.memory * 2**30
        batch = None if case.samples is None else case.samples * case.devices
        asked = {"devices": case.devices, "memory_limit": memory, "global_batch": batch, "simplicity": 0.0}
        try:
            return search(case.model, case.hardware, **asked)
        except InfeasibleError:
            return None

    return cpu_seconds(work)


def main() -> None:
    """Print the step, the gap and the CPU seconds of every case."""
    wanted = [word.removeprefix("--only=") for word in sys.argv if word.startswith("--only=")]
    chosen = [case for case in cases() if all(text in case.name for text in wanted)]
    chosen = chosen[:: {"quick": 8, "usual": 3, "full": 1}[extent()]]
    line = "| {} | {} | {} | {} | {} |" if "--markdown" in sys.argv else "{:<46}{:>10}{:>8}{:>16}{:>8}"
    print(line.format("case", "step", "gap", "evaluated", "CPU s"))
    if "--markdown" in sys.argv:
        print("|---|---|---|---|---|")
    gaps = []
    for case in chosen:
        seconds, found = searched(case)
        if found is None:
            print(line.format(case.name, "none", "", "", f"{seconds:.1f}"), flush=True)
            continue
        gaps.append(found.gap)
        step, done = found.plan.prediction.step_seconds, found.statistics
        evaluated = f"{done.evaluated} of {done.configurations:,}"
        print(line.format(case.name, f"{step:.4g} s", f"{found.gap:.1%}", evaluated, f"{seconds:.1f}"), flush=True)
    within = sum(gap <= WITHIN for gap in gaps)
    middle = statistics.median(gaps)
    print(f"\n{len(gaps)} plans: gap {middle:.1%} in the median, {max(gaps):.1%} at most; {within} within {WITHIN:.0%}")


if __name__ == "__main__":
    main()
