"""Plans made by hand or at random, and the small models they are for. Used inside the worker processes."""

import random
from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.gpt import GPT, GPTConfig
from planner.models.llama import Llama, LlamaConfig
from planner.plan.bind import prepare
from planner.plan.plan import (
    ClusterReference,
    Group,
    ModelReference,
    Plan,
    Prediction,
    Provenance,
    Stage,
    StoredParameter,
    Training,
)
from planner.sharding.layout import PARTIAL, REPLICATE, Layout, divides, shard
from planner.sharding.mesh import Mesh, MeshAxis
from planner.sharding.rescale import rescale_batch
from planner.sharding.rule import Rule, Strategy, legal_strategies, strategy_names
from planner.sharding.rules import rule_of

BATCH, SEQUENCE, VOCABULARY = 4, 8, 32
LLAMA = LlamaConfig(
    num_layers=2, hidden_size=32, ffn_size=64, num_heads=8, num_kv_heads=4, vocab_size=VOCABULARY, sequence_length=SEQUENCE
)
GPT_CONFIG = GPTConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=VOCABULARY, sequence_length=SEQUENCE)

Choose = Callable[[str, Rule, Mesh], Strategy]
Store = Callable[[str, tuple[int, ...], Mesh], StoredParameter]
Load = Callable[[str, tuple[int, ...], Mesh], Layout]


def build(model: str) -> nn.Module:
    torch.manual_seed(1)
    return Llama(LLAMA) if model == "llama" else GPT(GPT_CONFIG)


def batch(samples: int = BATCH, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(VOCABULARY, (samples, SEQUENCE), generator=generator)  # noqa: E731
    return draw(), draw()


@cache
def traced(model: str) -> OperatorGraph:
    return trace(build(model), batch())


def mesh_of(*sizes: int) -> Mesh:
    axes, stride = [], 1
    for size in reversed(sizes):
        axes.append(MeshAxis(name=f"axis{len(sizes) - 1 - len(axes)}", size=size, stride=stride, bandwidth=1e9))
        stride *= size
    return Mesh(axes=tuple(reversed(axes)))


def make_plan(
    model: str,
    mesh: Mesh,
    choose: Choose,
    store: Store,
    load: Load,
    *,
    micro_batches: int = 1,
    recomputation: str = "none",
    optimizer: str = "adamw",
    stages: int = 1,
    graph: OperatorGraph | None = None,
) -> Plan:
    """A plan with one group outside the blocks and one per block, so that every operator is chosen by itself."""
    original = graph or traced(model)
    prepared, blocks = prepare(original)
    scaled = rescale_batch(prepared, BATCH, BATCH // micro_batches)
    found: dict[int | None, tuple[list[tuple[str, tuple[str | None, ...]]], list[tuple[str, StoredParameter]]]] = {}
    for index, op in enumerate(scaled.operators):
        rule = rule_of(scaled, op)
        operators, _ = found.setdefault(blocks.block_of(index), ([], []))
        operators.append((op.name, strategy_names(rule, choose(op.name, rule, mesh))))
    for parameter in scaled.parameters:
        stored = store(parameter.name, scaled.types[parameter.name].shape, mesh)
        homes = {blocks.block_of(use) for use in scaled.consumers[parameter.name]}
        found[homes.pop() if len(homes) == 1 else None][1].append((parameter.name, stored))
    groups = tuple(
        Group(
            name="outside" if block is None else f"block {block}",
            first_block=block or 0,
            blocks=0 if block is None else 1,
            operators=tuple(operators),
            parameters=tuple(parameters),
        )
        for block, (operators, parameters) in found.items()
    )
    return Plan(
        model=ModelReference(
            reference=model, sequence_length=SEQUENCE, parameters=1, fingerprint=original.fingerprint()
        ),
        training=Training(
            global_batch=BATCH, micro_batches=micro_batches, precision="fp32", optimizer=optimizer
        ),
        cluster=ClusterReference(profile="cpu", digest="", devices=mesh.size),
        mesh=mesh,
        stages=tuple(Stage(first_block=0, blocks=blocks.count) for _ in range(stages)),
        schedule="none",
        recomputation=recomputation,
        inputs=tuple((name, load(name, scaled.types[name].shape, mesh)) for name in scaled.inputs),
        groups=groups,
        prediction=Prediction(
            step_seconds=0.0, peak_bytes=0.0, capacity_bytes=0.0, model_flops=0.0, model_flops_utilisation=0.0,
            samples_per_second=0.0, time=(), memory=(),
        ),
        provenance=Provenance(planner="test", search="none", status="feasible", gap=0.0),
    )  # fmt: skip


def random_layout(random_: random.Random, shape: tuple[int, ...], mesh: Mesh, partial: bool = False) -> Layout:
    """Any layout that divides the shape."""
    choices = [REPLICATE, *(shard(dim) for dim in range(len(shape))), *([PARTIAL] if partial else [])]
    while True:
        layout = tuple(random_.choice(choices) for _ in mesh.axes)
        if divides(shape, layout, mesh.sizes):
            return layout


def random_plan(model: str, mesh: Mesh, seed: int, **settings: object) -> Plan:
    """Any legal strategy of every operator, any legal stored layouts of every parameter, any layout of the inputs."""
    random_ = random.Random(seed)

    def choose(name: str, rule: Rule, mesh: Mesh) -> Strategy:
        return random_.choice(legal_strategies(rule, mesh))

    def store(name: str, shape: tuple[int, ...], mesh: Mesh) -> StoredParameter:
        weight = random_layout(random_, shape, mesh)
        gradient = tuple(w if w.is_shard else random_.choice((REPLICATE, PARTIAL)) for w in weight)
        while True:
            finer = random_layout(random_, shape, mesh)
            state = tuple(w if w.is_shard else f for w, f in zip(weight, finer, strict=True))
            if divides(shape, state, mesh.sizes):
                return StoredParameter(weight=weight, gradient=gradient, state=state)

    def load(name: str, shape: tuple[int, ...], mesh: Mesh) -> Layout:
        return random_layout(random_, shape, mesh)

    return make_plan(model, mesh, choose, store, load, **settings)  # type: ignore[arg-type]
