"""Where the stages of a plan are, if it has devices of several kinds."""

from dataclasses import dataclass
from itertools import groupby

from hardware_profiles import Bytes
from planner.plan.plan import Plan, Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRun:
    """Neighbouring pipeline ranks on devices of one profile, `group`: number of the first one, number of pipeline
    ranks, numbers of their devices (the ranks of the runtime), and the blocks of each, in all of its stages."""

    group: str
    first_stage: int
    stages: int
    first_device: int
    devices: int
    blocks: tuple[int, ...]

    def peaks(self, prediction: Prediction) -> tuple[Bytes, ...]:
        """Peak memory of a device of each of these pipeline ranks."""
        own = prediction.stages[self.first_stage : self.first_stage + self.stages]
        return tuple(stage.peak_bytes for stage in own)


def group_runs(plan: Plan) -> tuple[GroupRun, ...]:
    """The runs of a plan, in the order of the pipeline; empty where all devices are alike."""
    found, held = (
        list[GroupRun](),
        [[plan.stages[one] for one in plan.stages_of(rank)] for rank in range(plan.pipeline)],
    )
    for group, equal in groupby(range(plan.pipeline), key=lambda rank: held[rank][0].group):
        ranks = list(equal)
        if group:
            found.append(
                GroupRun(
                    group=group,
                    first_stage=ranks[0],
                    stages=len(ranks),
                    first_device=ranks[0] * plan.mesh.size,
                    devices=len(ranks) * plan.mesh.size,
                    blocks=tuple(sum(stage.blocks for stage in held[rank]) for rank in ranks),
                )
            )
    return tuple(found)
