"""Rule of a recurrent layer: LSTM, GRU, RNN, in one or both directions.

Samples are independent. A step of the sequence needs all hidden elements of the step before, so that neither the
sequence nor the hidden elements are split: a layer that splits hidden elements would gather them in every step. The
large tensors of such a layer are its weights, whose stored layout may be cut as that of any other (optimizer
parallelism).
"""

from dataclasses import dataclass
from typing import final

from planner.errors import RuleError
from planner.graph.call import Call
from planner.sharding.rule import Dims, FactorKind, Rule, Work
from planner.sharding.rules.spec import FactorTable, RuleSpec

_KEPT = 7.0
"""Elements that autograd keeps of a step for each hidden element where there are gates: the activated gates, and the
states, as PyTorch's own steps do (`runtime.ops.local.local_recurrent`); libraries of devices keep less."""


@final
@dataclass(frozen=True, kw_only=True)
class Recurrent(RuleSpec):
    """`b s i, 1 b h, g i, g h, g, g -> b s h, 1 b h`: input, states, and for each direction both matrices, and, where
    they exist, biases and the projection of the states.

    g are `gates` times the hidden elements; o is what a step hands on: h, or its projection. An LSTM has two states,
    the second of which is never projected. The work is that of the products: 2 s b g (i + o), and 2 s b h o for a
    projection, forward. The backward pass takes twice as much, whichever gradients are needed, because libraries
    compute all at once. Biases are not kept for it.
    """

    gates: int
    states: int = 1

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        source, state, *_ = call.operands
        first_weight = 1 + self.states
        if call.integer(4, "num_layers", 1) != 1:
            raise RuleError(f"{call.op}: layers have operators of their own; this one has several")
        both = call.argument(7, "bidirectional") is True
        batch_first = call.argument(8, "batch_first") is True
        b = table.add_unless_one("b", source.shape[not batch_first])
        s = table.add_unless_one("s", source.shape[batch_first], FactorKind.BLOCKED)
        i = table.add_unless_one("i", source.shape[2], FactorKind.BLOCKED)
        d = table.add_unless_one("d", 2 if both else 1, FactorKind.BLOCKED)
        hidden = call.operands[first_weight].shape[0] // self.gates
        g = table.add_unless_one("g", hidden * self.gates, FactorKind.BLOCKED)
        h = table.add_unless_one("h", hidden, FactorKind.BLOCKED)
        projected = state.shape[2] != hidden
        o = table.add_unless_one("o", state.shape[2], FactorKind.BLOCKED) if projected else h
        steps = (b, s) if batch_first else (s, b)
        weights: list[Dims] = [(g, i), (g, o)]
        if call.argument(3, "has_biases") is True:
            weights += [(g,), (g,)]
        if projected:
            weights.append((o, h))
        states: tuple[Dims, ...] = ((d, b, o), (d, b, h))[: self.states]
        directions, width = 2.0 if both else 1.0, max(2, source.element_bytes)
        operands: tuple[Dims, ...] = ((*steps, i), *states, *weights, *(weights if both else ()))
        every = tuple(range(len(operands)))
        if [len(dims) for dims in operands] != [len(operand.shape) for operand in call.operands]:
            raise RuleError(f"{call.op}: its operands are not those of a layer: {len(call.operands)} of them")
        products = [Work(coefficient=2.0 * directions, factors=(*b, *s, *g, *each)) for each in (i, o)]
        if projected:
            products.append(Work(coefficient=2.0 * directions, factors=(*b, *s, *h, *o)))
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=operands,
            results=((*steps, (*d, *o)), *states),
            op_class="recurrent",
            work=tuple(products),
            gradient_work=0.0,
            repeated_work=2.0,
            saves=tuple((at, every) for at in range(batch_first, len(operands)) if len(operands[at]) > 1),
            saved_extra=self._kept(directions, batch_first, width, (b, s, i, h)),
            stepwise=True,
            gradient_scratch=(
                (first_weight, Work(coefficient=2.0 * width, factors=(*b, *s, *g))),  # of each step, and joined
                (first_weight, Work(coefficient=width, factors=(*g, *o))),  # what a step adds to a gradient
            ),
            scratch=(
                Work(coefficient=width, factors=(*b, *s, *g)),  # what inputs add, of all steps
                *((Work(coefficient=2.0 * width, factors=(*b, *s, *o)),) if both else ()),  # to be joined
            ),
            roles=(
                ("batch", b),
                ("steps", s),
                ("inputs", i),
                ("outputs", o),
                ("gates", g),
                ("hidden", h),
                ("directions", d),
            ),
        )

    def _kept(self, directions: float, turned: bool, width: int, dims: Dims) -> tuple[Work, ...]:
        """What autograd keeps beside operands and results: the gates and states of each step, and a copy of the input
        in the order of steps for each direction, where it is `turned`."""
        b, s, i, h = dims
        each = _KEPT if self.gates > 1 else 1.0
        return (
            *((Work(coefficient=directions * width, factors=(*b, *s, *i)),) if turned else ()),
            Work(coefficient=directions * width * each, factors=(*b, *s, *h)),
            Work(coefficient=directions * width, factors=(*b, *h)),
        )
