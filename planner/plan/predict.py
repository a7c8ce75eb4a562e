"""What a bound plan costs, computed operator by operator over the whole graph.

This is the judge. The search fills tables for one block and multiplies; here nothing is folded, tabulated or shared
between stages, so that an error in the search shows as a difference between the two. Both use the prices of
`planner.pricing`.

    stage s:  t_s  seconds of one micro-batch, forward and backward, with the transfers it waits for
              u_s  seconds once a step: gradients, optimizer, weights
    step   =  sum t_s + (m - 1) max t_s + max u_s              (1F1B, see costmodels.schedules)
    memory =  weights + gradients + states + in_flight * kept activations + largest transient, then allocator slack

Communication is charged in full: overlap with computation is not modelled yet, so step times are pessimistic where much
could overlap.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

from costmodels import collective_time, in_flight, peak_memory, step_time
from hardware_profiles import Cluster
from planner.graph.operator_graph import TensorType
from planner.plan.bind import BoundOperator, BoundPlan, stage_of_operators
from planner.plan.plan import Plan, Prediction, Stage
from planner.pricing import OperatorPrices, RedistributionPricer, price_operator, price_parameter
from planner.pricing.liveness import liveness, replay
from planner.pricing.message import Message
from planner.pricing.operator_price import inner_messages
from planner.sharding.layout import Layout, local_fraction
from planner.sharding.rule import Duplex, Rule

TIME_PER_MICRO_BATCH = (
    "forward",
    "backward",
    "recomputation",
    "communication",
    "parameter gathering",
    "gradient accumulation",
    "stage transfer",
)
TIME_PER_STEP = ("gradient reduction", "optimizer", "weight gathering")
MEMORY = ("weights", "gradients", "optimizer state", "activations", "transient")


@dataclass(kw_only=True)
class StageCost:
    """Sums of one stage: seconds per micro-batch, seconds once a step, bytes.

    `messages` counts what the seconds of communication stand for, by the part of the time in which they are charged.
    """

    micro_batch: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_PER_MICRO_BATCH, 0.0))
    once: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_PER_STEP, 0.0))
    memory: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MEMORY, 0.0))
    messages: Counter[tuple[str, Message]] = field(default_factory=Counter)


def predict(bound: BoundPlan, cluster: Cluster) -> Prediction:
    """Step time and peak memory of a plan, in parts that sum to the whole."""
    walk = _Walk(bound=bound, cluster=cluster)
    costs = [walk.stage(index, stage) for index, stage in enumerate(bound.plan.stages)]
    return _assemble(bound.plan, walk.flops, costs, cluster)


def stage_costs(bound: BoundPlan, cluster: Cluster) -> tuple[StageCost, ...]:
    """The sums of every stage, for those who want to look inside."""
    walk = _Walk(bound=bound, cluster=cluster)
    return tuple(walk.stage(index, stage) for index, stage in enumerate(bound.plan.stages))


def _assemble(plan: Plan, flops_per_part: float, costs: list[StageCost], cluster: Cluster) -> Prediction:
    m = plan.training.micro_batches
    per_part = [sum(cost.micro_batch.values()) for cost in costs]
    per_step = [sum(cost.once.values()) for cost in costs]
    step = float(step_time(per_part, per_step, m))
    slowest, latest = per_part.index(max(per_part)), per_step.index(max(per_step))
    time = [(name, m * seconds) for name, seconds in costs[slowest].micro_batch.items()]
    time.append(("pipeline bubble", sum(per_part) - per_part[slowest]))
    time += list(costs[latest].once.items())
    fullest = max(costs, key=lambda cost: sum(cost.memory.values()))
    wanted = sum(fullest.memory.values())
    peak = float(peak_memory(wanted, 0.0, 0.0, cluster.device))
    memory = [*fullest.memory.items(), ("allocator slack and reserved", peak - wanted)]
    flops = flops_per_part * m
    devices = plan.cluster.devices
    return Prediction(
        step_seconds=step,
        peak_bytes=peak,
        capacity_bytes=cluster.device.memory,
        model_flops=flops,
        model_flops_utilisation=flops / (step * devices * cluster.device.peak(plan.training.precision)),
        samples_per_second=plan.training.global_batch / step,
        time=tuple(time),
        memory=tuple(memory),
    )


@dataclass(kw_only=True)
class _Walk:
    bound: BoundPlan
    cluster: Cluster

    def __post_init__(self) -> None:
        graph, plan = self.bound.graph, self.bound.plan
        self.pricer = RedistributionPricer(mesh=plan.mesh, cluster=self.cluster)
        self.alive = liveness(graph)
        self.replay = replay(graph, self.bound.blocks.start, self.bound.blocks.start + self.bound.blocks.period)
        self.full = plan.recomputation == "full"
        self.stage_of = stage_of_operators(self.bound)
        self.flops = 0.0
        self._prices: dict[tuple[int, object, tuple[bool, ...]], OperatorPrices] = {}
        self._alone: dict[tuple[int, tuple[bool, ...]], float] = {}

    def stage(self, index: int, stage: Stage) -> StageCost:
        """Walk the operators of one stage."""
        cost = StageCost()
        plan = self.bound.plan
        live = in_flight(index, len(plan.stages), plan.training.micro_batches)
        received: set[str] = set()
        recomputed: dict[int, float] = {}
        for at, bound in enumerate(self.bound.operators):
            if self.stage_of[at] == index:
                self._operator(cost, at, bound, index, live, received, recomputed)
        if recomputed:
            cost.memory["activations"] += max(recomputed.values())
        used = {name for at in range(len(self.bound.operators)) if self.stage_of[at] == index
                for name in self.bound.operators[at].operator.operands}  # fmt: skip
        for parameter in self.bound.graph.parameters:  # in a fixed order: sums must not depend on hashes
            if parameter.name in used:
                self._parameter(cost, parameter.name)
        self._sends(cost, index)
        return cost

    def _operator(
        self,
        cost: StageCost,
        at: int,
        bound: BoundOperator,
        stage: int,
        live: int,
        received: set[str],
        recomputed: dict[int, float],
    ) -> None:
        graph, op = self.bound.graph, bound.operator
        prices = self._price(bound)
        block = self.bound.blocks.block_of(at)
        again = self.full and block is not None  # kept for one block at a time
        place = (at - self.bound.blocks.start) % self.bound.blocks.period if again else 0
        works, moves = again and place < self.replay.works, again and place < self.replay.moves
        forward = float(prices.forward[0] + prices.inner_forward[0])
        cost.micro_batch["forward"] += float(prices.forward[0])
        cost.micro_batch["backward"] += float(prices.backward[0])
        cost.micro_batch["communication"] += float(prices.inner_forward[0] + prices.inner_backward[0])
        cost.micro_batch["recomputation"] += forward if works else 0.0
        for inner in inner_messages(bound.rule, bound.strategy, self.bound.plan.mesh):
            cost.messages["communication", inner.message] += inner.forward + inner.backward
            cost.messages["recomputation", inner.message] += inner.forward if works else 0
        kept = float(prices.saved_extra[0])
        results = [name for name in op.results if name is not None]
        kept += sum(float(prices.results[i][0]) for i, name in enumerate(results) if name in self.alive.kept)
        saved = self.alive.saved[at]
        transient = float(prices.transient[0])
        for i, name in enumerate(op.operands):
            wanted, nbytes = bound.layouts.operands[i], float(prices.operands[i][0])
            if name in self.bound.parameters:
                needed = i in self.alive.weights[at]
                gathered = self._use_parameter(cost, name, wanted, 1 + int(moves if again else needed))
                kept += nbytes if gathered and needed and again else 0.0  # a recomputed block gathers all its weights
                transient += nbytes
            elif name in graph.producer:
                made = self._made(name)
                if name in graph.data_dependent:  # what never changes is brought into a layout once
                    self._edge(cost, name, made, wanted, moves)
                if i in saved and not (made.forward == wanted.forward and name in self.alive.kept):
                    kept += nbytes
                if (
                    self.stage_of[graph.producer[name]] != stage
                    and name in graph.data_dependent
                    and name not in received
                ):
                    received.add(name)
                    nbytes_received = self._transfer(cost, graph.types[name], made.forward)
                    cost.memory["activations"] += 0.0 if again else live * nbytes_received
                if again and self.bound.blocks.block_of(graph.producer[name]) != block and name in graph.differentiable:
                    self._checkpoint(cost, name, made.forward, live, received, block)
        if again:
            assert block is not None
            recomputed[block] = recomputed.get(block, 0.0) + kept
        else:
            cost.memory["activations"] += kept * live
        cost.memory["transient"] = max(cost.memory["transient"], transient)

    def _checkpoint(
        self, cost: StageCost, name: str, layout: Layout, live: int, seen: set[str], block: int | None
    ) -> None:
        """A recomputed block keeps what flows into it."""
        key = f"{block}<-{name}"
        if key not in seen:
            seen.add(key)
            tensor = self.bound.graph.types[name]
            cost.memory["activations"] += live * tensor.nbytes * local_fraction(layout, self.bound.plan.mesh.sizes)

    def _move(
        self, cost: StageCost, part: str, tensor: TensorType, source: Layout, target: Layout, times: int = 1
    ) -> None:
        """Charge a redistribution, in a part of the micro-batch's time or of what is done once a step."""
        route = self.pricer.route(tensor, source, target)
        (cost.once if part in TIME_PER_STEP else cost.micro_batch)[part] += times * route.seconds
        for message in route.messages:
            cost.messages[part, message] += times

    def _edge(self, cost: StageCost, name: str, made: Duplex, wanted: Duplex, again: bool) -> None:
        tensor = self.bound.graph.types[name]
        self._move(cost, "communication", tensor, made.forward, wanted.forward)
        if again:
            self._move(cost, "recomputation", tensor, made.forward, wanted.forward)
        if name in self.bound.graph.differentiable:
            self._move(cost, "communication", tensor, wanted.gradient, made.gradient)

    def _use_parameter(self, cost: StageCost, name: str, wanted: Duplex, times: int) -> bool:
        """One use: the weight is gathered for the forward pass and, where that needs it, for the backward pass; its
        gradient goes back. Returns whether anything is gathered."""
        tensor, stored = self.bound.graph.types[name], self.bound.parameters[name]
        self._move(cost, "parameter gathering", tensor, stored.weight, wanted.forward, times)
        if name in self.bound.graph.differentiable:
            self._move(cost, "parameter gathering", tensor, wanted.gradient, stored.gradient)
        return bool(self.pricer.route(tensor, stored.weight, wanted.forward).messages)

    def _parameter(self, cost: StageCost, name: str) -> None:
        plan, graph = self.bound.plan, self.bound.graph
        tensor, stored, trainable = graph.types[name], self.bound.parameters[name], name in graph.differentiable
        prices = price_parameter(
            tensor,
            trainable,
            [stored],
            plan.training.precision,
            plan.training.optimizer,
            self.pricer,
        )
        if trainable:
            self._move(cost, "gradient reduction", replace(tensor, dtype="float32"), stored.gradient, stored.state)
            self._move(cost, "weight gathering", tensor, stored.state, stored.weight)
            self._tied(cost, name)
        cost.micro_batch["gradient accumulation"] += float(prices.accumulation[0])
        cost.once["optimizer"] += float(prices.update[0])
        cost.memory["weights"] += float(prices.weight[0])
        cost.memory["gradients"] += float(prices.gradient[0])
        cost.memory["optimizer state"] += float(prices.state[0])

    def _tied(self, cost: StageCost, name: str) -> None:
        """A parameter used by several stages: their gradients are summed once a step."""
        stages = sorted({self.stage_of[at] for at in self.bound.graph.consumers.get(name, ())})
        if len(stages) < 2:
            return
        plan, tensor = self.bound.plan, self.bound.graph.types[name]
        nbytes = 4.0 * tensor.numel * local_fraction(self.bound.parameters[name].state, plan.mesh.sizes)
        seconds = tied_seconds(nbytes, stages[-1] - stages[0], plan.mesh.size, self.cluster)
        cost.once["gradient reduction"] += seconds
        cost.messages["gradient reduction", Message(kind="all_reduce", axis=None, nbytes=nbytes)] += 1

    def _sends(self, cost: StageCost, stage: int) -> None:
        """Gradients of what this stage sent come back to it."""
        graph = self.bound.graph
        for name, uses in graph.consumers.items():
            at = graph.producer.get(name)
            if at is None or self.stage_of[at] != stage or name not in graph.differentiable:
                continue
            for _ in {self.stage_of[use] for use in uses} - {stage}:
                self._transfer(cost, graph.types[name], self._made(name).forward)

    def _transfer(self, cost: StageCost, tensor: TensorType, layout: Layout) -> float:
        """Charge a tensor that crosses to another stage; returns its bytes on a device."""
        mesh = self.bound.plan.mesh
        nbytes = tensor.nbytes * local_fraction(layout, mesh.sizes)
        cost.micro_batch["stage transfer"] += transfer_seconds(nbytes, mesh.size, self.cluster)
        cost.messages["stage transfer", Message(kind="send_recv", axis=None, nbytes=nbytes)] += 1
        return nbytes

    def _made(self, name: str) -> Duplex:
        """Layouts in which a value is made."""
        bound = self.bound.operators[self.bound.graph.producer[name]]
        results = [result for result in bound.operator.results if result is not None]
        return bound.layouts.results[results.index(name)]

    def _price(self, bound: BoundOperator) -> OperatorPrices:
        graph, rule, op = self.bound.graph, bound.rule, bound.operator
        graded = tuple(name in graph.differentiable for name in op.operands)
        key = (id(rule), bound.strategy, graded)
        if key not in self._prices:
            types = ([graph.types[n] for n in op.operands], [graph.types[n] for n in op.results if n is not None])
            self._prices[key] = price_operator(
                rule, [bound.strategy], *types, graded, self.bound.plan.mesh, self.cluster
            )
        alone = (id(rule), graded)
        if alone not in self._alone:
            self._alone[alone] = _whole_flops(rule, graded)
        self.flops += self._alone[alone]
        return self._prices[key]


def _whole_flops(rule: Rule, graded: tuple[bool, ...]) -> float:
    """Forward and backward work of the whole operator, not of one device's part of it.

    What an implementation does twice, as recomputation, is no work of the model: utilisation by this count is that of
    Chowdhery et al. 2022 (PaLM, appendix B), but for the masked half of causal attention, which is not counted.
    """
    forward = 0.0
    for term in rule.work:
        product = term.coefficient
        for factor in term.factors:
            product *= rule.factors[factor].extent
        forward += product
    worked = sum(needed for i, needed in enumerate(graded) if i not in rule.addends)
    return forward * (1 + rule.gradient_work * worked)


def transfer_seconds(nbytes: float, stage_devices: int, cluster: Cluster) -> float:
    """Sending one tensor of `nbytes` per device to the next pipeline stage."""
    return float(collective_time("send_recv", nbytes, cluster.group(2, stage_devices)))


def tied_seconds(nbytes: float, distance: int, stage_devices: int, cluster: Cluster) -> float:
    """Summing the gradient of a parameter that two stages, `distance` apart, both hold."""
    return float(collective_time("all_reduce", nbytes, cluster.group(2, distance * stage_devices)))
