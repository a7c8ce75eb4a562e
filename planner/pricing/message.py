"""One collective between devices, as it is priced and as the runtime sends it.

Communication times are sums over lists of these, so the price and the list cannot differ.
`tests/contract/test_priced_is_emitted.py` compares the list with what is sent.
"""

from dataclasses import dataclass

from costmodels import collective_time
from hardware_profiles import Cluster
from planner.sharding.buckets import Bucket
from planner.sharding.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A collective along one axis of the mesh; `axis` is None for a transfer from one pipeline stage to another.

    `nbytes` has the meaning that `costmodels.collective_time` gives it for this kind.
    """

    kind: str
    axis: int | None
    nbytes: float


def bucket_messages(bucket: Bucket) -> tuple[Message, ...]:
    """The collectives of a bucket: one message for each of its moves."""
    moves = zip(bucket.moves, bucket.nbytes, strict=True)
    return tuple([Message(kind=kind, axis=axis, nbytes=nbytes) for (kind, axis), nbytes in moves])


def message_seconds(message: Message, mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of a collective along an axis."""
    assert message.axis is not None, "what crosses stages is priced where the distance of the stages is known"
    line = mesh.axes[message.axis]
    return float(collective_time(message.kind, message.nbytes, cluster.group(line.size, line.stride)))
