"""What a bound plan costs, computed operator by operator over the whole graph.

This is the judge. The search fills tables for one block and multiplies; here nothing is folded, tabulated or shared
between stages, so that an error in the search shows as a difference between the two. Both use the prices of
`planner.pricing`.

    rank r:   t_r  seconds of one micro-batch, forward and backward, with the transfers it waits for
              u_r  seconds once a step: gradients, optimizer, weights
    step   =  what the schedule makes of them (see planner.plan.step)
    objective  =  m max t_r + (sum t_r - max t_r) / v + max u_r     (1F1B of v virtual stages, see costmodels.schedules)
    memory =  weights + gradients + states + in_flight * kept activations + largest transient, then allocator slack

A pipeline rank holds v stages of the model (v = 1: its one stage), and is what is summed up here. A block that is
recomputed keeps what flows into it and what its kept operators have made for every micro-batch in flight, and the rest
while its own backward pass runs: one block of a rank at a time. What the operators after the blocks keep is gone before
the backward pass of a block begins: it counts as one more such block.

The objective is what the search minimises and proves gaps about. Both charge the share of communication that software
does not hide; the step also asks whether there is work enough to hide the rest under.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from costmodels import collective_time, peak_memory, step_time
from hardware_profiles import Cluster, Hidden, spread_of
from planner.graph.blocks import IDENTITY, Blocks
from planner.graph.operator_graph import OperatorGraph, TensorType
from planner.plan.bind import BoundOperator, BoundPlan, stage_of_operators
from planner.plan.charges import UNCHARGED, Charges, Phase, Times, charge
from planner.plan.once import once_of
from planner.plan.plan import Plan, Prediction, StagePrediction
from planner.plan.put_off import put_off
from planner.plan.schedule import in_flight_of, put_off_at_most, splits, whole_in_flight
from planner.plan.slices import earlier_keys
from planner.plan.stage_cut import crossing_values
from planner.plan.step import AHEAD, COVERED, PIPELINE_BUBBLE, UNCOVERED, ChunkCost, Launches, PassCost, step_of
from planner.pricing import (
    OperatorPrices,
    ParameterPrices,
    Pricers,
    RedistributionPricer,
    keeping,
    price_operator,
    price_parameter,
)
from planner.pricing.liveness import liveness, replays
from planner.pricing.message import Message, message_seconds
from planner.pricing.operator_price import ROUND, inner_messages, transient_bytes
from planner.pricing.parameter_price import reduced, summed
from planner.pricing.redistribution_price import PricedRoute
from planner.sharding.layout import Layout, local_fraction, replicated
from planner.sharding.rule import Duplex, Rule
from planner.sharding.stored import StoredParameter

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
BEFORE, AFTER = -2, -1
"""What stands before and after the blocks, where blocks are numbered."""

MEMORY = ("weights", "gradients", "optimizer state", "activations", "transient")


@dataclass(kw_only=True)
class StageCost:
    """Sums of one pipeline rank: seconds per micro-batch, seconds once a step, bytes.

    `launches` are of each chunk, block and pass; the additive sums charge every operator that is late for itself, and
    `ahead` is what of that a host saves which launches a block while its longer kernels still run.
    `messages` counts what the seconds of communication stand for, once a micro-batch or, in an update, once a step.
    `chunks` has the seconds once more, by the passes through each chunk, and what software hides. `beyond` is what
    buckets and norms take once a step beyond the additive sums (see `planner.plan.once`).
    """

    chunks: list[ChunkCost]
    beyond: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_PER_STEP, 0.0))
    micro_batch: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_PER_MICRO_BATCH, 0.0))
    once: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_PER_STEP, 0.0))
    memory: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MEMORY, 0.0))
    messages: Charges = field(default_factory=Counter)
    launches: defaultdict[tuple[int, int | None, str], Launches] = field(default_factory=lambda: defaultdict(Launches))
    ahead: float = 0.0

    @property
    def all_once(self) -> dict[str, float]:
        """Seconds once a step, with what no single parameter is charged for."""
        return {part: seconds + self.beyond[part] for part, seconds in self.once.items()}


def predict(bound: BoundPlan, cluster: Cluster) -> Prediction:
    """Step time and peak memory of a plan, in parts that sum to the whole."""
    walk = _Walk(bound=bound, cluster=cluster)
    costs = [walk.rank(rank) for rank in range(bound.plan.pipeline)]
    experts = any(operator.rule.op_class == "experts" for operator in bound.operators)
    return _assemble(bound.plan, walk.flops, costs, cluster, experts=experts)


def stage_costs(bound: BoundPlan, cluster: Cluster) -> tuple[StageCost, ...]:
    """The sums of every pipeline rank, for those who want to look inside."""
    walk = _Walk(bound=bound, cluster=cluster)
    return tuple(walk.rank(rank) for rank in range(bound.plan.pipeline))


def _assemble(
    plan: Plan, flops_per_part: float, costs: list[StageCost], cluster: Cluster, *, experts: bool
) -> Prediction:
    m, virtual = plan.training.micro_batches * plan.slices, plan.virtual_stages
    per_part = [sum(cost.micro_batch.values()) for cost in costs]
    per_step = [sum(cost.once.values()) for cost in costs]
    step = step_of([cost.chunks for cost in costs], [cost.all_once for cost in costs], m // plan.slices, plan.schedule)
    busiest = costs[step.busiest]
    time = [(name, m * seconds) for name, seconds in busiest.micro_batch.items()]
    time += [(PIPELINE_BUBBLE, step.bubble), *busiest.all_once.items()]
    if _hides(cluster):
        time.append((UNCOVERED, step.uncovered))
    if plan.training.copies > 1:
        time.append((COVERED, -step.covered))
    if busiest.ahead:
        time.append((AHEAD, -m * busiest.ahead))
    fullest = max(costs, key=lambda cost: sum(cost.memory.values()))
    wanted = sum(fullest.memory.values())
    peaks = [float(peak_memory(sum(cost.memory.values()), 0.0, 0.0, cluster.device)) for cost in costs]
    peak = max(peaks)
    memory = [*fullest.memory.items(), ("allocator slack and reserved", peak - wanted)]
    spread = spread_of(cluster.name, experts)
    flops = flops_per_part * m
    devices = plan.cluster.devices
    return Prediction(
        step_seconds=step.seconds,
        objective_seconds=float(step_time(per_part, per_step, m, virtual)),
        peak_bytes=peak,
        capacity_bytes=cluster.device.memory,
        model_flops=flops,
        model_flops_utilisation=flops / (step.seconds * devices * cluster.device.peak(plan.training.precision)),
        samples_per_second=plan.training.global_batch / step.seconds,
        low_seconds=step.seconds * spread.low,
        high_seconds=step.seconds * spread.high,
        time=tuple(time),
        memory=tuple(memory),
        stages=tuple(
            StagePrediction(micro_batch_seconds=part, once_seconds=once, peak_bytes=bytes_)
            for part, once, bytes_ in zip(per_part, per_step, peaks, strict=True)
        ),
    )


def _hides(cluster: Cluster) -> bool:
    """Whether the software hides any communication."""
    return cluster.software.hidden != Hidden()


@dataclass(kw_only=True)
class _Walk:
    bound: BoundPlan
    cluster: Cluster

    def __post_init__(self) -> None:
        graph, plan = self.bound.graph, self.bound.plan
        self.update = plan.training.update
        self.pricers = Pricers.of(plan.mesh, self.cluster, self.update.bucket_size)
        software = self.cluster.software
        self.whole: Pricers | None = None  # with the seconds that are hidden
        if _hides(self.cluster):
            bare = replace(software, hidden=Hidden())
            self.whole = Pricers.of(plan.mesh, self.cluster.with_software(bare), self.update.bucket_size)
        self.alive = liveness(graph, software.fused, software.loss)
        blocks = self.bound.blocks
        self.replays = replays(graph, blocks, software.whole_blocks)
        self.ending = blocks.stop if _handed_alone(graph, blocks) else len(graph.operators)
        self.stage_of = stage_of_operators(self.bound)
        self.arriving = crossing_values(graph, self.stage_of, len(plan.stages))
        self.rank_of = {at: stage % plan.pipeline for at, stage in self.stage_of.items()}
        self.put_off = {
            op.operator.operands[place]
            for at, op in enumerate(self.bound.operators)
            for place in put_off(self.bound, at)
        }
        self.waiting = 0
        self.flops = 0.0
        self._prices: dict[tuple[int, object, tuple[bool, ...]], OperatorPrices] = {}
        self._hosted = bool(self.cluster.device.host_latency * self.cluster.software.host)
        self._alone: dict[tuple[int, tuple[bool, ...]], float] = {}
        self._stored: dict[tuple[TensorType, bool, StoredParameter, bool], ParameterPrices] = {}

    def rank(self, rank: int) -> StageCost:
        """Walk the operators of all stages of one pipeline rank."""
        plan, operators = self.bound.plan, self.bound.operators
        copies = plan.training.copies
        held = plan.stages[rank :: plan.pipeline]
        cost = StageCost(
            chunks=[
                ChunkCost(
                    blocks=stage.blocks,
                    later=PassCost() if splits(plan.schedule) else None,
                    copies=copies,
                    slices=plan.slices,
                )
                for stage in held
            ]
        )
        self.waiting = put_off_at_most(plan, rank) if splits(plan.schedule) else 0
        live = in_flight_of(plan, rank)
        seen: set[str] = set()  # what flows into blocks
        at_once: dict[int, float] = {}
        own = [at for at in range(len(operators)) if self.rank_of[at] == rank]
        for at in own:
            chunk = cost.chunks[self._chunk(at)]
            passes = [chunk.forward, chunk.backward] if copies > 1 else []
            before = [one.taken for one in passes]
            self._operator(cost, at, live[self._chunk(at)], seen, at_once)
            for one, taken in zip(passes, before, strict=True):
                one.close(taken)
        cost.memory["activations"] += copies * max(at_once.values(), default=0.0)
        cost.memory["transient"] *= copies
        cost.memory["transient"] += self.cluster.software.buffers
        for (number, _, name), launches in cost.launches.items():
            _save(cost.chunks[number], name, launches.ahead)
            cost.ahead += launches.ahead
        used = {name: self._chunk(at) for at in reversed(own) for name in operators[at].operator.operands}
        for parameter in self.bound.graph.parameters:  # in a fixed order: sums must not depend on hashes
            if parameter.name in used:
                self._parameter(cost, parameter.name, cost.chunks[used[parameter.name]])
        once = once_of(self.bound, used, self.cluster, self.pricers)
        for part, seconds in once.seconds.items():
            cost.beyond[part] += seconds
        for (part, message), times in once.messages.items():
            charge(cost.messages, part, "", message, {"update": times})
        cost.memory["transient"] += once.flat
        self._crossings(cost, rank, live)
        self._loss(cost, rank)
        return cost

    def _operator(self, cost: StageCost, at: int, live: int, seen: set[str], at_once: dict[int, float]) -> None:
        bound = self.bound.operators[at]
        graph, op = self.bound.graph, bound.operator
        prices, chunk = self._price(bound), cost.chunks[self._chunk(at)]
        block = self.bound.blocks.block_of(at)
        again = self.bound.recompute_of(block) is not None  # kept for one block at a time
        works, moves = again and self._works(at), again and self._moves(at)
        results = [name for name in op.results if name is not None]
        pieces = self._kept_in_pieces(at)
        own = [] if pieces else [i for i, name in enumerate(results) if name in self.alive.kept]
        kept = 0.0 if at in self.alive.piecewise else float(prices.saved_extra[0])
        kept += sum(float(prices.results[i][0]) for i in own)
        forward = float(prices.forward[0] + prices.inner_forward[0])
        if again and self.bound.is_kept(at):
            changes = keeping(prices, works, own)
            forward -= float(changes.seconds[0])
            cost.memory["activations"] += live * float(changes.kept[0])
            kept -= float(changes.interior[0])
        elif again:
            outlives = sum(float(prices.results[i][0]) for i in own if self._outlives(at, results[i]))
            cost.memory["activations"] += live * outlives
            kept -= outlives
        cost.micro_batch["forward"] += float(prices.forward[0])
        cost.micro_batch["backward"] += float(prices.backward[0])
        cost.micro_batch["communication"] += float(prices.inner_forward[0] + prices.inner_backward[0])
        cost.micro_batch["recomputation"] += forward if works else 0.0
        waits, back = float(prices.inner_forward[0]), float(prices.inner_backward[0])
        chunk.forward.add(work=float(prices.forward[0]), waits=waits)
        chunk.backward.add(work=float(prices.backward[0]), waits=back)
        if works and forward > 0:
            chunk.backward.add(work=forward - waits, waits=waits)
        later = put_off(self.bound, at)
        if later:
            self._put_off(cost, chunk, at, prices, later, seen)
        if self.bound.plan.slices > 1 and bound.rule.op_class == "attention":
            self._earlier_slices(cost, chunk, bound, at, works=works and not self.bound.is_kept(at))
        if self._hosted:
            self._launch(cost, at, prices, again=works and forward > waits)
        for inner in inner_messages(bound.rule, bound.strategy, self.bound.plan.mesh):
            passes: Times = {"forward": inner.forward, "backward": inner.backward}
            charge(cost.messages, "communication", op.name, inner.message, passes)
            repeats = works and not (again and self.bound.is_kept(at))
            if repeats:
                charge(cost.messages, "recomputation", op.name, inner.message, {"recomputation": inner.forward})
            if (share := self.cluster.software.hidden.tensor) and inner.message.kind != ROUND:
                hidden = share * message_seconds(inner.message, self.bound.plan.mesh, self.cluster)
                chunk.forward.add(hidden=inner.forward * hidden)
                chunk.backward.add(hidden=(inner.backward + (inner.forward if repeats else 0)) * hidden)
        saved = self.alive.saved[at]
        transient = float(transient_bytes(self.alive, graph, at, bound.rule, prices)[0])
        for i, name in enumerate(op.operands):
            wanted, nbytes = bound.layouts.operands[i], float(prices.operands[i][0])
            if name in self.bound.parameters:
                needed = i in self.alive.weights[at]
                times: Times = {"recomputation": int(moves)} if again else {"backward": int(needed)}
                gathered = self._use_parameter(cost, chunk, op.name, name, wanted, times, i in later)
                ahead = self.cluster.software.ahead
                if gathered and ahead:
                    where = block if block is not None else AFTER if at >= self.bound.blocks.stop else BEFORE
                    at_once[where] = at_once.get(where, 0.0) + ahead * nbytes
                elif gathered and needed and again:  # a recomputed block gathers all its weights
                    kept += nbytes
                transient += 0.0 if ahead else nbytes
            elif name in self.bound.inputs:
                again_too: Times = {"forward": 1, "recomputation": int(moves)}
                for message in self._route("activations", graph.types[name], self.bound.inputs[name], wanted.forward)[
                    0
                ].messages:
                    charge(cost.messages, UNCHARGED, op.name, message, again_too)
            elif name in graph.producer:
                made = self._made(name)
                if name in graph.data_dependent:  # what never changes is brought into a layout once
                    self._edge(cost, chunk, op.name, name, made, wanted, moves)
                if i in saved:
                    kept += self._kept_copy(name, made, wanted, nbytes)
                if pieces:
                    kept += min(nbytes, self._local_bytes(name, made.forward))
                if again and self.bound.blocks.block_of(graph.producer[name]) != block and name in graph.differentiable:
                    self._checkpoint(cost, name, made.forward, live, seen, block)
        brief = at >= self.ending  # the backward pass of what follows the blocks comes first, and frees what it kept
        if again or brief:
            where = block if block is not None else AFTER
            at_once[where] = at_once.get(where, 0.0) + kept
            cost.memory["activations"] += 0.0 if again else kept * (live - self.bound.plan.training.copies)
        else:
            cost.memory["activations"] += kept * live
        cost.memory["transient"] = max(cost.memory["transient"], transient)

    def _put_off(
        self,
        cost: StageCost,
        chunk: ChunkCost,
        at: int,
        prices: OperatorPrices,
        later: Sequence[int],
        seen: set[str],
    ) -> None:
        """Move the gradients of these operands into the turn that they wait for, until which what they are made of is
        kept: the gradient of the result and what the operator was given, which several may share."""
        bound = self.bound.operators[at]
        rest = self._price(bound, without=later, counted=False)
        seconds = float(prices.backward[0]) - float(rest.backward[0])
        chunk.backward.add(work=-seconds)
        chunk.pass_of(later=True).add(work=seconds)
        kept = float(prices.results[0][0])
        for place, needed_by in bound.rule.saves:
            key = f"{bound.operator.operands[place]} later as {bound.layouts.operands[place].forward}"
            if place not in later and set(needed_by) & set(later) and key not in seen:
                seen.add(key)
                kept += float(prices.operands[place][0])
        cost.memory["activations"] += self.waiting * kept

    def _kept_copy(self, name: str, made: Duplex, wanted: Duplex, nbytes: float) -> float:
        """Bytes that a reader keeps of a value of which it needs `nbytes`, beside what others keep."""
        if name in self.alive.kept and made.forward == wanted.forward:
            return 0.0
        pieces = self._local_bytes(name, made.forward)
        if not self.cluster.software.regathers or pieces >= nbytes:
            return nbytes
        return 0.0 if name in self.alive.kept else pieces

    def _kept_in_pieces(self, at: int) -> bool:
        """Whether a shared value of a block is kept as it comes, and gathered again for the backward pass."""
        op, block = self.bound.operators[at].operator, self.bound.blocks.block_of(at)
        if op.op != IDENTITY or block is None or not self.cluster.software.regathers:
            return False
        (name,) = op.results
        uses = self.bound.graph.consumers.get(name or "", ())
        return name in self.alive.kept and all(self.bound.blocks.block_of(use) == block for use in uses)

    def _local_bytes(self, name: str, layout: Layout) -> float:
        return self.bound.graph.types[name].nbytes * local_fraction(layout, self.bound.plan.mesh.sizes)

    def _launch(self, cost: StageCost, at: int, prices: OperatorPrices, *, again: bool) -> None:
        """Count what the operator's kernels wait for their launches, block by block and pass by pass."""
        number, block = self._chunk(at), self.bound.blocks.block_of(at)
        forward, backward = (cost.launches[number, block, name] for name in ("forward", "backward"))
        forward.add(float(prices.forward[0]), float(prices.late[0][0]), prices.host[0])
        if prices.backward[0]:
            backward.add(float(prices.backward[0]), float(prices.late[1][0]), prices.host[1])
        if again:
            backward.add(float(prices.forward[0]), float(prices.late[0][0]), prices.host[0])

    def _earlier_slices(self, cost: StageCost, chunk: ChunkCost, bound: BoundOperator, at: int, *, works: bool) -> None:
        """What attention takes that reads the keys of earlier slices too, as many whole ones on average as there are
        before the middle one; and the keys, values and their gradients of a whole sequence, which it writes down."""
        plan, whole = self.bound.plan, earlier_keys(bound.rule)
        prices = self._price(replace(bound, rule=whole), counted=False)
        forward, backward = float(prices.forward[0]), float(prices.backward[0])
        before = (plan.slices - 1) / 2
        cost.micro_batch["forward"] += before * forward
        cost.micro_batch["backward"] += before * backward
        chunk.forward.add(work=before * forward)
        chunk.backward.add(work=before * (backward + (forward if works else 0.0)))
        cost.micro_batch["recomputation"] += before * forward if works else 0.0
        chunk.forward.grows += forward
        chunk.backward.grows += backward + (forward if works else 0.0)
        keys = sum(float(nbytes[0]) for nbytes in prices.operands[1:3])
        element = self.bound.graph.types[bound.operator.operands[1]].element_bytes
        begun = whole_in_flight(plan, self.rank_of[at])
        cost.memory["activations"] += plan.slices * keys * (begun + plan.training.copies * max(4, element) / element)

    def _outlives(self, at: int, name: str) -> bool:
        """Whether a block that is not recomputed keeps, as it is made, a result of the recomputed block before it."""
        bound, made = self.bound, self._made(name).forward
        return any(
            bound.blocks.block_of(use) not in (None, bound.blocks.block_of(at))
            and bound.recompute_of(bound.blocks.block_of(use)) is None
            and self.stage_of[use] == self.stage_of[at]
            and operand == name
            and i in self.alive.saved[use]
            and bound.operators[use].layouts.operands[i].forward == made
            for use in bound.graph.consumers.get(name, ())
            for i, operand in enumerate(bound.operators[use].operator.operands)
        )

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
        self,
        cost: StageCost,
        chunk: ChunkCost,
        owner: str,
        part: str,
        moved: str,
        tensor: TensorType,
        source: Layout,
        target: Layout,
        times: Times,
        later: bool = False,
    ) -> None:
        """Charge a redistribution of what is `moved`, a field of `Pricers`, in a part of the micro-batch's time, as
        often as each pass does it for its `owner`; `later` in a backward pass says that it is put off."""
        route, hidden = self._route(moved, tensor, source, target)
        cost.micro_batch[part] += sum(times.values()) * route.seconds
        for phase, number in times.items():
            into = chunk.forward if phase == "forward" else chunk.pass_of(later=later)
            into.add(waits=number * route.seconds, hidden=number * hidden, sent=number * route.seconds)
        for message in route.messages:
            charge(cost.messages, part, owner, message, times)

    def _route(self, moved: str, tensor: TensorType, source: Layout, target: Layout) -> tuple[PricedRoute, float]:
        """A redistribution as it is charged, and the seconds of it that are hidden."""
        pricer: RedistributionPricer = getattr(self.pricers, moved)
        route = pricer.route(tensor, source, target)
        if self.whole is None:
            return route, 0.0
        whole: RedistributionPricer = getattr(self.whole, moved)
        return route, max(0.0, whole.route(tensor, source, target).seconds - route.seconds)

    def _edge(
        self, cost: StageCost, chunk: ChunkCost, owner: str, name: str, made: Duplex, wanted: Duplex, again: bool
    ) -> None:
        tensor = self.bound.graph.types[name]
        moved, there, back = "activations", (made.forward, wanted.forward), (wanted.gradient, made.gradient)
        self._move(cost, chunk, owner, "communication", moved, tensor, *there, {"forward": 1})
        if again:
            self._move(cost, chunk, owner, "recomputation", moved, tensor, *there, {"recomputation": 1})
        if name in self.bound.graph.differentiable:
            self._move(cost, chunk, owner, "communication", moved, tensor, *back, {"backward": 1})

    def _use_parameter(
        self, cost: StageCost, chunk: ChunkCost, owner: str, name: str, wanted: Duplex, again: Times, later: bool
    ) -> bool:
        """One use: the weight is gathered for the forward pass and, `again`, for the backward pass; its gradient goes
        back, `later` where it is put off. Returns whether anything is gathered."""
        tensor, stored = self.bound.graph.types[name], self.bound.parameters[name]
        part, there = "parameter gathering", (stored.weight, wanted.forward)
        self._move(cost, chunk, owner, part, "parameters", tensor, *there, {"forward": 1, **again})
        if name in self.bound.graph.differentiable and not self.update.is_local(name):
            moved, back = reduced(tensor, self.update), (wanted.gradient, stored.gradient)
            self._move(cost, chunk, owner, part, "gradients", moved, *back, {"backward": 1}, later)
        return bool(self.pricers.parameters.route(tensor, *there).messages)

    def _parameter(self, cost: StageCost, name: str, chunk: ChunkCost) -> None:
        plan, graph = self.bound.plan, self.bound.graph
        tensor, stored, trainable = graph.types[name], self.bound.parameters[name], name in graph.differentiable
        local = self.update.is_local(name)
        kind = (tensor, trainable, stored, local)
        if kind not in self._stored:
            training = plan.training
            self._stored[kind] = price_parameter(
                tensor, trainable, [stored], training.precision, training.optimizer, self.pricers, self.update, local
            )
        prices = self._stored[kind]
        if trainable and not local:
            sums, hidden = self._route("sums", summed(tensor, self.update), stored.gradient, stored.state)
            gathered, below = self._route("updated", tensor, stored.state, stored.weight)
            for part, route in (("gradient reduction", sums), ("weight gathering", gathered)):
                cost.once[part] += route.seconds
                for message in () if self.update.bucketed else route.messages:
                    charge(cost.messages, part, "", message, {"update": 1})
            chunk.reductions += hidden
            chunk.weights += below
            self._tied(cost, name)
        cost.micro_batch["gradient accumulation"] += float(prices.accumulation[0])
        chunk.pass_of(later=name in self.put_off).add(work=float(prices.accumulation[0]))
        cost.once["optimizer"] += float(prices.update[0])
        cost.memory["weights"] += float(prices.weight[0])
        cost.memory["gradients"] += float(prices.gradient[0])
        cost.memory["optimizer state"] += float(prices.state[0])

    def _tied(self, cost: StageCost, name: str) -> None:
        """A parameter used on several pipeline ranks: their gradients are summed once a step."""
        ranks = sorted({self.rank_of[at] for at in self.bound.graph.consumers.get(name, ())})
        if len(ranks) < 2:
            return
        plan, tensor = self.bound.plan, self.bound.graph.types[name]
        nbytes = summed(tensor, self.update).nbytes * local_fraction(self.bound.parameters[name].state, plan.mesh.sizes)
        seconds = tied_seconds(nbytes, ranks[-1] - ranks[0], plan.mesh.size, self.cluster)
        cost.once["gradient reduction"] += seconds
        charge(
            cost.messages, "gradient reduction", "", Message(kind="all_reduce", axis=None, nbytes=nbytes), {"update": 1}
        )

    def _crossings(self, cost: StageCost, rank: int, live: Sequence[int]) -> None:
        """What the stages of this rank receive, and what comes back of what they sent. A stage hands on what later ones
        read."""
        graph, stages, ranks = self.bound.graph, len(self.bound.plan.stages), self.bound.plan.pipeline
        for number, chunk in enumerate(cost.chunks):
            stage = number * ranks + rank
            for name in self.arriving[stage]:
                nbytes = self._transfer(cost, chunk, "forward", name, stage)
                if not self._kept_by_block(name, stage):
                    cost.memory["activations"] += live[number] * nbytes
            for name in self.arriving[stage + 1] if stage + 1 < stages else ():
                if name in graph.differentiable:
                    self._transfer(cost, chunk, "backward", name, stage + 1)

    def _kept_by_block(self, name: str, stage: int) -> bool:
        """Whether a recomputed block of a stage, which reads a value, keeps it by itself."""
        bound = self.bound
        return any(
            self.stage_of[use] == stage and bound.recompute_of(bound.blocks.block_of(use)) is not None
            for use in bound.graph.consumers[name]
        )

    def _loss(self, cost: StageCost, rank: int) -> None:
        """Every rank gets to know the loss: of every micro-batch on the last stage, of the step on the others."""
        plan, tensor = self.bound.plan, self.bound.graph.types[self.bound.graph.loss]
        if self.rank_of[self.bound.graph.producer[self.bound.graph.loss]] == rank:
            made = self._made(self.bound.graph.loss).forward
            known = self.pricers.activations.route(tensor, made, replicated(len(plan.mesh.axes)))
            for message in known.messages:
                charge(cost.messages, UNCHARGED, "", message, {"forward": 1})
        if plan.pipeline > 1:
            charge(cost.messages, UNCHARGED, "", Message(kind="all_reduce", axis=None, nbytes=4.0), {"update": 1})

    def _works(self, at: int) -> bool:
        """Whether an operator of a recomputed block is computed once more."""
        block = self.bound.blocks.block_of(at)
        return block is not None and self.bound.place_of(at) < self.replays[self.bound.blocks.kinds[block]].works

    def _moves(self, at: int) -> bool:
        """Whether it gets its operands once more."""
        block = self.bound.blocks.block_of(at)
        return block is not None and self.bound.place_of(at) < self.replays[self.bound.blocks.kinds[block]].moves

    def _chunk(self, at: int) -> int:
        """Which of the chunks of its rank an operator is in."""
        return self.stage_of[at] // self.bound.plan.pipeline

    def _transfer(self, cost: StageCost, chunk: ChunkCost, phase: Phase, name: str, stage: int) -> float:
        """Charge a value that crosses from the stage before into `stage`, or its gradient that goes back, in the pass
        that waits for it; returns its bytes on a device."""
        ranks = self.bound.plan.pipeline
        distance = 1 if stage % ranks else ranks - 1  # from the last rank back to the first
        tensor, mesh = self.bound.graph.types[name], self.bound.plan.mesh
        nbytes = tensor.nbytes * local_fraction(self._made(name).forward, mesh.sizes)
        seconds = transfer_seconds(nbytes, distance * mesh.size, self.cluster)
        cost.micro_batch["stage transfer"] += seconds
        (chunk.forward if phase == "forward" else chunk.backward).add(waits=seconds)
        charge(cost.messages, "stage transfer", "", Message(kind="send_recv", axis=None, nbytes=nbytes), {phase: 1})
        return nbytes

    def _made(self, name: str) -> Duplex:
        """Layouts in which a value is made."""
        bound = self.bound.operators[self.bound.graph.producer[name]]
        results = [result for result in bound.operator.results if result is not None]
        return bound.layouts.results[results.index(name)]

    def _price(self, bound: BoundOperator, without: Sequence[int] = (), *, counted: bool = True) -> OperatorPrices:
        """Prices of an operator, `without` the gradients of some operands; its work is the model's where `counted`."""
        graph, rule, op = self.bound.graph, bound.rule, bound.operator
        graded = tuple(name in graph.differentiable and i not in without for i, name in enumerate(op.operands))
        key = (id(rule), bound.strategy, graded)
        if key not in self._prices:
            types = ([graph.types[n] for n in op.operands], [graph.types[n] for n in op.results if n is not None])
            self._prices[key] = price_operator(
                rule, [bound.strategy], *types, graded, self.bound.plan.mesh, self.cluster
            )
        alone = (id(rule), graded)
        if alone not in self._alone:
            self._alone[alone] = _whole_flops(rule, graded)
        seen = self.bound.plan.slices if rule.op_class == "attention" else 1  # of them a slice reads half, in the mean
        self.flops += self._alone[alone] * seen if counted else 0.0
        return self._prices[key]


def _save(chunk: ChunkCost, name: str, seconds: float) -> None:
    """Take from a pass what a host saves by launching ahead; of a backward pass that is taken apart from both turns, in
    proportion to their work."""
    if name == "forward":
        chunk.forward.add(work=-seconds)
        return
    later = 0.0 if chunk.later is None else chunk.later.work
    share = later / (chunk.backward.work + later) if later else 0.0
    chunk.backward.add(work=-seconds * (1 - share))
    if chunk.later is not None:
        chunk.later.add(work=-seconds * share)


def _handed_alone(graph: OperatorGraph, blocks: Blocks) -> bool:
    """Whether what follows the blocks reads of the last one only what every block of its kind hands to the next."""
    if blocks.count < 2:
        return False
    handed, left = set(), set()
    for block in range(1, blocks.count):
        for at in blocks.operators(block):
            made = {graph.producer.get(name, -1) for name in graph.operators[at].operands}
            handed |= {blocks.template(one) for one in made if blocks.start <= one < blocks.borders[block]}
    for op in graph.operators[blocks.stop :]:
        left |= {graph.producer[n] for n in op.operands if n in graph.producer and n in graph.data_dependent}
    return {blocks.template(at) for at in left if blocks.start <= at < blocks.stop} <= handed


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


def transfer_seconds(nbytes: float, stride: int, cluster: Cluster) -> float:
    """Sending one tensor of `nbytes` per device to the device so many further on: those of a pipeline rank, to the
    next one."""
    return float(collective_time("send_recv", nbytes, cluster.group(2, stride)))


def tied_seconds(nbytes: float, distance: int, stage_devices: int, cluster: Cluster) -> float:
    """Summing the gradient of a parameter that two stages, `distance` apart, both hold."""
    return float(collective_time("all_reduce", nbytes, cluster.group(2, distance * stage_devices)))
