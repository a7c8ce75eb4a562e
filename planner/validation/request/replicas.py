"""Hybrid sharding of a row (HSDP): groups that shard states among their own devices, and replicas of these groups.

    what the row says, in flags, `zero_stage` or notes                               replicas
    dp_replicate=8, data_parallel_replicate_degree: 8 (torchtitan)                   8
    num-distributed-optimizer-instances=8 (Megatron-LM)                              8
    HSDP 8 x 8; 4 x 16 may mean either order, and is refused                         8
    dp_shard=8, data_parallel_shard_degree=8 (torchtitan)                            dp / 8
    sharding_group_size=8 (fms-fsdp), mics_shard_size=8 (DeepSpeed's MiCS)           dp / 8
    zero1=8 (InternEvo; below 1: all)                                                dp / 8
    HYBRID_SHARD, _HYBRID_SHARD_ZERO2, HSDP, and no number                           nodes, without other parallelism

Without numbers PyTorch shards within a node (torch/distributed/fsdp/_init_utils.py: _init_intra_and_inter_node_groups).
Replicas of single devices shard nothing, which is plain data parallelism. Notes count only with numbers: without any
they may compare with another run.
"""

import re

from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions
from planner.validation.unsupported import UnsupportedError

_IS = r"\s*[=: ]\s*(\d{1,7})\b"
_INSTANCES = r"num[-_]distributed[-_]optimizer[-_]instances" + _IS
_COPIES = (r"\b(?:dp|data_parallel)[-_]replicate(?:[-_](?:degree|size))?" + _IS, _INSTANCES)
_SHARDS = (
    r"\b(?:dp|data_parallel)[-_]shard(?:[-_](?:degree|size))?" + _IS,
    r"\bshard(?:ing)?[-_]group[-_]size" + _IS,
    r"\bmics[-_]shard[-_]size" + _IS,
)
_ZERO1 = r"\bzero1(?:[-_ .]size)?" + _IS
_PAIR = r"\bhsdp\W{1,2}(\d{1,7})\s*[x*]\s*(\d{1,7})\b"
_HYBRID = r"\bhsdp\b|hybrid[-_ ]?shard"
_USUAL_NODE = 8


def replicas_of(row: Row, data: int, others: int, notes: list[str]) -> int | None:
    """Number of replicas of the groups that shard states; None if a row says nothing about it.

    `data` is the data-parallel degree, `others` the product of tensor, pipeline and context parallelism. Raises
    UnsupportedError for degrees that are ambiguous or do not divide `data`.
    """
    columns = ("model", "zero_stage", "distributed_optimizer", "other_flags", "flag")
    flags = row.words(*columns)
    words = f"{flags}; {row.text('notes').lower()}"
    copies, shards = _number(words, _COPIES), _number(words, _SHARDS)
    if shards is None and mentions(f"{flags}; {row.text('source').lower()}", r"internevo|internlm"):
        within = _number(flags, (_ZERO1,))  # at most all of them, as in its process groups
        shards = within and min(within, data)
    if copies is shards is None and (pair := re.search(_PAIR, words)):
        if pair[1] != pair[2]:
            raise UnsupportedError(f"'{pair[0]}' does not say which are the copies: say dp_replicate=... in the flags")
        copies = int(pair[1])
    if copies is not None or shards is not None:
        if copies is None:
            copies = _whole_part(data, shards or data, "devices of a group that shares states out")
        _whole_part(data, copies, "copies")
        if shards is not None and copies * shards != data:
            raise UnsupportedError(f"{copies} copies of shards on {shards} devices are not dp {data} (HSDP)")
    elif mentions(flags, _HYBRID):
        copies = _copies_of_nodes(row, data, others)
    elif mentions(words, _HYBRID):
        raise UnsupportedError(
            "its notes name HSDP without degrees: say zero_stage=HYBRID_SHARD, or dp_replicate=... among the flags"
        )
    if copies is None:
        return None
    if copies > 1:
        notes.append(f"hybrid sharding: {copies} copies of states that {data // copies} devices share out")
    return copies


def hybrid_stage(row: Row) -> int:
    """The ZeRO stage of hybrid sharding if none is stated: 1 for Megatron's instances, which shard only optimizer
    states, else 3."""
    return 1 if re.search(_INSTANCES, row.text("other_flags").lower()) else 3


def _number(words: str, patterns: tuple[str, ...]) -> int | None:
    """The one number that the words give; None without any. Raises UnsupportedError for two."""
    found = {int(each[1]) for pattern in patterns for each in re.finditer(pattern, words)}
    if len(found) > 1:
        raise UnsupportedError(f"two degrees of hybrid sharding are named: {', '.join(map(str, sorted(found)))}")
    return found.pop() if found else None


def _whole_part(data: int, part: int, what: str) -> int:
    if part < 1 or data % part:
        raise UnsupportedError(f"{part} {what} do not divide dp {data} (HSDP)")
    return data // part


def _copies_of_nodes(row: Row, data: int, others: int) -> int:
    """Replicas if every node shards states among its own devices."""
    if others > 1:
        raise UnsupportedError(
            "HSDP without degrees, beside tensor, pipeline or context parallelism: say dp_replicate=... among the flags"
        )
    node = row.integer("devices_per_node") or _USUAL_NODE
    return 1 if data <= node else _whole_part(data, node, "devices of a node")
