"""The table of docs/advise.md: `plan advise` on ten published configurations of all engines, as Markdown.

"quick" has the first three. Names of files after the options run these alone.
"""

import csv
import sys
import time
import warnings
from pathlib import Path

from timing import extent

import planner
from planner.api.advising import Change
from planner.errors import PlannerError
from planner.plan.plan import Prediction
from planner.report.units import bytes_text, seconds_text

PUBLISHED = Path(__file__).parents[1] / "data" / "published"
H100, ASCEND = "h100-80gb", "ascend-910b-64gb"
FILES = {
    "torchtitan/llama3_8b.toml": H100,
    "torchtitan/qwen3_0.6b.toml": H100,
    "torchtitan/qwen3_1.7b.toml": H100,
    "nemo/llama3_8b.py": H100,
    "megatron/train_llama3_8b_h100_fp8.sh": H100,
    "deepspeed/axolotl_zero3_bf16.json": H100,
    "accelerate/axolotl_fft-8b-liger-fsdp.yaml": H100,
    "accelerate/axolotl_qwen3-8b-fsdp-tp-cp.yaml": H100,
    "mindspeed/pretrain_qwen3_8b_4K_ptd.sh": ASCEND,
    "mindformers/finetune_llama3_1_8b.yaml": ASCEND,
}
"""By their places in `tests/data/published`, the devices that each is priced on."""
QUICK = 3


def row(file: str, profile: str) -> str:
    """A row of the table: what was published, what it takes, and what to change."""
    published = next(
        one
        for one in csv.DictReader((PUBLISHED / "configurations.csv").read_text().splitlines())
        if one["file"] == file
    )
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = planner.advise(
            PUBLISHED / file,
            profile,
            engine=published["engine"],
            model=published["model"] or None,
            devices=int(published["devices"]),
            recipe=published["recipe"],
        )
    seconds = time.process_time() - started
    better = ("", "", "nothing faster was found")
    if found.best is not None:
        told = "; ".join(told_of(one) for one in found.changes)
        better = (*figures(found.best.prediction), told)
    name = f"`{Path(published['path']).name}`"
    cells = (name, published["repository"], found.now.model.reference, *figures(found.now.prediction), *better)
    return f"| {' | '.join(cells)} | {seconds:.0f} s |"


def figures(prediction: Prediction) -> tuple[str, str]:
    memory, room = prediction.peak_bytes, prediction.capacity_bytes
    over = f" of {bytes_text(room)}" if memory > room else ""
    return seconds_text(prediction.step_seconds), bytes_text(memory) + over


def told_of(change: Change) -> str:
    """`ZeRO: 3 -> 2 (saves 2 ms)`."""
    how = f"{'saves' if change.seconds >= 0 else 'costs'} {seconds_text(abs(change.seconds))}"
    return f"{change.name}: {change.here} → {change.there} ({how})"


def main() -> None:
    """The table."""
    named = [word for word in sys.argv[1:] if not word.startswith("--")]
    files = named or list(FILES)[: QUICK if extent() == "quick" else None]
    print("| configuration | of | model | step | memory | better step | memory | what changes | search |")
    print("|---" * 9 + "|")
    for file in files:
        try:
            print(row(file, FILES[file]), flush=True)
        except PlannerError as error:
            print(f"| `{file}` | | | | | | | refused: {error} | |", flush=True)


if __name__ == "__main__":
    main()
