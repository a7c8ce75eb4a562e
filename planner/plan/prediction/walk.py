"""The judge's walk over a bound plan: one pipeline rank after the other, operator by operator.

Nothing is tabulated or shared between ranks (see `planner.plan.prediction.predict`). A recomputed block keeps its
inputs, and the results of its kept operators, for every micro-batch in flight; everything else lives during its own
backward pass: one block of a rank at a time. The operators after the blocks free what they keep before the backward
pass of a block begins, so they count as one more such block.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import cast

from costmodels import counts_at_moments, fullest_moment
from hardware_profiles import (
    PYTORCH,
    Bytes,
    Cluster,
    Group,
    Hidden,
    Machine,
    Seconds,
    clusters_of_ranks,
    links_of_ranks,
)
from planner.errors import RequestError
from planner.faults import refuse
from planner.graph.blocks import Blocks
from planner.graph.fp8 import history_bytes, scales_of
from planner.graph.operator_graph import OperatorGraph, TensorType
from planner.plan.binding.bind import BoundOperator, BoundPlan, stage_of_operators
from planner.plan.binding.slices import work_of_slices
from planner.plan.layout.block_gathers import run_of
from planner.plan.layout.deferred_weight_gradients import deferred_weight_gradients
from planner.plan.layout.expert_overlap import ExpertOverlap, expert_overlaps_of
from planner.plan.layout.matrix_groups import matrix_groups
from planner.plan.layout.micro_batch_turns import turns_of_stages
from planner.plan.layout.offloaded import tables_on_hosts, visiting_order
from planner.plan.layout.overlapped_products import Overlap, overlaps_of
from planner.plan.layout.parameter_owners import Owner, owners_of, pushes_of
from planner.plan.layout.per_step_communication import once_of
from planner.plan.layout.segments import Segment, segments_by_stage
from planner.plan.layout.shared_parameters import shared_parameters
from planner.plan.layout.stage_cut import crossing_values
from planner.plan.layout.weight_offload import block_of_offloaded
from planner.plan.offload_checks import owners_fault
from planner.plan.prediction.bucket_overlap import slots_of
from planner.plan.prediction.charges import UNCHARGED, Phase, Times, charge
from planner.plan.prediction.coalesced_collectives import Together
from planner.plan.prediction.exchange_overlap import ExchangeOverlap
from planner.plan.prediction.gradient_moments import GradientMoments
from planner.plan.prediction.operator_visit import OperatorVisit
from planner.plan.prediction.price_book import price_books
from planner.plan.prediction.product_overlap import ProductOverlap
from planner.plan.prediction.repeated_blocks import BlockSums, InFlight
from planner.plan.prediction.stage_cost import (
    ACCUMULATION,
    GATHERING,
    REDUCING,
    StageCost,
    holders_of,
    tied_seconds,
    transfer_seconds,
)
from planner.plan.prediction.step import ChunkCost, PassCost, further_ahead
from planner.plan.schedule import Moment, moments_of, runs_in_pairs, updates_of, weight_versions
from planner.pricing import (
    OperatorPrices,
    ParameterPrices,
    RedistributionPricer,
    price_operator,
    price_parameter,
)
from planner.pricing.liveness import liveness, replays
from planner.pricing.matrix_update import most_bytes, seconds_of_one, stack_messages
from planner.pricing.message import Message
from planner.pricing.model_flops import whole_flops
from planner.pricing.narrow_weights import in_8_bits
from planner.pricing.parameter_price import launch_seconds, reduced, summed
from planner.pricing.redistribution_price import PricedRoute
from planner.sharding.layout import Layout, local_share, replicated
from planner.sharding.matrices import optimizer_of
from planner.sharding.rule import Duplex


def hides(cluster: Machine) -> bool:
    """Whether the software overlaps any communication."""
    return cluster.software.hidden != Hidden()


@dataclass(kw_only=True)
class Walk:
    """Walks over the graph of a bound plan, operator by operator, with the prices of one cluster, which may be one
    group of the `machine`. Also used to take a prediction apart (`planner.plan.compare.dissection`)."""

    bound: BoundPlan
    stages: Sequence[Sequence[Segment]]
    cluster: Cluster
    machine: Machine | None = None
    known_overlaps: Sequence[Overlap] | None = None

    def __post_init__(self) -> None:
        graph, plan = self.bound.graph, self.bound.plan
        self._machine = self.cluster if self.machine is None else self.machine
        self.update, self.bucketed = plan.training.update, plan.training.update.bucketed
        software, blocks = self.cluster.software, self.bound.blocks
        self.book, self.once = price_books(self.bound, self.cluster)
        self.pricers = self.once.pricers[0][0]
        self.alive = liveness(graph, software)
        self.replays = replays(graph, blocks, software.whole_blocks)
        self.ending = blocks.stop if _handed_alone(graph, blocks) else len(graph.operators)
        self.stage_of = stage_of_operators(self.bound)
        self.arriving = crossing_values(self.bound)
        pipeline = plan.pipeline
        ranks = [plan.rank_of(stage) for stage in range(len(plan.stages))]
        self.rank_of = {at: ranks[stage] for at, stage in self.stage_of.items()}
        self.chunk_of = {at: stage // pipeline for at, stage in self.stage_of.items()}  # the chunk of its rank
        device = self.cluster.device
        self.hosted = bool(device.host_latency * software.host) and not device.in_line
        self.gathers_in_autograd = software.name == PYTORCH.name  # a saved weight is gathered when autograd unpacks it
        self.counted = software.counts_rows and any(op.rule.op_class == "experts" for op in self.bound.operators)
        self.owners: Mapping[str, Owner] = {}  # of whole optimizer states of the rank
        self.tied, self.share_overlapped = shared_parameters(self.bound), self.cluster.device.overlapped
        self._made: dict[str, Duplex] = {}
        self._travels: dict[object, tuple[PricedRoute, Seconds, PricedRoute, Seconds]] = {}  # once a step, by kind
        self.products, self.exchanges = ProductOverlap(walk=self), ExchangeOverlap(walk=self)
        self.begin(self.bound, self.stages, self.known_overlaps)

    def begin(
        self, bound: BoundPlan, stages: Sequence[Sequence[Segment]], overlaps: Sequence[Overlap] | None = None
    ) -> None:
        """Start over with the same plan under another schedule, with the segments of its stages, and its overlaps if
        known."""
        self.bound = bound
        self.defers, self.flushes = bound.plan.schedule_kind.splits_backward, bound.plan.schedule_kind.flushes
        self.in_pairs = runs_in_pairs(bound.plan)
        self.takes_turns = self.in_pairs or bound.plan.training.interleave > 1
        self.deferred_weight_gradients = {
            op.operator.operands[place]
            for at, op in enumerate(self.bound.operators if self.defers else ())
            for place in deferred_weight_gradients(self.bound, at)
        }
        self.thens = turns_of_stages(bound, stages)
        self.waiting, self.turns = 0, False
        self.scaled = scales_of(bound.graph)
        self.flops = 0.0
        overlaps = overlaps_of(bound) if overlaps is None else overlaps
        self.overlapped = {(one.reader, one.place) for one in overlaps}
        self.overlaps: dict[int, list[Overlap]] = {}
        for one in overlaps:
            self.overlaps.setdefault(one.at, []).append(one)
        self.runs = {at: bound.operators[one.at].operator.name for one in overlaps for at in one.early}
        experts = expert_overlaps_of(bound, overlaps)
        self.in_parts: dict[int, ExpertOverlap] = {one.at: one for one in experts}
        self.beside = frozenset(at for one in experts for at in one.beside)
        self.segments = {
            at: segment
            for stage, segments in enumerate(stages)
            for segment in segments
            for at in segment.operators
            if self.stage_of[at] == stage
        }
        self.together = Together(
            bound=bound, stages=stages, cluster=self.cluster, pricers=self.pricers, works=self._work
        )

    def rank(
        self,
        rank: int,
        moments: Sequence[Moment] | None = None,
        after: Callable[[int, StageCost, Mapping[int, float]], None] = lambda at, cost, at_once: None,
        *,
        keys: Mapping[int, object] = MappingProxyType({}),
    ) -> StageCost:
        """Walk the operators of all stages of one pipeline rank.

        The rank holds most at one of the `moments`, by default those of the schedule. `after` is called behind each
        operator, with the sums so far, and the bytes of each block that live during its backward pass. Blocks with the
        same `keys` add the same, in any plan for the graph; their messages are not listed."""
        plan, operators = self.bound.plan, self.bound.operators
        training, interleave = plan.training, plan.training.interleave
        held = [plan.stages[stage] for stage in plan.stages_of(rank)]
        cost = StageCost(
            chunks=[
                ChunkCost(
                    blocks=stage.blocks,
                    later=PassCost() if plan.schedule_kind.splits_backward else None,
                    interleave=interleave,
                    slices=plan.slices,
                    paired=self.in_pairs,
                    receives_ahead=self.cluster.software.name == PYTORCH.name,
                )
                for stage in held
            ]
        )
        moments = moments_of(plan, rank) if moments is None else moments
        live, waiting = (
            [counts_at_moments(counts) for counts in zip(*rows, strict=True)] for rows in zip(*moments, strict=True)
        )
        seen: set[str] = set()  # inputs of blocks
        at_once: dict[int, float] = {}
        moment = GradientMoments()
        own = [at for at in range(len(operators)) if self.rank_of[at] == rank]
        numbers, last = self.bound.blocks.numbers, -1
        for at in own:
            block, number = numbers.get(at, -1), self.chunk_of[at]
            if block in keys:
                if block != last:
                    key = keys[block]
                    if key not in self.book.blocks:
                        self.book.blocks[key] = self._written(block, number)
                    written = self.book.blocks[key]
                    place = (self.stage_of[at], number)
                    counts = live[number], waiting[number]
                    with moment.of(cost.memory, inside=True):
                        written.add(cost, at_once, self.together.charged, block, place, counts)
                    for flops in written.flops:
                        self.flops += flops
                last = block
                continue
            chunk = cost.chunks[number]
            passes = [chunk.forward, chunk.backward] if self.takes_turns else []
            before = [one.taken for one in passes]
            if passes and self.segments.get(at) is not self.segments.get(at - 1):  # forward, each runs for all
                chunk.forward.borders.append(len(chunk.forward.operators))
            self.waiting, self.turns = waiting[number], False
            with moment.of(cost.memory, inside=block >= 0):
                self._visit(cost, at, live[number], seen, at_once)
            backs = self.exchanges.left_back(self.in_parts.get(at)) if passes else ()
            for one, taken, back in zip(passes, before, backs, strict=True):
                one.close(taken, back, turns=self.turns, then=self.thens.get(at, "work"))
            after(at, cost, at_once)
        first = {name: at for at in reversed(own) for name in operators[at].operator.operands}
        used = {name: self.chunk_of[at] for name, at in first.items()}
        self.owners = owners_of(self.bound, used)
        parameters = [one.name for one in self.bound.graph.parameters if one.name in used]
        for name in parameters:
            self._launch_accumulation(cost, name, first[name])
        cost.memory["transient"] *= 2 if self.in_pairs else interleave
        cost.memory["transient"] += self.cluster.software.buffers
        alone = plan.pipeline == 1 and not self.counted
        further = further_ahead(cost.launches.values(), training.micro_batches) if alone else 0.0
        for (number, _, name), launches in cost.launches.items():
            saved = launches.ahead + further * (launches.late - launches.ahead)
            cost.chunks[number].save(name, saved)
            cost.ahead += saved
        for stage in plan.stages_of(rank):
            self.together.end_stage(cost, cost.chunks[stage // plan.pipeline], stage)
        blocks = block_of_offloaded(self.bound, [name for name in used if name in self.bound.parameters])
        for name in parameters:  # a fixed order, so that sums do not depend on hashes
            nbytes = self._parameter(cost, name, cost.chunks[used[name]], blocks.get(name))
            if name in blocks:
                at_once[blocks[name]] = at_once.get(blocks[name], 0.0) + nbytes
        gathers = self.in_pairs and plan.training.update.by_block  # a block for each of two passes
        moment.kept, moment.at_once = cost.memory["activations"], at_once
        cost.memory["activations"] += (2 if gathers else interleave) * max(at_once.values(), default=0.0)
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
        if self.cluster.software.name == PYTORCH.name and not self.update.served:
            for number, slots in slots_of(self.bound, used, once.early, lambda one: self._backward(one, keys)).items():
                cost.chunks[number].buckets = tuple(self.cluster.device.overlapped * seconds for seconds in slots)
        matrices = self._matrices(cost, used)
        self._updates(cost, rank)
        self._crossings(cost, rank, live)
        self._loss(cost, rank)
        cost.memory["activations"], number = fullest_moment(cost.memory["activations"])
        passing = cost.memory["activations"] + cost.memory["transient"]
        cost.memory["transient"] += max(0.0, matrices - passing)
        cost.fullest = moments[number]
        if self.cluster.software.frees_gradients and plan.pipeline == 1 and self.bound.graph.trains:
            moment.hold(cost, self.bound, self.cluster.software)
        return cost

    def _matrices(self, cost: StageCost, held: Collection[str]) -> Bytes:
        """Matrices that are updated together: their collectives, and the seconds of unused places of a stack; returns
        the bytes that live meanwhile, when everything of a micro-batch is freed."""
        mesh, most = self.bound.plan.mesh, 0.0
        for group in matrix_groups(self.bound, held, mesh.coordinate(mesh.size // 2)):
            for message in stack_messages(group.stack, self.pricers):
                charge(cost.messages, "optimizer", "", message, {"update": 1})
            if group.spare:
                tensor, launched = self.bound.graph.types[group.names[0]], launch_seconds(self.cluster)
                each = seconds_of_one(tensor, group.stored.state, self.pricers, launched)
                cost.beyond["optimizer"] += group.spare * each
            most = max(most, most_bytes(group.stack, mesh.sizes))
        return most

    def _visit(self, cost: StageCost, at: int, live: int, seen: set[str], at_once: dict[int, float]) -> None:
        visit = OperatorVisit(self, cost, at, live, seen, at_once)
        visit.work()
        visit.communicate()
        visit.hold()

    def _written(self, block: int, number: int) -> BlockSums:
        """What the operators of a block of a chunk add to the sums."""
        written, flops, charged = BlockSums(block=block, chunk=number), self.flops, self.together.charged
        self.together.charged, seen = written.charged, set[str]()
        live = cast(int, InFlight())  # records what is done with the number in flight
        self.waiting = cast(int, InFlight(deferred=True))
        for at in self.bound.blocks.operators(block):
            self.flops = 0.0
            self._visit(written.cost, at, live, seen, written.at_once)
            written.flops.append(self.flops)
        self.flops, self.together.charged = flops, charged
        written.backward = self._backward_seconds(block)
        return written

    def _work(self, at: int) -> tuple[Seconds, Seconds]:
        """Seconds of both passes of an operator."""
        prices = self.price(self.bound.operators[at], counted=False)
        return float(prices.forward[0]), float(prices.backward[0])

    def _backward(self, block: int, keys: Mapping[int, object]) -> Sequence[Seconds]:
        """As `_backward_seconds`, recorded once for blocks with the same key."""
        written = self.book.blocks.get(keys[block]) if block in keys else None
        return self._backward_seconds(block) if written is None else written.backward

    def _backward_seconds(self, block: int) -> Sequence[Seconds]:
        """Seconds of the backward pass of each operator of a block, with its own collectives."""
        prices = [self.price(self.bound.operators[at], counted=False) for at in self.bound.blocks.operators(block)]
        return [float(one.backward[0] + one.inner_backward[0]) for one in prices]

    def _updates(self, cost: StageCost, rank: int) -> None:
        """Schedules without a flush may update after every micro-batch, and hold several versions of weights."""
        plan = self.bound.plan
        cost.memory["weights"] *= weight_versions(plan, rank)
        if (times := updates_of(plan)) > 1:
            cost.once = {part: times * seconds for part, seconds in cost.once.items()}
            cost.beyond = {part: times * seconds for part, seconds in cost.beyond.items()}
            cost.copied *= times
            for chunk in cost.chunks:
                chunk.reductions, chunk.weights = times * chunk.reductions, times * chunk.weights
            for sent in [sent for sent in cost.messages if sent.phase == "update"]:
                cost.messages[sent] *= times

    def move(
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
        run: int = 0,
    ) -> None:
        """Charge a redistribution of a tensor of kind `moved`, a field of `Pricers`, to a part of the micro-batch's
        time, as often as each pass does it for its `owner`. In a backward pass, `later` says that it is deferred.
        `beyond` are the seconds of its collectives in addition to the additive sums, each time; None if its collectives
        are counted elsewhere. `run` is the kind of run with which it is coalesced."""
        route, hidden = self.route(moved, tensor, source, target, run)
        if not (route.messages or route.seconds or hidden or beyond):
            return
        cost.micro_batch[part] += sum(times.values()) * route.seconds
        for phase, number in times.items():
            into = chunk.forward if phase == "forward" else chunk.pass_of(later=later)
            waits = self.bound.plan.mesh.zigzag or self.in_pairs  # zigzag reorders; in pairs only experts yield
            inside = self.gathers_in_autograd and moved == "parameters" and phase == "backward"
            sent = 0.0 if waits or inside else number * route.sent * self.share_overlapped
            self.turns |= sent > 0 and moved != "activations"  # for a weight, in both passes
            more = number * (beyond or 0.0)
            into.add(waits=number * route.seconds + more, hidden=number * hidden, sent=sent)
            if more:
                cost.together[part] += more
        for message in route.messages if beyond is not None else ():
            charge(cost.messages, part, owner, message, times)

    def run_of(self, at: int) -> int:
        """The kind of run of an operator with coalesced all-gathers; 0 without them."""
        return run_of(self.bound.blocks, at) if self.update.by_block else 0

    def route(
        self, moved: str, tensor: TensorType, source: Layout, target: Layout, run: int = 0
    ) -> tuple[PricedRoute, float]:
        """A redistribution as it is charged, and its overlapped seconds. Blocks share types and layouts, so it is
        cached by their ids."""
        book = self.once if moved in ("sums", "updated") else self.book
        key, routes = (moved, id(tensor), id(source), id(target), run), book.routes
        if key not in routes:
            own, bare = book.pricers[run]
            pricer: RedistributionPricer = getattr(own, moved)
            route, hidden = pricer.route(tensor, source, target), 0.0
            if bare is not None:
                whole: RedistributionPricer = getattr(bare, moved)
                hidden = max(0.0, whole.route(tensor, source, target).seconds - route.seconds)
            routes[key] = (route, hidden, tensor, source, target)
        return routes[key][:2]

    def narrow(self, tensor: TensorType) -> TensorType:
        """A parameter of the graph as it is sent in 8 bits."""
        key = (id(tensor), "narrow")
        if key not in self.book.tensors:
            self.book.tensors[key] = in_8_bits(tensor)
        return self.book.tensors[key]

    def gathered(self, tensor: TensorType) -> TensorType:
        """A parameter of the graph as it is gathered for its use."""
        if not self.cluster.software.autocasts:
            return tensor
        key = (id(tensor), "gathered")
        if key not in self.book.tensors:
            self.book.tensors[key] = replace(tensor, dtype="float32")
        return self.book.tensors[key]

    def reduced(self, tensor: TensorType) -> TensorType:
        """A parameter of the graph as the gradient of one use is reduced."""
        key = (id(tensor), "reduced")
        if key not in self.book.tensors:
            self.book.tensors[key] = reduced(tensor, self.update)
        return self.book.tensors[key]

    def summed(self, tensor: TensorType) -> TensorType:
        """A parameter of the graph as its gradient is accumulated."""
        key = (id(tensor), "summed")
        if key not in self.book.tensors:
            self.book.tensors[key] = summed(tensor, self.update)
        return self.book.tensors[key]

    def gather(
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
        run: int = 0,
    ) -> None:
        """Charge a weight, or its gradient, that is moved for one use in a kind of run. Coalesced collectives belong to
        no operator."""
        pricer: RedistributionPricer = getattr(self.book.pricers[run][0], moved)
        part = REDUCING if moved == "gradients" else GATHERING
        beyond = self.together.use(pricer, part, name, self.route(moved, tensor, source, target, run)[0], times)
        self.move(cost, chunk, owner, part, moved, tensor, source, target, times, later, beyond, run)

    def _priced(self, name: str) -> tuple[ParameterPrices, tuple[int, bool, int, bool, float | None, str]]:
        """The prices of a parameter, and a key that parameters with equal prices share."""
        plan, graph = self.bound.plan, self.bound.graph
        tensor, stored, trainable = graph.types[name], self.bound.parameters[name], name in graph.differentiable
        local = bool(self.update.local_parameters) and self.update.is_local(name)
        owner = self.owners.get(name)
        share = None if owner is None else float(owner.at(plan.mesh.coordinate(plan.mesh.size // 2)))
        optimizer, precision = optimizer_of(graph, plan.training.optimizer, name), plan.training.precision
        kind = (id(tensor), trainable, id(stored), local, share, optimizer)
        if kind not in self.once.parameters:
            found = price_parameter(
                tensor, trainable, [stored], precision, optimizer, self.pricers, self.update, local, share
            )
            self.once.parameters[kind] = (found, stored)
        return self.once.parameters[kind][0], kind

    def _launch_accumulation(self, cost: StageCost, name: str, at: int) -> None:
        """Launch the accumulation of a parameter's gradient in the backward pass of the block of its first reader."""
        prices, _ = self._priced(name)
        if prices.launches[0]:
            launches = cost.launches[self.chunk_of[at], self.bound.blocks.block_of(at), "backward"]
            late = float(prices.late[0])
            launches.add(float(prices.accumulation[0]) + late, late, float(prices.launches[0]))

    def _parameter(self, cost: StageCost, name: str, chunk: ChunkCost, block: int | None) -> float:
        """Add a parameter of a rank; `block` is given if its weight is offloaded. Returns the bytes of that weight on
        the device while the block runs."""
        plan, graph = self.bound.plan, self.bound.graph
        tensor, stored, trainable = graph.types[name], self.bound.parameters[name], name in graph.differentiable
        local = bool(self.update.local_parameters) and self.update.is_local(name)
        owner = self.owners.get(name)
        prices, kind = self._priced(name)
        if trainable and not local and kind not in self._travels:
            self._travels[kind] = (
                *self.route("sums", self.summed(tensor), stored.gradient, stored.state),
                *self.route("updated", tensor, stored.state, stored.weight),
            )
        if name in self.scaled:
            cost.memory["optimizer state"] += history_bytes(plan.training.fp8, self.scaled[name])
        if trainable and not local:
            sums, hidden, gathered, below = self._travels[kind]
            if owner is not None:
                cost.once["weight gathering"] += float(prices.gather[0])
                if self.update.served:
                    whole, steps = self.summed(tensor).nbytes, pushes_of(self.bound, name, owner)
                    messages = (Message(kind=s.kind, axis=s.axis, nbytes=s.fraction * whole) for s in steps)
                    seconds = float(prices.synchronisation[0])
                    sums = PricedRoute(seconds=seconds, sent=seconds, messages=tuple(messages))
                    cost.offloaded["host"] += float(prices.served[0])
            for part, route in (("gradient reduction", sums), ("weight gathering", gathered)):
                cost.once[part] += route.seconds
                cost.copied += route.copies if route is sums else 0.0
                for message in () if self.bucketed else route.messages:
                    charge(cost.messages, part, "", message, {"update": 1})
            chunk.reductions += hidden
            chunk.weights += below
            if name in self.tied:
                self._tied(cost, name)
        added = float(prices.accumulation[0] + prices.late[0])
        cost.micro_batch[ACCUMULATION] += added
        chunk.pass_of(later=name in self.deferred_weight_gradients).add(work=added)
        cost.once["optimizer"] += float(prices.update[0])
        cost.memory["weights"] += float(prices.weight[0])
        cost.memory["gradients"] += float(prices.gradient[0])
        cost.memory["optimizer state"] += float(prices.state[0])
        if stored.state_home != "device" and trainable:
            cost.offload(name, prices, stored.state_home)
        if block is not None:
            cost.offload_weight(block, prices, stored.weight_home)
        if not self.flushes and trainable and tensor.dtype == "float32":  # master weights are separate copies there
            cost.memory["optimizer state"] += tensor.nbytes * local_share(tensor.shape, stored.state, plan.mesh.sizes)
        return float(prices.visiting[0])

    def _tied(self, cost: StageCost, name: str) -> None:
        """A parameter used on several pipeline ranks: its gradients are summed once a step."""
        ranks = sorted({self.rank_of[at] for at in self.bound.graph.consumers[name]})
        plan, tensor = self.bound.plan, self.bound.graph.types[name]
        share = local_share(tensor.shape, self.bound.parameters[name].state, plan.mesh.sizes)
        nbytes = share * self.summed(tensor).nbytes
        seconds = tied_seconds(nbytes, self._links(ranks[0], ranks[-1]))
        cost.once["gradient reduction"] += seconds
        charge(
            cost.messages, "gradient reduction", "", Message(kind="all_reduce", axis=None, nbytes=nbytes), {"update": 1}
        )

    def _crossings(self, cost: StageCost, rank: int, live: Sequence[int]) -> None:
        """The values that the stages of this rank receive, and the gradients of the values that they sent. A stage
        hands on what later stages read."""
        graph, stages, held = self.bound.graph, len(self.bound.plan.stages), self.bound.plan.stages_of(rank)
        for number, (chunk, stage) in enumerate(zip(cost.chunks, held, strict=True)):
            for name in self.arriving[stage]:
                nbytes = self._transfer(cost, chunk, "forward", name, stage)
                if not self._kept_by_block(name, stage):
                    cost.memory["activations"] += live[number] * nbytes
            for name in self.arriving[stage + 1] if stage + 1 < stages else ():
                if name in graph.differentiable:
                    self._transfer(cost, chunk, "backward", name, stage + 1)

    def _kept_by_block(self, name: str, stage: int) -> bool:
        """Whether a recomputed block of a stage reads a value that has gradients, and keeps it as its own input."""
        bound = self.bound
        return name in bound.graph.differentiable and any(
            self.stage_of[use] == stage and bound.recompute_of(bound.blocks.block_of(use)) is not None
            for use in bound.graph.consumers[name]
        )

    def _loss(self, cost: StageCost, rank: int) -> None:
        """Every rank receives the loss: that of every micro-batch on the last stage, that of the step on the others."""
        plan, tensor = self.bound.plan, self.bound.graph.types[self.bound.graph.loss]
        if self.rank_of[self.bound.graph.producer[self.bound.graph.loss]] == rank:
            made = self.made(self.bound.graph.loss).forward
            known = self.pricers.activations.route(tensor, made, replicated(len(plan.mesh.axes)))
            for message in known.messages:
                charge(cost.messages, UNCHARGED, "", message, {"forward": 1})
        if plan.pipeline > 1:
            charge(cost.messages, UNCHARGED, "", Message(kind="all_reduce", axis=None, nbytes=4.0), {"update": 1})

    def _transfer(self, cost: StageCost, chunk: ChunkCost, phase: Phase, name: str, stage: int) -> float:
        """Charge a value that crosses from the previous stage into `stage`, or its gradient that goes back, in the pass
        that waits for it; returns its bytes on a device. Nothing is sent if both stages are on one rank."""
        plan = self.bound.plan
        tensor, mesh = self.bound.graph.types[name], plan.mesh
        nbytes = tensor.nbytes * local_share(tensor.shape, self.made(name).forward, mesh.sizes)
        source, target = plan.rank_of(stage - 1), plan.rank_of(stage)
        if source == target:
            return nbytes
        holders = holders_of(nbytes, tensor, mesh, self.cluster)
        seconds = transfer_seconds(nbytes, self._links(source, target), self.cluster.software, holders)
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

    def made(self, name: str) -> Duplex:
        """The layouts in which a value is made."""
        if name not in self._made:
            bound = self.bound.operators[self.bound.graph.producer[name]]
            results = [result for result in bound.operator.results if result is not None]
            self._made.update(zip(results, bound.layouts.results, strict=True))
        return self._made[name]

    def price(self, bound: BoundOperator, without: Sequence[int] = (), *, counted: bool = True) -> OperatorPrices:
        """Prices of an operator, `without` the gradients of some operands. If `counted`, its work is added to that of
        the model."""
        graph, rule, op = self.bound.graph, bound.rule, bound.operator
        differentiable = graph.differentiable
        graded = tuple([name in differentiable and i not in without for i, name in enumerate(op.operands)])
        key = (id(rule), bound.strategy, graded)
        known, flops = self.book.operators, self.book.flops
        if key not in known:
            types = ([graph.types[n] for n in op.operands], [graph.types[n] for n in op.results if n is not None])
            plan = self.bound.plan
            optimizer = plan.training.optimizer
            prices = price_operator(rule, [bound.strategy], *types, graded, plan.mesh, self.cluster, optimizer)
            known[key] = (prices, rule)
        if counted:
            alone = (id(rule), graded)
            if alone not in flops:
                flops[alone] = (whole_flops(rule, graded), rule)
            seen = work_of_slices(rule, self.bound.plan.slices) if rule.op_class == "attention" else 1.0
            self.flops += flops[alone][0] * seen
        return known[key][0]


def walks_of(bound: BoundPlan, machine: Machine) -> tuple[Walk, ...]:
    """For every pipeline rank the walk with the prices of its devices; ranks of one group share it. Raises RequestError
    if owners of whole parameters are not possible on this machine."""
    refuse(owners_fault(bound.plan.training.update, machine), RequestError)
    clusters = clusters_of_ranks(machine, bound.plan.pipeline)
    overlaps = overlaps_of(bound)
    stages = segments_by_stage(bound, overlaps)
    known = {
        one: Walk(bound=bound, stages=stages, cluster=one, machine=machine, known_overlaps=overlaps)
        for one in dict.fromkeys(clusters)
    }
    return tuple(known[one] for one in clusters)


def _handed_alone(graph: OperatorGraph, blocks: Blocks) -> bool:
    """Whether the operators after the blocks read of the last block only the values that every block of its kind hands
    to the next."""
    key = ("handed alone", blocks.borders, blocks.kinds)
    if key not in graph.derived:
        graph.derived[key] = blocks.count > 1 and _is_handed_alone(graph, blocks)
    return bool(graph.derived[key])


def _is_handed_alone(graph: OperatorGraph, blocks: Blocks) -> bool:
    handed, left = set(), set()
    for block in range(1, blocks.count):
        for at in blocks.operators(block):
            made = {graph.producer.get(name, -1) for name in graph.operators[at].operands}
            handed |= {blocks.template(one) for one in made if blocks.start <= one < blocks.borders[block]}
    for op in graph.operators[blocks.stop :]:
        left |= {graph.producer[n] for n in op.operands if n in graph.producer and n in graph.data_dependent}
    return {blocks.template(at) for at in left if blocks.start <= at < blocks.stop} <= handed
