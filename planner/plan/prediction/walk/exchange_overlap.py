"""The exchange of experts that overlaps with other work (`planner.plan.layout.expert_overlap`).

It is charged in full, as if it were exposed. The work that runs at the same time covers as many seconds of it as that
work takes, in each direction. These are subtracted from the exposed seconds of the pass:

    forward    min(r + w, there) + min(r, back)                  r  rows, w  their weights, on the outermost axis
    backward   min(r, back') + min(r + w, there' + gradients of the experts' own weights)

`there` and `back` are the seconds of the kernels that run at the same time, forward and backward ('). Collectives of
these operators cover nothing. The exchange on inner axes is exposed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hardware_profiles import Bytes, Cluster, Seconds
from planner.plan.binding.bind import BoundOperator
from planner.plan.layout.deferred_weight_gradients import deferred_weight_gradients
from planner.plan.layout.expert_overlap import ExpertOverlap
from planner.pricing.inner_messages import InnerMessage, inner_hidden, inner_messages, inner_seconds
from planner.sharding.mesh import Mesh
from planner.sharding.rule import Rule, Strategy
from planner.sharding.rules.experts import matrices_of

if TYPE_CHECKING:
    from planner.plan.prediction.walk.walk import Walk


class Ways(NamedTuple):
    """Seconds on the outermost axis. Forward: rows with their weights that are dispatched (`there`), and `rows` that
    are combined. Backward: gradients that are `sent` to experts, and those of rows with their weights that come back
    (`weighted`). The rows that are dispatched may be in 8 bits."""

    rows: Seconds
    weighted: Seconds
    there: Seconds
    sent: Seconds


class Saved(NamedTuple):
    """Seconds of each pass."""

    forward: Seconds
    backward: Seconds


def rows_of(rule: Rule, strategy: Strategy, mesh: Mesh) -> list[InnerMessage]:
    """The messages of rows, to experts and back, and last that of their weights, on the outermost axis. Messages of the
    forward pass alone only tell how many rows there are."""
    found = [one for one in inner_messages(rule, strategy, mesh) if one.message.kind == "all_to_all"]
    axes = [one.message.axis for one in found if one.message.axis is not None]
    return [one for one in found if one.message.axis == min(axes) and one.backward]


def ways_of(rule: Rule, strategy: Strategy, mesh: Mesh, cluster: Cluster) -> Ways:
    """Seconds of the rows of experts on the outermost of their axes: the part that the software does not overlap by
    itself, and that does not slow other work where it overlaps (`Device.overlapped`)."""
    waits = (1 - inner_hidden(rule, cluster)) * cluster.device.overlapped
    sent = [waits * inner_seconds(rule, one, mesh, cluster) for one in rows_of(rule, strategy, mesh)]
    if not sent:
        return Ways(rows=0.0, weighted=0.0, there=0.0, sent=0.0)
    there, back, weights = sent[0], sent[-2], sent[-1]  # if equal, one message of rows stands for both
    return Ways(rows=back, weighted=back + weights, there=there + weights, sent=there)


def sent_rows(operator: BoundOperator, mesh: Mesh) -> Bytes:
    """Bytes of the rows of experts that are exchanged."""
    return max(one.message.nbytes for one in rows_of(operator.rule, operator.strategy, mesh))


class Left(NamedTuple):
    """Seconds of each pass. Forward: of rows that go to experts, and of rows that come back; backward: of gradients of
    rows that come from experts, and of gradients that go to them."""

    forward: tuple[Seconds, Seconds]
    backward: tuple[Seconds, Seconds]


NOTHING_LEFT = Left((0.0, 0.0), (0.0, 0.0))


def _rest(sent: Seconds, covered: Seconds) -> Seconds:
    return max(0.0, sent - covered)


@dataclass(kw_only=True)
class ExchangeOverlap:
    """Prices overlaps on a walk. Caches the seconds of rows."""

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
        """Seconds that it saves when the block is recomputed, under the operators whose results are not kept."""
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
        """The part in which rows come back from experts, or, backward, go to them; zero without experts."""
        left = NOTHING_LEFT if one is None else self.left(one)
        return Saved(forward=left.forward[1], backward=left.backward[1])

    def _again(self, at: int) -> bool:
        """Whether experts are recomputed in the backward pass of their block."""
        bound = self.walk.bound
        block = bound.blocks.block_of(at)
        if block is None or bound.recompute_of(block) is None:
            return False
        return bound.place_of(at) < self.walk.replays[bound.blocks.kinds[block]].works

    def transient(self, one: ExpertOverlap) -> Bytes:
        """Bytes of rows that are sent and received while others run, plus the largest transient bytes of these, and of
        gradients of results that wait for those of the matrices."""
        operators = self.walk.bound.operators
        prices = [self.walk.price(operators[at], counted=False) for at in one.beside]
        others = max((float(price.transient[0]) for price in prices), default=0.0)
        return others + 2 * sent_rows(operators[one.at], self.walk.bound.plan.mesh)

    def ways(self, at: int) -> Ways:
        """`ways_of` for an operator, cached."""
        operator = self.walk.bound.operators[at]
        key = (id(operator.rule), operator.strategy)
        if key not in self._known:
            found = ways_of(operator.rule, operator.strategy, self.walk.bound.plan.mesh, self.walk.cluster)
            self._known[key] = (found, operator.rule)
        return self._known[key][0]

    def _own(self, at: int) -> Seconds:
        """Seconds of the gradients of the experts' matrices."""
        matrices = matrices_of(self.walk.bound.operators[at].rule)
        return self._backward((at,)) - self._backward((at,), without=matrices)

    def _forward(self, operators: Sequence[int]) -> Seconds:
        bound = self.walk.bound
        return sum(float(self.walk.price(bound.operators[at], counted=False).forward[0]) for at in operators)

    def _backward(self, operators: Sequence[int], without: tuple[int, ...] = ()) -> Seconds:
        """Backward seconds, without the gradients of some operands, and without deferred ones."""
        bound, found = self.walk.bound, 0.0
        for at in operators:
            later = deferred_weight_gradients(bound, at) if self.walk.defers else ()
            price = self.walk.price(bound.operators[at], without=(*without, *later), counted=False)
            found += float(price.backward[0])
        return found
