"""Where ranks wait for one that is stopped: the report names it, and the operator and the collective of the others."""

import re
from pathlib import Path

import pytest

from tests.long_lists import first

MEGATRON = ("megatron", (2, 2), {"micro_batches": 2})
PIPELINE = (1, (2,), {"micro_batches": 2, "stages": (2, 2)})
OPERAND = r"operand '\S+' of operator '\S+' \(\S+\)"
CASES = {
    "backward": (
        MEGATRON,
        3,
        f"rank 2 waits for all_reduce among ranks 2, 3: gradient of {OPERAND}, backward of micro-batch 0",
    ),
    "pipeline": (PIPELINE, 2, r"rank 0 waits for recv from rank 2: '\S+', backward of micro-batch 0 in stage 0"),
    "forward": (MEGATRON, 3, f"rank 2 waits for all_reduce among ranks 2, 3: {OPERAND}, forward of micro-batch 0"),
    "optimizer": (MEGATRON, 3, "rank 1 waits for all_reduce among ranks 1, 3: the gradient reduction, the optimizer"),
}
USUAL = 2


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("case", first(USUAL, list(CASES)))
def test_the_report_names_who_is_stopped_and_where_the_others_wait(pool, tmp_path: Path, case: str) -> None:
    plan, victim, words = CASES[case]
    when = "forward" if case == "pipeline" else case
    said = pool.run("tasks_hang", "reported", *plan, victim, when, str(tmp_path / "store"))
    (report,) = [one for reports in said for one in reports]
    assert report.startswith(f"no progress in 3 s (--timeout) at step 2: rank {victim} does not answer; "), report
    assert re.search(words, report), report
