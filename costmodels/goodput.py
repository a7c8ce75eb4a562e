"""How much longer a run takes when devices fail: expected wall-clock time with checkpoints and restarts.

    M      mean time between failures of the whole run, seconds: 86400 / (failures per device-day x devices)
    C      seconds that a checkpoint stops the run
    R      seconds from a failure until training goes on
    tau    seconds of training between two checkpoints
    T      seconds of training that are needed

    T_expected = M e^(R/M) (e^((tau + C)/M) - 1) T / tau

    tau_best = sqrt(2 C M) (1 + sqrt(C / (2 M)) / 3 + (C / (2 M)) / 9) - C     for C < 2 M, else M

J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22(3), 2006: the expected time and its minimum, if failures come at a constant rate, also during checkpoints and
restarts. The first term, sqrt(2 C M), is J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17(9), 1974. Not modelled: failures that come together, and devices that are slow but do not
fail.
"""

import math
from dataclasses import dataclass

from hardware_profiles.units import Seconds

__all__ = ["DAY", "Goodput", "checkpoint_interval", "expected_time"]

DAY: Seconds = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What is assumed of failures: failures per device and day, and seconds of a checkpoint and of a restart."""

    failures_per_device_day: float
    checkpoint: Seconds
    restart: Seconds

    def between_failures(self, devices: int) -> Seconds:
        """Mean time between failures of any of the devices, in seconds; infinite if devices never fail."""
        return DAY / (self.failures_per_device_day * devices) if self.failures_per_device_day else math.inf

    def slowdown(self, devices: int) -> float:
        """Expected time over the time of training alone, at the best checkpoint interval; infinite if the formula
        overflows."""
        mean = self.between_failures(devices)
        interval = checkpoint_interval(self.checkpoint, mean)
        return expected_time(1.0, interval, self.checkpoint, self.restart, mean)


def checkpoint_interval(checkpoint: Seconds, between_failures: Seconds) -> Seconds:
    """Seconds of training between two checkpoints that minimise the expected time (Daly 2006, see the top of this
    file)."""
    if math.isinf(between_failures) or checkpoint == 0:
        return math.inf if checkpoint else 0.0
    if checkpoint >= 2 * between_failures:
        return between_failures
    ratio = checkpoint / (2 * between_failures)
    return math.sqrt(2 * checkpoint * between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint


def expected_time(
    training: Seconds, interval: Seconds, checkpoint: Seconds, restart: Seconds, between_failures: Seconds
) -> Seconds:
    """Expected wall-clock seconds of `training` seconds of training (formula at the top of this file); infinite on
    overflow.

    At its ends the formula has its limits. M infinite: only checkpoints cost time, T (tau + C) / tau. `interval` 0:
    nothing but checkpoints is done if they take time, else only restarts are lost, T e^(R/M). `interval` infinite: a
    single failure loses everything.
    """
    never = math.isinf(between_failures)
    if interval == 0 and checkpoint:
        return math.inf
    if math.isinf(interval):
        return training if never else math.inf
    if never:
        return training * (1 + checkpoint / interval) if interval else training
    try:
        lost = math.exp(restart / between_failures)
        if interval == 0:
            return training * lost
        return between_failures * lost * math.expm1((interval + checkpoint) / between_failures) * training / interval
    except (OverflowError, ZeroDivisionError):  # more failures than any number counts
        return math.inf
