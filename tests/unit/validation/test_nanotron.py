"""Models as nanotron builds them: vocabularies that are padded to the tensor parallel degree alone, and stages that are
dealt out by weights."""

import csv
import gzip
from pathlib import Path

import pytest

from planner.validation.pricing.evaluate import evaluate_rows
from planner.validation.pricing.unpriced import NAME
from planner.validation.reading.row_files import read_rows
from planner.validation.request.configuration import run_of
from tests.unit.validation.runs import one

OWN = {"other_flags": "nanotron in eager PyTorch", "n_params_B": "", "n_devices": "8", "dp": "", "global_batch": "16"}
LLAMA = {"n_layers": "24", "hidden": "2048", "ffn_hidden": "4096", "n_heads": "32", "n_kv_heads": "32"}


@pytest.mark.parametrize(
    ("pipeline", "stages"), [("1", None), ("2", (14, 10)), ("4", (7, 7, 6, 4)), ("8", (4, 3, 3, 4, 3, 3, 4, 0))]
)
def test_stages_are_dealt_out_by_weights(tmp_path: Path, pipeline: str, stages: tuple[int, ...] | None) -> None:
    """The head is as heavy as two layers and a half, and each stage takes the layer that makes it more than its
    share."""
    run = run_of(one(tmp_path, **OWN, **LLAMA, tp="1", pp=pipeline))
    assert run.stages == stages
    assert (stages is None) == (not any("nanotron deals them out" in note for note in run.notes))


@pytest.mark.parametrize(("tensor", "words"), [("1", 50257), ("2", 50258), ("8", 50264)])
def test_vocabularies_are_padded_to_the_tensor_parallel_degree(tmp_path: Path, tensor: str, words: int) -> None:
    assert run_of(one(tmp_path, **OWN, **LLAMA, tp=tensor, pp="1")).job.model.vocabulary == words
    other = {**OWN, "other_flags": ""}
    assert run_of(one(tmp_path, **other, **LLAMA, tp=tensor, pp="1")).job.model.vocabulary == 50304


@pytest.mark.thorough
@pytest.mark.slow
def test_published_runs_on_one_node(tmp_path: Path) -> None:
    """But for one sample a micro-batch, where the host decides, and 131,072 tokens of one, steps and peaks of its
    benchmark are near what is priced; without its stages and words they were up to 24% and 31% too little."""
    text = gzip.decompress(Path("tests/benchmarks/data/unseen_runs.csv.gz").read_bytes()).decode()
    rows = list(csv.DictReader(text.splitlines()))
    near = [row for row in rows if row["id"].startswith("nanotron-1b-8-") and row["micro_batch"] not in ("1", "32")]
    path = tmp_path / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(near)
    found = list(evaluate_rows(list(read_rows(path))))
    assert len(found) == 7
    for each in found:
        assert each.predicted_seconds is not None
        priced = each.predicted_seconds - dict(each.time)[NAME]
        assert priced == pytest.approx(float(each.row.text("iter_time_s")), rel=0.08)
        assert each.predicted_peak_bytes == pytest.approx(1e9 * float(each.row.text("peak_mem_GB")), rel=0.12)
