"""What it saves and what it takes to keep the results of an operator of a recomputed block.

    norm ─> q, k, v ─> attention ─> o_proj ─> ...         "selective", attention kept
    └── done again ──┘ └ kept ┘ └── done again ...

The kernel of a kept operator is not run again; its results, and what it saves beside them (the log-sum-exp of
attention), are kept for every micro-batch in flight instead of for the one block that is being recomputed. What feeds
it is moved and computed again all the same: autograd needs its operands. Korthikanti et al. 2022 keep all but
attention; FlashAttention made attention the operator that is most worth keeping, dear to compute and small to keep.

What a reader of the results keeps of them is counted with the reader, in the one block, as for every value: there it
is the same memory, so the sum is an upper bound.
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
    """What keeping an operator changes, under each of K strategies, (K,) each: `seconds` a micro-batch that recomputing
    the block takes less, `kept` bytes for every micro-batch in flight, `interior` bytes that the block which is being
    recomputed holds less."""

    seconds: Array
    kept: Array
    interior: Array


def keeping_fault(rule: Rule) -> Fault | None:
    """Why the results of an operator cannot be kept through recomputation; None where they can."""
    if rule.op_class == "view" or rule.local_form == "reshape":  # whether a reshape copies depends on the device
        return Fault(reason=f"{rule.op} computes nothing, its result is a view of its operand or a copy")
    kinds = {rule.factors[message.factor].kind for message in rule.inner}
    together = (rule.casts and rule.op_class != "experts") or kinds <= {FactorKind.RING, FactorKind.HALO}
    if not together:  # what is kept as a whole is kept with what it sends (`runtime.ops.kept_results`)
        return Fault(reason=f"{rule.op} communicates inside, and is computed again as a whole")
    return None


def keeping(prices: OperatorPrices, works: bool | NDArray[np.bool_], own: Mapping[int, float]) -> Keeping:
    """What it changes to keep an operator for which `keeping_fault` has nothing to say.

    `works` says whether recomputing the block would run the operator again (see `liveness.Replay`), for all strategies
    or each; `own` has the positions, among the results that are tensors, of those in `Liveness.kept`: they are counted
    in the block already, with these shares (`Liveness.shares`).
    """
    return Keeping(
        seconds=(prices.forward + prices.inner_forward) * works,
        kept=sum(prices.results, prices.saved_extra),
        interior=sum((share * prices.results[place] for place, share in own.items()), prices.saved_extra),
    )
