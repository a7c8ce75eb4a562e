"""Tables of embeddings on the hosts of the ranks, and on servers, as a plan says: losses and weights of the plain
model.

The plain model has the tables on its device, with torch's sparse gradients and torch.optim.SparseAdam or SGD.
"""

import contextlib
from pathlib import Path

import numpy as np
import pytest

from planner.plan.binding.bind import bind
from planner.plan.file import dump_plan, parse_plan
from runtime.checkpoint.offline import convert
from runtime.checkpoint.source import open_checkpoint
from runtime.servers.fleet import Fleet
from tests.distributed import plans
from tests.long_lists import first

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


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize(
    ("model", "sizes", "seeds"),
    [
        ("wide-deep", (2,), [0, 1, 2]),
        ("dlrm", (2, 2), [0, 1]),
        ("bags", (2,), [0, 1]),
        pytest.param("dlrm", (2,), list(range(8)), marks=pytest.mark.exhaustive),
        pytest.param("wide-deep", (2, 2), list(range(8)), marks=pytest.mark.thorough),
        pytest.param("wide-deep", (4,), list(range(4)), marks=pytest.mark.exhaustive),
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


@pytest.mark.cases(0, 1)
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


WORDS = (("model.embed_tokens.*", "host"),)
BOTH = (("wpe.*", "host"), ("wte.*", "servers"))
PIPELINES = {
    "stages of two ranks": ("gpt-untied", (1, 1), (2,), BOTH, {}),
    "a rank is a stage": ("llama4", (1, 1, 1, 1), (), WORDS, {"schedule": "gpipe"}),
    "virtual stages": ("llama4", (1, 1, 1, 1), (2,), WORDS, {"virtual_stages": 2, "schedule": "interleaved_1f1b"}),
    "deferred gradients": ("llama4", (2, 2), (2,), WORDS, {"schedule": "zb_h1"}),
    "what all stages read": ("skipping", (2, 2), (2,), (("memory.*", "host"),), {"optimizer": "sgd"}),
    "two at a time": ("llama4", (3, 1), (2,), WORDS, {"interleave": 2}),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", first(1, list(PIPELINES)))
def test_tables_of_the_first_of_several_stages(pool, tmp_path: Path, case: str) -> None:
    """Also saved after two steps and taken up again."""
    model, stages, sizes, placed, settings = PIPELINES[case]
    plan = plans.random_plan(
        model, plans.mesh_of(*sizes), 1, placed=placed, stages=stages, micro_batches=2, **settings
    )  # fmt: skip
    text = dump_plan(plan)
    with contextlib.ExitStack() as fleets:
        names = ("one", "two", "three") if "servers" in dict(placed).values() else ()
        folders = [str(fleets.enter_context(Fleet(tmp_path / name, 2)).addresses.folder) for name in names]
        fresh = [(folder, 2) for folder in folders[1:]] or [None, None]
        trained = pool.run("tasks_placed", "training", model, [text], folders[:1])
        saved = pool.run("tasks_placed", "saved", model, text, str(tmp_path / "saved"), fresh[0])
        again = pool.run("tasks_placed", "restored", model, text, str(tmp_path / "saved"), fresh[1])
    for ((losses, weights, _, _),) in trained:
        assert losses < LOSSES
        assert weights < WEIGHTS
    assert [pulled > 0 for ((_, _, _, pulled),) in trained] == [rank < plan.mesh.size for rank in range(4)]
    for (losses, state), (others, other) in zip(saved, again, strict=True):
        assert others == losses
        assert all(np.array_equal(values, other[name]) for name, values in state.items())


def test_nothing_of_a_table_on_the_host_is_on_the_device(pair) -> None:
    given = dump_plan(plans.random_plan("dlrm", plans.mesh_of(2), 0, placed=(("tables.*", "host"),)))
    whole = dump_plan(plans.random_plan("dlrm", plans.mesh_of(2), 0))
    names = pair.run("tasks_placed", "held", "dlrm", given)[0]
    assert names
    assert not any(name.startswith("tables") for name in names)
    assert any(name.startswith("tables") for name in pair.run("tasks_placed", "held", "dlrm", whole)[0])


def test_servers_that_nobody_names_are_asked_for(pair) -> None:
    (given,) = texts("dlrm", (2,), (("tables.*", "servers"),), [0])
    for told in pair.run("tasks_placed", "without_servers", "dlrm", given):
        assert "the plan has table 'tables.0.weight' on servers: start them with python -m runtime.servers" in told


@pytest.mark.parametrize(
    ("seed", "placed"),
    [(0, "host"), (1, "host"), (4, "servers")],
)
def test_what_crosses_the_link_of_a_device_is_what_is_predicted(pair, tmp_path: Path, seed: int, placed: str) -> None:
    """Of random plans, in which some look-ups are done twice: both sides say which rank gives gradients back. What
    ranks or servers send each other of the tables is the same rows again."""
    (given,) = texts("dlrm", (2,), (("tables.1.*", "host"), ("tables.*", placed)), [seed])
    if placed == "servers":
        with Fleet(tmp_path, 2) as fleet:
            answers = pair.run("tasks_placed", "crossed", "dlrm", given, (str(fleet.addresses.folder), 2))
    else:
        answers = pair.run("tasks_placed", "crossed", "dlrm", given, None)
    for predicted, found, moved in answers:
        assert found == predicted
        passes = [[n for (phase, _), n in predicted.items() if phase == one] for one in ("forward", "backward")]
        assert moved == tuple(map(sum, passes))
    assert any(phase == "backward" for _, found, _ in answers for phase, _ in found)


HOST = (("tables.*", "host"), ("wide.*", "host"))
MIXED = (("tables.1.*", "host"), ("tables.*", "servers"))
Case = tuple[tuple[int, ...], tuple[tuple[str, str], ...], int]
"""Sizes of the mesh, what is placed, and a seed (see `texts`: of 2 the optimizer is SGD)."""


def state_of(request, folder: Path, task: str, model: str, case: Case, servers: int = 2):
    sizes, placed, seed = case
    pool = request.getfixturevalue("pair" if sizes == (2,) else "pool")
    (text,) = texts(model, sizes, placed, [seed])
    if "servers" not in dict(placed).values():
        return pool.run("tasks_placed", task, model, text, str(folder / "saved"), None)
    with Fleet(folder / f"{task}-servers", servers) as fleet:
        given = (str(fleet.addresses.folder), servers)
        return pool.run("tasks_placed", task, model, text, str(folder / "saved"), given)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("model", "case"),
    [
        ("wide-deep", ((2,), HOST, 1)),
        ("dlrm", ((2,), MIXED, 0)),
        pytest.param("bags", ((2,), (("bags.*", "host"), ("sums.*", "host")), 2), marks=pytest.mark.thorough),
        pytest.param("wide-deep", ((2, 2), MIXED, 3), marks=pytest.mark.thorough),
    ],
)
def test_what_is_resumed_goes_on_bit_by_bit(request, tmp_path: Path, model: str, case: Case) -> None:
    wanted = state_of(request, tmp_path, "saved", model, case)
    for (losses, state), (again, other) in zip(
        wanted, state_of(request, tmp_path, "restored", model, case), strict=True
    ):
        assert again == losses
        assert state.keys() == other.keys()
        assert all(np.array_equal(one, other[name]) for name, one in state.items())


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (((2,), HOST, 1), ((4,), MIXED, 3)),  # other ranks, tables that are on servers now
        (((2,), (), 0), ((2,), HOST, 0)),
        (((2,), HOST, 0), ((2,), (), 0)),
        pytest.param(((2,), HOST, 2), ((2,), (), 2), marks=pytest.mark.thorough),  # dense SGD has a momentum
        pytest.param(((2,), (), 2), ((2,), HOST, 2), marks=pytest.mark.thorough),
        pytest.param(((2, 2), MIXED, 0), ((2,), HOST, 1), marks=pytest.mark.thorough),
    ],
)
def test_another_plan_goes_on_from_the_same_tables(request, tmp_path: Path, first: Case, then: Case) -> None:
    """The first loss is that of the plan that saved; later ones differ where a table is updated by another rule."""
    wanted = state_of(request, tmp_path, "saved", "wide-deep", first)
    found = state_of(request, tmp_path, "restored", "wide-deep", then, servers=3)
    alike = bool(first[1]) == bool(then[1])
    for losses, _ in found:
        assert losses[0] == pytest.approx(wanted[0][0][0], rel=1e-5)
        assert losses[1] == pytest.approx(wanted[0][0][1], rel=1e-5 if alike else 0.5)
        if alike:
            assert losses == pytest.approx(wanted[0][0], rel=1e-5)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (((2,), HOST, 1), ((2,), (), 0)),
        pytest.param(((2,), (), 2), ((2,), HOST, 2), marks=pytest.mark.thorough),
    ],
)
def test_a_checkpoint_converted_for_another_plan_says_the_same(
    request, tmp_path: Path, first: Case, then: Case
) -> None:
    state_of(request, tmp_path, "saved", "wide-deep", first)
    direct = state_of(request, tmp_path, "restored", "wide-deep", then)
    source = open_checkpoint(tmp_path / "saved")
    (text,) = texts("wide-deep", then[0], then[1], [then[2]])
    bound = bind(parse_plan(text), plans.traced("wide-deep"), plans.BATCH)
    assert source.manifest is not None
    convert(source, source.manifest, bound, {}, tmp_path / "other" / "saved" / "step-000002", most=64)
    converted = state_of(request, tmp_path / "other", "restored", "wide-deep", then)
    for (losses, state), (again, other) in zip(direct, converted, strict=True):
        assert again == losses
        assert all(np.array_equal(one, other[name]) for name, one in state.items())


def test_all_ranks_hear_of_one_that_cannot_write_its_tables(pair, tmp_path: Path) -> None:
    (given,) = texts("wide-deep", (2,), HOST, [0])
    for said, count in pair.run("tasks_placed", "unwritable", "wide-deep", given, str(tmp_path / "runs")):
        assert "tables-00001.safetensors: cannot be written: File exists" in said
        assert count == 0
