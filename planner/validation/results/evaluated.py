"""A row of a measured run beside what is predicted of it."""

from dataclasses import dataclass

from planner.validation.reading.cells import PeakKind
from planner.validation.reading.rows import Row

INFERRED = "recomputation inferred"
"""Start of the note that says what a run must have recomputed, because it does not fit otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A row and its prediction. Without a prediction, values are None and `error` is the reason.

    The step should be measured between `low_seconds` and `high_seconds`, multiples of the priced time, and the peak
    between `low_peak_bytes` and `high_peak_bytes`. `time` has the parts of the step. Peaks are counted as the row
    counts them (`peak_kind`). Only `needed_bytes` is not: with less than this of the device's `capacity_bytes`, the run
    would have stopped.
    """

    row: Row
    predicted_seconds: float | None = None
    low_seconds: float | None = None
    high_seconds: float | None = None
    predicted_peak_bytes: float | None = None
    low_peak_bytes: float | None = None
    high_peak_bytes: float | None = None
    peak_kind: PeakKind | None = None
    needed_bytes: float | None = None
    capacity_bytes: float | None = None
    time: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()
    error: str | None = None

    @property
    def feasible(self) -> bool | None:
        """Whether it fits by our memory model; None if unknown."""
        if self.needed_bytes is None or self.capacity_bytes is None:
            return None
        return self.needed_bytes <= self.capacity_bytes

    @property
    def inferred(self) -> bool:
        """Whether the recomputation was inferred from the memory of the device alone."""
        return any(note.startswith(INFERRED) for note in self.notes)

    @property
    def ran(self) -> bool:
        """Whether the run was made and did not run out of memory."""
        row = self.row
        return not row.out_of_memory and (row.measured_seconds or row.measured_peak_bytes) is not None

    @property
    def seconds_error(self) -> float | None:
        """Relative error of the step time; positive if the prediction is too long. None if unknown."""
        return _relative(self.predicted_seconds, self.row.measured_seconds)

    @property
    def inside(self) -> bool | None:
        """Whether the measured time lies between the ends; None if either is unknown."""
        measured = self.row.measured_seconds
        if measured is None or self.low_seconds is None or self.high_seconds is None:
            return None
        return self.low_seconds <= measured <= self.high_seconds

    @property
    def memory_error(self) -> float | None:
        """Relative error of the peak; None if unknown."""
        return _relative(self.predicted_peak_bytes, self.row.measured_peak_bytes)

    @property
    def peak_inside(self) -> bool | None:
        """Whether the measured peak lies between the ends; None if either is unknown."""
        measured = self.row.measured_peak_bytes
        if measured is None or self.low_peak_bytes is None or self.high_peak_bytes is None:
            return None
        return self.low_peak_bytes <= measured <= self.high_peak_bytes


def _relative(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1
