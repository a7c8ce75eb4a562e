"""Launches of dense layers of Megatron-LM and NeMo, counted from their code."""

from dataclasses import replace

from hardware_profiles import Software
from planner.validation.frameworks.traits import MEGATRON_WORDS, flags_of
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


def with_engine_launches(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with launches by count of Megatron-Core's layers, if it runs them and the row has no experts.

    Launches of experts were fitted beside blocks that launch once for each operator of the graph, and stay with these.
    """
    named = f"{row.text('stack')}; {row.text('source')}; {flags_of(row)}".lower()
    if stack.name not in _STACKS or row.text("arch").lower() == "moe" or not mentions(named, _NAMES):
        return stack
    return replace(stack, engine_launches=True, host=HOST)
