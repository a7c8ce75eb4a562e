"""All engines by name."""

from collections.abc import Mapping

from planner.export.accelerate import ACCELERATE
from planner.export.deepspeed import DEEPSPEED
from planner.export.megatron import MEGATRON
from planner.export.megatron_bridge import MEGATRON_BRIDGE
from planner.export.mindformers import MINDFORMERS
from planner.export.mindspeed import MINDSPEED
from planner.export.mindspore import MINDSPORE
from planner.export.nemo import NEMO
from planner.export.target import OperatorTarget, Target
from planner.export.torch_script import TORCH
from planner.export.torchtitan import TORCHTITAN

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (ACCELERATE, DEEPSPEED, MEGATRON, MEGATRON_BRIDGE, MINDFORMERS, MINDSPEED, NEMO, TORCH, TORCHTITAN)
}
"""The engines that plans can be carried to, and from."""

OPERATOR_TARGETS: Mapping[str, OperatorTarget] = {MINDSPORE.name: MINDSPORE}
"""The engines that plans can be carried to operator by operator."""
