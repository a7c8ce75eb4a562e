"""Operators that every data-parallel replica computes by itself: graphs, rules, and what is refused."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.errors import RequestError
from planner.graph.fp8 import Fp8, recipe_of, with_fp8
from planner.graph.operator_graph import OperatorGraph
from planner.graph.per_replica import PER_REPLICA, replicas_in
from planner.graph.trace import trace
from planner.sharding.legality import legal_strategies
from planner.sharding.mesh import Mesh, MeshAxis
from planner.sharding.per_replica import joining, prepared_batch, with_replicas
from planner.sharding.rescale import batch_growths, rescale_batch
from planner.sharding.rule import derive_layouts, local_extents, named_strategy
from planner.sharding.rules import rule_of
from planner.sharding.rules.per_replica import REPLICA
from planner.sharding.update import Update, update_fault
from tests.refusals import refused
from tests.replicas import SAMPLES, batch, network

MESH = Mesh(
    axes=(MeshAxis(name="a", size=2, stride=2, bandwidth=1e9), MeshAxis(name="b", size=2, stride=1, bandwidth=1e9))
)


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return trace(network(), batch())


def of_replicas(
    graph: OperatorGraph, patterns: tuple[str, ...], count: int = 4, samples: int = SAMPLES
) -> OperatorGraph:
    return with_replicas(graph, Update(per_replica=patterns, replicas=count), samples)


def test_what_joins_samples_is_known(graph: OperatorGraph) -> None:
    calls = [op.name for op in joining(graph, batch_growths(graph, SAMPLES))]
    assert sum("batch_norm" in name for name in calls) == 9
    assert [name for name in calls if "batch_norm" not in name] == ["centre/mean", "cross_entropy_loss"]


def test_a_replica_is_a_loop_of_its_own_along_which_nothing_is_sent(graph: OperatorGraph) -> None:
    """Statistics of whole replicas need no other device; within a replica they are combined, as without replicas."""
    changed = of_replicas(graph, ("*bn*",))
    norms = [op for op in changed.operators if op.op == PER_REPLICA and "bn" in op.module]
    norm = next(op for op in norms if op.module == "bn" and op.results[0] is not None and len(op.operands) == 5)
    rule = rule_of(changed, norm)
    assert rule.format().startswith("(replica n) c h w, c, c, c, c -> (replica n) c h w, replica c")
    assert not any(sent.factor == rule.replica for sent in rule.inner)
    assert {rule.factors[sent.factor].name for sent in rule.inner} == {"n", "h", "w"}
    apart = named_strategy(rule, (REPLICA, REPLICA), "here")
    assert local_extents(rule, apart, MESH)[rule.index[REPLICA]] == 1
    layouts = derive_layouts(rule, apart)
    assert [str(placement) for placement in layouts.results[0].forward] == ["S0", "S0"]
    assert [str(placement) for placement in layouts.operands[1].gradient] == ["P", "P"], "of weights that all share"
    within = [named_strategy(rule, names, "here") for names in ((REPLICA, "n"), ("n", REPLICA), ("n", "n"))]
    legal = legal_strategies(rule, MESH)
    assert apart in legal
    assert not any(one in legal for one in within), "replicas are cut first, and completely"
    fewer = of_replicas(graph, ("*bn*",), 2)
    two = rule_of(rescale_batch(fewer, 4, 8), next(op for op in fewer.operators if op.name == norm.name))
    assert named_strategy(two, (REPLICA, "n"), "here") in legal_strategies(two, MESH)


def test_statistics_are_those_of_the_first_replica_and_losses_a_mean(graph: OperatorGraph) -> None:
    changed = of_replicas(graph, ("*",))
    contents = dict(changed.updates)
    update = changed.operators[changed.producer[contents["bn.running_mean"]]]
    first = changed.operators[changed.producer[update.operands[0]]]
    assert (first.op, first.arguments[1:]) == ("aten.select.int", (0, 0))
    assert changed.types[first.operands[0]].shape == (4, 8)
    end = changed.operators[changed.producer[changed.loss]]
    assert (end.op, end.arguments[1:]) == ("aten.mean.dim", ((0,),))
    assert changed.types[changed.loss].shape == ()


def test_what_reads_a_value_of_replicas_is_computed_by_replicas(graph: OperatorGraph) -> None:
    changed = of_replicas(graph, ("centre",))
    own = [op for op in changed.operators if op.op == PER_REPLICA]
    assert {replicas_in(op.keywords).called for op in own} >= {"aten.mean.dim", "aten.sub.Tensor", "aten.div.Tensor"}
    assert all(op.module == "centre" for op in own), "behind it there are samples again"
    assert changed.loss == graph.loss


@pytest.mark.cases(1)
@pytest.mark.parametrize("samples", [8, 32])
def test_another_batch_has_other_samples_in_as_many_replicas(graph: OperatorGraph, samples: int) -> None:
    update = Update(per_replica=("*",), replicas=4)
    found = rescale_batch(of_replicas(graph, ("*",)), prepared_batch(update, SAMPLES), samples)
    images, targets = (tensor.repeat(2, *[1] * (tensor.dim() - 1))[:samples] for tensor in batch())
    fresh = trace(network(), (images, targets))
    again = rescale_batch(with_replicas(fresh, update, samples), prepared_batch(update, samples), samples)
    assert found.types == again.types
    assert [op.arguments for op in found.operators] == [op.arguments for op in again.operators]


def test_no_replicas_change_nothing(graph: OperatorGraph) -> None:
    assert with_replicas(graph, Update(), SAMPLES) is graph
    assert of_replicas(graph, ("*",), 1) is graph


class Odd(nn.Module):
    """What replicas cannot compute by themselves, by its kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.kind == "negatives":
            return F.cross_entropy(y @ y.t(), torch.arange(x.shape[0]))
        if self.kind == "counted":
            return (y.mean(0) * torch.arange(x.shape[0]).unsqueeze(1) + y).sum()
        if self.kind == "dropped":
            return (y - F.dropout(y.mean(0), 0.5)).square().sum()
        return y.square().sum(1).sum()


@pytest.mark.parametrize(
    ("kind", "pattern", "facts"),
    [
        ("plain", "*nothing*", ("*nothing*", "sum_2")),
        ("negatives", "*cross*", ("cross_entropy_loss",)),
        ("counted", "mean", ("mul",)),
        ("dropped", "mean", ("dropout",)),
    ],
)
def test_what_replicas_cannot_compute_is_refused_by_name(kind: str, pattern: str, facts: tuple[object, ...]) -> None:
    graph = trace(Odd(kind), (torch.randn(8, 4),))
    with refused(RequestError, "per_replica", *facts):
        of_replicas(graph, (pattern,), 4, 8)


def test_updates_say_which_operators_and_how_many_replicas() -> None:
    update = Update(per_replica=("*bn*",), replicas=4)
    assert update_fault(update) is None
    assert update_fault(replace(update, padding_samples=3)) is not None
    assert update_fault(Update(replicas=4)) is not None


class Gated(nn.Module):
    """Features in the measure that a linear layer makes of their means over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(y * self.gate(y.mean(0))).sum()


def test_a_linear_layer_that_reads_a_value_of_replicas_is_not_left_out_of_fp8_in_silence() -> None:
    graph = trace(Gated(), (torch.randn(SAMPLES, 16),))
    changed = of_replicas(graph, ("mean*",))
    places = range(len(changed.operators))
    with refused(RequestError, "gate/linear", "per_replica", "fp8_left_out = 'gate.weight'"):
        with_fp8(changed, places, Fp8(recipe="tensorwise"))
    found = with_fp8(changed, places, Fp8(recipe="tensorwise", left_out=("gate.weight",)))
    assert [op.name for op in found.operators if recipe_of(op)] == ["last/linear"]
