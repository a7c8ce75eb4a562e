"""What the user has decided holds for every operator and parameter of the plan; what cannot be is refused by name."""

import math
from dataclasses import replace

import pytest

from planner.errors import RequestError
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.roles import roles
from planner.sharding.labels import factor_labels
from planner.sharding.rule import strategy_names
from planner.sharding.stored import StoredParameter
from planner.sharding.update import DEFAULT, PLAIN, Update
from planner.strategy_search.request.constraints import NothingAgreesError
from planner.strategy_search.request.request import Shard
from planner.strategy_search.request.shard import shard
from planner.strategy_search.request.space import FREE, Pinned
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search
from tests.refusals import refused
from tests.unit.search.cases import cluster_of, request_of

MULTIPLIED = ("matmul", "embedding")


def result_of(
    model: str, devices: int, pinned: Pinned = FREE, shards: tuple[Shard, ...] = (), update: Update = PLAIN
) -> SearchResult:
    """Each weight is gathered by itself, unless something else is said: that has nothing to do with what is decided."""
    asked = request_of(model, cluster_of("h100-80gb", devices), 8, pinned=pinned, shards=shards, update=update)
    return search(asked)


def labelled(bound: BoundPlan) -> list[tuple[str, str, bool, tuple[str | None, ...]]]:
    """Of every operator that follows from data its name, class, whether it reads a parameter, labels of its split."""
    found = []
    for op, labels in zip(bound.operators, factor_labels(bound.graph), strict=True):
        if not any(name in bound.graph.data_dependent for name in op.operator.results if name is not None):
            continue
        reads = any(name in bound.graph.parameter_names for name in op.operator.operands)
        split = tuple(None if choice is None else labels[choice] for choice in op.strategy)
        found.append((op.operator.name, op.rule.op_class, reads, split))
    return found


def cut(stored: StoredParameter, axis: int) -> tuple[bool, bool, bool]:
    return stored.weight[axis].is_shard, stored.gradient[axis].is_shard, stored.state[axis].is_shard


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["llama-4", "gpt-4-tied"])
def test_a_data_axis_splits_samples_and_nothing_else(model: str) -> None:
    result = result_of(model, 4, Pinned(data=4, tensor=1, context=1), update=DEFAULT)
    assert (result.plans[0].configuration.roles, result.plan.mesh.sizes) == (("data",), (4,))
    for name, _, _, split in labelled(result.bound):
        assert split[0] in ("batch", None), name
    assert sum(split[0] == "batch" for *_, split in labelled(result.bound)) > 20


@pytest.mark.cases(3)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("model", ["llama-4", "gpt-4-tied"])
def test_zero_says_what_a_data_axis_shares_out(model: str, zero: int) -> None:
    result = result_of(model, 2, Pinned(data=2, zero=zero))
    wanted = (zero > 2, zero > 1, zero > 0)
    matrices = [name for name in result.bound.parameters if len(result.bound.graph.types[name].shape) > 1]
    assert len(matrices) > 4
    for name, stored in result.bound.parameters.items():
        assert cut(stored, 0) == wanted, name


@pytest.mark.parametrize("split_sequence", [None, True, False])
def test_a_tensor_axis_splits_weights(split_sequence: bool | None) -> None:
    result = result_of("llama-4", 4, Pinned(tensor=4, sequence_parallel=split_sequence))
    assert result.plans[0].configuration.roles == ("tensor",)
    for name, op_class, reads, split in labelled(result.bound):
        assert split[0] != "batch", name
        if op_class in MULTIPLIED and reads:
            assert split[0] not in (None, "sequence"), name
        if op_class == "normalisation" and reads and split_sequence is not None:
            assert split[0] == ("sequence" if split_sequence else None), name
        if split_sequence is False:
            assert split[0] != "sequence", name
    for name, stored in result.bound.parameters.items():
        matrix = len(result.bound.graph.types[name].shape) > 1
        assert cut(stored, 0) == (matrix,) * 3, name


def test_a_context_axis_splits_the_sequence() -> None:
    result = result_of("llama-4", 4, Pinned(context=4))
    for name, op_class, reads, split in labelled(result.bound):
        assert split[0] != "batch", name
        if op_class == "matmul" and reads and name != "lm_head/linear":
            assert split[0] == "sequence", name


@pytest.mark.slow
@pytest.mark.exhaustive
def test_degrees_may_be_left_open() -> None:
    result = result_of("llama-4", 8, Pinned(tensor=2))
    configuration = result.plans[0].configuration
    degrees = dict(zip(configuration.roles, configuration.mesh, strict=True))
    assert degrees["tensor"] == 2
    assert math.prod(degrees.values()) * configuration.pipeline == 8
    every = [
        result_of("llama-4", 8, Pinned(tensor=2, data=data, context=context)).plans[0].seconds
        for data, context in ((4, 1), (2, 2), (1, 4), (2, 1), (1, 2), (1, 1))
    ]
    assert math.isclose(result.plans[0].seconds, min(every), rel_tol=1e-9)


@pytest.mark.cases(0, 2)
@pytest.mark.slow
@pytest.mark.parametrize("pinned", [Pinned(data=2), Pinned(tensor=2), Pinned(zero=3), Pinned(data=2, zero=1)])
def test_what_is_decided_is_never_faster_than_what_is_found(pinned: Pinned) -> None:
    """In the order of turns that the search minimises under, by more than sums and steps differ."""
    decided = result_of("llama-4", 4, replace(pinned, schedule="1f1b"))
    assert decided.plans[0].seconds >= result_of("llama-4", 4, Pinned(schedule="1f1b")).plans[0].seconds * (1 - 5e-4)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("pattern", "strategy"),
    [
        ("*.mlp.up_proj/linear", "b,o"),
        ("*.mlp.up_proj/linear", "-,s"),
        ("*q_proj/linear", "*,o"),
        ("*.down_proj/linear", "i,-"),
        ("lm_head/linear", "o,b"),
    ],
)
def test_a_pattern_holds_for_every_operator_that_it_means(pattern: str, strategy: str) -> None:
    result = result_of("llama-4", 4, Pinned(pipeline=1, mesh=(2, 2)), (shard(pattern, strategy),))
    wanted, seen = strategy.split(","), 0
    for op in result.bound.operators:
        if op.operator.name.endswith(pattern.removeprefix("*")):
            names = strategy_names(op.rule, op.strategy)
            assert all(word in ("*", name or "-") for word, name in zip(wanted, names, strict=True))
            seen += 1
    assert seen == (1 if pattern.startswith("lm_head") else 4)


def test_pieces_of_dims_hold_on_any_mesh_that_has_them() -> None:
    result = result_of("llama-4", 4, Pinned(pipeline=1), (shard("*.up_proj/linear", "((2,1,1),(2,1))"),))
    for op in result.bound.operators:
        if op.operator.name.endswith("up_proj/linear"):
            names = strategy_names(op.rule, op.strategy)
            pieces = {"b": 1, "o": 1}
            for name, size in zip(names, result.plan.mesh.sizes, strict=True):
                assert name in ("b", "o", None)
                if name is not None:
                    pieces[name] *= size
            assert pieces == {"b": 2, "o": 2}


def test_a_shape_that_only_some_meshes_have_is_found_on_those() -> None:
    result = result_of("llama-4", 4, FREE, (shard("*.up_proj/linear", "b,o"),))
    assert len(result.plan.mesh.sizes) == 2
    assert result.gap < 0.3  # the bound knows the least that small messages take, beside launches or kernels


@pytest.mark.parametrize(
    ("shards", "error", "words"),
    [
        (("*.nothing", "b,o"), RequestError, ("--shard *.nothing", "unknown operator")),
        (("*.up_proj/linear", "q,o"), NothingAgreesError, ("no factor 'q'", "it has b, s, i, o")),
        (("*.up_proj/linear", "b"), NothingAgreesError, ("1 entries", "this mesh has 2")),
        (("*.up_proj/linear", "((3,1,1),(1,1))"), NothingAgreesError, ("no legal strategy on mesh 2x2",)),
        (
            ("*/scaled_dot_product_attention", "b,b"),
            NothingAgreesError,
            ("no legal strategy on mesh 2x2", "does not divide factor 'b' of extent 2; change or pad it"),
        ),
    ],
)
def test_what_cannot_be_is_named(shards: tuple[str, str], error: type[Exception], words: tuple[str, ...]) -> None:
    pinned = Pinned(pipeline=1, mesh=(2, 2), micro_batches=4)
    with pytest.raises(error) as caught:
        result_of("llama-4", 4, pinned, (shard(*shards),))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_shard_that_contradicts_a_role_is_named() -> None:
    with refused(NothingAgreesError, "model.layers.0.mlp.up_proj/linear", "mesh 4", "*.up_proj/linear=o"):
        result_of("llama-4", 4, Pinned(data=4), (shard("*.up_proj/linear", "o"),))


@pytest.mark.parametrize("text", ["", "  ", "(a,1)", "()"])
def test_a_strategy_that_says_nothing_is_named(text: str) -> None:
    with refused(RequestError, f"--shard x={text.strip()}"):
        shard("x", text)


def experts_of(result: SearchResult) -> set[tuple[str | None, ...]]:
    """What the operators of experts split."""
    return {strategy_names(op.rule, op.strategy) for op in result.bound.operators if op.rule.op_class == "experts"}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("pinned", "roles", "mesh", "split"),
    [
        (Pinned(pipeline=1, data=4, tensor=1, context=1, expert=1), ("data",), (4,), {("b",)}),
        (Pinned(pipeline=1, data=4, tensor=1, context=1, expert=4), ("expert",), (4,), {("e@b",)}),
        (Pinned(pipeline=1, data=4, tensor=1, context=1, expert=2), ("data", "expert"), (2, 2), {("b", "e@b")}),
        (Pinned(pipeline=1, data=2, tensor=2, expert=2), ("expert", "tensor"), (2, 2), {("e@b", "f")}),
        (Pinned(pipeline=1, context=4, expert=4), ("context",), (4,), {("e@s",)}),
        (Pinned(pipeline=1, data=2, context=2, expert=4), ("expert", "context"), (2, 2), {("e@b", "e@s")}),
        (Pinned(pipeline=1, data=2, context=2, expert=2), ("data", "context"), (2, 2), {("b", "e@s")}),
        (Pinned(pipeline=1, data=1, context=1, tensor=4, expert=4, whole_experts=True), ("tensor",), (4,), {("e@s",)}),
    ],
)
def test_experts_are_cut_over_devices_that_split_tokens(
    pinned: Pinned, roles: tuple[str, ...], mesh: tuple[int, ...], split: set[tuple[str, ...]]
) -> None:
    result = result_of("mixture", 4, pinned)
    assert (result.plans[0].configuration.roles, result.plan.mesh.sizes) == (roles, mesh)
    assert experts_of(result) == split


@pytest.mark.cases(1)
@pytest.mark.parametrize("zero", range(1, 4))
def test_copies_of_what_zero_shares_out(zero: int) -> None:
    """Parameters are whole on the outer axis, as copies, and cut on the inner one."""
    pinned = Pinned(pipeline=1, data=4, tensor=1, context=1, zero=zero, replicas=2)
    result = result_of("llama-4", 4, pinned)
    assert result.plans[0].configuration.roles == ("replica", "data")
    for name, stored in result.bound.parameters.items():
        assert cut(stored, 0) == (False,) * 3, name
        assert cut(stored, 1) == (zero > 2, zero > 1, zero > 0), name
    assert roles(result.bound).replicas == 2


@pytest.mark.cases(2)
@pytest.mark.parametrize("zero", range(4))
def test_zero_shares_out_what_experts_leave(zero: int) -> None:
    """On the axis that cuts experts their weights are cut; on the data axis, and all others, ZeRO is what it says."""
    result = result_of("mixture", 4, Pinned(pipeline=1, data=4, context=1, expert=2, zero=zero))
    wanted = (zero > 2, zero > 1, zero > 0)
    seen = 0
    for name, stored in result.bound.parameters.items():
        assert cut(stored, 0) == wanted, name
        matrix_of_experts = ".experts." in name
        assert cut(stored, 1) == ((True,) * 3 if matrix_of_experts else wanted), name
        assert not matrix_of_experts or stored.weight[1].dim == 0
        seen += matrix_of_experts
    assert seen == 9


@pytest.mark.parametrize("zero", [0, 1])
def test_a_weight_of_gates_and_the_rest_is_cut_along_its_experts(zero: int) -> None:
    """The operator of experts reads chunks of it: it is cut as the experts are, and ZeRO takes the other axis."""
    result = result_of("mixture-fused", 4, Pinned(pipeline=1, data=4, context=1, expert=2, zero=zero, micro_batches=1))
    matrices = {name: one for name, one in result.bound.parameters.items() if ".experts." in name}
    assert len(matrices) == 6
    for name, stored in matrices.items():
        assert cut(stored, 0) == (False, False, zero == 1), name
        assert (cut(stored, 1), stored.weight[1].dim) == ((True,) * 3, 0), name


@pytest.mark.thorough
def test_experts_are_left_to_the_search_unless_they_are_given() -> None:
    free = result_of("mixture", 4, Pinned(pipeline=1, data=4, tensor=1, context=1, zero=0)).plans[0].seconds
    given = [
        result_of("mixture", 4, Pinned(pipeline=1, data=4, tensor=1, context=1, zero=0, expert=expert)).plans[0].seconds
        for expert in (1, 4)
    ]
    assert free <= min(given) * 1.002  # of which each is one cut of all layers; launches and kernels are weighed


@pytest.mark.parametrize(
    ("model", "pinned", "facts"),
    [
        ("llama-4", Pinned(expert=2), ("expert = 2", 1)),
        ("mixture", Pinned(expert=3), ("expert = 3", 4)),
        (
            "mixture",
            Pinned(data=1, context=1, tensor=4, expert=2),
            ("expert = 2", "data = 1", "context = 1"),
        ),
        ("mixture", Pinned(whole_experts=True), ("whole_experts", "expert")),
    ],
)
def test_experts_that_cannot_be_cut_are_named(model: str, pinned: Pinned, facts: tuple[object, ...]) -> None:
    with refused(RequestError, *facts):
        result_of(model, 4, pinned)
