"""Rows of tables that are not on the devices."""

import numpy as np
import pytest

from costmodels import ROW_MOMENTS, host_rows_time, server_rows_time
from hardware_profiles import load_profile

ROWS = np.array([1e6])
WIDTH = 512
CLUSTER = load_profile("h100-80gb").with_devices(8)


@pytest.mark.parametrize(("optimizer", "rows_moved"), [("adamw", 8), ("sgd", 4)])
def test_an_update_moves_the_gradient_the_sum_the_weight_and_its_moments(optimizer: str, rows_moved: int) -> None:
    host = CLUSTER.host
    assert host is not None
    there, back = host_rows_time(ROWS, WIDTH, host, None, ROW_MOMENTS[optimizer])
    passing = 1e6 * WIDTH / host.link
    assert there - passing == pytest.approx(2 * 1e6 * WIDTH / host.memory_rate)
    assert back - passing == pytest.approx(rows_moved * 1e6 * WIDTH / host.memory_rate)


def test_rows_of_servers_pass_over_the_link_of_the_host() -> None:
    host = CLUSTER.host
    assert host is not None
    there, back = server_rows_time(ROWS, WIDTH, host, CLUSTER)
    assert there == back
    assert there > 1e6 * WIDTH / host.link
