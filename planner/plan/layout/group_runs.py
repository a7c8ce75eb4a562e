"""Where the stages of a plan are, if it has devices of several kinds."""

from dataclasses import dataclass
from itertools import groupby

from hardware_profiles import Bytes
from planner.plan.plan import Plan, Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRun:
    """Neighbouring stages on devices of one profile, `group`: number of the first stage, number of stages, numbers of
    their devices (the ranks of the runtime), and the blocks of each stage."""

    group: str
    first_stage: int
    stages: int
    first_device: int
    devices: int
    blocks: tuple[int, ...]

    def peaks(self, prediction: Prediction) -> tuple[Bytes, ...]:
        """Peak memory of a device of each of these stages."""
        own = prediction.stages[self.first_stage : self.first_stage + self.stages]
        return tuple(stage.peak_bytes for stage in own)


def group_runs(plan: Plan) -> tuple[GroupRun, ...]:
    """The runs of a plan, in the order of the pipeline; empty where all devices are alike."""
    found, first = list[GroupRun](), 0
    for group, equal in groupby(plan.stages, key=lambda stage: stage.group):
        stages = list(equal)
        if group:
            found.append(
                GroupRun(
                    group=group,
                    first_stage=first,
                    stages=len(stages),
                    first_device=first * plan.mesh.size,
                    devices=len(stages) * plan.mesh.size,
                    blocks=tuple(stage.blocks for stage in stages),
                )
            )
        first += len(stages)
    return tuple(found)
