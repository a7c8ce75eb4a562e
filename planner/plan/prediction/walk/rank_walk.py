"""The walk over the operators of one pipeline rank, and what the rank takes in addition to its operators."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from costmodels import counts_at_moments, fullest_moment
from hardware_profiles import PYTORCH, Bytes, Seconds
from planner.plan.layout.matrix_groups import matrix_groups
from planner.plan.layout.offloaded import tables_on_hosts, visiting_order
from planner.plan.layout.per_step_communication import once_of
from planner.plan.prediction.charges import charge
from planner.plan.prediction.step import ChunkCost, PassCost, further_ahead
from planner.plan.prediction.walk.bucket_overlap import slots_of
from planner.plan.prediction.walk.gradient_moments import GradientMoments
from planner.plan.prediction.walk.operator_visit import OperatorVisit
from planner.plan.prediction.walk.rank_parameters import RankParameters
from planner.plan.prediction.walk.rank_transfers import RankTransfers
from planner.plan.prediction.walk.repeated_blocks import BlockSums, InFlight
from planner.plan.prediction.walk.stage_cost import StageCost
from planner.plan.schedule import Moment, moments_of, updates_of, weight_versions
from planner.pricing.matrix_update import most_bytes, seconds_of_one, stack_messages
from planner.pricing.parameter_price import launch_seconds

if TYPE_CHECKING:
    from planner.plan.prediction.walk.walk import Walk


class RankWalk:
    """Sums up one pipeline rank. Arguments as for `Walk.rank`."""

    def __init__(
        self,
        walk: "Walk",
        rank: int,
        moments: Sequence[Moment] | None,
        after: Callable[[int, StageCost, Mapping[int, float]], None],
        keys: Mapping[int, object],
    ) -> None:
        self.walk, self.rank, self.after, self.keys = walk, rank, after, keys
        self.bound, self.update = walk.bound, walk.update
        self.plan, self.software = walk.bound.plan, walk.cluster.software
        self.cost = StageCost(chunks=self._chunks())
        self.moments = moments_of(self.plan, rank) if moments is None else moments
        self.live, self.waiting = (
            [counts_at_moments(counts) for counts in zip(*rows, strict=True)]
            for rows in zip(*self.moments, strict=True)
        )
        self.own = [at for at in range(len(self.bound.operators)) if walk.rank_of[at] == rank]
        self.moment = GradientMoments()
        self.at_once: dict[int, Bytes] = {}  # of each block, during its backward pass
        self._seen: set[str] = set()  # inputs of blocks

    def _chunks(self) -> list[ChunkCost]:
        plan = self.plan
        return [
            ChunkCost(
                blocks=plan.stages[stage].blocks,
                later=PassCost() if plan.schedule_kind.splits_backward else None,
                interleave=plan.training.interleave,
                slices=plan.slices,
                paired=self.walk.in_pairs,
                receives_ahead=self.software.name == PYTORCH.name,
            )
            for stage in plan.stages_of(self.rank)
        ]

    def run(self) -> StageCost:
        """The sums of the rank."""
        cost, operators = self.cost, self.bound.operators
        self._visit_operators()
        first = {name: at for at in reversed(self.own) for name in operators[at].operator.operands}
        transfers = RankTransfers(self.walk, cost, self.rank)
        parameters = RankParameters(self.walk, cost, transfers, first)
        parameters.launch_accumulation()
        cost.memory["transient"] *= 2 if self.walk.in_pairs else self.plan.training.interleave
        cost.memory["transient"] += self.software.buffers
        self._launch_ahead()
        self._start_passes()
        for stage in self.plan.stages_of(self.rank):
            self.walk.together.end_stage(cost, cost.chunks[stage // self.plan.pipeline], stage)
        parameters.add(self.at_once)
        self._hold_blocks()
        self._offload(parameters)
        self._communicate_once(parameters.used)
        matrices = self._matrices(parameters.used)
        self._updates()
        if self.rank == 0:
            parameters.keep_unread()
        transfers.cross(self.live)
        transfers.loss()
        self._end_memory(matrices)
        return cost

    # operators

    def _visit_operators(self) -> None:
        numbers, last = self.bound.blocks.numbers, -1
        for at in self.own:
            block = numbers.get(at, -1)
            if block in self.keys:
                if block != last:
                    self._add_known(block, at)
                last = block
            else:
                self._visit_in_turn(at, block)
                self.after(at, self.cost, self.at_once)

    def _add_known(self, block: int, at: int) -> None:
        """Add a block that is like others with its key, by what these have added. `at` is its first operator."""
        key, number = self.keys[block], self.walk.chunk_of[at]
        known = self.walk.book.blocks
        if key not in known:
            known[key] = self._written(block, number)
        place = (self.walk.stage_of[at], number)
        counts = self.live[number], self.waiting[number]
        with self.moment.of(self.cost.memory, inside=True):
            known[key].add(self.cost, self.at_once, self.walk.together.charged, block, place, counts)
        for flops in known[key].flops:
            self.walk.flops += flops

    def _visit_in_turn(self, at: int, block: int) -> None:
        """Visit an operator; where micro-batches take turns, its work stands between the turns in both passes."""
        walk, number = self.walk, self.walk.chunk_of[at]
        chunk = self.cost.chunks[number]
        passes = [chunk.forward, chunk.backward] if walk.takes_turns else []
        before = [one.taken for one in passes]
        if passes and walk.segments.get(at) is not walk.segments.get(at - 1):  # forward, each runs for all
            chunk.forward.borders.append(len(chunk.forward.operators))
        walk.waiting, walk.turns = self.waiting[number], False
        with self.moment.of(self.cost.memory, inside=block >= 0):
            self._visit(self.cost, at, self.live[number], self._seen, self.at_once)
        backs = walk.exchanges.left_back(walk.in_parts.get(at)) if passes else ()
        for one, taken, back in zip(passes, before, backs, strict=True):
            one.close(taken, back, turns=walk.turns, then=walk.thens.get(at, "work"))

    def _visit(self, cost: StageCost, at: int, live: int, seen: set[str], at_once: dict[int, Bytes]) -> None:
        visit = OperatorVisit(self.walk, cost, at, live, seen, at_once)
        visit.work()
        visit.communicate()
        visit.hold()

    def _written(self, block: int, number: int) -> BlockSums:
        """What the operators of a block of a chunk add to the sums."""
        walk, written, seen = self.walk, BlockSums(block=block, chunk=number), set[str]()
        flops, charged = walk.flops, walk.together.charged
        walk.together.charged = written.charged
        live = cast(int, InFlight())  # records what is done with the number in flight
        walk.waiting = cast(int, InFlight(deferred=True))
        for at in self.bound.blocks.operators(block):
            walk.flops = 0.0
            self._visit(written.cost, at, live, seen, written.at_once)
            written.flops.append(walk.flops)
        walk.flops, walk.together.charged = flops, charged
        written.backward = self._backward_seconds(block)
        return written

    # what belongs to no operator

    def _launch_ahead(self) -> None:
        """Subtract what a host saves that launches a block while longer kernels of the block before it still run."""
        cost = self.cost
        alone = self.plan.pipeline == 1 and not self.walk.counted
        further = further_ahead(cost.launches.values(), self.plan.training.micro_batches) if alone else 0.0
        for (number, _, name), launches in cost.launches.items():
            saved = launches.ahead + further * (launches.late - launches.ahead)
            cost.chunks[number].save(name, saved)
            cost.ahead += saved

    def _start_passes(self) -> None:
        """Add what the host launches at the start of each pass while the device waits for it."""
        each = self.walk.cluster.device.host_latency * self.software.host
        trains = self.plan.schedule_kind.trains
        forward, backward = (each * number for number in self.software.starts)
        for chunk in self.cost.chunks:
            chunk.forward.add(work=forward)
            self.cost.micro_batch["forward"] += forward
            if trains:
                chunk.backward.add(work=backward)
                self.cost.micro_batch["backward"] += backward

    def _hold_blocks(self) -> None:
        """Add the block that holds most during its backward pass: one for each micro-batch that runs beside others."""
        memory = self.cost.memory
        gathers = self.walk.in_pairs and self.update.by_block  # a block for each of two passes
        self.moment.kept, self.moment.at_once = memory["activations"], self.at_once
        beside = 2 if gathers else self.plan.training.interleave
        memory["activations"] += beside * max(self.at_once.values(), default=0.0)

    def _offload(self, parameters: RankParameters) -> None:
        """Charge the transfers of what is offloaded, in the order in which passes and updates need it."""
        cost, used, blocks = self.cost, parameters.used, parameters.offloaded
        trains = self.plan.schedule_kind.trains
        for number, chunk in enumerate(cost.chunks):
            away = sorted({blocks[name] for name in blocks if used[name] == number})
            cost.end_fetches(chunk, away, trains=trains)
        cost.end_values()
        cost.end_visits(visiting_order(self.bound, used))
        if nbytes := tables_on_hosts(self.bound):
            cost.offloaded["host"] += nbytes

    def _communicate_once(self, used: Mapping[str, int]) -> None:
        """Charge the communication of buckets and norms once a step, and how much of it backward passes can cover."""
        cost, walk = self.cost, self.walk
        once = once_of(self.bound, used, walk.cluster, walk.pricers, walk.whole_machine)
        for part, seconds in once.seconds.items():
            cost.beyond[part] += seconds
        for (part, message), times in once.messages.items():
            charge(cost.messages, part, "", message, {"update": times})
        cost.memory["transient"] += once.flat
        if self.software.name == PYTORCH.name and not self.update.served:
            overlapped = walk.cluster.device.overlapped
            for number, slots in slots_of(self.bound, used, once.early, self._backward).items():
                cost.chunks[number].buckets = tuple([overlapped * seconds for seconds in slots])

    def _backward(self, block: int) -> Sequence[Seconds]:
        """As `_backward_seconds`, recorded once for blocks with the same key."""
        written = self.walk.book.blocks.get(self.keys[block]) if block in self.keys else None
        return self._backward_seconds(block) if written is None else written.backward

    def _backward_seconds(self, block: int) -> Sequence[Seconds]:
        """Seconds of the backward pass of each operator of a block, with its own collectives."""
        operators = self.bound.operators
        prices = [self.walk.price(operators[at], counted=False) for at in self.bound.blocks.operators(block)]
        return [float(one.backward[0] + one.inner_backward[0]) for one in prices]

    def _matrices(self, held: Collection[str]) -> Bytes:
        """Matrices that are updated together: their collectives, and the seconds of unused places of a stack; returns
        the bytes that live meanwhile, when everything of a micro-batch is freed."""
        walk, mesh, most = self.walk, self.plan.mesh, 0.0
        for group in matrix_groups(self.bound, held, mesh.coordinate(mesh.size // 2)):
            for message in stack_messages(group.stack, walk.pricers):
                charge(self.cost.messages, "optimizer", "", message, {"update": 1})
            if group.spare:
                tensor, launched = self.bound.graph.types[group.names[0]], launch_seconds(walk.cluster)
                each = seconds_of_one(tensor, group.stored.state, walk.pricers, launched)
                self.cost.beyond["optimizer"] += group.spare * each
            most = max(most, most_bytes(group.stack, mesh.sizes))
        return most

    def _updates(self) -> None:
        """Schedules without a flush may update after every micro-batch, and hold several versions of weights."""
        cost = self.cost
        cost.memory["weights"] *= weight_versions(self.plan, self.rank)
        if (times := updates_of(self.plan)) > 1:
            cost.once = {part: times * seconds for part, seconds in cost.once.items()}
            cost.beyond = {part: times * seconds for part, seconds in cost.beyond.items()}
            cost.copied *= times
            for chunk in cost.chunks:
                chunk.reductions, chunk.weights = times * chunk.reductions, times * chunk.weights
            for sent in [sent for sent in cost.messages if sent.phase == "update"]:
                cost.messages[sent] *= times

    def _end_memory(self, matrices: Bytes) -> None:
        """Take the moment at which the rank holds most. `matrices` live in updates, when activations are freed."""
        memory = self.cost.memory
        memory["activations"], number = fullest_moment(memory["activations"])
        passing = memory["activations"] + memory["transient"]
        memory["transient"] += max(0.0, matrices - passing)
        self.cost.fullest = self.moments[number]
        if self.software.frees_gradients and self.plan.pipeline == 1 and self.bound.graph.trains:
            self.moment.hold(self.cost, self.bound, self.software)
