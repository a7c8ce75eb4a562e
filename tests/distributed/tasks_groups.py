"""What the worker processes do for tests of the groups of a plan."""

import torch
import torch.distributed as dist

import runtime
from planner.errors import RequestError
from tests.distributed import plans
from tests.distributed.tasks import build_step

NAMES = ("world", "pipeline", "data", "tensor", "context", "expert", "replicated")


def groups(
    kind: str, sizes: tuple[int, ...], stages: tuple[int, ...] | None
) -> tuple[dict[str, tuple[int, int, tuple[int, ...], list[int]]], str]:
    """For each name this rank in the group, its size, its ranks and the ranks that a collective of it reaches; and
    what asking for a role before tracing is refused with."""
    more = {} if stages is None else {"stages": stages}
    plan = plans.hand_plan(kind, "llama", plans.mesh_of(*sizes), **more)
    step = build_step("llama", plan)
    assert runtime.get_group_size() == dist.get_world_size()
    refusal = ""
    try:
        runtime.get_rank("data")
    except RequestError as error:
        refusal = str(error)
    step.prepare(*plans.batch())
    found = {}
    for name in (*NAMES, *plan.mesh.names):
        group = runtime.get_group(name)
        reached = torch.zeros(dist.get_world_size())
        reached[dist.get_rank()] = 1
        if group is not None:
            dist.all_reduce(reached, group=group)
        ranks = step.groups.ranks(name)
        found[name] = (
            runtime.get_rank(name),
            runtime.get_group_size(name),
            ranks,
            reached.nonzero().flatten().tolist(),
        )
    return found, refusal
