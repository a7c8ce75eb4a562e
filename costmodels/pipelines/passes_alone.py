"""A step of passes alone: nothing is sent, gathered or reduced, and a rank only waits for the results of others. It
takes as long as `costmodels.pipelines.timeline` simulates, and is found in about a quarter of the time."""

from collections import deque
from collections.abc import Sequence

from costmodels.errors import CostModelError
from costmodels.pipelines.orders import Orders
from hardware_profiles import Seconds

_LATER = -1.0
"""A result that is not there yet."""


def step_of_passes(passes: Sequence[tuple[Seconds, Seconds]], orders: Orders) -> Seconds:
    """The seconds of a step of a pipeline whose ranks each take their turns in the order of a schedule that has whole
    sequences and undivided backward passes (`costmodels.schedule_orders`).

    Args:
        passes: seconds of a micro-batch forward and backward through each stage, in the order of the model; of p ranks
            the stages of rank r are r, p + r, 2p + r, ...
        orders: the turns of each rank.

    Raises:
        CostModelError: orders that wait for each other forever.
    """
    ranks = len(orders)
    units = 1 + max(turn.micro_batch for turn in orders[0])
    last = (len(passes) - 1) * units
    forwards, backwards = zip(*passes, strict=True)
    turns = [
        [(turn.kind == "forward", (turn.chunk * ranks + rank) * units + turn.micro_batch) for turn in own]
        for rank, own in enumerate(orders)
    ]
    ahead, back = ([_LATER] * (last + 2 * units) for _ in range(2))  # by stage; the last results are of no use
    ahead[:units] = back[last : last + units] = [0.0] * units  # the data; the loss is part of the last stage
    taken, free, awake = [0] * ranks, [0.0] * ranks, deque(range(ranks))
    while awake:
        rank = awake.popleft()
        own, at, now = turns[rank], taken[rank], free[rank]
        while at < len(own):
            forward, place = own[at]
            came = ahead[place] if forward else back[place]
            if came == _LATER:
                break
            now = came if came > now else now
            if forward:
                now += forwards[place // units]
                ahead[place + units] = now
            else:
                now += backwards[place // units]
                back[place - units] = now
            at += 1
        if at > taken[rank]:
            awake += ((rank + 1) % ranks, (rank - 1) % ranks)
        taken[rank], free[rank] = at, now
    if any(at < len(own) for at, own in zip(taken, turns, strict=True)):
        raise CostModelError("the orders wait for each other; take those of costmodels.schedule_orders")
    return max(free)
