"""What an exchange of experts takes that runs under other work (`planner.plan.layout.expert_overlap`).

It is charged in full, as if everything waited. What runs meanwhile covers as much of it as it takes itself, way by way;
that is taken from what the pass waits for:

    forward    min(r + w, there) + min(r, back)                  r  rows, w  their weights, on the outermost axis
    backward   min(r, back') + min(r + w, there' + gradients of the experts' own weights)

`there` and `back` are the seconds of the kernels beside, forward and backward ('). What these send themselves covers
nothing. An axis inside of the outermost is waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hardware_profiles import Bytes, Cluster, Seconds
from planner.plan.binding.bind import BoundOperator
from planner.plan.layout.deferred_weight_gradients import deferred_weight_gradients
from planner.plan.layout.expert_overlap import ExpertOverlap
from planner.pricing.operator_price import InnerMessage, inner_hidden, inner_messages, inner_seconds
from planner.sharding.mesh import Mesh
from planner.sharding.rule import Rule, Strategy
from planner.sharding.rules.experts import matrices_of

if TYPE_CHECKING:
    from planner.plan.prediction.walk import Walk


class Ways(NamedTuple):
    """Seconds on the outermost axis: forward of rows with their weights that go `there`, and of `rows` that come back;
    backward of gradients that are `sent` there, and of those of rows with their weights (`weighted`) that come back.
    What goes there may be in 8 bits."""

    rows: Seconds
    weighted: Seconds
    there: Seconds
    sent: Seconds


class Saved(NamedTuple):
    """Seconds of each pass."""

    forward: Seconds
    backward: Seconds


def rows_of(rule: Rule, strategy: Strategy, mesh: Mesh) -> list[InnerMessage]:
    """Messages of rows, there and back, and last of their weights, on the outermost axis; what is sent forward alone
    says how many rows come."""
    found = [one for one in inner_messages(rule, strategy, mesh) if one.message.kind == "all_to_all"]
    axes = [one.message.axis for one in found if one.message.axis is not None]
    return [one for one in found if one.message.axis == min(axes) and one.backward]


def ways_of(rule: Rule, strategy: Strategy, mesh: Mesh, cluster: Cluster) -> Ways:
    """What the rows of experts take on the outermost of their axes that the software does not hide by itself, and that
    costs other work nothing where they overlap (`Device.overlapped`)."""
    waits = (1 - inner_hidden(rule, cluster)) * cluster.device.overlapped
    sent = [waits * inner_seconds(rule, one, mesh, cluster) for one in rows_of(rule, strategy, mesh)]
    if not sent:
        return Ways(rows=0.0, weighted=0.0, there=0.0, sent=0.0)
    there, back, weights = sent[0], sent[-2], sent[-1]  # one of rows stands for both ways, where these are alike
    return Ways(rows=back, weighted=back + weights, there=there + weights, sent=there)


def sent_rows(operator: BoundOperator, mesh: Mesh) -> Bytes:
    """Bytes of the rows of experts on their way."""
    return max(one.message.nbytes for one in rows_of(operator.rule, operator.strategy, mesh))


class Left(NamedTuple):
    """Seconds of each pass: of rows that go to experts and of those that come back; backward of gradients of rows that
    come from experts, and of those that go to them."""

    forward: tuple[Seconds, Seconds]
    backward: tuple[Seconds, Seconds]


NOTHING_LEFT = Left((0.0, 0.0), (0.0, 0.0))


def _rest(sent: Seconds, covered: Seconds) -> Seconds:
    return max(0.0, sent - covered)


@dataclass(kw_only=True)
class ExchangeOverlap:
    """Prices overlaps on a walk. Keeps what rows take."""

    walk: "Walk"
    _known: dict[tuple[int, object], tuple[Ways, object]] = field(default_factory=dict)

    def saves(self, one: ExpertOverlap) -> Saved:
        """Seconds that an overlap saves forward and backward."""
        ways = self.ways(one.at)
        own = self._own(one.at)
        return Saved(
            forward=min(ways.there, self._forward(one.there)) + min(ways.rows, self._forward(one.back)),
            backward=min(ways.sent, self._backward(one.back)) + min(ways.weighted, self._backward(one.there) + own),
        )

    def saves_again(self, one: ExpertOverlap) -> Seconds:
        """Seconds that it saves where the block is computed again, under what is not kept of it."""
        there, back = ([at for at in some if not self.walk.bound.is_kept(at)] for some in (one.there, one.back))
        ways = self.ways(one.at)
        return min(ways.there, self._forward(there)) + min(ways.rows, self._forward(back))

    def left(self, one: ExpertOverlap) -> Left:
        """Seconds that nothing beside the experts covers, in which another pass may compute."""
        ways, forward, backward = self.ways(one.at), self._forward, self._backward
        own = self._own(one.at)
        there, back = _rest(ways.there, forward(one.there)), _rest(ways.rows, forward(one.back))
        returned = _rest(ways.weighted, backward(one.there) + own)
        sent = _rest(ways.sent, backward(one.back))
        if self._again(one.at):
            left = [[at for at in some if not self.walk.bound.is_kept(at)] for some in (one.there, one.back)]
            returned += _rest(ways.there, forward(left[0]))
            sent += _rest(ways.rows, forward(left[1]))
        return Left((there, back), (returned, sent))

    def left_back(self, one: ExpertOverlap | None) -> Saved:
        """Those of them in which rows come back from experts, or backward go to them; none without experts."""
        left = NOTHING_LEFT if one is None else self.left(one)
        return Saved(forward=left.forward[1], backward=left.backward[1])

    def _again(self, at: int) -> bool:
        """Whether experts run again in the backward pass of their block."""
        bound = self.walk.bound
        block = bound.blocks.block_of(at)
        if block is None or bound.recompute_of(block) is None:
            return False
        return bound.place_of(at) < self.walk.replays[bound.blocks.kinds[block]].works

    def transient(self, one: ExpertOverlap) -> Bytes:
        """Bytes of rows that are sent and come while others run, beside the most that these take for a moment, and of
        gradients of results that wait for those of the matrices."""
        operators = self.walk.bound.operators
        prices = [self.walk.price(operators[at], counted=False) for at in one.beside]
        others = max((float(price.transient[0]) for price in prices), default=0.0)
        return others + 2 * sent_rows(operators[one.at], self.walk.bound.plan.mesh)

    def ways(self, at: int) -> Ways:
        """What the rows of experts take on the outermost of their axes that the software does not hide by itself."""
        operator = self.walk.bound.operators[at]
        key = (id(operator.rule), operator.strategy)
        if key not in self._known:
            found = ways_of(operator.rule, operator.strategy, self.walk.bound.plan.mesh, self.walk.cluster)
            self._known[key] = (found, operator.rule)
        return self._known[key][0]

    def _own(self, at: int) -> Seconds:
        """What the gradients of the matrices of experts take."""
        matrices = matrices_of(self.walk.bound.operators[at].rule)
        return self._backward((at,)) - self._backward((at,), without=matrices)

    def _forward(self, operators: Sequence[int]) -> Seconds:
        bound = self.walk.bound
        return sum(float(self.walk.price(bound.operators[at], counted=False).forward[0]) for at in operators)

    def _backward(self, operators: Sequence[int], without: tuple[int, ...] = ()) -> Seconds:
        """Without the gradients of some operands, and those that are deferred."""
        bound, found = self.walk.bound, 0.0
        for at in operators:
            later = deferred_weight_gradients(bound, at) if self.walk.defers else ()
            price = self.walk.price(bound.operators[at], without=(*without, *later), counted=False)
            found += float(price.backward[0])
        return found
