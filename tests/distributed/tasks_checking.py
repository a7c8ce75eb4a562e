"""What the worker processes do for tests of the checks of the first step, and of losses that are not finite."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from planner.errors import LossSpikeError, NonFiniteError, PlannerError, StrategyError
from planner.graph.call import Call
from planner.graph.trace import trace
from planner.plan.plan import Plan
from planner.sharding import rules
from planner.sharding.layout import REPLICATE
from planner.sharding.mesh import Mesh
from planner.sharding.rule import FactorKind, Rule, Strategy
from planner.sharding.rules.spec import RuleSpec
from planner.sharding.update import Update
from runtime.guard_settings import GuardSettings
from runtime.ops.local import local_ops
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.step.training_step import TrainingStep, parallelize
from tests.distributed import plans
from tests.distributed.tasks import CPU, KEPT, Counted, build_step, known


def reductions(sizes: list[int]) -> list[int]:
    """Of all-reduces of tensors of these sizes, those whose results are not the same bits on all ranks."""
    differing = []
    for size in sizes:
        total = torch.randn(size, generator=torch.Generator().manual_seed(size + dist.get_rank()))
        dist.all_reduce(total)
        every = [torch.empty_like(total) for _ in range(dist.get_world_size())]
        dist.all_gather(every, total)
        if not all(other.view(torch.int32).equal(every[0].view(torch.int32)) for other in every):
            differing.append(size)
    return differing


def healthy(model: str, sizes: tuple[int, ...], seeds: list[int], settings: dict[str, object]) -> list[str]:
    """What differs in the first step of random plans."""
    found = []
    for seed in seeds:
        step = build_step(model, plans.random_plan(model, plans.mesh_of(*sizes), seed, kept=KEPT, **settings))
        found.append(refusal(step))
        assert not step.rank.check_layouts or found[-1]
    return [message for message in found if message]


def refusal(step: TrainingStep, batch: tuple[torch.Tensor, ...] | None = None) -> str:
    """What a step is refused with; empty where it is taken."""
    try:
        step(*(batch or plans.batch()))
    except StrategyError as error:
        return str(error)
    return ""


class Largest(nn.Module):
    """A loss that reads the largest hidden unit of every token."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(plans.VOCABULARY, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        x = (self.rows(tokens_BS) * self.scale).amax(dim=-1)
        return (x * labels_BS).mean()


class WronglyCombined(RuleSpec):
    """Claims that pieces of what is reduced are combined by the operator."""

    def __init__(self, right: RuleSpec) -> None:
        self._right = right

    def build(self, call: Call) -> Rule:
        rule = self._right.build(call)
        factors = tuple(
            replace(factor, kind=FactorKind.COMBINED) if factor.kind is FactorKind.BLOCKED else factor
            for factor in rule.factors
        )
        return replace(rule, factors=factors)


def wrong_rule() -> str:
    """The largest of the local pieces is promised to be that of the whole."""
    graph = trace(Largest(), plans.batch())
    table = {**rules.RULES, "aten.amax.default": WronglyCombined(rules.RULES["aten.amax.default"])}

    def choose(name: str, rule: Rule, mesh: Mesh) -> Strategy:
        cut = rule.index["d2"] if rule.op == "aten.amax.default" else None
        return (None, cut)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "RULES", table)
        rules._build.cache_clear()
        try:
            plan = plans.make_plan(
                "largest", plans.mesh_of(2, 2), choose, plans.store_zero1, plans.load_samples, graph=graph
            )
            torch.manual_seed(0)
            step = parallelize(Largest(), plan, traced=graph, device=CPU, known=known())
            return refusal(step)
        finally:
            rules._build.cache_clear()


def other_weights(kind: str) -> str:
    """One weight of one rank changes after the step was built, which compares what the ranks are given."""
    step = build_step("llama", plans.hand_plan(kind, "llama", plans.mesh_of(2, 2)))
    step.prepare(*plans.batch())
    if dist.get_rank() == 3:
        with torch.no_grad():
            step.rank.parameters["model.layers.1.self_attn.q_proj.weight"].piece[-1, -1] += 1e-3
    return refusal(step)


def other_shared_weight() -> str:
    """The last of four stages reads the first one's embedding, and comes to have another."""
    step = build_step("gpt4", plans.hand_plan("zero1", "gpt4", plans.mesh_of(1), stages=(1, 1, 1, 1)))
    step.prepare(*plans.batch())
    if dist.get_rank() == 3:
        with torch.no_grad():
            step.rank.parameters["wte.weight"].piece[-1, -1] += 1e-3
    return refusal(step)


class Skewed(torch.autograd.Function):
    """GELU with a gradient that is too large on rank 1."""

    @staticmethod
    def forward(ctx, tensor):
        ctx.save_for_backward(tensor)
        return nn.functional.gelu(tensor)

    @staticmethod
    def backward(ctx, gradient):
        (tensor,) = ctx.saved_tensors
        with torch.enable_grad():
            tensor = tensor.detach().requires_grad_()
            (found,) = torch.autograd.grad(nn.functional.gelu(tensor), tensor, gradient)
        return found * (1.001 if dist.get_rank() == 1 else 1.0)


def wrong_gradient() -> str:
    """All is whole on every rank, and one rank computes a gradient otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        forms = {**local_ops.LOCAL_OPS, "aten.gelu.default": lambda shard, tensor, **keywords: Skewed.apply(tensor)}
        patch.setattr(local_ops, "LOCAL_OPS", forms)
        return refusal(build_step("gpt", whole_plan("none")))


def whole_plan(recomputation: str) -> Plan:
    """Nothing is split: every rank computes everything."""
    return plans.make_plan(
        "gpt",
        plans.mesh_of(4),
        lambda name, rule, mesh: (None,),
        plans.store_zero1,
        lambda name, shape, mesh: (REPLICATE,),
        recomputation=recomputation,
    )


def not_deterministic() -> str:
    """An operator of a recomputed block gives something else each time, the same on all ranks."""

    def noisy(shard: local_ops.Shard, tensor: torch.Tensor, **keywords: object) -> torch.Tensor:
        return nn.functional.gelu(tensor) + torch.rand(())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_ops, "LOCAL_OPS", {**local_ops.LOCAL_OPS, "aten.gelu.default": noisy})
        torch.manual_seed(0)
        return refusal(build_step("gpt", whole_plan("full")))


def later_steps(seed: int) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives of the second step after a checked first one, and of a step that was never checked."""
    plan = plans.random_plan("llama", plans.mesh_of(2, 2), seed, micro_batches=2, recomputation="full")
    checked = build_step("llama", plan)
    checked(*plans.batch())
    with Counted() as second:
        checked(*plans.batch())
    plain = build_step("llama", plan)
    plain.prepare(*plans.batch())  # which sends too: optimizers cut their masters
    plain.rank.check_layouts = False
    with Counted() as first:
        plain(*plans.batch())
    return dict(second), dict(first)


class Level(nn.Module):
    def __init__(self, level: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)
        self.level = nn.Parameter(torch.full((16,), level))
        self.root = nn.Parameter(torch.ones(16))

    def forward(self, x_BSH: torch.Tensor, offset_BS: torch.Tensor) -> torch.Tensor:
        x = x_BSH + self.linear(self.norm(x_BSH))
        offset = offset_BS.unsqueeze(-1)
        return x + torch.log(self.level + offset) + torch.exp(offset - 1) + torch.sqrt(self.root)


class Fragile(nn.Module):
    """Breaks down where an offset is too low (the second block, by a logarithm) or too high (the first, by an
    exponential). A mask of infinities does no harm."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(plans.VOCABULARY, 16)
        self.blocks = nn.ModuleList([Level(50.0), Level(2.0)])

    def forward(self, tokens_BS: torch.Tensor, offset_BS: torch.Tensor) -> torch.Tensor:
        x = self.rows(tokens_BS)
        for block in self.blocks:
            x = block(x, offset_BS)
        masked = x.masked_fill((tokens_BS == 3).unsqueeze(-1), -torch.inf)
        return torch.exp(masked * 0.1).mean()


def fragile_batch(dtype: torch.dtype, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Only the last token of the last sample has the offset."""
    offsets = torch.zeros(plans.BATCH, plans.SEQUENCE, dtype=dtype)
    offsets[-1, -1] = offset
    return plans.batch()[0], offsets


def fragile_step(
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    seed: int,
    buckets: int | str = "none",
    guard: GuardSettings | None = None,
    rollback: Callable[[TrainingStep], None] | None = None,
    **settings: object,
) -> TrainingStep:
    torch.manual_seed(0)
    module = Fragile().to(dtype)
    example = fragile_batch(dtype, 0.0)
    graph = trace(module, example)
    plan = plans.random_plan("fragile", plans.mesh_of(*sizes), seed, graph=graph, **settings)
    plan = replace(plan, training=replace(plan.training, update=Update(buckets=buckets)))
    return parallelize(
        module,
        plan,
        example=example,
        traced=graph,
        optimizer=OptimizerSettings(learning_rate=1e-4),
        device=CPU,
        known=known(),
        guard=guard,
        rollback=rollback,
    )


def breakdown(dtype: torch.dtype, offset: float, sizes: tuple[int, ...], seed: int, settings: dict[str, object]) -> str:
    """Two good steps, and a third with an offset that breaks the model down; says what the third is refused with."""
    step = fragile_step(dtype, sizes, seed, **settings)
    for _ in range(2):
        step(*fragile_batch(dtype, 0.0))
    before = {name: parameter.piece.detach().clone() for name, parameter in step.rank.parameters.items()}
    try:
        step(*fragile_batch(dtype, offset))
    except NonFiniteError as error:
        assert all(parameter.piece.equal(before[name]) for name, parameter in step.rank.parameters.items())
        assert all(parameter.gradient is None for parameter in step.rank.parameters.values())
        assert step(*fragile_batch(dtype, 0.0)) > 0, "a good batch trains on"
        return str(error)
    return ""


def broken_weight(sizes: tuple[int, ...], seed: int, settings: dict[str, object]) -> str:
    """One element of a weight becomes NaN between two steps, on the ranks that hold it."""
    step = fragile_step(torch.float32, sizes, seed, **settings)
    step(*fragile_batch(torch.float32, 0.0))
    weight = step.rank.parameters.get("blocks.1.linear.weight")
    if weight is not None:
        whole = weight.whole(step.place)
        with torch.no_grad():
            weight.piece[weight.piece == whole[3, 5]] = torch.nan
    try:
        step(*fragile_batch(torch.float32, 0.0))
    except NonFiniteError as error:
        return str(error)
    return ""


def broken_gradient(check: bool, sizes: tuple[int, ...], seed: int, settings: dict[str, object]) -> tuple[int, str]:
    """The gradient of a square root at zero is infinite; the loss is not. The step that is refused, and why."""
    step = fragile_step(torch.float32, sizes, seed, **settings)
    step.rank.check_gradients = check
    for number in range(1, 5):
        if number == 2 and "blocks.0.root" in step.rank.parameters:
            with torch.no_grad():
                step.rank.parameters["blocks.0.root"].piece.zero_()
        try:
            step(*fragile_batch(torch.float32, 0.0))
        except PlannerError as error:
            return number, f"{type(error).__name__}: {error}"
    return 0, ""


def everything(step: TrainingStep) -> list[torch.Tensor]:
    """Copies of all that a step changes on this rank."""
    pieces = [parameter.piece for parameter in step.rank.parameters.values()]
    kept = (*pieces, *step.rank.optimizer.states(), *step.rank.buffers.values())
    return [tensor.detach().clone() for tensor in kept]


def left_alone(
    trouble: str, action: str, sizes: tuple[int, ...], seed: int, settings: dict[str, object]
) -> tuple[list[str | None], bool, bool, int, list[int]]:
    """Three good batches, one that is in trouble, and a good one, of Adam: what was said of each, whether the bad one
    left everything as it was, whether the last is as if it had not been there, how many steps were made, and at which
    of them it was rolled back."""
    guard = GuardSettings(
        on_nonfinite=action, on_spike=action if trouble == "spike" else "ignore", spike_factor=3.0, spike_window=3
    )
    back: list[int] = []
    step = fragile_step(
        torch.float32, sizes, seed, guard=guard, rollback=lambda step: back.append(step.steps), **settings
    )
    plain = fragile_step(torch.float32, sizes, seed, **settings)
    good, bad = fragile_batch(torch.float32, 0.0), fragile_batch(torch.float32, {"spike": 5.5}.get(trouble, -100.0))
    said = []
    for _ in range(3):
        step(*good)
        plain(*good)
        said.append(None if step.trouble is None else step.trouble.message)
    roots = (
        [p.piece for p in step.rank.parameters.values() if p.name == "blocks.0.root"] if trouble == "gradient" else []
    )
    with torch.no_grad():
        kept = [root.clone() for root in roots]
        for root in roots:
            root.zero_()  # whose square root has an infinite gradient
    before = everything(step)
    step(*(good if trouble == "gradient" else bad))
    said.append(None if step.trouble is None else step.trouble.message)
    same = all(map(torch.equal, before, everything(step)))
    with torch.no_grad():
        for root, value in zip(roots, kept, strict=True):
            root.copy_(value)
    step(*good)
    plain(*good)
    said.append(None if step.trouble is None else step.trouble.message)
    return said, same, all(map(torch.equal, everything(plain), everything(step))), step.steps, back


def too_many(in_a_row: int) -> tuple[str, int]:
    """A batch that breaks, again and again: what ends it, and after how many."""
    step = fragile_step(torch.float32, (2, 2), 0, guard=GuardSettings(on_nonfinite="skip", in_a_row=in_a_row))
    for number in range(1, 10):
        try:
            step(*fragile_batch(torch.float32, -100.0))
        except NonFiniteError as error:
            return str(error), number
    return "", 0


def stops_at_a_leap() -> tuple[str, bool]:
    """What a loss that leaps is refused with, and whether it left everything as it was."""
    step = fragile_step(torch.float32, (2, 2), 0, guard=GuardSettings(on_spike="stop", spike_window=2))
    for _ in range(2):
        step(*fragile_batch(torch.float32, 0.0))
    before = everything(step)
    try:
        step(*fragile_batch(torch.float32, 5.5))
    except LossSpikeError as error:
        return str(error), all(map(torch.equal, before, everything(step)))
    return "", False
