"""The judge's walk over a bound plan: one pipeline rank after the other, operator by operator.

Nothing is folded, tabulated or shared between ranks (see `planner.plan.prediction.predict`). A block that is recomputed
keeps what flows into it and what its kept operators have made for every micro-batch in flight, and the rest while its
own backward pass runs: one block of a rank at a time. What the operators after the blocks keep is gone before the
backward pass of a block begins: it counts as one more such block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from costmodels import away_seconds, offloaded_bytes
from hardware_profiles import Bytes, Cluster, Group, Hidden, Home, Machine, Seconds, clusters_of_ranks, links_of_ranks
from planner.graph.blocks import IDENTITY, Blocks
from planner.graph.operator_graph import OperatorGraph, TensorType
from planner.plan.binding.bind import BoundOperator, BoundPlan, stage_of_operators
from planner.plan.binding.slices import earlier_keys
from planner.plan.layout.deferred_weight_gradients import deferred_weight_gradients
from planner.plan.layout.offloaded import tables_on_hosts, visiting_order
from planner.plan.layout.per_step_communication import once_of
from planner.plan.layout.saved_tensor_offload import read_elsewhere
from planner.plan.layout.segments import Segment, segments_by_stage
from planner.plan.layout.stage_cut import crossing_values
from planner.plan.layout.weight_offload import block_of_offloaded
from planner.plan.prediction.charges import UNCHARGED, Phase, Times, charge
from planner.plan.prediction.coalesced_collectives import Together
from planner.plan.prediction.stage_cost import GATHERING, StageCost, tied_seconds, transfer_seconds
from planner.plan.prediction.step import ChunkCost, PassCost
from planner.plan.schedule import in_flight_of, most_deferred, updates_of, weight_versions, whole_in_flight
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
from planner.pricing.parameter_price import gathered_at_once, reduced, summed
from planner.pricing.redistribution_price import PricedRoute
from planner.sharding.layout import Layout, local_fraction, replicated
from planner.sharding.rule import Duplex, Rule
from planner.sharding.stored import StoredParameter

BEFORE, AFTER = -2, -1
"""What stands before and after the blocks, where blocks are numbered."""


def hides(cluster: Machine) -> bool:
    """Whether the software hides any communication."""
    return cluster.software.hidden != Hidden()


@dataclass(kw_only=True)
class Walk:
    """Operator by operator over the graph of a bound plan, by the prices of one cluster, which may be one group of the
    `machine`. For those who take a prediction apart (`planner.plan.compare.dissection`)."""

    bound: BoundPlan
    cluster: Cluster
    machine: Machine | None = None

    def __post_init__(self) -> None:
        graph, plan = self.bound.graph, self.bound.plan
        self._machine = self.cluster if self.machine is None else self.machine
        self.update = plan.training.update
        self.pricers = Pricers.of(plan.mesh, self.cluster, self.update)
        software = self.cluster.software
        self.whole: Pricers | None = None  # with the seconds that are hidden
        if hides(self.cluster):
            bare = replace(software, hidden=Hidden())
            self.whole = Pricers.of(plan.mesh, self.cluster.with_software(bare), self.update)
        self.alive = liveness(graph, software.fused, software.loss)
        blocks = self.bound.blocks
        self.replays = replays(graph, blocks, software.whole_blocks)
        self.ending = blocks.stop if _handed_alone(graph, blocks) else len(graph.operators)
        self.stage_of = stage_of_operators(self.bound)
        self.arriving = crossing_values(graph, self.stage_of, len(plan.stages))
        self.rank_of = {at: stage % plan.pipeline for at, stage in self.stage_of.items()}
        self._prices: dict[tuple[int, object, tuple[bool, ...]], OperatorPrices] = {}
        self._hosted = bool(self.cluster.device.host_latency * self.cluster.software.host)
        self._alone: dict[tuple[int, tuple[bool, ...]], float] = {}
        self._stored: dict[tuple[TensorType, bool, StoredParameter, bool], ParameterPrices] = {}
        self.begin(self.bound)

    def begin(self, bound: BoundPlan) -> None:
        """Start over, perhaps with the same plan under another schedule."""
        self.bound = bound
        self.deferred_weight_gradients = {
            op.operator.operands[place]
            for at, op in enumerate(self.bound.operators)
            for place in deferred_weight_gradients(self.bound, at)
        }
        self.waiting = 0
        self.flops = 0.0
        stages = segments_by_stage(bound)
        self.segments = {
            at: segment
            for stage, segments in enumerate(stages)
            for segment in segments
            for at in segment.operators
            if self.stage_of[at] == stage
        }
        self.together = Together(bound=bound, stages=stages, cluster=self.cluster, pricers=self.pricers)

    def rank(
        self,
        rank: int,
        live: Sequence[int] | None = None,
        after: Callable[[int, StageCost, Mapping[int, float]], None] = lambda at, cost, at_once: None,
    ) -> StageCost:
        """Walk the operators of all stages of one pipeline rank, with `live` micro-batches in flight in each chunk,
        where these are not those of the schedule. `after` each operator somebody may look at the sums so far, and at
        the bytes of each block that are there while its backward pass runs."""
        plan, operators = self.bound.plan, self.bound.operators
        interleave = plan.training.interleave
        held = plan.stages[rank :: plan.pipeline]
        cost = StageCost(
            chunks=[
                ChunkCost(
                    blocks=stage.blocks,
                    later=PassCost() if plan.schedule_kind.splits_backward else None,
                    interleave=interleave,
                    slices=plan.slices,
                )
                for stage in held
            ]
        )
        self.waiting = most_deferred(plan, rank) if plan.schedule_kind.splits_backward else 0
        live = in_flight_of(plan, rank) if live is None else live
        seen: set[str] = set()  # what flows into blocks
        at_once: dict[int, float] = {}
        own = [at for at in range(len(operators)) if self.rank_of[at] == rank]
        for at in own:
            chunk = cost.chunks[self._chunk(at)]
            passes = [chunk.forward, chunk.backward] if interleave > 1 else []
            before = [one.taken for one in passes]
            self._operator(cost, at, live[self._chunk(at)], seen, at_once)
            for one, taken in zip(passes, before, strict=True):
                one.close(taken)
            after(at, cost, at_once)
        cost.memory["transient"] *= interleave
        cost.memory["transient"] += self.cluster.software.buffers
        for (number, _, name), launches in cost.launches.items():
            _save(cost.chunks[number], name, launches.ahead)
            cost.ahead += launches.ahead
        used = {name: self._chunk(at) for at in reversed(own) for name in operators[at].operator.operands}
        for stage in range(rank, len(plan.stages), plan.pipeline):
            self.together.end_stage(cost, cost.chunks[stage // plan.pipeline], stage)
        blocks = block_of_offloaded(self.bound, [name for name in used if name in self.bound.parameters])
        for parameter in self.bound.graph.parameters:  # in a fixed order: sums must not depend on hashes
            if parameter.name in used:
                nbytes = self._parameter(
                    cost, parameter.name, cost.chunks[used[parameter.name]], blocks.get(parameter.name)
                )
                if parameter.name in blocks:
                    at_once[blocks[parameter.name]] = at_once.get(blocks[parameter.name], 0.0) + nbytes
        cost.memory["activations"] += interleave * max(at_once.values(), default=0.0)
        for number, chunk in enumerate(cost.chunks):
            cost.end_fetches(chunk, sorted({blocks[name] for name in blocks if used[name] == number}))
        cost.end_values()
        cost.end_visits(visiting_order(self.bound, used))
        if nbytes := tables_on_hosts(self.bound):
            cost.offloaded["host"] += nbytes
        once = once_of(self.bound, used, self.cluster, self.pricers, self._machine)
        for part, seconds in once.seconds.items():
            cost.beyond[part] += seconds
        for (part, message), times in once.messages.items():
            charge(cost.messages, part, "", message, {"update": times})
        cost.memory["transient"] += once.flat
        self._updates(cost, rank)
        self._crossings(cost, rank, live)
        self._loss(cost, rank)
        return cost

    def _updates(self, cost: StageCost, rank: int) -> None:
        """Schedules without a flush may update with every micro-batch, and hold weights that others still read."""
        plan = self.bound.plan
        cost.memory["weights"] *= weight_versions(plan, rank)
        if (times := updates_of(plan)) > 1:
            cost.once = {part: times * seconds for part, seconds in cost.once.items()}
            cost.beyond = {part: times * seconds for part, seconds in cost.beyond.items()}
            for chunk in cost.chunks:
                chunk.reductions, chunk.weights = times * chunk.reductions, times * chunk.weights
            for sent in [sent for sent in cost.messages if sent.phase == "update"]:
                cost.messages[sent] *= times

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
        segment = self.segments[at]
        home, away = segment.home_of_saved, []  # bytes that are offloaded
        if block is not None and home != "device":
            others = (i for i in own if read_elsewhere(self.bound, results[i], block))
            away.append(kept - sum(float(prices.results[i][0]) for i in others))
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
        later = deferred_weight_gradients(self.bound, at)
        if later:
            self._defer(cost, chunk, at, prices, later, seen)
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
                ahead = gathered_at_once(self.cluster.software, self.update)
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
                copied = self._kept_copy(name, made, wanted, nbytes) if i in saved else 0.0
                whole = copied + (min(nbytes, self._local_bytes(name, made.forward)) if pieces else 0.0)
                kept += whole
                if home != "device":
                    inside = self.bound.blocks.block_of(graph.producer[name]) == block
                    away.append(whole if inside else copied if self._is_copy(name, made, wanted, nbytes) else 0.0)
                if again and self.bound.blocks.block_of(graph.producer[name]) != block and name in graph.differentiable:
                    kept += self._checkpoint(cost, at, name, made.forward, live, seen, segment)
        if block is not None and away:
            kept -= sum(away)
            at_once[block] = at_once.get(block, 0.0) + offloaded_bytes(sum(away))
            for nbytes in away:
                self._offload(cost, at, block, home, live, nbytes)
        brief = at >= self.ending  # the backward pass of what follows the blocks comes first, and frees what it kept
        if again or brief:
            where = block if block is not None else AFTER
            at_once[where] = at_once.get(where, 0.0) + kept
            cost.memory["activations"] += 0.0 if again else kept * (live - self.bound.plan.training.interleave)
        else:
            cost.memory["activations"] += kept * live
        cost.memory["transient"] = max(cost.memory["transient"], transient)

    def _offload(self, cost: StageCost, at: int, block: int, home: Home, live: int, nbytes: Bytes) -> None:
        """Charge for what a block offloads of a micro-batch, of which so many are `live`."""
        if nbytes > 0:
            latency = self.cluster.device.launch_latency
            fetch, store = away_seconds(nbytes, self.cluster.store(home), latency)
            cost.offload_values((self._chunk(at), block), home, live * nbytes, (float(fetch), float(store)))

    def _defer(
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

    def _is_copy(self, name: str, made: Duplex, wanted: Duplex, nbytes: float) -> bool:
        """Whether what a reader keeps of a value is memory of its own, and not that of the value."""
        pieces = self.cluster.software.regathers and self._local_bytes(name, made.forward) < nbytes
        return made.forward != wanted.forward and not pieces

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
        gradients = plan.training.interleave * max(4, element) / element
        cost.memory["activations"] += plan.slices * keys * (begun + gradients)

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
        self,
        cost: StageCost,
        at: int,
        name: str,
        layout: Layout,
        live: int,
        seen: set[str],
        segment: Segment,
    ) -> float:
        """A recomputed block keeps what flows into it; returns the bytes of what it offloads that are on the device at
        a time, its own and those of a neighbour."""
        key = f"{segment.block}<-{name}"
        if key in seen:
            return 0.0
        seen.add(key)
        nbytes = self.bound.graph.types[name].nbytes * local_fraction(layout, self.bound.plan.mesh.sizes)
        if segment.block is None or name not in segment.offloads:
            cost.memory["activations"] += live * nbytes
            return 0.0
        self._offload(cost, at, segment.block, segment.home, live, nbytes)
        return float(offloaded_bytes(nbytes))

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
        beyond: Seconds | None = 0.0,
    ) -> None:
        """Charge a redistribution of what is `moved`, a field of `Pricers`, in a part of the micro-batch's time, as
        often as each pass does it for its `owner`; `later` in a backward pass says that it is put off. Its messages
        take so much `beyond` the additive sums, each time; None for those that are somebody else's."""
        route, hidden = self._route(moved, tensor, source, target)
        cost.micro_batch[part] += sum(times.values()) * route.seconds
        for phase, number in times.items():
            into = chunk.forward if phase == "forward" else chunk.pass_of(later=later)
            sent = 0.0 if self.bound.plan.mesh.zigzag else number * route.seconds  # what is reordered is waited for
            more = number * (beyond or 0.0)
            into.add(waits=number * route.seconds + more, hidden=number * hidden, sent=sent)
            cost.together += more
        for message in route.messages if beyond is not None else ():
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
        back, `later` where it is put off. Returns whether anything is gathered, or waits to be reduced with others."""
        tensor, stored = self.bound.graph.types[name], self.bound.parameters[name]
        there, times = (stored.weight, wanted.forward), {"forward": 1, **again}
        self._gather(cost, chunk, owner, name, "parameters", tensor, *there, times)
        gathered = bool(self.pricers.parameters.route(tensor, *there).messages)
        if name in self.bound.graph.differentiable and not self.update.is_local(name):
            moved, back = reduced(tensor, self.update), (wanted.gradient, stored.gradient)
            self._gather(cost, chunk, owner, name, "gradients", moved, *back, {"backward": 1}, later)
            gathered |= self.update.by_block and bool(self.pricers.gradients.route(moved, *back).messages)
        return gathered

    def _gather(
        self,
        cost: StageCost,
        chunk: ChunkCost,
        owner: str,
        name: str,
        moved: str,
        tensor: TensorType,
        source: Layout,
        target: Layout,
        times: Times,
        later: bool = False,
    ) -> None:
        """Charge a weight, or its gradient, that moves for one use; messages of those that go together are nobody's."""
        pricer: RedistributionPricer = getattr(self.pricers, moved)
        beyond = self.together.use(pricer, name, pricer.route(tensor, source, target), times)
        self._move(cost, chunk, owner, GATHERING, moved, tensor, source, target, times, later, beyond)

    def _parameter(self, cost: StageCost, name: str, chunk: ChunkCost, block: int | None) -> float:
        """A parameter of a rank, whose weight is offloaded where its `block` is given; returns the bytes of what visits
        the device while this block runs."""
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
        chunk.pass_of(later=name in self.deferred_weight_gradients).add(work=float(prices.accumulation[0]))
        cost.once["optimizer"] += float(prices.update[0])
        cost.memory["weights"] += float(prices.weight[0])
        cost.memory["gradients"] += float(prices.gradient[0])
        cost.memory["optimizer state"] += float(prices.state[0])
        if stored.offloaded and trainable:
            cost.offload(name, prices, stored.state_home)
        if block is not None:
            cost.offload_weight(block, prices, stored.weight_home)
        if not plan.schedule_kind.flushes and trainable and tensor.dtype == "float32":  # no master is a view there
            cost.memory["optimizer state"] += tensor.nbytes * local_fraction(stored.state, plan.mesh.sizes)
        return float(prices.visiting[0])

    def _tied(self, cost: StageCost, name: str) -> None:
        """A parameter used on several pipeline ranks: their gradients are summed once a step."""
        ranks = sorted({self.rank_of[at] for at in self.bound.graph.consumers.get(name, ())})
        if len(ranks) < 2:
            return
        plan, tensor = self.bound.plan, self.bound.graph.types[name]
        nbytes = summed(tensor, self.update).nbytes * local_fraction(self.bound.parameters[name].state, plan.mesh.sizes)
        seconds = tied_seconds(nbytes, self._links(ranks[0], ranks[-1]))
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
        tensor, mesh = self.bound.graph.types[name], self.bound.plan.mesh
        nbytes = tensor.nbytes * local_fraction(self._made(name).forward, mesh.sizes)
        seconds = transfer_seconds(nbytes, self._links((stage - 1) % ranks, stage % ranks))
        cost.micro_batch["stage transfer"] += seconds
        into = chunk.forward if phase == "forward" else chunk.backward
        into.add(waits=seconds)
        into.transfers += seconds
        charge(cost.messages, "stage transfer", "", Message(kind="send_recv", axis=None, nbytes=nbytes), {phase: 1})
        return nbytes

    def _links(self, one: int, other: int) -> tuple[Group, ...]:
        """The links between two pipeline ranks."""
        plan = self.bound.plan
        return links_of_ranks(self._machine, one, other, plan.pipeline, plan.mesh.size)

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


def walks_of(bound: BoundPlan, machine: Machine) -> tuple[Walk, ...]:
    """For every pipeline rank the walk by the prices of the devices that it is on; ranks of one group share it."""
    clusters = clusters_of_ranks(machine, bound.plan.pipeline)
    known = {cluster: Walk(bound=bound, cluster=cluster, machine=machine) for cluster in dict.fromkeys(clusters)}
    return tuple(known[cluster] for cluster in clusters)


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
