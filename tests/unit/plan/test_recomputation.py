"""What the prediction charges for blocks that are recomputed, all or some, wholly or in part."""

from dataclasses import replace
from functools import cache

import pytest

from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.layout.roles import roles
from planner.plan.plan import Group, Plan
from planner.plan.prediction.predict import stage_costs
from planner.plan.prediction.walk.stage_cost import StageCost
from planner.pricing import keeping, price_operator
from planner.strategy_search.request.space import Configuration
from tests.distributed import plans
from tests.unit.search.by_hand import UPDATE_CUT, by_hand
from tests.unit.search.cases import BATCH, cluster_of, make_case, plan_of, traced

PROFILE, DEVICES = "h100-80gb", 8
BLOCK = "model.layers.0"
ATTENTION = f"{BLOCK}.self_attn/scaled_dot_product_attention"
DOWN = f"{BLOCK}.mlp.down_proj/linear"
GATE = f"{BLOCK}.mlp.gate_proj/linear"


@cache
def plan_with(mesh: tuple[int, ...], stages: int, model: str = "llama-4") -> Plan:
    """Megatron's plan of four blocks, nothing recomputed, in 4 micro-batches."""
    configuration = Configuration(pipeline=stages, mesh=mesh, micro_batches=4)
    case = make_case(model, PROFILE, configuration, 16)
    axes = ("data", "tensor")[: len(mesh)]
    return plan_of(case, by_hand(case, axes, UPDATE_CUT))


def with_blocks(plan: Plan, *ways: tuple[int, str, tuple[str, ...]]) -> Plan:
    """The groups of blocks replaced by runs (number of blocks, recomputation, kept operators of block 0)."""
    first = next(group for group in plan.groups if group.blocks)

    def named(name: str, block: int) -> str:
        return name.replace("layers.0", f"layers.{block}")

    groups, at = [], 0
    for blocks, word, kept in ways:
        groups.append(
            Group(
                name=f"from {at}",
                first_block=at,
                blocks=blocks,
                recomputation=word,
                kept=tuple(named(name, at) for name in kept),
                operators=tuple((named(name, at), strategy) for name, strategy in first.operators),
                parameters=tuple((named(name, at), stored) for name, stored in first.parameters),
            )
        )
        at += blocks
    outside = [group for group in plan.groups if not group.blocks]
    return replace(plan, groups=(outside[0], *groups, *outside[1:]))


def cost_of(plan: Plan, stage: int = 0) -> StageCost:
    return stage_costs(bind(plan, traced(plan.model.reference), BATCH), cluster_of(PROFILE, plan.cluster.devices))[
        stage
    ]


def operator_at(bound: BoundPlan, name: str) -> int:
    return next(at for at, op in enumerate(bound.operators) if op.operator.name == name)


MESHES = pytest.mark.parametrize("mesh", [(), (2, 4)], ids=str)


@MESHES
def test_part_of_the_blocks_costs_that_part(mesh: tuple[int, ...]) -> None:
    """Seconds grow evenly with the number of recomputed blocks; memory falls with each."""
    plan = plan_with(mesh, 1)
    costs = [
        cost_of(with_blocks(plan, (n, "full", ()), (4 - n, "none", ())) if 0 < n < 4
                else with_blocks(plan, (4, "full" if n else "none", ())))
        for n in range(5)
    ]  # fmt: skip
    whole = costs[4].micro_batch["recomputation"]
    assert [cost.micro_batch["recomputation"] for cost in costs] == pytest.approx([whole * n / 4 for n in range(5)])
    assert {cost.micro_batch["forward"] for cost in costs} == {costs[0].micro_batch["forward"]}
    kept = [cost.memory["activations"] for cost in costs]
    assert kept[1] > kept[2] > kept[3] > kept[4]
    assert kept[0] > kept[2]


@MESHES
def test_a_kept_operator_is_neither_computed_again_nor_dropped(mesh: tuple[int, ...]) -> None:
    plan = plan_with(mesh, 1)
    full = cost_of(with_blocks(plan, (4, "full", ())))
    some = cost_of(with_blocks(plan, (4, "selective", (ATTENTION,))))
    bound = bind(plan, traced("llama-4"), BATCH)
    op = bound.operators[operator_at(bound, ATTENTION)]
    graph = bound.graph
    prices = price_operator(
        op.rule,
        [op.strategy],
        [graph.types[name] for name in op.operator.operands],
        [graph.types[name] for name in op.operator.results if name is not None],
        (True,) * 3,
        plan.mesh,
        cluster_of(PROFILE, plan.cluster.devices),
    )
    saved = full.micro_batch["recomputation"] - some.micro_batch["recomputation"]
    assert saved == pytest.approx(4 * float(prices.forward[0]))
    # In each of four blocks the result and the log-sum-exp; in the block that is recomputed they were counted before.
    kept = float(prices.results[0][0] + prices.saved_extra[0])
    assert some.memory["activations"] - full.memory["activations"] == pytest.approx((4 - 1) * kept)
    changes = keeping(prices, True, {0: 1.0})
    assert [float(array[0]) for array in (changes.seconds, changes.kept, changes.interior)] == [
        float(prices.forward[0]),
        kept,
        kept,
    ]
    others = set(full.micro_batch) - {"recomputation"}
    assert {part: full.micro_batch[part] for part in others} == {part: some.micro_batch[part] for part in others}
    assert full.messages == some.messages


def test_what_is_not_recomputed_anyway_saves_no_time() -> None:
    """The last projection of a block is left out of its recomputation; keeping it only takes memory."""
    plan = plan_with((), 1)
    full = cost_of(with_blocks(plan, (4, "full", ())))
    kept = cost_of(with_blocks(plan, (4, "selective", (DOWN,))))
    assert kept.micro_batch == full.micro_batch
    assert kept.memory["activations"] > full.memory["activations"]


def test_a_result_that_only_its_readers_keep_is_counted_with_them_too() -> None:
    """The gate is no result of which autograd keeps anything at its own operator: the block holds it for its reader."""
    plan = plan_with((), 1)
    full = cost_of(with_blocks(plan, (4, "full", ())))
    kept = cost_of(with_blocks(plan, (4, "selective", (GATE,))))
    graph = bind(plan, traced("llama-4"), BATCH).graph
    nbytes = graph.types[GATE].nbytes
    assert kept.memory["activations"] - full.memory["activations"] == pytest.approx(4 * nbytes)


@pytest.mark.parametrize("stage", range(4))
def test_kept_results_are_kept_for_every_micro_batch_in_flight(stage: int) -> None:
    plan = plan_with((2,), 4)
    full, kept = (
        cost_of(with_blocks(plan, (4, word, names)), stage)
        for word, names in (("full", ()), ("selective", (ATTENTION,)))
    )
    bound = bind(plan, traced("llama-4"), BATCH)
    result = bound.graph.types[ATTENTION]
    extra = result.numel / result.shape[-1] * 4
    one = (result.nbytes + extra) / 2
    assert kept.memory["activations"] - full.memory["activations"] == pytest.approx((4 - stage - 1) * one)


def test_what_a_kept_block_reads_of_a_recomputed_one_outlives_it() -> None:
    """Three recomputed blocks, each before a block that keeps what flows into it: all three values are there at the
    same time. In a row, one of them is, and one more while its block is recomputed."""
    found = []
    for words in (("full", "none") * 3, ("full",) * 3 + ("none",) * 3):
        plan = plans.hand_plan("zero1", "llama6", plans.mesh_of(), recomputation=words)
        bound = bind(plan, plans.traced("llama6"), plans.BATCH)
        found.append(stage_costs(bound, cluster_of(PROFILE, 1))[0].memory["activations"])
    assert found[0] - found[1] == 4 * plans.BATCH * plans.SEQUENCE * plans.LLAMA.hidden_size


@pytest.mark.parametrize(
    ("ways", "words"),
    [
        ([(4, "none", ())], "none"),
        ([(4, "full", ())], "full"),
        ([(3, "full", ()), (1, "none", ())], "3 of 4 blocks fully"),
        ([(4, "selective", (ATTENTION,))], "4 of 4 blocks keep attention"),
        ([(2, "full", ()), (2, "selective", (GATE, ATTENTION))], "2 of 4 blocks fully, 2 keep attention and gate_proj"),
        ([(3, "full", ()), (1, "selective", (f"{BLOCK}.mlp/silu",))], "3 of 4 blocks fully, 1 keeps silu"),
        (
            [
                (1, "full", ()),
                (1, "selective", (ATTENTION,)),
                (1, "selective", (ATTENTION, GATE)),
                (1, "selective", (ATTENTION, f"{BLOCK}.mlp/silu")),
            ],
            "1 of 4 blocks fully, 3 keep attention; some also gate_proj and silu",
        ),
        (
            [(2, "selective", (ATTENTION,)), (1, "selective", (GATE,)), (1, "selective", (f"{BLOCK}.mlp/silu",))],
            "4 of 4 blocks keep attention, gate_proj or silu",
        ),
    ],
)
def test_words(ways: list[tuple[int, str, tuple[str, ...]]], words: str) -> None:
    assert roles(bind(with_blocks(plan_with((), 1), *ways), traced("llama-4"), BATCH)).recomputation == words
