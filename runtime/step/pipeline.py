"""Pipeline stages on real processes: runs the turns of a schedule, and sends tensors between stages.

    chunk c of rank r is stage c p + r, or, in a V, stage 2p-1-r where c is 1
                                                  values     ──> the rank of the next stage
    rank 0   F0.0 F1.0 F0.1 F1.1 .. B0.1 ..       gradients  <── back
    rank 1     F0.0 F1.0 F0.1 B0.1 ..

A turn is one pass (forward, backward, ...) of one chunk on its micro-batches. A rank runs its turns in the order of the
plan's schedule (`planner.plan.schedule`), with any number of stages (chunks) and of micro-batches in flight. Stages
have equal meshes, so a tensor is sent piece by piece: it arrives in the layout in which its producer made it, and the
reading operator redistributes it like any other value. A value for a later stage is forwarded by the stages in between:
they receive and send it, and its gradient is the sum of the returned one and their own. If a schedule splits the
backward pass, the inputs of its second part are kept in `runtime.executor.deferred_weight_gradients`.

Sends do not wait, and receives are posted one turn ahead (`runtime.step.receiving`). Messages from one rank to another
on a process group arrive in the order in which they were sent, so every line of messages has a separate group
(`runtime.step.stage_links`): no turn waits behind another's messages. Huang et al. 2019 (GPipe); Narayanan et al. 2019
(PipeDream), 2021 (the flush, virtual stages).
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from costmodels import Turn, ends
from planner.plan.schedule import passes_of
from runtime.comm.collectives import all_reduce
from runtime.executor.alternation import Alternation
from runtime.executor.deferred_weight_gradients import DeferredGradients
from runtime.executor.relay import Relay
from runtime.observer import Observer
from runtime.step.receiving import Lines, lines_of
from runtime.step.stage_links import Chunk, Crossing
from runtime.waiting import phase, waiting_for

Values = Mapping[str, torch.Tensor]
Forward = Callable[[Turn, Sequence[Values], Sequence[DeferredGradients | None]], Sequence[Values]]
"""Computes the stage of a turn's chunk on its micro-batch, or on several interleaved ones: from the values received for
each to the values to send, or the loss on the last stage. Deferred weight gradients are collected in the third
argument."""
Edges = Mapping[str, GradientEdge | None]
"""The autograd edges of the values by name; None where no gradient is needed."""
Key = tuple[int, int, int]  # chunk, micro-batch, slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What the backward pass of a turn's micro-batches through a chunk needs: the received values of each, which
    collect their gradients; the edges where it starts; and its deferred weight gradients."""

    received: Sequence[Values]
    edges: Sequence[Edges]
    deferred: Sequence[DeferredGradients | None]


@dataclass(frozen=True, slots=True)
class Turned:
    """Values passed from one chunk of a rank to its other chunk, in the order of micro-batches; only on the last rank
    of V-shaped placements."""

    values: deque[torch.Tensor] = field(default_factory=deque)
    gradients: deque[torch.Tensor] = field(default_factory=deque)


class _Sent(NamedTuple):
    """A tensor being sent over a group."""

    work: dist.Work
    kept: torch.Tensor
    group: dist.ProcessGroup


@dataclass(kw_only=True)
class Pipeline:
    """One rank's share of the micro-batches of a step. A rank without others sends nothing.

    Each turn takes `interleave` micro-batches. `passed` is called after every backward pass. `order` are the turns of
    this rank in a step. For the last step, `turns` has the turns that were run, in order, and `most_live` the maximum
    number of micro-batches (or slices of them) between their forward pass and the end of their backward pass.
    """

    chunks: tuple[Chunk, ...]
    order: tuple[Turn, ...]
    everyone: dist.ProcessGroup | None
    loss: Crossing
    device: torch.device
    interleave: int = 1
    passed: Callable[[], None] = lambda: None
    alternation: Alternation | None = None
    paired: frozenset[int] = frozenset()
    relay: Relay | None = None
    observer: Callable[[], Observer | None] = lambda: None
    has_gone: Callable[[dist.Work], bool] = dist.Work.is_completed
    turns: list[Turn] = field(default_factory=list)
    most_live: int = 0
    _live: dict[Key, Passed] = field(default_factory=dict)
    _sent: list[_Sent] = field(default_factory=list)
    _turned: Turned = field(default_factory=Turned)
    _lines: tuple[Lines, ...] = ()
    _together_now: int = 1

    def run(
        self,
        forward: Forward,
        seed: float,
        *,
        order: Sequence[Turn] | None = None,
        batches: int = 1,
        then: Callable[[Turn], None] = lambda turn: None,
    ) -> torch.Tensor:
        """Run all micro-batches of a step, forward and backward; returns the mean loss, the same on every rank. `seed`
        is the gradient of the loss of each micro-batch, or of each of its slices.

        For several `batches` that follow each other without a flush, `order` has the turns, and the mean loss of each
        batch is returned. `then` is called after every turn.
        """
        order = self.order if order is None else order
        totals: list[torch.Tensor | None] = [None] * batches
        self._live, self._turned, self.most_live = {}, Turned(), 0  # an aborted step may have left some
        self._expect(order)
        self.turns.clear()
        apart = any(turn.kind == "weight_gradient" for turn in order)
        losses = self.interleave * sum(turn.kind == "forward" and turn.chunk == 0 for turn in order) // batches
        turns = (max(turn.micro_batch for turn in order) + 1) // batches
        paired = self.paired if order is self.order else frozenset()
        beside = [order[at + 1] if at in paired else None for at in range(len(order))]
        passes = self._announce(order, paired, self.relay)
        for at, turn in enumerate(order):
            passes(at)
            if turn.kind == "forward":
                deferred = [DeferredGradients() if apart else None for _ in range(self.interleave)]
                loss = self._forward(forward, turn, deferred, beside[at], seed)
                if loss is not None:
                    before, part = totals[turn.micro_batch // turns], loss / losses
                    totals[turn.micro_batch // turns] = part if before is None else before + part
            elif not at or beside[at - 1] is None:  # else it has run together with the one before
                self._backward(turn, seed)
            self.turns.append(turn)
            then(turn)
        if self.relay is not None:
            with phase("backward"):
                self.relay.end()
        self._wait()
        means = [torch.zeros((), dtype=torch.float32, device=self.device) if t is None else t for t in totals]
        found = torch.stack(means) if batches > 1 else means[0]
        return self._mean(found)

    @torch.no_grad()
    def evaluate(self, forward: Forward, relay: Relay | None = None) -> torch.Tensor:
        """Run all micro-batches of a step forward only, in the schedule's order; returns the mean loss, the same on
        every rank. The sends of a turn have finished when the next turn of its chunk has made its own, which limits the
        memory held. `relay` is the relay of the executors that run."""
        self._turned = Turned()
        turns = [turn for turn in self.order if turn.kind == "forward"]
        self._expect(turns)
        losses = self.interleave * sum(turn.chunk == 0 for turn in turns)
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        passes = self._announce(turns, frozenset(), relay)
        for at, turn in enumerate(turns):
            passes(at)
            for loss in self._evaluated(forward, turn):
                total += loss.float().reshape(()) / losses
        self._wait()
        return self._mean(total)

    def _evaluated(self, forward: Forward, turn: Turn) -> list[torch.Tensor]:
        """The micro-batches of a turn through a chunk; returns their losses, none except on the last stage. Their
        values are freed on return, except those being sent."""
        chunk = self.chunks[turn.chunk]
        received = self._arrived(turn.chunk)
        with phase("forward"):
            made = forward(turn, received, [None] * self.interleave)
        if (
            chunk.after is not None and chunk.after.values is not None
        ):  # in a V two ranks send to each other: each line separately
            self._wait(chunk.after.values)
        self._hand_on(turn.chunk, made)
        return [values[self.loss.name] for values in made] if chunk.cut.last else []

    def _mean(self, found: torch.Tensor) -> torch.Tensor:
        """The mean loss on every rank; the last stage has it, and the others hold zero."""
        return found if self.everyone is None else all_reduce(found, self.everyone)

    def forward(self, forward: Forward, micro_batch: int, number: int = 0) -> None:
        """Run a slice of one micro-batch through all stages, forward only; it has no effect besides the calls of
        `forward`."""
        turns = [Turn("forward", micro_batch, at, number) for at in range(len(self.chunks))]
        if self.relay is not None:
            self.relay.start((), None)
        self._expect(turns, together=1)
        for turn in turns:
            self._hand_on(turn.chunk, forward(turn, self._arrived(turn.chunk), [None]))
        self._wait()

    def _announce(self, order: Sequence[Turn], paired: Collection[int], relay: Relay | None) -> Callable[[int], None]:
        """Tell a relay the passes of a step; returns a function that tells it which turn is next, by its position."""
        if relay is None:
            return lambda at: None
        passes, observer = passes_of(order, paired), self.observer()
        turns = [[order[at] for at in own] for own in passes]
        begins = {own[0]: (one, behind) for own, one, behind in zip(passes, turns, [*turns[1:], []], strict=True)}
        relay.start(turns, observer)

        def begin(at: int) -> None:
            if at in begins:
                relay.begin(*begins[at], observer)

        return begin

    def _expect(self, order: Sequence[Turn], *, together: int | None = None) -> None:
        """Post the first receives of these turns; each takes `together` micro-batches, by default as many as in a
        step."""
        together = self.interleave if together is None else together
        self._together_now = together
        self._lines = tuple(lines_of(chunk, self.device, together) for chunk in self.chunks)
        for at, lines in enumerate(self._lines):
            own = [turn.kind for turn in order if turn.chunk == at]
            if lines.values is not None:
                lines.values.expect(own.count("forward"), post=True)
            if lines.gradients is not None:
                lines.gradients.expect(own.count("backward") + own.count("input_gradient"), post=False)

    def _wait(self, group: dist.ProcessGroup | None = None) -> None:
        """Wait until everything has been sent, on one group or on all."""
        for sent in self._sent:
            if group is None or sent.group is group:
                waiting_for(sent.work.wait)
        self._sent = [] if group is None else [sent for sent in self._sent if sent.group is not group]

    def _forward(
        self,
        forward: Forward,
        turn: Turn,
        deferred: Sequence[DeferredGradients | None],
        beside: Turn | None = None,
        seed: float = 0.0,
    ) -> torch.Tensor | None:
        """The micro-batches of a turn through a chunk; returns the sum of their losses, None except on the last stage.
        Their values are released on return, except those being sent. A backward turn may run `beside` it."""
        chunk = self.chunks[turn.chunk]
        received = self._arrived(turn.chunk)
        if beside is None:
            with phase("forward"):
                made = forward(turn, received, deferred)
        else:
            made = self._together(lambda: forward(turn, received, deferred), beside, seed)
        self._hand_on(turn.chunk, made)
        edges = [self._edges(chunk, values) for values in made]
        self._live[_key(turn)] = Passed(received=received, edges=edges, deferred=deferred)
        self.most_live = max(self.most_live, self.interleave * len(self._live))
        if not chunk.cut.last:
            return None
        first, *others = (values[self.loss.name].detach().float().reshape(()) for values in made)
        return sum(others, first)

    def _together(self, forward: Callable[[], Sequence[Values]], turn: Turn, seed: float) -> Sequence[Values]:
        """Run a forward pass together with a backward turn; returns the values of the forward pass."""
        assert self.alternation is not None, "passes take turns by it"
        chunk, passed, gradients = self._begun(turn, seed)
        with phase("backward"):
            _, made = self.alternation.run(lambda: self._differentiate(passed, gradients), forward)
        self._give_back(chunk, passed)
        if ends(turn):
            del self._live[_key(turn)]
        return made

    def _arrived(self, at: int) -> Sequence[Values]:
        """The values that a forward turn of a chunk has received, for each of its micro-batches."""
        chunk, line = self.chunks[at], self._lines[at].values
        came = self._turned.values if line is None else deque(line.take())  # of this rank's other chunk, or of others
        found = []
        for _ in range(self._together_now):
            values = {arrival.name: came.popleft() for arrival in chunk.arrivals}
            for arrival in chunk.arrivals:
                values[arrival.name].requires_grad_(arrival.differentiable and torch.is_grad_enabled())
            found.append(values)
        return found

    def _hand_on(self, at: int, made: Sequence[Values]) -> None:
        """Start to send the values of a turn's micro-batches; their gradients may be received from now on."""
        chunk, gradients = self.chunks[at], self._lines[at].gradients
        for values in made:
            for departure in chunk.departures:
                assert chunk.after is not None, "the last stage sends nothing"
                value = values[departure.name].detach()
                self._send(value, chunk.after.rank, chunk.after.values, self._turned.values)
        if gradients is not None:
            gradients.post()

    def _edges(self, chunk: Chunk, made: Values) -> Edges:
        """The edges where the backward pass starts; values that have been sent are not kept alive."""
        names = (self.loss.name,) if chunk.cut.last else tuple(d.name for d in chunk.departures if d.differentiable)
        return {name: get_gradient_edge(made[name]) if made[name].requires_grad else None for name in names}

    def _backward(self, turn: Turn, seed: float) -> None:
        if turn.kind == "weight_gradient":
            with phase("backward"):
                for products in self._live[_key(turn)].deferred:
                    assert products is not None, turn
                    products.finish()
        else:
            chunk, passed, gradients = self._begun(turn, seed)
            with phase("backward"):
                self._differentiate(passed, gradients)
            self._give_back(chunk, passed)
        if ends(turn):
            del self._live[_key(turn)]

    def _begun(self, turn: Turn, seed: float) -> tuple[Chunk, Passed, Sequence[torch.Tensor]]:
        """The inputs of a turn's backward pass: what its forward pass has left, and the gradients of its values."""
        chunk, key = self.chunks[turn.chunk], _key(turn)
        passed = self._live[key]
        self._live[key] = Passed(received=(), edges=(), deferred=passed.deferred)
        return chunk, passed, self._returned(turn.chunk, seed)

    def _returned(self, at: int, seed: float) -> Sequence[torch.Tensor]:
        """The gradients of the values that a turn's micro-batches have sent, or of their losses."""
        chunk, line = self.chunks[at], self._lines[at].gradients
        if chunk.cut.last:
            loss = self.loss
            return [torch.full(loss.shape, seed, dtype=loss.dtype, device=self.device) for _ in range(self.interleave)]
        if line is not None:
            return line.take()
        many = self.interleave * sum(departure.differentiable for departure in chunk.departures)
        return [self._turned.gradients.popleft() for _ in range(many)]  # from this rank's other chunk

    def _differentiate(self, passed: Passed, gradients: Sequence[torch.Tensor]) -> None:
        """Run the backward pass through a chunk, from the gradients of its results to those of its received values."""
        edges = [edge for copy in passed.edges for edge in copy.values()]
        pairs = [(edge, given) for edge, given in zip(edges, gradients, strict=True) if edge is not None]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
            self.passed()

    def _give_back(self, chunk: Chunk, passed: Passed) -> None:
        """Start to send the gradients of a chunk's received values."""
        for values in passed.received:
            for arrival in chunk.arrivals:
                if arrival.differentiable:
                    assert chunk.before is not None, "the first stage receives nothing"
                    value = values[arrival.name]
                    gradient = torch.zeros_like(value) if value.grad is None else value.grad
                    self._send(gradient, chunk.before.rank, chunk.before.gradients, self._turned.gradients)

    def _send(
        self, value: torch.Tensor, target: int, group: dist.ProcessGroup | None, turned: deque[torch.Tensor]
    ) -> None:
        """Start to send; the tensor is kept alive until it is sent. Without a group it goes to this rank's other
        chunk."""
        if group is None:
            turned.append(value)
            return
        self._sent = [sent for sent in self._sent if not self.has_gone(sent.work)]
        whole = value.contiguous()
        work = dist.isend(whole, target, group=group)
        assert work is not None, "this rank is a member of the group"
        self._sent.append(_Sent(work, whole, group))


def _key(turn: Turn) -> Key:
    return turn.chunk, turn.micro_batch, turn.slice
