"""Lower bounds on collectives: no algorithm is faster, even at full bandwidth and without latency.

Cut the group into the Q units below a level. Each unit has `inner` devices, so `inner` ports of bandwidth B. All data
that a unit must receive, or pass on, goes through its ports. The bound is the largest over the levels of

    all_reduce      2 (Q-1)/Q S / (inner B); S / (inner B) where the switches reduce
    all_gather        (Q-1)/Q S / (inner B)          reduce_scatter: the same
    all_to_all        (Q-1)/Q S / B                  each device sends that share of its own buffer S
    broadcast, reduce         S / (inner B)
    send_recv                 S / B                  at the outermost level

Traffic of outer levels also counts at the ports of inner levels, as in the rings of communication libraries.

Sources: Patarasuk, Yuan, JPDC 69(2), 2009 (all-reduce); Chan, Heimlich, Purkayastha, van de Geijn, "Collective
communication: theory, practice, and experience", CCPE 19(13), 2007 (the others); a cut argument level by level.
"""

from costmodels.collectives import COLLECTIVES
from costmodels.errors import CostModelError
from costmodels.units import Bytes, Seconds
from hardware_profiles import Group, Span


def collective_lower_bound(kind: str, message: Bytes, group: Group) -> Seconds:
    """Lower bound in seconds for one collective; 0 in a group of one.

    `message` is in bytes, as in `collective_time`. Raises `CostModelError` for an unknown kind.
    """
    if kind not in COLLECTIVES:
        raise CostModelError(f"no lower bound for collective {kind!r}; known: {', '.join(COLLECTIVES)}")
    if group.size == 1:
        return 0.0
    if kind == "send_recv":
        return message / Span(level=group.spans[-1].level, count=2).bandwidth
    bound, inner = 0.0, 1
    for span in group.spans:
        units = group.size // inner
        share = _share(kind, units, inner, reduces=span.level.in_network is not None)
        bound = max(bound, share * message / (inner * span.bandwidth))
        inner *= span.count
    return bound


def _share(kind: str, units: int, inner: int, *, reduces: bool) -> float:
    """Bytes through the ports of one of the `units` units, per byte of message."""
    others = (units - 1) / units
    if kind == "all_reduce":
        return min(1.0, 2 * others) if reduces else 2 * others
    if kind == "all_to_all":
        return others * inner
    return 1.0 if kind in ("broadcast", "reduce") else others
