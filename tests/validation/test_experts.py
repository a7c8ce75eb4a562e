"""Kernels of mixtures of experts that others measured, against a formula of which nothing was fitted to them.

Data: see `data/README.md`. It has balanced routers only. To see the errors of every device:

    python -m tests.validation.test_experts
"""

import csv
from pathlib import Path

import numpy as np
import pytest

from costmodels import Array, ExpertsShape, experts_time
from hardware_profiles import load_profile

DATA = Path(__file__).parent / "data" / "kernels_moe.csv"
DTYPES = {"bfloat16": "bf16", "fp8": "fp8"}
BARS = {"bf16": (0.15, 0.21), "fp8": (0.20, 0.25)}
"""Median and mean of the absolute error. The mean has some shapes for which the library had no tuned kernel and took
three to six times as long as for their neighbours. The formula is too slow in fp8, where it converts the rows of every
product; these kernels seem to do so less often."""


def tables() -> list[tuple[str, str]]:
    """Devices and dtypes."""
    with DATA.open(encoding="utf-8") as file:
        return sorted({(row["profile"], DTYPES[row["moe_dtype"]]) for row in csv.DictReader(file)})


def errors(profile: str, dtype: str) -> Array:
    """Predicted over measured, minus one, of every row."""
    with DATA.open(encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if (r["profile"], DTYPES[r["moe_dtype"]]) == (profile, dtype)]
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "time_s")
    tokens, hidden, width, choices, count, within, parts, time = (
        np.array([float(row[name]) for row in rows]) for name in names
    )
    shape = ExpertsShape(
        tokens=tokens, choices=choices / parts, experts=count / parts, width=width / within, hidden=hidden
    )
    return np.asarray(experts_time(shape, dtype, load_profile(profile).device)) / time - 1


@pytest.mark.parametrize(("profile", "dtype"), tables())
def test_groups_of_products_take_what_they_take(profile: str, dtype: str) -> None:
    found = np.abs(errors(profile, dtype))
    median, mean = BARS[dtype]
    assert np.median(found) <= median
    assert np.mean(found) <= mean


def main() -> None:
    """Errors of every device."""
    for profile, dtype in tables():
        found = errors(profile, dtype)
        print(
            f"{profile:12} {dtype:5} {len(found)} rows: median {100 * np.median(np.abs(found)):.1f}%, mean"
            f" {100 * np.mean(np.abs(found)):.1f}%, bias {100 * np.median(found):+.1f}%"
        )


if __name__ == "__main__":
    main()
