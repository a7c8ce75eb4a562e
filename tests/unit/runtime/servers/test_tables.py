"""Which server has which rows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import RequestError
from runtime.servers.host_tables import HostTables
from runtime.servers.sparse_optimizers import SparseOptimizer
from runtime.servers.tables import Table, first_values, partition_of
from tests.refusals import refused


def table(rows: int, **settings: object) -> Table:
    return Table(name="users", rows=rows, width=4, optimizer=SparseOptimizer(), **settings)


@given(
    rows=st.integers(1, 400),
    servers=st.integers(1, 7),
    partition=st.sampled_from(["hashed", "ranges"]),
    weights=st.lists(st.floats(0.01, 100.0), min_size=7, max_size=7),
)
def test_every_row_is_on_one_server_and_is_found_there(
    rows: int, servers: int, partition: str, weights: list[float]
) -> None:
    parts = partition_of(table(rows, partition=partition, shares=tuple(weights[:servers])), servers)
    ids = np.arange(rows)
    held = [parts.ids_of(server, 0, parts.held(server)) for server in range(servers)]
    assert sorted(np.concatenate(held).tolist()) == ids.tolist()
    assert sum(map(bool, map(len, held))) == min(servers, rows)
    for server, (positions, numbers) in enumerate(parts.split(ids)):
        assert (np.diff(numbers) > 0).all()
        assert np.array_equal(parts.ids_of(server, 0, parts.held(server))[numbers], ids[positions])


def test_shares_are_those_of_the_servers() -> None:
    parts = partition_of(table(1000, shares=(1.0, 2.0, 1.0)), 3)
    assert [parts.held(server) for server in range(3)] == [250, 500, 250]


def test_hashing_spreads_what_lies_together() -> None:
    busy = np.arange(100)
    alone = max(len(rows) for _, rows in partition_of(table(1000, partition="ranges"), 4).split(busy))
    spread = max(len(rows) for _, rows in partition_of(table(1000), 4).split(busy))
    assert alone == 100
    assert spread <= 30


def test_first_values_depend_on_the_row_alone() -> None:
    one = table(1000, deviation=0.5, seed=3)
    whole = first_values(one, np.arange(1000))
    assert np.array_equal(first_values(one, np.array([7, 900])), whole[[7, 900]])
    assert abs(float(whole.mean())) < 0.03
    assert abs(float(whole.std()) - 0.5) < 0.02
    assert not np.array_equal(whole, first_values(table(1000, deviation=0.5, seed=4), np.arange(1000)))


@pytest.mark.parametrize(
    ("made", "servers", "facts"),
    [
        ({"rows": 9, "shares": (1.0, 2.0)}, 3, ("users", "1, 2", 3, 0)),
        ({"rows": 9, "shares": (1.0, 0.0)}, 2, ("users", "1, 0", 2, 0)),
        ({"rows": 9, "shares": (1e308, 7e307)}, 2, ("users", "1e+308, 7e+307", 2, "1e+15")),
    ],
)
def test_what_cannot_be_shared_out(made: dict[str, object], servers: int, facts: tuple[object, ...]) -> None:
    with refused(RequestError, *facts):
        partition_of(table(**made), servers)


def test_unknown_words_name_the_known_ones() -> None:
    with refused(RequestError, "users", "hash", "hashed"):
        table(4, partition="hash")
    with refused(RequestError, "adamw", "adam"):
        SparseOptimizer(name="adamw")


@pytest.mark.parametrize("wrong", [5, -1])
def test_ids_that_are_no_rows_of_a_table_on_hosts_are_named(wrong: int) -> None:
    table = Table(name="users", rows=5, width=2, optimizer=SparseOptimizer(name="sgd", learning_rate=0.1))
    hosts = HostTables([table], {"users": np.zeros((5, 2), dtype=np.float32)}, None, torch.device("cpu"))
    assert hosts.pull({"users": np.array([4])})["users"].shape == (1, 2)
    with refused(RequestError, "users", wrong, 5, 0, 4):
        hosts.pull({"users": np.array([1, wrong])})
