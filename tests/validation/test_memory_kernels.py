"""Shares of the memory bandwidth that eager kernels of PyTorch reach, from a table that others measured.

Data: sitar-lab/NeuSight (MIT license), forward kernels of PyTorch 2.1 in fp32 of 30 MB and more (data/README.md). Their
times are between two events around one call, so the launch is in each: it is an offset, fitted beside the share.
"""

import csv
from pathlib import Path

import numpy as np
import pytest

from hardware_profiles import load_profile

TABLE = Path(__file__).parent / "data" / "kernels_memory.csv"
BANDWIDTH = {"v100-pcie-32gb": 900e9, "a100-pcie-40gb": 1555e9, "a100-pcie-80gb": 1935e9}
TENSORS = {"add": 3, "layer_norm": 2, "softmax": 2}


def share(device: str, operator: str) -> float:
    """Of the bandwidth of the datasheet: least squares of relative errors of `offset + bytes / (share bandwidth)`."""
    with TABLE.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["device"], row["operator"]) == (device, operator)]
    seconds = np.array([float(row["time_s"]) for row in rows])
    moved = np.array([4.0 * TENSORS[operator] * int(row["rows"]) * int(row["columns"]) for row in rows])
    _, slope = np.linalg.lstsq(np.stack([1.0 / seconds, moved / seconds], axis=1), np.ones(len(rows)), rcond=None)[0]
    return float(1.0 / (slope * BANDWIDTH[device]))


def test_norms_of_v100_have_the_share_of_the_table() -> None:
    device = load_profile("v100-32gb").device
    found = device.efficiency("normalisation").bandwidth
    assert share("v100-pcie-32gb", "layer_norm") == pytest.approx(found, abs=0.005)


@pytest.mark.parametrize("operator", TENSORS)
def test_a_chip_with_faster_memory_keeps_its_shares(operator: str) -> None:
    """An A100 of 80 GB has 1.24 times the bandwidth of one of 40 GB. So GH200 has the shares of H200, the same chip."""
    assert share("a100-pcie-80gb", operator) == pytest.approx(share("a100-pcie-40gb", operator), rel=0.1)
