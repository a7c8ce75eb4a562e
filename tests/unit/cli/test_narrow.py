"""Narrow terminals: no line is longer than they are, and no table is squeezed into letters."""

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("searched_once")

TINY = ("--model", "llama-tiny", "--hardware", "cpu", "--devices", "4", "--data", "2", "--tensor", "2")


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("width", [40, 80])
def test_reports_keep_to_the_width(plan: Any, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    plan(*TINY, "--micro-batches", "1", "-q", "-o", "plan.json")
    for command in (("show", "plan.json"), ("models",), ("profiles",), ("profiles", "cpu"), ("stacks", "nemo")):
        outcome = plan(*command)
        assert outcome.code == 0
        longest = max(outcome.out.splitlines(), key=len)
        assert len(longest.rstrip()) <= width, (command, longest)
    compared = plan("diff", "plan.json", "plan.json").out
    assert max(map(len, compared.splitlines())) <= width


@pytest.mark.thorough
def test_a_table_without_room_is_told_line_by_line(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan(*TINY, "--micro-batches", "1", "-q", "-o", "plan.json")
    monkeypatch.setenv("COLUMNS", "40")
    assert "self_attn.q_proj\n  axis0: batch\n  axis1: out\n" in plan("show", "plan.json", "--layouts").out
    monkeypatch.setenv("COLUMNS", "120")
    assert "axis0: batch" not in plan("show", "plan.json").out


@pytest.mark.slow
def test_every_report_in_a_pipe_has_one_width(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    searched = plan(*TINY, "--micro-batches", "1", "-o", "plan.json").out
    table = [line for line in searched.splitlines() if line.startswith(("layers.", "self_attn.", "mlp."))]
    assert max(map(len, table)) > 80
    assert "\n".join(table) in plan("show", "plan.json").out
