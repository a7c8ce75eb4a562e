"""Predictions compared with measurements of real training runs: read, evaluate, summarise."""

from planner.validation.pricing.evaluate import evaluate_rows
from planner.validation.reading.row_files import read_rows, sampled
from planner.validation.reading.rows import Row
from planner.validation.results.evaluated import Evaluated
from planner.validation.results.record import run_errors
from planner.validation.results.summary import Summary, summarise

__all__ = ["Evaluated", "Row", "Summary", "evaluate_rows", "read_rows", "run_errors", "sampled", "summarise"]
