"""Time of runs from unknown publishers beyond everything that is priced.

No term contains loading, logging, garbage collection, clocks, jitter and the slowest device. Runs that stacks were
fitted to have them in their numbers. For other runs predictions are too short, whoever publishes them:

    measured / sum of terms  =  1 + u,      u of a source, each source once

The best u for an unknown source is that of the others (a prediction for an exchangeable unit). There are 353 runs of 31
such sources (tests/benchmarks/bench_unseen.py prints it). The u that 30 of them choose is 0.035 to 0.04 by the mean
error, 0.044 to 0.052 by a robust mean, and 0.025 to 0.034 if the known sources vote, too. With it the source that is
left out errs by 9.2% instead of 10.1% by run, 9.6% instead of 10.1% by source. Neither a u for each family of machines,
stack or both does better there, nor one that grows with devices, communication, recomputation or twenty other
properties of a run. It is no term of plans: runs of this runtime were measured (docs/device.md).
"""

from costmodels.units import Seconds
from hardware_profiles import is_known
from planner.validation.reading.rows import Row

SHARE = 0.04
"""u (see the top of this file), fitted to runs of sources that no other number is fitted to (26 November 2026)."""

NAME = "not priced"
"""Name of this time among the parts of a step."""

_OWN = "pytorch"
"""The stack of this runtime, which was measured."""


def not_priced(row: Row, stack: str, seconds: Seconds) -> Seconds:
    """Expected seconds of a run beyond the sum of its terms; 0 if its source or its stack is known."""
    return 0.0 if stack == _OWN or is_known(row.text("source")) else SHARE * seconds


def words(seconds: Seconds) -> tuple[str, ...]:
    """The note on it."""
    return (f"source unknown: {SHARE:.0%} beyond what is priced",) if seconds else ()
