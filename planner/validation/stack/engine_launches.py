"""Launches of dense layers of Megatron-LM and NeMo, counted from their code."""

from dataclasses import replace

from hardware_profiles import Software
from planner.validation.frameworks.traits import MEGATRON_WORDS
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions

HOST = 9.0
"""Time of the host for an operator that `planner.pricing.kernels.engine_launches` counts, in units of the device's.

Fitted to tests of Megatron-LM with layers so small that all kernels wait for the host
(tests/functional_tests/test_cases/gpt at d98e8a64dd: 12 layers of width 512; golden values without
deterministic-mode). From two stages of tensor parallelism 2 with 4 micro-batches to tensor parallelism 4 with 8, a
step grows by 3.3 ms for each layer and micro-batch on H100 and by 4.8 on A100, for 45 launches, collectives included:
73 and 106 us each, where profiles have 8 and 12."""

_NAMES = rf"{MEGATRON_WORDS}|nemo\b"

_STACKS = ("megatron", "nemo")

_TIMED_UNTIL = "2022-10"
"""Month until which timers of Megatron-LM made the host wait for the device at every pass (megatron/timers.py replaced
those of megatron/global_vars.py, which call torch.cuda.synchronize)."""

_BATCH = 12
"""Operators that Megatron-LM launches on every stage for a micro-batch before its forward pass, by count at 55ba1f7b96
(May 2022). `get_batch` of pretrain_gpt.py: sizes to the device, their broadcast, and back; tokens to the device, and
their broadcast; inputs and labels. `get_ltor_masks_and_position_ids`: ones, their lower triangle, comparison; mask of
the loss; positions."""

_RECEIVED = 2
"""Operators for what a pass gets from another stage (megatron/p2p_communication.py): the transfer, after which the host
waits for the device, and the gathering of its parts."""


def with_engine_launches(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with launches by count of Megatron-Core's layers, if it runs them and the row has no experts.

    Launches of experts were fitted beside blocks that launch once for each operator of the graph, and stay with these.
    """
    named = row.words("stack", "source", "other_flags")
    if stack.name not in _STACKS or row.text("arch").lower() == "moe" or not mentions(named, _NAMES):
        return stack
    return replace(stack, engine_launches=True, host=HOST)


def with_starts(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with what Megatron-LM launches at the start of each pass while the device waits, until its timers no
    longer made it wait. NeMo has other batches, and no such timers. What DeepSpeed's pipeline engine launches (23 and
    32 operators with tensor parallelism) is part of its `host`, which was fitted to runs with pipelines, too."""
    named = row.words("stack", "source", "other_flags")
    if stack.name != "megatron-2021" or mentions(named, r"nemo\b") or row.date()[: len(_TIMED_UNTIL)] >= _TIMED_UNTIL:
        return stack
    received = _RECEIVED if (row.integer("pp") or 1) > 1 else 0
    return replace(stack, starts=(_BATCH + received, received))
