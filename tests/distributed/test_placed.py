"""Tables of embeddings on the hosts of the ranks, and on servers, as a plan says: losses and weights of the plain
model.

The plain model has the tables on its device, with torch's sparse gradients and torch.optim.SparseAdam or SGD.
"""

from pathlib import Path

import pytest

from planner.plan.file import dump_plan
from runtime.servers.fleet import Fleet
from tests.distributed import plans

LOSSES, WEIGHTS = 1e-5, 2e-4
"""Relative errors of losses, and of weights: Adam's first steps divide roundings by themselves."""


def texts(model: str, sizes: tuple[int, ...], placed: tuple[tuple[str, str], ...], seeds: list[int]) -> list[str]:
    """Random plans: any legal strategy of the look-ups and of all else, one and two micro-batches, two optimizers."""
    found = []
    for seed in seeds:
        optimizer = "sgd" if seed % 3 == 2 else "adamw"
        plan = plans.random_plan(
            model, plans.mesh_of(*sizes), seed, placed=placed, micro_batches=1 + seed % 2, optimizer=optimizer
        )
        found.append(dump_plan(plan))
    return found


@pytest.mark.parametrize(
    ("model", "sizes", "seeds"),
    [
        ("wide-deep", (2,), [0, 1, 2]),
        ("dlrm", (2, 2), [0, 1]),
        ("bags", (2,), [0, 1]),
        pytest.param("dlrm", (2,), list(range(8)), marks=pytest.mark.thorough),
        pytest.param("wide-deep", (2, 2), list(range(8)), marks=pytest.mark.thorough),
        pytest.param("wide-deep", (4,), list(range(4)), marks=pytest.mark.thorough),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tables_on_the_host(request, model: str, sizes: tuple[int, ...], seeds: list[int]) -> None:
    pool = request.getfixturevalue("pair" if sizes == (2,) else "pool")
    placed = {
        "bags": (("bags.*", "host"), ("sums.*", "host")),
        "dlrm": (("tables.*", "host"),),
        "wide-deep": (("tables.*", "host"), ("wide.*", "host")),
    }[model]
    answers = pool.run("tasks_placed", "training", model, texts(model, sizes, placed, seeds), [])
    for answer in answers:
        for losses, weights, nbytes, pulled in answer:
            assert losses < LOSSES
            assert weights < WEIGHTS
            assert nbytes > 0
            assert pulled > 0
    for number in range(len(seeds)):  # every row is on one host
        assert len({answer[number][2] for answer in answers}) <= 2


@pytest.mark.parametrize(
    ("model", "sizes", "seeds"),
    [("dlrm", (2,), [0, 1]), pytest.param("wide-deep", (2, 2), [1, 2, 5], marks=pytest.mark.thorough)],
)
def test_tables_on_servers(request, tmp_path: Path, model: str, sizes: tuple[int, ...], seeds: list[int]) -> None:
    pool = request.getfixturevalue("pair" if sizes == (2,) else "pool")
    given = texts(model, sizes, (("tables.1.*", "host"), ("tables.*", "servers")), seeds)
    folders = [tmp_path / str(seed) for seed in seeds]
    fleets = [Fleet(folder, 2) for folder in folders]
    for fleet in fleets:
        fleet.__enter__()
    try:
        answers = pool.run("tasks_placed", "training", model, given, [str(folder) for folder in folders])
    finally:
        for fleet in fleets:
            fleet.__exit__(None, None, None)
    for answer in answers:
        for losses, weights, nbytes, _ in answer:
            assert losses < LOSSES
            assert weights < WEIGHTS
            assert nbytes > 0


def test_nothing_of_a_table_on_the_host_is_on_the_device(pair) -> None:
    given = dump_plan(plans.random_plan("dlrm", plans.mesh_of(2), 0, placed=(("tables.*", "host"),)))
    whole = dump_plan(plans.random_plan("dlrm", plans.mesh_of(2), 0))
    names = pair.run("tasks_placed", "held", "dlrm", given)[0]
    assert names
    assert not any(name.startswith("tables") for name in names)
    assert any(name.startswith("tables") for name in pair.run("tasks_placed", "held", "dlrm", whole)[0])


def test_what_a_plan_with_tables_elsewhere_cannot_do_is_told(pair, tmp_path: Path) -> None:
    given = dump_plan(plans.random_plan("dlrm", plans.mesh_of(2), 0, placed=(("tables.*", "host"),)))
    for told in pair.run("tasks_placed", "refusals", "dlrm", given, str(tmp_path)):
        servers, checkpoint = told
        assert "the plan has table 'tables.0.weight' on servers: start them with python -m runtime.servers" in servers
        assert "tables outside of its devices" in checkpoint
