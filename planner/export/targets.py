"""All engines by name."""

from collections.abc import Mapping

from planner.export.megatron.megatron import MEGATRON
from planner.export.megatron.megatron_bridge import MEGATRON_BRIDGE
from planner.export.megatron.mindspeed import MINDSPEED
from planner.export.megatron.nemo import NEMO
from planner.export.mindspore.mindformers import MINDFORMERS
from planner.export.mindspore.mindspore import MINDSPORE
from planner.export.pytorch.accelerate import ACCELERATE
from planner.export.pytorch.deepspeed import DEEPSPEED
from planner.export.pytorch.torch_script import TORCH
from planner.export.pytorch.torchtitan import TORCHTITAN
from planner.export.target import OperatorTarget, Target

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (ACCELERATE, DEEPSPEED, MEGATRON, MEGATRON_BRIDGE, MINDFORMERS, MINDSPEED, NEMO, TORCH, TORCHTITAN)
}
"""The engines to which plans can be exported, and from which they can be imported."""

OPERATOR_TARGETS: Mapping[str, OperatorTarget] = {MINDSPORE.name: MINDSPORE}
"""The engines to which plans are exported operator by operator, and from which they are imported so."""
