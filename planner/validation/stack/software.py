"""The software of a run: the stack that its row names, changed by everything that the row says about how it ran.

    which stack                           stack_names
    what it did until a date              planner.validation.frameworks.versions
    fp8 and TF32                          fp8_products
    gradients, optimizer state, buckets   gradients
    the loss and its logits               losses
    overlaps, eager and fused modules     flagged
    gates, rotations                      fused_kernels
    attention                             attention_kernels, attention_masks, dropout
    experts, CUDA graphs                  experts
    launches, by count of Megatron's      engine_launches
    launches that wait for their kernels  here
    what is in use at the peak            allocation

Each trait is a function of the row, the stack so far and the notes for the reader. Their order is that of `_BEFORE` and
`_AFTER`: some read what earlier ones have changed (`loss`, `buffers`), and those of `_AFTER` read the attention
kernels.
"""

from collections.abc import Callable
from dataclasses import replace

from hardware_profiles import Cluster, Hidden, Software, load_software
from planner.validation.frameworks.traits import Trait, flags_of
from planner.validation.frameworks.versions import of_its_time
from planner.validation.reading.rows import Row
from planner.validation.stack.attention_kernels import attention_of
from planner.validation.stack.attention_masks import (
    with_alibi,
    with_masks_apart,
    with_padding_mask,
    with_repeated_keys,
    with_sinks,
    with_window,
)
from planner.validation.stack.dropout import in_one_order, with_dropout
from planner.validation.stack.engine_launches import with_engine_launches, with_starts
from planner.validation.stack.experts import with_experts, with_graphs
from planner.validation.stack.flagged import with_kernels, with_overlaps
from planner.validation.stack.fp8_products import with_narrow_gathers, with_products
from planner.validation.stack.fused_kernels import (
    with_complex_rotations,
    with_composed_gelu,
    with_gates_of_liger,
    with_kept_gates,
)
from planner.validation.stack.gradients import (
    with_buckets_of_nemo_1,
    with_gradients,
    with_large_gradients,
    with_sums,
    with_whole_reductions,
)
from planner.validation.stack.losses import with_chunked_loss, with_loss, with_loss_of_megatron, with_loss_of_pytorch
from planner.validation.stack.network import machine_as_stated
from planner.validation.stack.stack_names import stack_of


def machine_of_run(row: Row, devices: int, zero: int, notes: list[str]) -> Cluster:
    """The cluster that a row ran on, with the software that it used.

    Raises `HardwareProfileError`, and RequestError for software or a power limit that is unknown.
    """
    cluster = machine_as_stated(row, devices, notes)
    return cluster.with_software(software_of(row, cluster, zero, notes)).with_devices(devices)


def software_of(row: Row, cluster: Cluster, zero: int, notes: list[str]) -> Software:
    """The stack of a row with all its traits."""
    stack = load_software(stack_of(row, zero))
    for trait in _BEFORE:
        stack = trait(row, stack, notes)
    stack = replace(stack, attention=attention_of(row, stack, cluster.device))
    notes.append(f"taken for {stack.name}, attention {stack.attention}")
    for trait in _AFTER:
        stack = trait(row, stack, notes)
    return stack


def _copying_inputs(row: Row, stack: Software, notes: list[str]) -> Software:
    """PaddlePaddle copies the inputs of tensor-parallel products (see `Software.copies_inputs`)."""
    copies = stack.name == "paddle" and (row.integer("tp") or 1) > 1
    return replace(stack, copies_inputs=True) if copies else stack


_BLOCKING = Trait(
    words=r"cuda_launch_blocking\s*[=:]\s*\W?1",
    changes={"waits_for_kernels": True, "hidden": Hidden(ring=0.0)},
    note="every launch waits for its kernel, and nothing overlaps (CUDA_LAUNCH_BLOCKING=1)",
)
"""A launch returns when its kernel has ended, also that of a collective (CUDA C++ Programming Guide, environment
variables). BigScience's scripts set it, because their nodes hung without it (tr11-176B-ml.slurm)."""


def _launching(row: Row, stack: Software, notes: list[str]) -> Software:
    return _BLOCKING.given(flags_of(row), stack, notes)


def _as_flagged(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with what flags say about overlaps, modules and kernels."""
    flags = flags_of(row)
    precision = f"{row.precision()}; {row.text('precision_detail').lower()}"
    return with_kernels(with_overlaps(stack, flags), flags, notes, row.date(), precision)


_Change = Callable[[Row, Software, list[str]], Software]

_BEFORE: tuple[_Change, ...] = (
    with_narrow_gathers,
    with_gradients,
    with_whole_reductions,
    with_large_gradients,
    _copying_inputs,
    with_loss,
    with_gates_of_liger,
    with_chunked_loss,
    with_kept_gates,
    with_buckets_of_nemo_1,
    of_its_time,
    _as_flagged,
    with_loss_of_pytorch,
    with_complex_rotations,
    with_composed_gelu,
)

_AFTER: tuple[_Change, ...] = (
    with_dropout,
    in_one_order,
    with_alibi,
    with_padding_mask,
    with_masks_apart,
    with_repeated_keys,
    with_experts,
    with_graphs,
    with_loss_of_megatron,
    with_sums,
    with_window,
    with_sinks,
    with_products,
    with_engine_launches,
    with_starts,
    _launching,
)
