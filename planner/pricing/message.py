"""One message between devices, as it is priced and as the runtime sends it.

Seconds of communication are sums over lists of these, so what is priced and what is listed cannot differ; what is
listed and what is sent are compared by `tests/contract/test_priced_is_emitted.py`.
"""

from dataclasses import dataclass

from costmodels import collective_time
from hardware_profiles import Cluster
from planner.sharding.buckets import Bucket
from planner.sharding.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A collective along one axis of the mesh; `axis` is None for what goes from one pipeline stage to another.

    `nbytes` counts what `costmodels.collective_time` counts for the kind.
    """

    kind: str
    axis: int | None
    nbytes: float


def bucket_messages(bucket: Bucket) -> tuple[Message, ...]:
    """What tensors that travel together send, one message for each of their collectives."""
    moves = zip(bucket.moves, bucket.nbytes, strict=True)
    return tuple([Message(kind=kind, axis=axis, nbytes=nbytes) for (kind, axis), nbytes in moves])


def message_seconds(message: Message, mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of a message along an axis."""
    assert message.axis is not None, "what crosses stages is priced where the distance of the stages is known"
    line = mesh.axes[message.axis]
    return float(collective_time(message.kind, message.nbytes, cluster.group(line.size, line.stride)))
