"""The amounts that one operator adds to the sums of its rank: its work, its communication, its memory.

work           kernels of both passes and of recomputation, and their waits for launches
communicate    collectives inside of the operator, and those that redistribute its operands
hold           bytes kept for the backward pass, on the device or offloaded, and transient bytes
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from costmodels import away_seconds, counts_beyond, offloaded_bytes
from hardware_profiles import Bytes, Home
from planner.graph.blocks import IDENTITY
from planner.graph.operator_graph import TensorType
from planner.plan.binding.slices import earlier_keys
from planner.plan.layout.deferred_weight_gradients import deferred_weight_gradients
from planner.plan.layout.expert_overlap import ExpertOverlap, replay_of
from planner.plan.layout.kept import replayed_places
from planner.plan.layout.saved_tensor_offload import read_elsewhere
from planner.plan.prediction.charges import UNCHARGED, Phase, Times, charge
from planner.plan.prediction.walk.exchange_overlap import NOTHING_LEFT
from planner.plan.prediction.walk.repeated_blocks import InFlight
from planner.plan.prediction.walk.stage_cost import GATHERING, StageCost
from planner.plan.schedule import whole_in_flight
from planner.pricing import OperatorPrices, keeping
from planner.pricing.inner_messages import inner_hidden, inner_messages, inner_seconds
from planner.pricing.narrow_weights import cast_seconds
from planner.pricing.operator_price import transient_bytes
from planner.pricing.parameter_price import gathered_at_once
from planner.sharding.layout import Layout, local_share
from planner.sharding.rule import Duplex
from planner.sharding.stored import StoredParameter

if TYPE_CHECKING:
    from planner.plan.prediction.walk.walk import Walk

BEFORE, AFTER = -2, -1
"""The numbers of the parts before and after the blocks, among numbers of blocks."""


class OperatorVisit:
    """One operator on a walk, with `live` micro-batches in flight. `seen` are the inputs of blocks counted so far;
    `at_once` has the bytes of each block that live during its backward pass."""

    def __init__(
        self, walk: "Walk", cost: StageCost, at: int, live: int, seen: set[str], at_once: dict[int, Bytes]
    ) -> None:
        self.walk, self.cost, self.at, self.live, self.seen, self.at_once = walk, cost, at, live, seen, at_once
        self.bound = bound = walk.bound
        self.operator = walk.counted_for(bound.operators[at])
        self.segment = walk.segments.get(at)  # None if no stage needs to compute it
        self.block = bound.blocks.block_of(at)
        self.again = bound.recompute_of(self.block) is not None  # its bytes are kept for one block at a time
        self.kept_again = self.again and bound.is_kept(at)
        self.prices = walk.price(self.operator)
        self.works = self.moves = False  # recomputed: its kernels; the redistribution of its operands
        self.run_again: frozenset[int] | None = None  # recomputed places in the block, if modules are recomputed
        self.apart = False  # in such a block, but in no recomputed module
        if self.again and self.block is not None:
            self._replay(self.block)
        self.chunk = cost.chunks[walk.chunk_of[at]]
        self.home: Home = "device" if self.segment is None else self.segment.home_of_saved
        self.later = (
            deferred_weight_gradients(bound, at) if walk.defers else ()
        )  # operands whose gradients are deferred
        self.results = [name for name in self.operator.operator.results if name is not None]
        self.in_pieces = self._kept_in_pieces()
        kept = walk.alive.kept
        self.own = [] if self.in_pieces else [i for i, name in enumerate(self.results) if name in kept]
        self.earlier: OperatorPrices | None = None  # of attention, on keys of an earlier slice
        if bound.plan.slices > 1 and self.operator.rule.op_class == "attention":
            rule = earlier_keys(self.operator.rule, bound.plan.slices)
            self.earlier = walk.price(replace(self.operator, rule=rule), counted=False)
        self._gathered: dict[int, bool] = {}

    def _replay(self, block: int) -> None:
        """How much of it is recomputed in the backward pass of its block."""
        bound, place = self.bound, self.bound.place_of(self.at)
        kept = bound.recompute_of(block)
        if kept and self.walk.cluster.software.modules:
            self.run_again = replayed_places(bound.graph, bound.blocks.operators(block), kept)
            self.works = self.moves = place in self.run_again
            self.apart = not self.works
        else:
            place, replay = replay_of(bound, self.at, block, self.walk.replays, self.walk.replayed)
            self.works, self.moves = replay.runs(place, float(self.prices.joined[0])), place < replay.moves

    def work(self) -> None:
        """Seconds of its kernels, and of collectives inside of the operator."""
        prices, chunk, micro_batch = self.prices, self.chunk, self.cost.micro_batch
        forward, works = self._forward_again(), self.works
        micro_batch["forward"] += float(prices.forward[0])
        micro_batch["backward"] += float(prices.backward[0])
        micro_batch["communication"] += float(prices.inner_forward[0] + prices.inner_backward[0])
        micro_batch["recomputation"] += forward if works else 0.0
        waits, back = float(prices.inner_forward[0]), float(prices.inner_backward[0])
        chunk.forward.add(work=float(prices.forward[0]), waits=waits)
        chunk.backward.add(work=float(prices.backward[0]), waits=back)
        if works and forward > 0:
            chunk.backward.add(work=forward - waits, waits=waits)
        if self.later:
            rest = self.walk.price(self.operator, without=self.later, counted=False)
            seconds = float(prices.backward[0]) - float(rest.backward[0])
            chunk.backward.add(work=-seconds)
            chunk.pass_of(later=True).add(work=seconds)
        if self.earlier is not None:
            self._work_on_earlier_slices(self.earlier)
        if self.walk.hosted:
            self._launch(prices, again=works and forward > waits)

    def communicate(self) -> None:
        """Its collectives, and those that redistribute its operands and their gradients."""
        self._send_inside()
        for one in self.walk.overlaps.get(self.at, ()):
            self.walk.products.charge(self.cost, self.chunk, one, again=self.again and self.works)
        if self.at in self.walk.in_parts:
            self._overlap_exchange(self.walk.in_parts[self.at])
        graph, op = self.bound.graph, self.operator.operator
        for place, name in enumerate(op.operands):
            wanted = self.operator.layouts.operands[place]
            if name in self.bound.parameters:
                self._gathered[place] = self._use_parameter(place, name, wanted)
            elif name in self.bound.inputs:
                times: Times = {"forward": 1, "recomputation": int(self.moves)}
                layouts = (self.bound.inputs[name], wanted.forward)
                for message in self.walk.book.route("activations", graph.types[name], *layouts)[0].messages:
                    charge(self.cost.messages, UNCHARGED, op.name, message, times)
            elif (self.at, place) in self.walk.overlapped:
                continue  # charged to the operator of the overlap
            elif name in graph.producer and name in graph.data_dependent:  # constant values are moved once
                self._bring(name, self.walk.made(name), wanted)

    def hold(self) -> None:
        """Bytes that it keeps for the backward pass, offloads, and needs for a moment."""
        memory, prices = self.cost.memory, self.prices
        kept, away = self._keep_results()
        if self.later:
            memory["activations"] += self.walk.waiting * self._kept_until_later()
        if self.earlier is not None:
            memory["activations"] += self._keys_of_all_slices(self.earlier)
        transient = float(transient_bytes(self.walk.alive, self.bound.graph, self.at, self.operator.rule, prices)[0])
        transient += sum(self.walk.products.transient(one) for one in self.walk.overlaps.get(self.at, ()))
        if self.at in self.walk.in_parts:
            transient += self.walk.exchanges.transient(self.walk.in_parts[self.at])
        for place, name in enumerate(self.operator.operator.operands):
            if name in self.bound.parameters:
                more, brief = self._hold_parameter(place, float(prices.operands[place][0]))
                kept += more
                transient += brief
            elif name in self.bound.graph.producer:
                more, left = self._hold_value(place, name, float(prices.operands[place][0]))
                kept += more
                away += left
        kept -= self._offload_saved(away)
        passing = not self.walk.alive.trains and self.block is not None  # one block at a time
        if self.apart:  # as in a block that is not recomputed, except for values handed on
            named = [(i, self.results[i]) for i in self.own]
            handed_on = [i for i, name in named if self._is_handed_on(name) and not self._outlives(name)]
            handed = sum(self._share(self.results[i]) * float(prices.results[i][0]) for i in handed_on)
            memory["activations"] += (kept - handed) * self.live
            kept = handed
        if self.again or passing or self.at >= self.walk.ending:  # operators after the blocks free their memory first
            where = AFTER if self.block is None else self.block
            self.at_once[where] = self.at_once.get(where, 0.0) + kept
            memory["activations"] += 0.0 if self.again else kept * self._beside(self.bound.plan.training.interleave)
        else:
            memory["activations"] += kept * self.live
        memory["transient"] = max(memory["transient"], transient)

    def _beside(self, taken: int) -> float:
        """The micro-batches in flight in addition to `taken` of them."""
        live: object = self.live
        return cast(float, live.beyond(taken)) if isinstance(live, InFlight) else counts_beyond(self.live, taken)

    # work

    def _forward_again(self) -> float:
        """Seconds of its recomputation."""
        prices = self.prices
        forward = float(prices.forward[0] + prices.inner_forward[0])
        if self.kept_again:
            forward -= float(keeping(prices, self.works, self._shares(self.own)).seconds[0])
        return forward

    def _work_on_earlier_slices(self, prices: OperatorPrices) -> None:
        """Seconds of attention on the keys of earlier slices: on average as many whole slices as precede the middle
        one."""
        cost, chunk = self.cost, self.chunk
        works = self.works and not self.kept_again
        forward, backward = float(prices.forward[0]), float(prices.backward[0])
        before = (self.bound.plan.slices - 1) / 2
        cost.micro_batch["forward"] += before * forward
        cost.micro_batch["backward"] += before * backward
        chunk.forward.add(work=before * forward)
        chunk.backward.add(work=before * (backward + (forward if works else 0.0)))
        cost.micro_batch["recomputation"] += before * forward if works else 0.0
        chunk.forward.grows += forward
        chunk.backward.grows += backward + (forward if works else 0.0)

    def _launch(self, prices: OperatorPrices, *, again: bool) -> None:
        """Count the waits of its kernels for their launches, by block and pass."""
        number = self.walk.chunk_of[self.at]
        launches = self.cost.launches
        forward, backward = launches[number, self.block, "forward"], launches[number, self.block, "backward"]
        hosts = [float(seconds[0]) for seconds in prices.host]
        sent, back = float(prices.inner_forward[0]), float(prices.inner_backward[0])
        if self.operator.rule.op_class == "experts" and self.walk.counted:
            sent = back = 0.0  # the host waits for row counts before it launches their exchange
        forward.add(float(prices.forward[0]), float(prices.late[0][0]), hosts[0], sent)
        if prices.backward[0]:
            backward.add(float(prices.backward[0]), float(prices.late[1][0]), hosts[1], back)
        if again:
            backward.add(float(prices.forward[0]), float(prices.late[0][0]), hosts[0], sent)

    # communication

    def _send_inside(self) -> None:
        """Collectives of the operator itself."""
        messages, mesh = self.cost.messages, self.bound.plan.mesh
        rule, cluster = self.operator.rule, self.walk.cluster
        hidden = inner_hidden(rule, cluster)
        repeats = self.works and not self.kept_again
        graded = self.bound.graph.graded_places(self.operator.operator)
        for inner in inner_messages(rule, self.operator.strategy, mesh, graded):
            name = self.operator.operator.name
            times: Times = {"forward": inner.forward, "backward": inner.backward}
            charge(messages, "communication", name, inner.message, times)
            if repeats:
                charge(messages, "recomputation", name, inner.message, {"recomputation": inner.forward})
            if hidden and not inner.comes_round:
                seconds = hidden * inner_seconds(rule, inner, mesh, cluster)
                self.chunk.forward.add(hidden=inner.forward * seconds)
                self.chunk.backward.add(hidden=(inner.backward + (inner.forward if repeats else 0)) * seconds)

    def _overlap_exchange(self, one: ExpertOverlap) -> None:
        """Seconds of its exchange that overlap with other work, in each pass. That work overlaps with nothing else, as
        the links are the same. The host launches it after the exchange."""
        saved = self.walk.exchanges.saves(one)
        again = self.walk.exchanges.saves_again(one) if self.again and self.works else 0.0
        left = self.walk.exchanges.left(one) if self.walk.takes_turns else NOTHING_LEFT
        back = saved.backward + again
        self.chunk.forward.add(
            waits=-saved.forward, hidden=saved.forward, exchanged=saved.forward, sent=sum(left.forward)
        )
        self.chunk.backward.add(waits=-back, hidden=back, exchanged=back, sent=sum(left.backward))
        if self.walk.hosted and not self.walk.counted:
            number = self.walk.chunk_of[self.at]
            for name, seconds in (("forward", saved.forward), ("backward", saved.backward + again)):
                self.cost.launches[number, self.block, name].add(0.0, 0.0, 0.0, -seconds)

    def _bring(self, name: str, made: Duplex, wanted: Duplex) -> None:
        """Redistribute a value from the layouts in which it is made, and its gradient back."""
        tensor, there, back = (
            self.bound.graph.types[name],
            (made.forward, wanted.forward),
            (wanted.gradient, made.gradient),
        )
        owner, moved = self.operator.operator.name, "activations"
        self._move("communication", "forward", owner, moved, tensor, there)
        if self._comes_again(name):
            self._move("recomputation", "recomputation", owner, moved, tensor, there)
        if self.bound.graph.returns(self.operator.operator, name):
            self._move("communication", "backward", owner, moved, tensor, back)

    def _comes_again(self, name: str) -> bool:
        """Whether a value is redistributed again: it enters or leaves recomputed operators, since a module runs to its
        end."""
        producer = self.bound.graph.producer[name]
        if self.run_again is None or self.moves or self.bound.blocks.block_of(producer) != self.block:
            return self.moves
        return self.bound.place_of(producer) in self.run_again

    def _move(
        self, part: str, phase: Phase, owner: str, moved: str, tensor: TensorType, between: tuple[Layout, Layout]
    ) -> None:
        """A redistribution of activations in one pass. While it runs, the host launches the next operators."""
        walk = self.walk
        walk.move(self.cost, self.chunk, owner, part, moved, tensor, *between, {phase: 1})
        if walk.hosted and (seconds := walk.book.route(moved, tensor, *between)[0].seconds):
            name = "forward" if phase == "forward" else "backward"
            launched = walk.launching * len(walk.book.route(moved, tensor, *between)[0].messages)
            self.cost.launches[walk.chunk_of[self.at], self.block, name].add(0.0, 0.0, launched, seconds)

    def _use_parameter(self, place: int, name: str, wanted: Duplex) -> bool:
        """One use of a parameter: the weight is gathered for the forward pass, and again if the backward pass needs it.
        Its gradient goes back, later if it is deferred. Returns whether anything is gathered, or waits for a coalesced
        reduction."""
        walk, update = self.walk, self.walk.update
        owner = walk.runs.get(self.at, self.operator.operator.name)
        sums = (self.cost, self.chunk, owner)
        needed = place in walk.alive.weights[self.at]
        once_more = self.again and (self.run_again is None or self.moves)
        again: Times = {"recomputation": int(self.moves)} if once_more else {"backward": int(needed)}
        tensor, stored = self.bound.graph.types[name], self.bound.parameters[name]
        there, run = (stored.weight, wanted.forward), walk.run_of(self.at)
        narrow, times = place in self.operator.rule.narrow, {"forward": 1, **again}
        moving = walk.book.narrow(tensor) if narrow else walk.book.gathered(tensor)
        walk.gather(*sums, name, "parameters", moving, *there, times, run=run)
        gathered = bool(walk.book.route("parameters", moving, *there, run)[0].messages) or narrow
        if narrow:
            self._cast(tensor, stored, times)
        if name in self.bound.graph.differentiable and not update.is_local(name):
            moved, back = walk.book.reduced(tensor), (wanted.gradient, stored.gradient)
            walk.gather(*sums, name, "gradients", moved, *back, {"backward": 1}, place in self.later, run)
            gathered |= update.by_block and bool(walk.book.route("gradients", moved, *back, run)[0].messages)
        return gathered

    def _cast(self, tensor: TensorType, stored: StoredParameter, times: Times) -> None:
        """Seconds to cast a shard of a weight before it is sent, in each pass."""
        mesh = self.bound.plan.mesh
        (seconds,) = cast_seconds(tensor, [stored.weight], mesh.sizes, self.walk.cluster).tolist()
        self.cost.micro_batch[GATHERING] += sum(times.values()) * seconds
        for phase, number in times.items():
            (self.chunk.forward if phase == "forward" else self.chunk.backward).add(work=number * seconds)

    # memory

    def _keep_results(self) -> tuple[float, list[Bytes]]:
        """Bytes of its results, and of other saved tensors, that are kept for its backward pass; and the offloaded part
        of them."""
        prices, results, own = self.prices, self.results, self.own
        kept = 0.0 if self.at in self.walk.alive.piecewise else float(prices.saved_extra[0])
        kept += sum(self._share(results[i]) * float(prices.results[i][0]) for i in own)
        away = list[Bytes]()
        if self.block is not None and self.home != "device":
            stays = not self.walk.cluster.software.offloads_inputs
            others = (i for i in own if stays and read_elsewhere(self.bound, results[i], self.block))
            away.append(kept - sum(self._share(results[i]) * float(prices.results[i][0]) for i in others))
        if self.kept_again and not self.apart:
            changes = keeping(prices, self.works, self._shares(own))
            self.cost.memory["activations"] += self.live * float(changes.kept[0])
            kept -= float(changes.interior[0])
        elif self.again:
            longer = [i for i in own if self._outlives(results[i]) or self._is_saved_apart(results[i])]
            outlives = sum(self._share(results[i]) * float(prices.results[i][0]) for i in longer)
            self.cost.memory["activations"] += self.live * outlives
            kept -= outlives
        return kept, away

    def _hold_parameter(self, place: int, nbytes: Bytes) -> tuple[Bytes, Bytes]:
        """Bytes of a gathered weight that are kept, and transient bytes."""
        ahead = gathered_at_once(self.walk.cluster.software, self.walk.update)
        if self._gathered[place] and ahead:
            where = self.block if self.block is not None else AFTER if self.at >= self.bound.blocks.stop else BEFORE
            self.at_once[where] = self.at_once.get(where, 0.0) + ahead * self._gathered_bytes(nbytes)
            return 0.0, 0.0
        needed = place in self.walk.alive.weights[self.at]
        again = self.again and not self.apart
        kept = nbytes if self._gathered[place] and needed and again else 0.0  # a recomputed block gathers all
        return kept, 0.0 if ahead else nbytes

    def _gathered_bytes(self, nbytes: Bytes) -> Bytes:
        """Bytes of a gathered weight. An fp32 weight that autocast rounds for its use takes memory twice, and once
        while it is prefetched."""
        software = self.walk.cluster.software
        return nbytes * (2 + 1 / software.ahead) if software.autocasts else nbytes

    def _hold_value(self, place: int, name: str, nbytes: Bytes) -> tuple[Bytes, list[Bytes]]:
        """Bytes kept of a value that it reads, and the offloaded part of them."""
        graph, blocks, away = self.bound.graph, self.bound.blocks, list[Bytes]()
        made, wanted = self.walk.made(name), self.operator.layouts.operands[place]
        copied = self._kept_copy(name, made, wanted, nbytes) if place in self.walk.alive.saved[self.at] else 0.0
        copied *= self.walk.alive.copied(self.at)
        pieces = min(nbytes, self._local_bytes(name, made.forward)) if self.in_pieces else 0.0
        kept = copied + pieces * self._share(self.results[0] if self.in_pieces else name)
        inside = blocks.block_of(graph.producer[name]) == self.block
        if self.home != "device":
            leaves = inside or self.walk.cluster.software.offloads_inputs
            away.append(kept if leaves else copied if self._is_copy(name, made, wanted, nbytes) else 0.0)
        if self.again and not inside and name in graph.differentiable:
            kept += self._checkpoint(name, made.forward)
        if inside and self._enters_a_module(name):
            self._checkpoint(name, made.forward)
        return kept, away

    def _share(self, name: str) -> float:
        """The share of the bytes of a value that is kept."""
        return self.walk.alive.share(name)

    def _shares(self, own: Sequence[int]) -> dict[int, float]:
        return {i: self._share(self.results[i]) for i in own}

    def _enters_a_module(self, name: str) -> bool:
        """Whether a value of the block enters a recomputed module from operators outside of it, and nothing else keeps
        it."""
        graph, bound = self.bound.graph, self.bound
        if self.run_again is None or self.apart or name not in graph.differentiable or name in self.walk.alive.kept:
            return False
        return bound.place_of(graph.producer[name]) not in self.run_again

    def _is_handed_on(self, name: str) -> bool:
        """Whether an operator outside of the block reads a result."""
        bound = self.bound
        return any(bound.blocks.block_of(use) != self.block for use in bound.graph.consumers.get(name, ()))

    def _is_saved_apart(self, name: str) -> bool:
        """Whether an operator of the block outside of recomputed modules keeps a result of one inside, and no other
        block reads it."""
        if self.run_again is None or self.apart or self._is_handed_on(name):
            return False
        bound, saved = self.bound, self.walk.alive.saved
        return any(
            bound.blocks.block_of(use) == self.block
            and bound.place_of(use) not in self.run_again
            and any(i in saved[use] and o == name for i, o in enumerate(bound.operators[use].operator.operands))
            for use in bound.graph.consumers.get(name, ())
        )

    def _checkpoint(self, name: str, layout: Layout) -> Bytes:
        """A recomputed block keeps its inputs. Returns the bytes of offloaded inputs that are on the device at a time:
        its own and those of a neighbouring block."""
        key = f"{self.block}<-{name}"
        if key in self.seen:
            return 0.0
        self.seen.add(key)
        wide = 2 if self.walk.cluster.software.autocasts else 1
        nbytes = wide * self._local_bytes(name, layout)
        if self.segment is None or name not in self.segment.offloads:
            self.cost.memory["activations"] += self.live * nbytes
            return 0.0
        self._offload(self.segment.home, nbytes)
        return float(offloaded_bytes(nbytes))

    def _offload_saved(self, away: Sequence[Bytes]) -> Bytes:
        """Charge for the saved tensors that are offloaded; returns their bytes."""
        if self.block is None or not away:
            return 0.0
        self.at_once[self.block] = self.at_once.get(self.block, 0.0) + offloaded_bytes(sum(away))
        for nbytes in away:
            self._offload(self.home, nbytes)
        return sum(away)

    def _offload(self, home: Home, nbytes: Bytes) -> None:
        """Charge for the tensors of a micro-batch that a block offloads."""
        if nbytes > 0 and self.block is not None:
            latency = self.walk.cluster.device.launch_latency
            fetch, store = away_seconds(nbytes, self.walk.cluster.store(home), latency)
            key = (self.walk.chunk_of[self.at], self.block)
            self.cost.offload_values(key, home, nbytes, self.live, (float(fetch), float(store)))

    def _kept_until_later(self) -> Bytes:
        """Bytes that deferred weight gradients need: the gradient of the result, and the operator's inputs, which
        several operators may share."""
        prices, operator = self.prices, self.operator
        kept = float(prices.results[0][0])
        for place, needed_by in operator.rule.saves:
            key = f"{operator.operator.operands[place]} later as {operator.layouts.operands[place].forward}"
            if place not in self.later and set(needed_by) & set(self.later) and key not in self.seen:
                self.seen.add(key)
                kept += float(prices.operands[place][0])
        return kept

    def _keys_of_all_slices(self, prices: OperatorPrices) -> Bytes:
        """Bytes of the keys and values of a whole sequence, and of their gradients, which attention stores."""
        plan = self.bound.plan
        keys = sum(float(nbytes[0]) for nbytes in prices.operands[1:3])
        element = self.bound.graph.types[self.operator.operator.operands[1]].element_bytes
        begun = whole_in_flight(plan, self.walk.rank_of[self.at], self.walk.chunk_of[self.at])
        return plan.slices * keys * (begun + plan.training.interleave * max(4, element) / element)

    def _kept_copy(self, name: str, made: Duplex, wanted: Duplex, nbytes: Bytes) -> Bytes:
        """Bytes that a reader, which needs `nbytes` of a value, keeps in addition to those kept by others."""
        if name in self.walk.alive.kept and made.forward == wanted.forward:
            return 0.0
        pieces = self._local_bytes(name, made.forward)
        if not self.walk.cluster.software.regathers or pieces >= nbytes:
            return nbytes
        return 0.0 if name in self.walk.alive.kept else pieces

    def _is_copy(self, name: str, made: Duplex, wanted: Duplex, nbytes: Bytes) -> bool:
        """Whether a reader keeps a value in memory of its own."""
        pieces = self.walk.cluster.software.regathers and self._local_bytes(name, made.forward) < nbytes
        return made.forward != wanted.forward and not pieces

    def _kept_in_pieces(self) -> bool:
        """Whether a shared value of a block, which nothing else keeps, is kept in the layout in which it arrives, and
        gathered again for the backward pass."""
        op, blocks = self.operator.operator, self.bound.blocks
        if (
            op.op != IDENTITY
            or self.block is None
            or not self.walk.cluster.software.regathers
            or not self.bound.graph.trains
        ):
            return False
        (name,) = op.results
        keeping = (use for use in self.bound.graph.consumers.get(name or "", ()) if self._keeps(use, name))
        return name in self.walk.alive.kept and all(blocks.block_of(use) == self.block for use in keeping)

    def _keeps(self, use: int, name: str | None) -> bool:
        """Whether an operator keeps a value that it reads."""
        operands = self.bound.operators[use].operator.operands
        return any(operands[place] == name for place in self.walk.alive.saved[use])

    def _outlives(self, name: str) -> bool:
        """Whether the next block is not recomputed, and keeps a result of this recomputed block in the layout in which
        it is made."""
        bound, made, stages = self.bound, self.walk.made(name).forward, self.walk.stage_of
        return any(
            bound.blocks.block_of(use) not in (None, self.block)
            and bound.recompute_of(bound.blocks.block_of(use)) is None
            and stages[use] == stages[self.at]
            and operand == name
            and i in self.walk.alive.saved[use]
            and bound.operators[use].layouts.operands[i].forward == made
            for use in bound.graph.consumers.get(name, ())
            for i, operand in enumerate(bound.operators[use].operator.operands)
        )

    def _local_bytes(self, name: str, layout: Layout) -> Bytes:
        tensor = self.bound.graph.types[name]
        return tensor.nbytes * local_share(tensor.shape, layout, self.bound.plan.mesh.sizes)
