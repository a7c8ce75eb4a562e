"""The cost and the savings of keeping the results of an operator in a recomputed block.

    norm ─> q, k, v ─> attention ─> o_proj ─> ...         "selective", attention kept
    └─ recomputed ─┘ └ kept ┘ └── recomputed ...

The kernel of a kept operator is not run again. Its results, and what it saves beside them (the log-sum-exp of
attention), are kept for every micro-batch in flight instead of for the one block under recomputation. Its operands are
still moved and computed again, because autograd needs them. Korthikanti et al. 2022 keep all but attention;
FlashAttention made attention the operator that is most worth keeping: expensive to compute and small to keep.

Whatever a reader keeps of the results is counted with the reader, in the one block, as for every value. It is the same
memory, so the sum is an upper bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.faults import Fault
from planner.pricing.operator_price import OperatorPrices
from planner.sharding.rule import FactorKind, Rule

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Keeping:
    """The effect of keeping an operator's results, under each of K strategies, (K,) each. `seconds` per micro-batch
    that recomputing the block saves; `kept` bytes for every micro-batch in flight; `interior` bytes that a block under
    recomputation holds less."""

    seconds: Array
    kept: Array
    interior: Array


def keeping_fault(rule: Rule) -> Fault | None:
    """Why the results of an operator cannot be kept through recomputation; None if they can."""
    if rule.op_class == "view" or rule.local_form == "reshape":  # a reshape copies on some devices only
        return Fault(reason=f"{rule.op} computes nothing, its result is a view of its operand or a copy")
    kinds = {rule.factors[message.factor].kind for message in rule.inner}
    together = (rule.casts and rule.op_class != "experts") or kinds <= {FactorKind.RING, FactorKind.HALO}
    if not together:  # a whole operator is kept with its collectives
        return Fault(reason=f"{rule.op} communicates inside, and is computed again as a whole")
    return None


def keeping(prices: OperatorPrices, works: bool | NDArray[np.bool_], own: Mapping[int, float]) -> Keeping:
    """The effect of keeping an operator for which `keeping_fault` returns None.

    `works` says whether recomputing the block would run the operator again (see `liveness.Replay`), for all strategies
    or for each. `own` has the positions, among the results that are tensors, of those in `Liveness.kept`, with their
    shares (`Liveness.shares`): the block counts these already.
    """
    return Keeping(
        seconds=(prices.forward + prices.inner_forward) * works,
        kept=sum(prices.results, prices.saved_extra),
        interior=sum((share * prices.results[place] for place, share in own.items()), prices.saved_extra),
    )
