"""What `plan profiles NAME --fit` says of kernel tables is what the packaged profiles give today."""

import pytest

from hardware_profiles import FitError, recorded
from tests.validation.fit_errors import fit_errors


def test_the_recorded_errors_are_those_of_today() -> None:
    today = {(one.profile, one.part): one for one in fit_errors("2026-11-20")}
    told = {(one.profile, one.part): one for one in recorded(FitError)}
    stale = "record them anew: python -m tests.validation.fit_errors"
    assert set(today) == set(told), stale
    for key, one in today.items():
        assert (told[key].rows, told[key].source) == (one.rows, one.source), (key, stale)
        assert (told[key].mean_absolute, told[key].bias) == pytest.approx((one.mean_absolute, one.bias), abs=2e-3), (
            key,
            stale,
        )
