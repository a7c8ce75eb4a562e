"""Logits of Aleph Alpha's framework are whole on all tensor parallel devices, where PyTorch's loss reads them."""

from pathlib import Path

from planner.validation.pricing.evaluate import evaluate_rows
from planner.validation.request.configuration import run_of
from tests.unit.validation.runs import machine, one

OWN = {"other_flags": "in-house framework in eager PyTorch; ZeRO-1; 1F1B", "date": "2023-09", "flash_attention": "FA2"}
THEIRS = {**OWN, "source_locator": "github Aleph-Alpha/layouts@e13c2cb trial 1"}


def test_only_their_rows_are_read_so(tmp_path: Path) -> None:
    (other, _), (theirs, _) = (machine(tmp_path, **cells) for cells in (OWN, THEIRS))
    assert (other.software.composed_loss, theirs.software.composed_loss) == ("", "pytorch")
    whole = 4 * 2 * 512 * 50257  # a third copy of the logits of two samples, in fp32
    assert theirs.software.buffers - other.software.buffers == whole
    for cells, gathered in ((OWN, False), (THEIRS, True)):
        pattern = run_of(one(tmp_path, **cells)).pinned.pattern
        assert pattern is not None
        assert pattern.whole_logits == gathered


def test_logits_are_whole_on_every_device(tmp_path: Path) -> None:
    """Beside the third copy there is at least one more in fp32 of words that other devices have otherwise."""
    alone = {"tp": "4", "pp": "1", "dp": "2"}
    other, theirs = (next(iter(evaluate_rows([one(tmp_path, **cells, **alone)]))) for cells in (OWN, THEIRS))
    assert other.needed_bytes is not None
    assert theirs.needed_bytes is not None
    logits = 2 * 512 * 50257
    assert theirs.needed_bytes - other.needed_bytes > 4 * logits + 4 * logits * 3 / 4
    assert other.predicted_seconds is not None
    assert theirs.predicted_seconds is not None
    assert theirs.predicted_seconds > other.predicted_seconds
