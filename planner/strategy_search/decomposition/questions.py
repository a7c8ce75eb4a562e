"""What is asked of the pieces of a chain: the weights of their seconds and bytes at a price of memory.

`Questions` makes the questions, one price each; `answers` solves several of them together.

Shares of exposed communication. Collectives that overlap with computation cost max(0, excess), where excess is their
seconds minus those of the computation. Since max(0, excess) >= s excess, every share s from 0 to 1 gives a lower bound.
The same holds for gradient reductions R under the last backward pass B. None of them can start before the first slot of
that pass is over (`planner.plan.prediction.walk.bucket_overlap`), so their excess is

    R - (1 - 1 / slots) B

Shares of memory. The largest interior of a recomputed block is at least the average interior, and at least the interior
in the tail. The largest transient memory of an operator is at least the least one, and at least that of an operator in
the tail. Both maxima count as a weighted mean of these two bounds; the bound from the tail has the share `at_tail`.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.plan.prediction.walk.bucket_overlap import SLOTS
from planner.strategy_search.decomposition.chain import Chain
from planner.strategy_search.decomposition.pieces import NEITHER, WAITED, Asked, Passes, Piece, Solved, Weights
from planner.strategy_search.decomposition.pieces import solve as solve_pieces
from planner.strategy_search.decomposition.priced import Priced, least_value, least_values
from planner.strategy_search.decomposition.setting import Setting

_LEAN = 1e-6
"""Value of a second in bytes when the least memory is asked for. It only breaks ties."""


_ASIDE = 2.0
"""Value of a byte of the host in bytes of a device where its price is infinite: offload would take more than it leaves
free."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """Pieces to solve for one price of memory.

    `under` has the shares with which excess counts: the seconds by which collectives exceed the computation that
    overlaps them. `asked` holds the pieces of head, tail and every kind of block one after the other; `numbers` says
    how many pieces belong to each."""

    price: float
    flights: float
    under: Passes
    proves: bool
    at_tail: float
    asked: list[Asked]
    numbers: list[int]
    hosted: float = 0.0


class Questions:
    """Makes the questions for the pieces of a chain. Arguments as for `Multipliers`; `most` is given, and `banned` has
    the candidates of each piece that may not be chosen, by its id."""

    def __init__(
        self,
        chain: Chain,
        weight: float,
        parts: int,
        banned: Mapping[int, NDArray[np.bool_]],
        *,
        most: int,
        columns: bool,
    ) -> None:
        self.chain, self.weight, self.parts, self.banned, self.columns = chain, weight, parts, banned, columns
        self.blocks, self.most = chain.block_ranges.blocks, most
        number = chain.tables.template.blocks.count
        self.covers = (
            1 - 1 / (SLOTS * (1 + number)) if number else 1.0
        )  # of the last backward pass, behind its first slot

    @property
    def interior(self) -> float:
        """The share of the interior of each block that counts when memory has a price."""
        return self._of_interior(self.most)

    def at_price(
        self,
        price: float,
        flights: float,
        under: Passes = NEITHER,
        cap: float = math.inf,
        at_tail: float = 0.0,
        hosted: float = 0.0,
    ) -> Question:
        """The pieces at a price of memory, as in `Multipliers.solve`."""
        weights = self._weights(price, flights, under)
        if at_tail:
            weights = replace(weights, replay=weights.replay * (1 - at_tail))
        if hosted:
            share = hosted if hosted < math.inf else _ASIDE * weights.fixed
            weights = replace(weights, hosted=share, hosted_live=share * flights)
        proves = cap == math.inf and under[2] != WAITED and not hosted
        question = self._question(weights, price, flights, under=under, proves=proves, cap=cap, hosted=hosted)
        if not at_tail:
            return question
        own = slice(question.numbers[0], question.numbers[0] + question.numbers[1])
        there = price * at_tail / self.parts
        counted = [
            replace(one, weights=replace(one.weights, replay=one.weights.replay + there, transient=there))
            for one in question.asked[own]
        ]
        asked = [*question.asked[: own.start], *counted, *question.asked[own.stop :]]
        return replace(question, asked=asked, at_tail=at_tail)

    def of_one_micro_batch(self) -> Question:
        """The least seconds of one micro-batch."""
        return self.unpriced(Weights(part=1 / self.parts, steady=1 - 1 / self.parts))

    def of_average_rank(self, setting: Setting) -> Question:
        """Ranks that are all as quick as the average one. It bounds best with few micro-batches."""
        weight = average_weight(setting)
        weights = Weights(
            part=weight / self.parts,
            steady=weight * (1 - 1 / self.parts),
            uncovered=(min(1.0, self.weight) / setting.ranks,) * 2,
            step=1 / setting.ranks,
            reduction=1 / setting.ranks,
        )
        return self.unpriced(weights)

    def unpriced(self, weights: Weights) -> Question:
        """The pieces with these weights, for free memory. The answer by itself bounds no rank."""
        return self._question(weights, 0.0, 0.0, proves=False)

    def leanest(self, flights: float, most: float, interiors: tuple[float, float, float]) -> Question:
        """The least bytes, with shares of the interior of head, inner blocks and tail. No operator may need more than
        `most` transient bytes, unless all of its candidates do."""
        question = self.at_price(math.inf, flights, cap=most)
        head, inner, tail = interiors
        sides = (len(self.chain.head), len(self.chain.tail), sum(map(len, self.chain.kinds)))
        parts = (*(head,) * sides[0], *(tail,) * sides[1], *(inner,) * sides[2])
        counted = [
            replace(one, weights=replace(one.weights, replay=part))
            for one, part in zip(question.asked, parts, strict=True)
        ]
        return replace(question, asked=counted)

    def of_live_bytes(self) -> Question:
        """The least bytes that are kept of a micro-batch until its backward pass."""
        return self._question(Weights(part=0.0, step=0.0, live=1.0), math.inf, 1.0, proves=False)

    def _weights(self, price: float, flights: float, under: Passes) -> Weights:
        waited = under[2] == WAITED
        last = under[2] if self.chain.reduces and not waited else 0.0
        covering = last * self.covers
        rest = (self.weight - covering) * (1 - 1 / self.parts)
        if math.isinf(price):
            return Weights(
                part=self.weight * _LEAN,
                step=_LEAN,
                fixed=1.0,
                live=flights,
                replay=self._of_interior(self.blocks) / self.parts,
            )
        return Weights(
            part=self.weight / self.parts,
            steady=rest,
            excess=(under[0] * self.weight / self.parts, under[1] * (self.weight - covering) / self.parts),
            under=(under[0] * rest, under[1] * rest),
            uncovered=self._uncovered(under, covering),
            step=1.0,
            backward=covering / self.parts,
            reduction=0.0 if waited else 1.0 - last,
            fixed=price,
            live=price * flights,
            replay=price * self._of_interior(self.most) / self.parts,
        )

    def _of_interior(self, most: int) -> float:
        """The share of the interior of each block that counts if a rank holds up to `most` inner blocks."""
        return 1 / max(1, most + self.chain.blocks_at_ends)

    def _uncovered(self, under: Passes, covering: float) -> tuple[float, float]:
        """Shares of the seconds U that are uncovered once a step, in the forward and in the backward pass.

        A pass with computation W and collectives H takes max(W, H), and once a step max(W + U, H). For a share s of the
        excess this is at least s H + (1 - s) (W + U). The last backward pass already counts `covering` of the
        reductions, so less of U counts there."""
        return (1 - under[0]) * min(1.0, self.weight), (1 - under[1]) * min(1.0, self.weight - covering)

    def _question(
        self,
        weights: Weights,
        price: float,
        flights: float,
        *,
        proves: bool,
        under: Passes = NEITHER,
        cap: float = math.inf,
        hosted: float = 0.0,
    ) -> Question:
        def banned(piece: Piece) -> NDArray[np.bool_] | None:
            return self.banned.get(id(piece)) if cap == math.inf else piece.bulky(cap)

        ending, single, chain = weights, 1 / self.parts, self.chain
        if flights > single:  # behind the blocks one micro-batch at a time is in flight
            ending = replace(
                weights, live=weights.live / flights * single, hosted_live=weights.hosted_live / flights * single
            )
        beginning = weights if chain.interior_in_head else replace(weights, replay=0.0)
        ending = ending if chain.blocks_in_tail else replace(ending, replay=0.0)
        groups = [(chain.head, beginning), (chain.tail, ending), *((pieces, weights) for pieces in chain.kinds)]
        worth = [(_worth(pieces, price), own) for pieces, own in groups]
        return Question(
            price=price,
            flights=flights,
            under=under,
            proves=proves,
            at_tail=0.0,
            asked=[Asked(piece=one, weights=own, banned=banned(one)) for pieces, own in worth for one in pieces],
            numbers=[len(pieces) for pieces, _ in worth],
            hosted=hosted,
        )

    def answer(self, question: Question, solved: Iterable[Solved]) -> Priced:
        """The answer, from the solved pieces of the question in their order."""
        left = iter(solved)
        head, tail, *inner = (tuple(itertools.islice(left, number)) for number in question.numbers)
        return Priced(
            price=question.price,
            flights=question.flights,
            under=question.under,
            proves=question.proves,
            at_tail=question.at_tail,
            hosted=question.hosted,
            head=head if self.columns else (),
            inner=tuple(inner) if self.columns else (),
            tail=tail if self.columns else (),
            values=(
                least_value(self.chain, head), least_values(self.chain, inner), least_value(self.chain, tail),
            ),
        )  # fmt: skip


def answers(asked: Sequence[tuple[Questions, Question]]) -> list[Priced]:
    """Solves questions of several chains together."""
    solved = iter(solve_pieces([one for _, question in asked for one in question.asked]))
    return [questions.answer(question, itertools.islice(solved, len(question.asked))) for questions, question in asked]


def average_weight(setting: Setting) -> float:
    """How often the micro-batch of the average rank counts."""
    return 1 / setting.chunks + setting.weight / setting.ranks


def _worth(pieces: Sequence[Piece], price: float) -> Sequence[Piece]:
    """The pieces worth solving: where memory is free, recomputation and offload never pay."""
    if price == 0.0 and pieces and not pieces[0].recompute and pieces[0].home == "device":
        return pieces[:1]
    return pieces
